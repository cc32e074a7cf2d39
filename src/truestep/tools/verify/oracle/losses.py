"""The loss term of every label, and its weight: docs/contract.md, sections 6 and 7."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from truestep.tools.verify.oracle.records import Document, whole_documents
from truestep.tools.verify.oracle.values import LabelValues

Metric = tuple[float, float]  # the value, and the sum of the absolute values of its terms

LOSS_TYPES = ("grpo", "gspo", "reinforce", "cispo", "sapo", "gmpo", "dppo", "cross_entropy")
DEFAULT_EPSILONS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "gmpo": (0.4, 0.4)}
KNOWN_OPTIONS = {
    "type", "epsilon_low", "epsilon_high", "dual_clip", "ratio_cap", "tau_positive", "tau_negative", "divergence",
    "threshold", "old_logprobs", "kl_reference", "correction", "off_policy_mask", "normalize_by", "max_labels",
    "gradient_divisor", "entropy_bonus", "entropy_normalize_by", "entropy_target", "clip_cov", "kl_cov", "z_loss",
    "metrics", "custom",
}  # fmt: skip
LARGEST_LOG_RATIO = 20.0


def complete_loss_config(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of the options. Raise an error for options that the oracle does not compute."""
    kind, custom = options["type"], options.get("custom")
    if kind not in LOSS_TYPES and custom is None:
        raise ValueError(f"loss.type: {kind}")
    for name, value in options.items():
        if name not in KNOWN_OPTIONS and value:
            raise NotImplementedError(f"the oracle does not know loss.{name}")
    epsilon_low, epsilon_high = DEFAULT_EPSILONS.get(kind, (None, None))
    defaults = {
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "dual_clip": None,
        "ratio_cap": None,
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "divergence": "tv",
        "threshold": 0.2,
        "old_logprobs": "sampler",
        "kl_reference": None,
        "correction": None,
        "off_policy_mask": None,
        "normalize_by": "document_means" if kind in ("gspo", "gmpo") else "labels",
        "max_labels": None,
        "gradient_divisor": None,
        "entropy_bonus": 0.0,
        "entropy_normalize_by": None,
        "entropy_target": None,
        "clip_cov": None,
        "kl_cov": None,
        "z_loss": 0.0,
    }
    complete = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    # Metrics of ratios use R_d for these losses.
    complete["document_ratio"] = kind == "gspo" or (custom is not None and custom.document_ratio)
    complete["bounds"] = None if custom is None else custom.bounds
    if kind in DEFAULT_EPSILONS:
        complete["bounds"] = clip_bounds(complete)
    return complete


def loss_terms(
    documents: list[Document], values: list[list[LabelValues]], loss_config: dict[str, Any]
) -> list[tuple[str, Tensor]]:
    """List (name of the contribution, weight * term / denominator) for every label; the loss is their sum."""
    wholes = whole_documents(documents)
    num_documents = len(wholes)
    labels_of = {place: sum(len(values[other]) for other in whole) for whole in wholes for place in whole}
    num_labels = sum(len(document.positions) for document in documents)
    terms = []

    def denominator_of(normalize_by: str, labels_of_document: int) -> int:
        if normalize_by == "labels":
            return num_labels
        if normalize_by == "documents":
            return num_documents
        if normalize_by == "document_means":
            return num_documents * labels_of_document
        if normalize_by == "constant":
            return num_documents * loss_config["max_labels"]
        raise ValueError(f"loss.normalize_by: {normalize_by}")

    for place, (document, labels) in enumerate(zip(documents, values, strict=True)):
        losses = label_losses(document, labels, loss_config)
        weights = policy_weights(document, labels, loss_config)
        terms_of_document: list[LabelValues] = []
        for loss, weight, label in zip(losses, weights, labels, strict=True):
            denominator = denominator_of(loss_config["normalize_by"], labels_of[place])
            # A term with weight 0 adds 0, even if it is NaN.
            terms.append(("policy_loss", weight * loss / denominator if weight else constant(0.0)))
            if loss_config["kl_reference"] and loss_config["kl_reference"].get("in", "loss") == "loss":
                index = len(terms_of_document)
                divergence = reference_divergence(document, label, index, loss_config["kl_reference"])
                terms.append(("kl_reference", loss_config["kl_reference"]["weight"] * divergence / denominator))
            terms_of_document.append(label)
            if loss_config["kl_cov"]:
                held = kl_of_chosen(document, label, len(terms_of_document) - 1)
                terms.append(("kl_cov", loss_config["kl_cov"].get("weight", 1.0) * held / denominator))
            if loss_config["entropy_bonus"] or loss_config["entropy_target"]:
                normalize_by = loss_config["entropy_normalize_by"] or loss_config["normalize_by"]
                own = denominator_of(normalize_by, labels_of[place])
                terms.append(("entropy_bonus", -loss_config["entropy_bonus"] * label.entropy / own))
            if loss_config["z_loss"]:
                terms.append(("z_loss", loss_config["z_loss"] * label.logsumexp**2 / denominator))
    return terms


def label_losses(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[Tensor]:
    """Compute l_t of every label of one document."""
    kind = loss_config["type"]
    if not labels:
        return []
    if loss_config.get("custom") is not None:
        return loss_config["custom"].losses(document, labels)
    if kind == "cross_entropy":
        return [-label.logprob for label in labels]
    if document.old_logprobs is None or document.advantages is None:
        raise ValueError(f"{document.id}: {kind} needs log-probs and an advantage")

    log_ratios = [label.logprob - old for label, old in zip(labels, document.old_logprobs, strict=True)]
    if kind == "gspo":
        document_ratio = document_mean_ratio(log_ratios)
        # The ratio of a label has the value R_d. Its slope in the label's own log-prob is R_d, and 0 in other labels'
        # log-probs.
        ratios = [as_ratio(document_ratio, label.logprob) for label in labels]
        return [
            clipped_loss(ratio, advantage, loss_config)
            for ratio, advantage in zip(ratios, document.advantages, strict=True)
        ]
    if kind == "gmpo":
        clipped = []
        for log_ratio, advantage in zip(log_ratios, document.advantages, strict=True):
            clipped.append(gmpo_log_ratio(log_ratio.item(), advantage, loss_config))
        document_ratio = document_mean_ratio([constant(value) for value, _ in clipped])
        losses = []
        for label, (_, is_clipped), advantage in zip(labels, clipped, document.advantages, strict=True):
            ratio = constant(document_ratio.item()) if is_clipped else as_ratio(document_ratio, label.logprob)
            losses.append(-ratio * advantage)
        return losses

    losses = []
    for label, log_ratio, old, advantage in zip(
        labels, log_ratios, document.old_logprobs, document.advantages, strict=True
    ):
        ratio = clamped_ratio(log_ratio)
        if kind == "grpo":
            losses.append(clipped_loss(ratio, advantage, loss_config))
        elif kind == "sapo":
            tau = loss_config["tau_negative"] if advantage < 0 else loss_config["tau_positive"]
            losses.append(-4.0 / tau / (1.0 + torch.exp(-tau * (ratio - 1.0))) * advantage)
        elif kind == "dppo":
            masked = is_masked(label.logprob.item(), old, advantage, loss_config)
            losses.append(constant(0.0) if masked else -ratio * advantage)
        else:
            weight = ratio.item()  # a number, which has no gradient: sg()
            if kind == "reinforce" and loss_config["ratio_cap"] is not None:
                weight = min(weight, loss_config["ratio_cap"])
            if kind == "cispo":
                low, high = clip_bounds(loss_config)
                weight = min(max(weight, low), high)
            logprob = label.logprob if ratio.requires_grad else constant(label.logprob.item())
            losses.append(-weight * advantage * logprob)
    return losses


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """Compute exp of the log-ratio; a constant if the log-ratio is above 20 or below -20."""
    if abs(log_ratio.item()) > LARGEST_LOG_RATIO:
        return constant(math.exp(math.copysign(LARGEST_LOG_RATIO, log_ratio.item())))
    return torch.exp(log_ratio)


def document_mean_ratio(log_ratios: list[Tensor]) -> Tensor:
    """Compute exp of the mean of a document's log-ratios, clamped."""
    total = constant(0.0)
    for log_ratio in log_ratios:
        total = total + log_ratio
    return clamped_ratio(total / len(log_ratios))


def as_ratio(document_ratio: Tensor, logprob: Tensor) -> Tensor:
    """Compute R exp(logπ - sg(logπ)): its value is R, and its slope in this label's own log-prob is R too."""
    value = document_ratio.item()
    if value in (math.exp(LARGEST_LOG_RATIO), math.exp(-LARGEST_LOG_RATIO)):
        return constant(value)
    return value * torch.exp(logprob - logprob.item())


def gmpo_log_ratio(log_ratio: float, advantage: float, loss_config: dict[str, Any]) -> tuple[float, bool]:
    """Clip a label's log-ratio on the side given by its advantage's sign, and return whether it was clipped."""
    low, high = float32(-loss_config["epsilon_low"]), float32(loss_config["epsilon_high"])
    if advantage > 0 and float32(log_ratio) > high:
        return high, True
    if advantage < 0 and float32(log_ratio) < low:
        return low, True
    return (0.0 if advantage == 0 else log_ratio), False


def is_masked(logprob: float, old: float, advantage: float, loss_config: dict[str, Any]) -> bool:
    """Tell whether dppo masks a label's gradient: its probability has moved too far, and would move further."""
    if not (advantage > 0 and logprob > old) and not (advantage < 0 and logprob < old):
        return False
    new_probability, old_probability = math.exp(logprob), math.exp(old)
    if loss_config["divergence"] == "tv":
        divergence = abs(new_probability - old_probability)
    else:
        divergence = old_probability * (old - logprob)
        if old_probability < 1.0:
            if new_probability == 1.0:
                return True
            divergence += (1.0 - old_probability) * math.log((1.0 - old_probability) / (1.0 - new_probability))
    return float32(divergence) > float32(loss_config["threshold"])


def reference_divergence(document: Document, label: LabelValues, index: int, options: dict[str, Any]) -> Tensor:
    """Estimate the divergence from the reference at one label, without its weight."""
    if document.reference_logprobs is None:
        raise ValueError(f"{document.id}: kl_reference needs the reference's log-probs")
    distance = label.logprob - document.reference_logprobs[index]
    estimator = options.get("estimator") or ("k1" if options.get("in") == "reward" else "k3")
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return distance**2 / 2
    if abs(distance.item()) > LARGEST_LOG_RATIO:
        distance = constant(math.copysign(LARGEST_LOG_RATIO, distance.item()))
    divergence = torch.exp(-distance) - 1.0 + distance
    if estimator == "k3":
        return divergence
    ratio = clamped_ratio(label.logprob - (document.old_logprobs or [])[index])
    if not ratio.requires_grad or not distance.requires_grad:
        return constant(ratio.item() * divergence.item())
    return ratio * divergence


def importance_logs(document: Document, labels: list[LabelValues]) -> list[float]:
    """Compute log c of every label: old minus sampler's log-probs if both are known, else log rho."""
    if document.sampler_logprobs is not None:
        return [old - its for old, its in zip(document.old_logprobs or [], document.sampler_logprobs, strict=True)]
    return [label.logprob.item() - old for label, old in zip(labels, document.old_logprobs or [], strict=True)]


def policy_weights(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[float]:
    """Compute the constant weight of every label's policy loss: the correction's times the off-policy mask's."""
    corrections = correction_weights(document, labels, loss_config)
    kept = off_policy_kept(document, labels, loss_config)
    weights = [weight * mask for weight, mask in zip(corrections, kept, strict=True)]
    if loss_config["clip_cov"]:
        weights = [0.0 if chosen else weight for weight, chosen in zip(weights, document.chosen or [], strict=True)]
    return weights


def kl_of_chosen(document: Document, label: LabelValues, index: int) -> Tensor:
    """Compute rho - log rho - 1 for a label that kl_cov chose; 0 for other labels."""
    if not (document.chosen or [])[index]:
        return constant(0.0)
    log_ratio = label.logprob - (document.old_logprobs or [])[index]
    if abs(log_ratio.item()) > LARGEST_LOG_RATIO:
        log_ratio = constant(math.copysign(LARGEST_LOG_RATIO, log_ratio.item()))
    return torch.exp(log_ratio) - log_ratio - 1.0


def choose_labels(documents: list[Document], loss_config: dict[str, Any], seed: int, documents_seen: int) -> None:
    """Choose the labels for clip_cov or kl_cov, in place. Call this before old log-probs are recomputed."""
    rule = loss_config["clip_cov"] or loss_config["kl_cov"]
    if not rule:
        return
    labels = [(document, place) for document in documents for place in range(len(document.positions))]
    logprobs = [float32((document.old_logprobs or [])[place]) for document, place in labels]
    advantages = [float32((document.advantages or [])[place]) for document, place in labels]
    mean_logprob, mean_advantage = (sum(values) / max(len(values), 1) for values in (logprobs, advantages))
    candidates: list[tuple[Any, Document, int]] = []  # sort key, document, index of the label
    for (document, place), logprob, advantage in zip(labels, logprobs, advantages, strict=True):
        covariance = (logprob - mean_logprob) * (advantage - mean_advantage)
        if loss_config["kl_cov"]:
            if covariance > 0:
                candidates.append((-covariance, document, place))
        elif rule.get("low", 1.0) < covariance < rule.get("high", 5.0):
            text = f"{seed} {documents_seen} {document.positions[place]} {document.id}"
            candidates.append((hashlib.sha256(text.encode(errors="surrogatepass")).digest(), document, place))
    for document in documents:
        document.chosen = [False] * len(document.positions)
    candidates.sort(key=lambda candidate: candidate[0])  # stable: ties stay in the step's order
    for _, document, place in candidates[: max(int(rule.get("share", 2e-4) * len(labels)), 1)]:
        (document.chosen or [])[place] = True


def next_entropy_bonus(loss_config: dict[str, Any], entropy: float | None) -> float:
    """Return the weight of the entropy bonus for the step after one with this entropy."""
    weight, target = loss_config.get("entropy_bonus") or 0.0, loss_config.get("entropy_target")
    if not target or entropy is None:
        return weight
    moved = weight + target.get("rate", 0.005) * (target["entropy"] - entropy)
    return min(max(moved, 0.0), target.get("largest_weight", 0.1))


def importances(document: Document, labels: list[LabelValues], level: str) -> list[float]:
    """Compute c of every label: from its own log-ratio, or from its document's."""
    log_ratios = importance_logs(document, labels)
    if level == "document":
        log_ratios = [sum(log_ratios)] * len(labels)
    elif level == "document_mean":
        log_ratios = [sum(log_ratios) / max(len(labels), 1)] * len(labels)
    return [math.exp(min(max(value, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)) for value in log_ratios]


def correction_weights(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[float]:
    correction = loss_config["correction"]
    if correction is None:
        return [1.0] * len(labels)
    weights = []
    for importance in importances(document, labels, correction.get("level", "label")):
        outside = is_below(importance, correction) or is_above(importance, correction)
        if correction["type"] == "truncate":
            weights.append(max(min(importance, correction["high"]), correction.get("low", 0.0)))
        elif correction["type"] == "mask":
            weights.append(0.0 if outside else importance)
        elif correction["type"] == "reject":
            weights.append(0.0 if outside else 1.0)
        else:
            raise ValueError(f"loss.correction.type: {correction['type']}")
    return weights


def is_below(importance: float, correction: dict[str, Any]) -> bool:
    return float32(importance) < float32(correction.get("low", 0.0))


def is_above(importance: float, correction: dict[str, Any]) -> bool:
    return float32(importance) > float32(correction["high"])


def off_policy_kept(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[float]:
    """Return 0 for each label that the off-policy mask leaves out, else 1."""
    threshold = loss_config["off_policy_mask"]
    if threshold is None or not labels:
        return [1.0] * len(labels)
    sampler = document.sampler_logprobs or document.old_logprobs or []
    drift = sum(its - v.logprob.item() for v, its in zip(labels, sampler, strict=True))
    left_out = float32(drift / len(labels)) > float32(threshold)
    return [0.0 if left_out and advantage < 0 else 1.0 for advantage in document.advantages or []]


def gradient_changed(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[bool] | None:
    """Tell for each label whether the loss's clip, cap, mask or clamp changed its gradient. None: the loss has none of
    these."""
    kind = loss_config["type"]
    if kind not in LOSS_TYPES or kind == "cross_entropy":
        return None
    clamped = ratio_clamped(document, labels, loss_config) or []
    if kind == "gspo":
        mean = sum(v.logprob.item() - old for v, old in zip(labels, document.old_logprobs or [], strict=True))
        log_ratios = [mean / max(len(labels), 1)] * len(labels)
    else:
        log_ratios = [v.logprob.item() - old for v, old in zip(labels, document.old_logprobs or [], strict=True)]
    result = []
    for index, advantage in enumerate(document.advantages or []):
        bounded = min(max(log_ratios[index], -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
        ratio = float32(math.exp(bounded))
        if kind in ("grpo", "gspo"):
            low, high = clip_bounds(loss_config)
            dual = loss_config["dual_clip"]
            beyond = ratio > high if advantage > 0 else ratio < low or (dual is not None and ratio > float32(dual))
        elif kind == "reinforce":
            beyond = loss_config["ratio_cap"] is not None and ratio > float32(loss_config["ratio_cap"])
        elif kind == "cispo":
            low, high = clip_bounds(loss_config)
            beyond = ratio < low or ratio > high
        elif kind == "gmpo":
            beyond = gmpo_log_ratio(log_ratios[index], advantage, loss_config)[1]
        elif kind == "dppo":
            old = (document.old_logprobs or [])[index]
            beyond = is_masked(labels[index].logprob.item(), old, advantage, loss_config)
        else:
            beyond = False
        result.append(advantage != 0 and (beyond or clamped[index]))
    return result


def ratio_clamped(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[bool] | None:
    """Tell for each label whether the log-ratio in the loss's exponential is clamped at ±20. None: the loss has no such
    log-ratio."""
    kind = loss_config["type"]
    if kind not in LOSS_TYPES or kind == "cross_entropy":
        return None
    log_ratios = [v.logprob.item() - old for v, old in zip(labels, document.old_logprobs or [], strict=True)]
    if kind == "gmpo":
        pairs = zip(log_ratios, document.advantages or [], strict=True)
        log_ratios = [gmpo_log_ratio(value, advantage, loss_config)[0] for value, advantage in pairs]
    if kind in ("gspo", "gmpo"):
        log_ratios = [sum(log_ratios) / max(len(labels), 1)] * len(labels)
    return [abs(value) > LARGEST_LOG_RATIO for value in log_ratios]


def clipped_loss(ratio: Tensor, advantage: float, loss_config: dict[str, Any]) -> Tensor:
    """Compute -min(rho A, clip(rho) A), and for A < 0 the minimum of that and -c A, case by case.

    The first minimum is the clipped product, a constant, only above the upper bound if A > 0, and only below the lower
    bound if A < 0. Otherwise, also exactly on a bound, it is rho A with its gradient.
    """
    low, high = clip_bounds(loss_config)
    rounded = float32(ratio.item())
    if advantage > 0 and rounded > high:
        return constant(-high * advantage)
    if advantage < 0 and rounded < low:
        return constant(-low * advantage)
    if advantage < 0 and loss_config["dual_clip"] is not None:
        # Decision: c is a bound like the clip bounds: it is rounded to float32, and a ratio equal to it keeps its
        # gradient.
        most = float32(loss_config["dual_clip"])
        if rounded > most:
            return constant(-most * advantage)
    return -ratio * advantage


def clip_bounds(loss_config: dict[str, Any]) -> tuple[float, float]:
    if loss_config["type"] == "gmpo":  # bounds of log-ratios
        return float32(-loss_config["epsilon_low"]), float32(loss_config["epsilon_high"])
    return float32(1.0 - loss_config["epsilon_low"]), float32(1.0 + loss_config["epsilon_high"])


def float32(value: float) -> float:
    """Round to the nearest float32. Comparisons with bounds are made in float32."""
    return torch.tensor(value, dtype=torch.float32).item()


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def sum_terms(terms: list[tuple[str, Tensor]]) -> Tensor:
    total = constant(0.0)
    for _, term in terms:
        total = total + term
    return total


def value_and_scale(terms: list[tuple[str, Tensor]]) -> Metric:
    values = [term.item() for _, term in terms]
    return float(sum(values)), float(sum(abs(value) for value in values))
