"""The metrics of a micro-batch, as sums and counts. They do not affect gradients.

A measure is a function from `Labels` and `StepFacts` to metrics by name. `BUILT_IN` lists the built-in ones with their
levels; users add their own by import path. T: labels, D: sequences of the micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from truestep.config.custom import CustomError
from truestep.losses.labels import Labels
from truestep.losses.objective import Objective
from truestep.metrics.types import Derived, Histogram, Max, Mean, Metric, Min, Sum
from truestep.types import StepTotals

# Bin edges for log-ratios from 1e-7 to 30 nats with either sign, evenly in the exponent; the middle bin holds zero.
_MAGNITUDES = torch.logspace(-7, 1.5, 256, dtype=torch.float64)
LOG_RATIO_EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
LOG_RATIO_PERCENTILES = (1, 5, 50, 95, 99)

LEVELS = ("none", "basic", "full")  # each level includes the metrics of the levels before it
MEASURED = LEVELS[1:]  # levels that log more than the metrics of the loss


@dataclass(frozen=True)
class StepFacts:
    """Facts about the whole step for metrics."""

    objective: Objective
    documents_seen: int  # documents that the policy was trained on before this step
    totals: StepTotals


Measure = Callable[[Labels, StepFacts], Mapping[str, Metric]]


def measure_labels(labels: Labels, step: StepFacts, level: str, custom: Mapping[str, Measure]) -> dict[str, Metric]:
    """Compute the metrics of a level for which the documents have data, and the user's own (`custom`)."""
    wanted = LEVELS[: LEVELS.index(level) + 1]
    metrics: dict[str, Metric] = {}
    for first_level, measure in BUILT_IN:
        if first_level in wanted:
            metrics |= measure(labels, step)
    for name, measure in custom.items():
        measured = measure(labels, step)
        _check(name, measured)
        if repeated := sorted(set(measured) & set(metrics)):
            raise CustomError(f"{name} gives {', '.join(repeated)}, which is the name of another metric")
        metrics |= measured
    return metrics


def _check(name: str, measured: Any) -> None:
    """Raise if the result of a user's function is not a mapping from names to metrics."""
    if not isinstance(measured, Mapping):
        raise CustomError(f"{name} gives {type(measured).__name__}, not a mapping of metrics by name")
    for metric, value in measured.items():
        if not (hasattr(value, "merge") and hasattr(value, "value")):
            raise CustomError(
                f"{name} gives {metric} as {type(value).__name__}: a metric is one of truestep.metrics.types, such as "
                "Sum(total) or Mean(total, count), which says how it is reduced"
            )


def document_mean(labels: Labels, values: torch.Tensor, present: torch.Tensor | None = None) -> Mean:
    """Average over the labels of each document, then over the documents with labels (only those `present` [D])."""
    there = labels.num_labels > 0
    if present is not None:
        there = there & present
    # Each sequence adds its share of its document's mean, even if another rank or micro-batch has the other sequences.
    means = labels.document_sums(values) / labels.document_labels.clamp(min=1)
    return Mean(torch.where(there, means, 0).sum(), (there & labels.counts).sum())


def extremes(name: str, values: torch.Tensor) -> dict[str, Metric]:
    """Return the largest and the smallest value as metrics `max_NAME` and `min_NAME`."""
    return {f"max_{name}": Max(_largest(values)), f"min_{name}": Min(-_largest(-values))}


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max().double() if len(values) else torch.tensor(-torch.inf, dtype=torch.float64)


def effective_sample_size(total: float, squares: float) -> float | None:
    return total * total / squares if squares else None


def effective_sample_share(total: float, squares: float, count: float) -> float | None:
    return total * total / squares / count if squares and count else None


def _loss(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    terms = step.objective.terms(labels, step.totals)
    metrics: dict[str, Metric] = {"new_logprobs": document_mean(labels, labels.logprobs)}
    metrics["loss"] = Sum(torch.stack([term.sum() for term in terms.values()]).sum())
    if len(terms) > 1 or step.objective.routers:
        metrics |= {name: Sum(term.sum()) for name, term in terms.items()}
    if (weight := step.objective.steered_weight) is not None:  # the controller reads it at every level
        metrics |= _entropy(labels, step) | {"entropy_bonus_weight": Max(weight)}
    return metrics


def _log_ratio(labels: Labels, step: StepFacts) -> torch.Tensor:  # [T] float64
    """Compute the log-ratio that the loss uses, from log-probs; 0 for documents without old log-probs.

    It does not take the logarithm of the ratio, because the ratio may be 0 or infinite. In float64, expm1 of the result
    is precise even for divergences far smaller than the ratio's rounding error.
    """
    log_ratio = labels.logprobs.double() - labels.old_logprobs.double()
    if step.objective.label_loss.document_ratio:
        log_ratio = labels.document_means(log_ratio)
    return torch.where(labels.has_label("logprobs"), log_ratio, 0)


def _ratio(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    present, label_present = labels.has["logprobs"], labels.has_label("logprobs")
    log_ratio = _log_ratio(labels, step)
    ratio, counted = log_ratio.exp(), label_present.double()
    if step.objective.label_loss.document_ratio:  # each sequence has one ratio and counts once
        counted = counted / labels.num_labels[labels.document]
    total, squares = Sum((ratio * counted).sum()), Sum((ratio.square() * counted).sum())
    metrics: dict[str, Metric] = {
        "old_logprobs": document_mean(labels, labels.old_logprobs, present),
        "ratio_new_old": document_mean(labels, ratio, present),
        "kl_new_old": document_mean(labels, log_ratio.expm1() - log_ratio, present),
    }
    # Without old log-probs there is no ratio: sums of 0 would be misleading.
    if bool(label_present.any()):
        metrics |= {"ratio_new_old_sum": total, "ratio_new_old_squared_sum": squares}
        metrics["effective_sample_size"] = Derived((total, squares), effective_sample_size)
        count = Sum(torch.where(label_present, counted, 0).sum())
        metrics["effective_sample_share"] = Derived((total, squares, count), effective_sample_share)
    return metrics


def _sampler(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compare recomputed old log-probs with the sampler's; empty if old log-probs are the sampler's."""
    if not labels.recomputed:
        return {}
    present, label_present = labels.has["sampler_logprobs"], labels.has_label("sampler_logprobs")
    log_ratio = labels.old_logprobs.double() - labels.sampler_logprobs.double()
    log_ratio = torch.where(label_present, log_ratio, 0)
    return {
        "sampler_logprobs": document_mean(labels, labels.sampler_logprobs, present),
        "ratio_old_sampler": document_mean(labels, log_ratio.exp(), present),
        "kl_old_sampler": document_mean(labels, log_ratio.expm1() - log_ratio, present),
    }


def _reference(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compute the divergence from the reference, without its weight."""
    kl_reference = step.objective.kl_reference
    if kl_reference is None:
        return {}
    present = labels.has["reference_logprobs"]
    return {
        "reference_logprobs": document_mean(labels, labels.reference_logprobs, present),
        "kl_new_reference": document_mean(labels, kl_reference(labels).loss.double(), present),
    }


def _clipped(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compute the fractions of labels outside the clip bounds, with the loss's own float32 comparison."""
    present, label_present = labels.has["logprobs"], labels.has_label("logprobs")
    outside = step.objective.label_loss.outside(labels)
    if outside is None:
        return {}
    below, above = ((label_present & side).float() for side in outside)
    return {
        "clipped_ratio_fraction": document_mean(labels, below + above, present),
        "clipped_ratio_fraction_low": document_mean(labels, below, present),
        "clipped_ratio_fraction_high": document_mean(labels, above, present),
    }


def _gradient_taken(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compute the share of labels with a clipped gradient, and the number of labels with a clamped log-ratio."""
    term = step.objective.label_loss(labels)
    counted = _counted(labels)
    metrics: dict[str, Metric] = {}
    if term.clipped is not None:
        metrics["clipped_fraction"] = Mean((term.clipped & counted).sum(), counted.sum())
    if term.clamped is not None:
        metrics["clamped_ratios"] = Sum((term.clamped & counted).sum())
    return metrics


def _weighed_away(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compute the mean correction weight, and the share of labels that each correction or mask affected."""
    correction, mask, objective = step.objective.correction, step.objective.off_policy_mask, step.objective
    counted = _counted(labels)
    total = counted.sum()
    metrics: dict[str, Metric] = {}
    if correction is not None:
        below, above = correction.outside(labels)
        metrics["correction_weight"] = Mean(torch.where(counted, correction.weights(labels), 0).double().sum(), total)
        metrics["corrected_fraction_high"] = Mean((counted & above).sum(), total)
        if correction.type != "truncate" or correction.low > 0:
            metrics["corrected_fraction_low"] = Mean((counted & below).sum(), total)
    if mask is not None:
        metrics["off_policy_fraction"] = Mean((counted & (mask.weights(labels) == 0)).sum(), total)
    for name, part in (("clip_cov_fraction", objective.clip_cov), ("kl_cov_fraction", objective.kl_cov)):
        if part is not None:
            metrics[name] = Mean((counted & (labels.chosen != 0)).sum(), total)
    return metrics


def _counted(labels: Labels) -> torch.Tensor:  # [T] bool
    """Return which labels have old log-probs and an advantage, as a policy loss needs."""
    return labels.has_label("logprobs") & labels.has_label("advantages")


def _percentiles(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    present = labels.has_label("logprobs")
    log_ratio = _log_ratio(labels, step)[present]
    edges = LOG_RATIO_EDGES.to(log_ratio.device)
    return {f"log_ratio_p{percent}": Histogram.of(log_ratio, edges, percent) for percent in LOG_RATIO_PERCENTILES}


def _advantages(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    present = labels.advantages[labels.has_label("advantages")]
    mean = document_mean(labels, labels.advantages, labels.has["advantages"])
    return {"advantage": mean, **extremes("advantage", present)}


def _rewards(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    present = labels.has["reward"] & labels.counts
    values = labels.reward[present].double()
    parts: dict[str, Metric] = {}
    for name, part in labels.rewards.items():
        there = ~part.isnan() & labels.counts
        parts[f"rewards/{name}"] = Mean(part[there].double().sum(), there.sum())
    return {"reward": Mean(values.sum(), present.sum()), **extremes("reward", values), **parts}


def _truncated(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    truncated, known = labels.truncated & labels.counts, labels.has["truncated"] & labels.counts
    return {"truncated_fraction": Mean(truncated.double().sum(), known.sum())}


def _staleness(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    staleness = (step.documents_seen - labels.model_version).double()
    mean = document_mean(labels, staleness, labels.has["model_version"])
    return {"staleness": mean, **extremes("staleness", staleness[labels.has_label("model_version")])}


def _zero_advantage(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compute the share of documents in which all advantages are 0, which give no policy gradient."""
    counted = labels.has["advantages"] & labels.counts & (labels.num_labels > 0)
    nothing = (labels.document_sums(labels.advantages.abs()) == 0) & ~labels.others_have_advantage
    return {"zero_advantage_fraction": Mean((nothing & counted).sum(), counted.sum())}


def _covariance(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Compute the covariance of logπ and A over the labels: if it is positive, an update lowers the entropy."""
    counted = _counted(labels)
    logprobs, advantages = (torch.where(counted, part, 0).double() for part in (labels.logprobs, labels.advantages))
    products = (logprobs * advantages).sum()
    sums = (Sum(products), Sum(logprobs.sum()), Sum(advantages.sum()), Sum(counted.sum()))
    return {"logprob_advantage_covariance": Derived(sums, covariance)}


def covariance(products: float, first: float, second: float, count: float) -> float | None:
    return products / count - first / count * (second / count) if count else None


def _entropy(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    return {"entropy": document_mean(labels, labels.entropy)}


# The measures, each with the lowest level that logs it, in the order of a step's log line.
BUILT_IN: tuple[tuple[str, Measure], ...] = (
    ("none", _loss),
    ("basic", _ratio),
    ("basic", _sampler),
    ("basic", _reference),
    ("basic", _clipped),
    ("basic", _gradient_taken),
    ("basic", _weighed_away),
    ("full", _percentiles),
    ("basic", _advantages),
    ("basic", _zero_advantage),
    ("basic", _rewards),
    ("basic", _truncated),
    ("basic", _staleness),
    ("basic", _covariance),
    ("basic", _entropy),
)
