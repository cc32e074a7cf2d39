"""One optimizer step's loss, metrics and gradients in float64, as docs/contract.md, sections 3 to 9, define them.

It shares nothing with the code that trains. No packing, no chunks, no ranks: a loop over documents and a loop over
their labels. Every label has one loss term
and one weight; the loss is the sum of weight * term. The gradient is autograd's on that sum.

Symbols: D documents of the step (those without labels too), N labels of the step, N_d labels of document d,
T tokens of a document, V vocabulary. rho is the ratio of one label, R_d gspo's ratio of a document.

Where docs/contract.md is silent, this file decides; each such place says "Decision".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Record = dict[str, Any]
Metric = tuple[float, float]  # the value, and the same sum with the absolute values of its terms

LOSS_TYPES = ("grpo", "gspo", "reinforce", "cispo", "cross_entropy")
DEFAULT_EPSILONS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
KNOWN_OPTIONS = {
    "type", "epsilon_low", "epsilon_high", "dual_clip", "ratio_cap", "normalize_by", "max_labels",
    "gradient_divisor", "entropy_bonus", "z_loss", "metrics",
}  # fmt: skip


class Model(Protocol):
    """A float64 causal language model, one document at a time."""

    parameters: dict[str, Tensor]  # leaves that autograd differentiates, a tied tensor once

    def logits(self, input_ids: list[int], temperature: float = 1.0) -> Tensor:  # [T, V]
        """softcap(h Wᵀ) · logits_scale / temperature"""
        ...


@dataclass
class Document:
    """One record, reduced to what the step needs. The lists are over the document's labels; None where absent."""

    id: str | None
    input_ids: list[int]
    positions: list[int]
    temperature: float
    old_logprobs: list[float] | None
    advantages: list[float] | None
    versions: list[int] | None
    reward: float | None


@dataclass
class LabelValues:
    """What the model says about one label: scalars on the autograd graph."""

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor


@dataclass
class OracleResult:
    loss: float
    loss_scale: float
    metrics: dict[str, Metric]
    documents: list[dict[str, Any]]
    gradients: dict[str, Tensor]
    grad_norm: float


def oracle_step(
    model: Model,
    records: list[Record],
    config: dict[str, Any],
    *,
    documents_seen_before_step: int = 0,
) -> OracleResult:
    """All of `records` as one step. `config` has the sections of the YAML file (docs/contract.md, section 10)."""
    loss_config = complete_loss_config(config["loss"])
    documents = read_documents(records, config.get("data", {}))
    values = [label_values(model, document) for document in documents]
    terms = loss_terms(documents, values, loss_config)

    total = sum_terms(terms)
    gradients = differentiate(total, model.parameters)
    if loss_config["gradient_divisor"] == "deepspeed":
        # The gradient once more by D; the reported loss stays.
        for name in gradients:
            gradients[name] = gradients[name] / len(documents)
    grad_norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients.values()))

    loss, loss_scale = value_and_scale(terms)
    metrics = step_metrics(documents, values, terms, loss_config, documents_seen_before_step)
    metrics["grad_norm"] = (grad_norm, grad_norm)
    outputs = []
    for document, labels in zip(documents, values, strict=True):
        ratios = metric_ratios(document, labels, loss_config["type"])
        outputs.append(
            {
                "id": document.id,
                "logprobs": [label.logprob.item() for label in labels],
                "entropy": [label.entropy.item() for label in labels],
                "ratio": [] if ratios is None else ratios,
            }
        )
    return OracleResult(loss, loss_scale, metrics, outputs, gradients, grad_norm)


def oracle_logprobs(model: Model, records: list[Record], default_temperature: float = 1.0) -> list[list[float]]:
    """The model's log-probs of every record's labels."""
    result = []
    with torch.no_grad():
        for record in records:
            document = read_document(record, default_temperature)
            result.append([label.logprob.item() for label in label_values(model, document)])
    return result


# --- Records (docs/contract.md, section 3) ---


def read_documents(records: list[Record], data_config: dict[str, Any]) -> list[Document]:
    documents = [read_document(record, data_config.get("temperature", 1.0)) for record in records]
    kind = data_config.get("advantages", "none")
    if kind != "none":
        for record, document in zip(records, documents, strict=True):
            # If both are there `advantage` wins.
            if document.advantages is None and document.reward is not None:
                rewards = group_rewards(records, record["group_id"], data_config.get("group_size"))
                advantage = advantage_from_rewards(document.reward, rewards, kind)
                document.advantages = [advantage] * len(document.positions)
    return documents


def read_document(record: Record, default_temperature: float) -> Document:
    input_ids = record["input_ids"]
    if "loss_mask" in record:
        positions = [position for position, value in enumerate(record["loss_mask"]) if value == 1]
    else:
        positions = list(range(record["prompt_length"], len(input_ids)))
    if 0 in positions:
        raise ValueError(f"{record.get('id')}: position 0 is never a label")

    advantages = None
    if record.get("advantage") is not None:
        advantages = on_labels(record["advantage"], positions, len(input_ids))
    versions = None
    if record.get("model_version") is not None:
        versions = on_labels(record["model_version"], positions, len(input_ids))
    old_logprobs = None
    if record.get("logprobs") is not None:
        old_logprobs = on_labels(record["logprobs"], positions, len(input_ids))
        if not all(math.isfinite(value) and value <= 0.0 for value in old_logprobs):
            raise ValueError(f"{record.get('id')}: a log-prob of a label is not finite or positive")

    temperature = record.get("temperature")
    return Document(
        id=record.get("id"),
        input_ids=input_ids,
        positions=positions,
        temperature=default_temperature if temperature is None else temperature,
        old_logprobs=old_logprobs,
        advantages=advantages,
        versions=versions,
        reward=record.get("reward"),
    )


def on_labels(value: Any, positions: list[int], length: int) -> list[Any]:
    """A field that is one value, one per token or one per label, as one per label.

    The two lists cannot be confused: position 0 is no label, so there are fewer labels than tokens.
    Decision: model_version's list has the same two lengths as that of logprobs.
    """
    if not isinstance(value, list):
        return [value for _ in positions]
    if len(value) == length:
        return [value[position] for position in positions]
    if len(value) == len(positions):
        return list(value)
    raise ValueError(f"{len(value)} values for {length} tokens and {len(positions)} labels")


def group_rewards(records: list[Record], group_id: str, group_size: int | None) -> list[float]:
    """Decision: a group is all records of the step with its group_id and a reward."""
    rewards = []
    for record in records:
        if record.get("group_id") == group_id and record.get("reward") is not None:
            rewards.append(record["reward"])
    if group_size is not None and len(rewards) > group_size:
        raise ValueError(f"group {group_id} has {len(rewards)} records, more than group_size {group_size}")
    return rewards


def advantage_from_rewards(reward: float, rewards: list[float], kind: str) -> float:
    """`rewards` are those of the whole group, this one among them."""
    count = len(rewards)
    if count == 1:
        return 0.0
    mean = sum(rewards) / count
    if kind == "group_mean":
        return reward - mean
    if kind == "group_normalized":
        variance = sum((other - mean) ** 2 for other in rewards) / (count - 1)
        return (reward - mean) / (math.sqrt(variance) + 1e-4)
    if kind == "leave_one_out":
        return reward - (sum(rewards) - reward) / (count - 1)
    raise ValueError(f"data.advantages: {kind}")


# --- Log-probabilities (docs/contract.md, section 5) ---


def label_values(model: Model, document: Document) -> list[LabelValues]:
    if not document.positions:
        return []
    logits = model.logits(document.input_ids, document.temperature)  # [T, V]
    result = []
    for position in document.positions:
        z = logits[position - 1]  # the token before predicts this one
        logsumexp = torch.logsumexp(z, dim=0)
        probabilities = torch.exp(z - logsumexp)
        logprob = z[document.input_ids[position]] - logsumexp
        entropy = logsumexp - (probabilities * z).sum()
        result.append(LabelValues(logprob, entropy, logsumexp))
    return result


# --- Losses (docs/contract.md, sections 6 and 7) ---


def complete_loss_config(options: dict[str, Any]) -> dict[str, Any]:
    """The options with their defaults; refuses what the oracle does not compute."""
    kind = options["type"]
    if kind not in LOSS_TYPES:
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
        "normalize_by": "document_means" if kind == "gspo" else "labels",
        "max_labels": None,
        "gradient_divisor": None,
        "entropy_bonus": 0.0,
        "z_loss": 0.0,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return {**defaults, **given}


def loss_terms(
    documents: list[Document], values: list[list[LabelValues]], loss_config: dict[str, Any]
) -> list[tuple[str, Tensor]]:
    """(name of the contribution, weight * term) for every label, with all divisions done; the loss is their sum."""
    num_documents = len(documents)
    num_labels = sum(len(document.positions) for document in documents)
    terms = []
    for document, labels in zip(documents, values, strict=True):
        losses = label_losses(document, labels, loss_config)
        for loss, label in zip(losses, labels, strict=True):
            if loss_config["normalize_by"] == "labels":
                denominator = num_labels
            elif loss_config["normalize_by"] == "documents":
                denominator = num_documents
            elif loss_config["normalize_by"] == "document_means":
                denominator = num_documents * len(labels)
            elif loss_config["normalize_by"] == "constant":
                denominator = num_documents * loss_config["max_labels"]
            else:
                raise ValueError(f"loss.normalize_by: {loss_config['normalize_by']}")

            terms.append(("policy_loss", loss / denominator))
            if loss_config["entropy_bonus"]:
                terms.append(("entropy_bonus", -loss_config["entropy_bonus"] * label.entropy / denominator))
            if loss_config["z_loss"]:
                terms.append(("z_loss", loss_config["z_loss"] * label.logsumexp**2 / denominator))
    return terms


def label_losses(document: Document, labels: list[LabelValues], loss_config: dict[str, Any]) -> list[Tensor]:
    """l_t of every label of one document."""
    kind = loss_config["type"]
    if not labels:
        return []
    if kind == "cross_entropy":
        return [-label.logprob for label in labels]
    if document.old_logprobs is None or document.advantages is None:
        raise ValueError(f"{document.id}: {kind} needs log-probs and an advantage")

    if kind == "gspo":
        log_ratio_sum = torch.zeros((), dtype=torch.float64)
        for label, old in zip(labels, document.old_logprobs, strict=True):
            log_ratio_sum = log_ratio_sum + (label.logprob - old)
        document_ratio = torch.exp(log_ratio_sum / len(labels))
        document_advantage = sum(document.advantages) / len(labels)
        return [clipped_loss(document_ratio, document_advantage, loss_config) for _ in labels]

    losses = []
    for label, old, advantage in zip(labels, document.old_logprobs, document.advantages, strict=True):
        ratio = torch.exp(label.logprob - old)
        if kind == "grpo":
            losses.append(clipped_loss(ratio, advantage, loss_config))
        elif kind == "reinforce":
            weight = ratio.item()  # a number: sg()
            if loss_config["ratio_cap"] is not None:
                weight = min(weight, loss_config["ratio_cap"])
            losses.append(-weight * advantage * label.logprob)
        else:  # cispo
            low, high = clip_bounds(loss_config)
            weight = min(max(ratio.item(), low), high)
            losses.append(-weight * advantage * label.logprob)
    return losses


def clipped_loss(ratio: Tensor, advantage: float, loss_config: dict[str, Any]) -> Tensor:
    """-min(rho A, clip(rho) A), then for A < 0 min(that, -c A), case by case.

    The minimum picks the clipped product, a constant, only above the upper bound when A > 0 and only below the lower
    bound when A < 0. Everywhere else, and so exactly on a bound, it is rho A with its gradient.
    """
    low, high = clip_bounds(loss_config)
    rounded = float32(ratio.item())
    if advantage > 0 and rounded > high:
        return constant(-high * advantage)
    if advantage < 0 and rounded < low:
        return constant(-low * advantage)
    if advantage < 0 and loss_config["dual_clip"] is not None:
        # Decision: c is a clip bound like the others, so rounded, and inclusive for the gradient.
        most = float32(loss_config["dual_clip"])
        if rounded > most:
            return constant(-most * advantage)
    return -ratio * advantage


def clip_bounds(loss_config: dict[str, Any]) -> tuple[float, float]:
    return float32(1.0 - loss_config["epsilon_low"]), float32(1.0 + loss_config["epsilon_high"])


def float32(value: float) -> float:
    """The nearest float32: what "exactly on a bound" is decided in."""
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


def differentiate(total: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    if not total.requires_grad:  # no label, or every one clipped
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    leaves = list(parameters.values())
    # The graph is kept for a model that gives the same logits to several losses.
    gradients = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True, allow_unused=True)
    return dict(zip(parameters, gradients, strict=True))


# --- Metrics (docs/contract.md, section 9) ---


def step_metrics(
    documents: list[Document],
    values: list[list[LabelValues]],
    terms: list[tuple[str, Tensor]],
    loss_config: dict[str, Any],
    documents_seen_before_step: int,
) -> dict[str, Metric]:
    """Level `full` without percentiles, times and the gradient norm. A metric without input is absent."""
    kind = loss_config["type"]
    metrics: dict[str, Metric] = {"loss": value_and_scale(terms)}
    for name in ("policy_loss", "entropy_bonus", "z_loss"):
        contribution = [term for term in terms if term[0] == name]
        if contribution:
            metrics[name] = value_and_scale(contribution)

    for name, count in [
        ("num_documents", len(documents)),
        ("num_labels", sum(len(document.positions) for document in documents)),
        ("num_tokens", sum(len(document.input_ids) for document in documents)),
    ]:
        metrics[name] = (float(count), float(count))

    # Per document a list over its labels; only documents that have labels and the input.
    logprobs, entropies, old_logprobs, advantages = [], [], [], []
    ratios: list[list[float]] = []
    staleness: list[list[float]] = []
    for document, labels in zip(documents, values, strict=True):
        if not labels:
            continue
        logprobs.append([label.logprob.item() for label in labels])
        entropies.append([label.entropy.item() for label in labels])
        if document.old_logprobs is not None:
            old_logprobs.append(document.old_logprobs)
            ratios.append(metric_ratios(document, labels, kind) or [])
        if document.advantages is not None:
            advantages.append(document.advantages)
        if document.versions is not None:
            staleness.append([documents_seen_before_step - version for version in document.versions])

    metrics.update(document_mean("new_logprobs", logprobs))
    metrics.update(document_mean("entropy", entropies))
    metrics.update(document_mean("old_logprobs", old_logprobs))
    metrics.update(document_mean("advantage", advantages))
    # Decision: the extremes are of the records' own values, for gspo too.
    metrics.update(extremes("advantage", advantages))
    metrics.update(document_mean("staleness", staleness))
    metrics.update(extremes("staleness", staleness))

    rewards = [[document.reward] for document in documents if document.reward is not None]
    metrics.update(document_mean("reward", rewards))
    metrics.update(extremes("reward", rewards))

    metrics.update(document_mean("ratio_new_old", ratios))
    # Decision: the scale of this one counts the three parts of rho - log rho - 1, which cancel to 0 near rho = 1.
    metrics.update(
        document_mean(
            "kl_new_old",
            ratios,
            value=lambda ratio: ratio - math.log(ratio) - 1.0,
            scale=lambda ratio: ratio + abs(math.log(ratio)) + 1.0,
        )
    )
    if kind in DEFAULT_EPSILONS:
        low, high = clip_bounds(loss_config)
        below = [[float(float32(ratio) < low) for ratio in document] for document in ratios]
        above = [[float(float32(ratio) > high) for ratio in document] for document in ratios]
        either = [[float(float32(ratio) < low or float32(ratio) > high) for ratio in document] for document in ratios]
        metrics.update(document_mean("clipped_ratio_fraction", either))
        metrics.update(document_mean("clipped_ratio_fraction_low", below))
        metrics.update(document_mean("clipped_ratio_fraction_high", above))

    flat = [ratio for document in ratios for ratio in document]
    if flat:
        total = sum(flat)
        squares = sum(ratio**2 for ratio in flat)
        metrics["ratio_new_old_sum"] = (total, total)
        metrics["ratio_new_old_squared_sum"] = (squares, squares)
        metrics["effective_sample_size"] = (total**2 / squares, total**2 / squares)
    return metrics


def metric_ratios(document: Document, labels: list[LabelValues], kind: str) -> list[float] | None:
    """The raw ratio of every label: rho, or R_d again and again for gspo. None without old log-probs."""
    if document.old_logprobs is None:
        return None
    log_ratios = [label.logprob.item() - old for label, old in zip(labels, document.old_logprobs, strict=True)]
    if kind == "gspo" and log_ratios:
        mean = sum(log_ratios) / len(log_ratios)
        return [math.exp(mean) for _ in log_ratios]
    return [math.exp(log_ratio) for log_ratio in log_ratios]


def document_mean(
    name: str,
    documents: list[list[float]],
    value: Callable[[float], float] = float,
    scale: Callable[[float], float] = abs,
) -> dict[str, Metric]:
    """The mean over the documents of each document's mean over its labels; nothing if there is no document."""
    if not documents:
        return {}
    means = [sum(value(item) for item in document) / len(document) for document in documents]
    scales = [sum(scale(item) for item in document) / len(document) for document in documents]
    return {name: (sum(means) / len(documents), sum(scales) / len(documents))}


def extremes(name: str, documents: list[list[float]]) -> dict[str, Metric]:
    flat = [float(item) for document in documents for item in document]
    if not flat:
        return {}
    return {f"max_{name}": (max(flat), abs(max(flat))), f"min_{name}": (min(flat), abs(min(flat)))}
