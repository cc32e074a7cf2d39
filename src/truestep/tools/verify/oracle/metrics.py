"""The metrics of a step: docs/contract.md, section 9."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from truestep.tools.verify.oracle.episodes import episode_metrics
from truestep.tools.verify.oracle.losses import (
    Metric,
    correction_weights,
    float32,
    gradient_changed,
    importance_logs,
    importances,
    is_above,
    is_below,
    off_policy_kept,
    ratio_clamped,
    reference_divergence,
    value_and_scale,
)
from truestep.tools.verify.oracle.records import Document, merged, whole_documents
from truestep.tools.verify.oracle.values import LabelValues


def step_metrics(
    documents: list[Document],
    values: list[list[LabelValues]],
    terms: list[tuple[str, Tensor]],
    loss_config: dict[str, Any],
    documents_seen_before_step: int,
) -> dict[str, Metric]:
    """Compute the metrics of level `full`, except percentiles, times and gradient norm. Absent without input."""
    metrics = term_metrics(terms, loss_config)
    sequences, values_of_sequences = documents, values
    wholes = whole_documents(sequences)
    documents = [merged([sequences[place] for place in whole]) for whole in wholes]
    values = [[label for place in whole for label in values_of_sequences[place]] for whole in wholes]
    counts = {"num_documents": len(documents), "num_sequences": len(sequences)}
    counts["num_labels"] = sum(len(document.positions) for document in documents)
    counts["num_tokens"] = sum(len(document.input_ids) for document in documents)
    metrics.update({name: (float(count), float(count)) for name, count in counts.items()})

    # One list per document with labels and this value; each list is over the document's labels.
    logprobs, entropies, old_logprobs, advantages = [], [], [], []
    ratios: list[list[float]] = []
    ratios_of_sequences: list[list[float]] = []
    staleness: list[list[float]] = []
    for whole, document, labels in zip(wholes, documents, values, strict=True):
        if not labels:
            continue
        logprobs.append([label.logprob.item() for label in labels])
        entropies.append([label.entropy.item() for label in labels])
        if document.old_logprobs is not None:
            old_logprobs.append(document.old_logprobs)
            parts = [(sequences[place], values_of_sequences[place]) for place in whole if values_of_sequences[place]]
            own = [metric_ratios(*part, loss_config["document_ratio"]) or [] for part in parts]
            ratios.append([ratio for part in own for ratio in part])
            ratios_of_sequences += own
        if document.advantages is not None:
            advantages.append(document.advantages)
        if document.versions is not None:
            staleness.append([documents_seen_before_step - version for version in document.versions])

    metrics.update(document_mean("new_logprobs", logprobs))
    metrics.update(document_mean("entropy", entropies))
    metrics.update(document_mean("old_logprobs", old_logprobs))
    metrics.update(document_mean("advantage", advantages))
    # Decision: the extremes are those of the records' own advantages, for gspo too.
    metrics.update(extremes("advantage", advantages))
    metrics.update(document_mean("staleness", staleness))
    metrics.update(extremes("staleness", staleness))

    metrics.update(reward_metrics(documents))
    empty = [[float(not any(values))] for values in advantages]
    metrics.update(document_mean("zero_advantage_fraction", empty))
    metrics.update(group_metrics(documents))
    metrics.update(answer_metrics(documents))
    metrics.update(turn_metrics(documents))
    metrics.update(episode_metrics([document for document in documents if document.turns]))
    metrics.update(ratio_metrics(ratios, ratios_of_sequences, loss_config))
    metrics.update(share_metrics(sequences, values_of_sequences, loss_config))
    metrics.update(covariance_metric(sequences, values_of_sequences))
    metrics.update(distance_metrics(documents, values, loss_config))
    return metrics


def reward_metrics(documents: list[Document]) -> dict[str, Metric]:
    """Compute the mean and the extremes of rewards, the means of their parts, and the share of truncated documents."""
    rewards = [[document.reward] for document in documents if document.reward is not None]
    metrics = document_mean("reward", rewards) | extremes("reward", rewards)
    for name in sorted({name for document in documents for name in document.rewards}):
        parts = [[document.rewards[name]] for document in documents if name in document.rewards]
        metrics.update(document_mean(f"rewards/{name}", parts))
    known = [[float(document.truncated)] for document in documents if document.truncated is not None]
    return metrics | document_mean("truncated_fraction", known)


def turn_metrics(documents: list[Document]) -> dict[str, Metric]:
    """Compute the number of turns per document, and the mean reward of the turns with a reward."""
    counts = [[float(len(document.turns))] for document in documents if document.turns]
    rewards = [turn["reward"] for document in documents for turn in document.turns if turn.get("reward") is not None]
    return document_mean("turns", counts) | document_mean("turn_reward", [[reward] for reward in rewards])


def group_metrics(documents: list[Document]) -> dict[str, Metric]:
    """Compute how much the members of groups differ. Groups with one document in the step are left out."""
    names = {document.group_id for document in documents if document.group_id is not None}
    groups = [[document for document in documents if document.group_id == name] for name in sorted(names)]
    without, distinct, spreads = [], [], []
    prompts: list[list[int]] = []
    completions: list[list[int]] = []
    for members in groups:
        if len(members) < 2:
            continue
        given = [member.unpenalised or member.advantages or [] for member in members if member.advantages is not None]
        if given:
            without.append([float(all(value == 0 for values in given for value in values))])
        different: list[list[int]] = []
        for member in members:
            if member.input_ids not in different:
                different.append(member.input_ids)
        distinct.append([len(different) / len(members)])
        prompts.append(without_labels(members[0]))
        completions += [[member.input_ids[place] for place in member.positions] for member in members]
        rewards = [member.reward for member in members if member.reward is not None]
        if len(rewards) > 1:
            mean = sum(rewards) / len(rewards)
            spreads.append([math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))])
    return {
        **document_mean("zero_advantage_groups", without),
        **document_mean("distinct_completions", distinct),
        **document_mean("group_reward_spread", spreads),
        **document_mean("most_common_completion", most_common(prompts, completions)),
    }


def without_labels(document: Document) -> list[int]:
    return [token for place, token in enumerate(document.input_ids) if place not in document.positions]


def most_common(prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
    """Return the share of the most common completion; nothing if all groups have the same prompt."""
    if all(prompt == prompts[0] for prompt in prompts):
        return []
    return [[max(completions.count(completion) for completion in completions) / len(completions)]]


def answer_metrics(documents: list[Document]) -> dict[str, Metric]:
    """Compute the lengths of completions, and the standard deviation of rewards over the step."""
    lengths = [[float(len(document.positions))] for document in documents]
    metrics = document_mean("response_length", lengths) | extremes("response_length", lengths)
    rewarded = [document for document in documents if document.reward is not None]
    if len(rewarded) < 2:
        return metrics
    rewards = [document.reward for document in rewarded if document.reward is not None]
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    # Decision: the scale includes the rewards, because for equal rewards the deviation is only rounding.
    metrics["reward_std"] = (spread, spread + sum(abs(reward) for reward in rewards) / len(rewards))
    above: list[list[float]] = []
    below: list[list[float]] = []
    largest = max(abs(reward) for reward in rewards)
    for document, reward in zip(rewarded, rewards, strict=True):
        (above if reward - mean > 1e-9 * largest else below).append([float(len(document.positions))])
    metrics.update(document_mean("response_length_rewarded", above))
    metrics.update(document_mean("response_length_unrewarded", below))
    return metrics


def distance_metrics(
    documents: list[Document], values: list[list[LabelValues]], loss_config: dict[str, Any]
) -> dict[str, Metric]:
    """Compute how far the old log-probs are from the sampler's, and the new ones from the reference's."""
    metrics: dict[str, Metric] = {}
    if loss_config["old_logprobs"] == "recompute":
        sampled = [d for d in documents if d.positions and d.sampler_logprobs is not None]
        logs = [importance_logs(document, []) for document in sampled]
        metrics.update(document_mean("sampler_logprobs", [document.sampler_logprobs or [] for document in sampled]))
        metrics.update(document_mean("ratio_old_sampler", logs, value=math.exp, scale=math.exp))
        metrics.update(
            document_mean(
                "kl_old_sampler",
                logs,
                value=lambda log: math.exp(log) - log - 1.0,
                scale=lambda log: math.exp(log) + abs(log) + 1.0,
            )
        )
    if loss_config["kl_reference"]:
        options = loss_config["kl_reference"]
        distances = []
        for document, labels in zip(documents, values, strict=True):
            if labels:
                pairs = [reference_divergence(document, label, at, options) for at, label in enumerate(labels)]
                distances.append([pair.item() for pair in pairs])
        known = [document.reference_logprobs or [] for document in documents if document.positions]
        metrics.update(document_mean("reference_logprobs", known))
        metrics.update(document_mean("kl_new_reference", distances, scale=lambda value: abs(value) + 1.0))
    return metrics


def term_metrics(terms: list[tuple[str, Tensor]], loss_config: dict[str, Any]) -> dict[str, Metric]:
    """Compute the loss, and the sum of each kind of term."""
    metrics: dict[str, Metric] = {"loss": value_and_scale(terms)}
    for name in ("policy_loss", "entropy_bonus", "z_loss", "kl_reference", "kl_cov", "expert_balance", "router_z_loss"):
        contribution = [term for term in terms if term[0] == name]
        if contribution:
            metrics[name] = value_and_scale(contribution)
    if "kl_reference" in metrics:
        # Decision: close to the reference, the log-probs in the divergence cancel, so the scale includes their size.
        value, scale = metrics["kl_reference"]
        metrics["kl_reference"] = (value, scale + loss_config["kl_reference"]["weight"])
    if "kl_cov" in metrics:
        value, scale = metrics["kl_cov"]
        metrics["kl_cov"] = (value, scale + loss_config["kl_cov"].get("weight", 1.0))
    if loss_config["entropy_target"]:
        metrics["entropy_bonus_weight"] = (loss_config["entropy_bonus"], 1.0)
    return metrics


def share_metrics(
    documents: list[Document], values: list[list[LabelValues]], loss_config: dict[str, Any]
) -> dict[str, Metric]:
    """Compute the shares of labels that clips and corrections changed, among all labels to which they apply."""
    found: dict[str, list[float]] = {}
    clamped = 0.0
    knows_clamps = loss_config["type"] not in ("cross_entropy",) and loss_config.get("custom") is None
    for document, labels in zip(documents, values, strict=True):
        if document.old_logprobs is None or document.advantages is None:
            continue
        shares: dict[str, list[float]] = {}
        changed = gradient_changed(document, labels, loss_config)
        if changed is not None:
            shares["clipped_fraction"] = [float(value) for value in changed]
            clamped += sum(ratio_clamped(document, labels, loss_config) or [])
        correction = loss_config["correction"]
        if correction is not None:
            importance = importances(document, labels, correction.get("level", "label"))
            shares["correction_weight"] = correction_weights(document, labels, loss_config)
            shares["corrected_fraction_high"] = [float(is_above(value, correction)) for value in importance]
            if correction["type"] != "truncate" or correction.get("low", 0.0) > 0:
                shares["corrected_fraction_low"] = [float(is_below(value, correction)) for value in importance]
        if loss_config["off_policy_mask"] is not None:
            kept = off_policy_kept(document, labels, loss_config)
            shares["off_policy_fraction"] = [float(value == 0.0) for value in kept]
        for name in ("clip_cov", "kl_cov"):
            if loss_config[name]:
                shares[f"{name}_fraction"] = [float(chosen) for chosen in document.chosen or []]
        for name, items in shares.items():
            found.setdefault(name, []).extend(items)
    # A mean over no values is absent; a count of no values is 0.
    metrics = {name: (sum(items) / len(items),) * 2 for name, items in found.items() if items}
    return metrics | ({"clamped_ratios": (clamped, clamped)} if knows_clamps else {})


def covariance_metric(documents: list[Document], values: list[list[LabelValues]]) -> dict[str, Metric]:
    """Compute the covariance of logπ and A over all labels with old log-probs and advantages."""
    pairs = []
    for document, labels in zip(documents, values, strict=True):
        if document.old_logprobs is not None and document.advantages is not None:
            pairs += [(label.logprob.item(), a) for label, a in zip(labels, document.advantages, strict=True)]
    if not pairs:
        return {}
    first, second = (sum(pair[place] for pair in pairs) / len(pairs) for place in (0, 1))
    value = sum((logprob - first) * (advantage - second) for logprob, advantage in pairs) / len(pairs)
    # Decision: the scale uses products of values, not of differences; the means' rounding is the error of the
    # differences.
    scale = sum(abs(logprob * advantage) for logprob, advantage in pairs) / len(pairs) + abs(first * second)
    return {"logprob_advantage_covariance": (value, scale)}


def ratio_metrics(
    ratios: list[list[float]], of_sequences: list[list[float]], loss_config: dict[str, Any]
) -> dict[str, Metric]:
    """Compute the metrics of ratios, given the ratios of every document's labels and of every sequence's."""
    bounds = loss_config["bounds"]
    # gmpo clips the log-ratio.
    clipped_value = math.log if loss_config["type"] == "gmpo" else float
    metrics = document_mean("ratio_new_old", ratios)
    # Decision: the scale counts the three parts of rho - log rho - 1 separately, because they cancel to 0 near rho = 1.
    metrics.update(
        document_mean(
            "kl_new_old",
            ratios,
            value=lambda ratio: ratio - math.log(ratio) - 1.0,
            scale=lambda ratio: ratio + abs(math.log(ratio)) + 1.0,
        )
    )
    if bounds is not None:
        low, high = bounds
        looked_at = [[float32(clipped_value(ratio)) for ratio in document] for document in ratios]
        below = [[float(value < low) for value in document] for document in looked_at]
        above = [[float(value > high) for value in document] for document in looked_at]
        either = [[float(value < low or value > high) for value in document] for document in looked_at]
        metrics.update(document_mean("clipped_ratio_fraction", either))
        metrics.update(document_mean("clipped_ratio_fraction_low", below))
        metrics.update(document_mean("clipped_ratio_fraction_high", above))

    # With document ratios, each sequence counts once.
    counted = [sequence[:1] for sequence in of_sequences] if loss_config["document_ratio"] else of_sequences
    flat = [ratio for document in counted for ratio in document]
    if flat:
        total = sum(flat)
        squares = sum(ratio**2 for ratio in flat)
        metrics["ratio_new_old_sum"] = (total, total)
        metrics["ratio_new_old_squared_sum"] = (squares, squares)
        size = total**2 / squares
        metrics["effective_sample_size"] = (size, size)
        metrics["effective_sample_share"] = (size / len(flat), size / len(flat))
    return metrics


def metric_ratios(document: Document, labels: list[LabelValues], whole_documents: bool) -> list[float] | None:
    """Return the ratio of every label without clamps: R_d for a loss of whole documents, else rho. None: no
    log-probs."""
    if document.old_logprobs is None:
        return None
    log_ratios = [label.logprob.item() - old for label, old in zip(labels, document.old_logprobs, strict=True)]
    if whole_documents and log_ratios:
        mean = sum(log_ratios) / len(log_ratios)
        return [math.exp(mean) for _ in log_ratios]
    return [math.exp(log_ratio) for log_ratio in log_ratios]


def document_mean(
    name: str,
    documents: list[list[float]],
    value: Callable[[float], float] = float,
    scale: Callable[[float], float] = abs,
) -> dict[str, Metric]:
    """Compute the mean over documents of the mean over labels. Without documents the metric is absent."""
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
