"""The metrics of a micro-batch, as sums and counts. Nothing here affects a gradient.

T: labels, D: documents of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from truestep.losses.labels import Labels
from truestep.losses.objective import Objective
from truestep.metrics.types import Derived, Histogram, Max, Mean, Metric, Min, Sum

# Log-ratios from 1e-7 to 30 nats either way, evenly in the exponent; zero lies inside the middle bin.
_MAGNITUDES = torch.logspace(-7, 1.5, 256, dtype=torch.float64)
LOG_RATIO_EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
LOG_RATIO_PERCENTILES = (1, 5, 50, 95, 99)


@dataclass(frozen=True)
class DocumentFacts:
    """What a metric needs of documents beside their labels. A document may lack any of it."""

    reward: torch.Tensor  # [D]
    model_version: torch.Tensor  # [T]
    documents_seen: int  # before this step
    has_logprobs: torch.Tensor  # [D] bool
    has_advantages: torch.Tensor  # [D] bool
    has_version: torch.Tensor  # [D] bool
    has_reward: torch.Tensor  # [D] bool


def effective_sample_size(total: float, squares: float) -> float | None:
    return total * total / squares if squares else None


def measure(labels: Labels, objective: Objective, facts: DocumentFacts, level: str) -> dict[str, Metric]:
    """Measure every metric of docs/contract.md, section 9, that the data at hand allows."""
    everyone = torch.ones_like(facts.has_logprobs)
    metrics: dict[str, Metric] = {"new_logprobs": _document_mean(labels, labels.logprobs, everyone)}
    terms = objective.terms(labels)
    metrics["loss"] = Sum(torch.stack([term.sum() for term in terms.values()]).sum())
    if len(terms) > 1:
        metrics |= {name: Sum(term.sum()) for name, term in terms.items()}
    if level in ("basic", "full"):
        metrics |= _ratio_family(labels, objective, facts.has_logprobs, percentiles=level == "full")
        metrics |= _advantages(labels, facts.has_advantages)
        metrics |= _rewards(facts)
        metrics |= _staleness(labels, facts)
    if level == "full":
        metrics["entropy"] = _document_mean(labels, labels.entropy, everyone)
    return metrics


def _document_mean(labels: Labels, values: torch.Tensor, present: torch.Tensor) -> Mean:
    """Over the documents that have labels and the input: the mean of the document's mean over its labels."""
    counted = present & (labels.num_labels > 0)
    means = labels.document_sums(values) / labels.num_labels.clamp(min=1)
    return Mean(torch.where(counted, means, 0).sum(), counted.sum())


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max().double() if len(values) else torch.tensor(-torch.inf, dtype=torch.float64)


def _ratio_family(labels: Labels, objective: Objective, present: torch.Tensor, percentiles: bool) -> dict[str, Metric]:
    label_present = present[labels.document]
    ratio = torch.where(label_present, objective.policy.ratio(labels), 1)
    # Not the logarithm of the ratio, which may be 0 or infinite; and expm1 in float64 keeps the digits of a divergence
    # far smaller than the ratio's own rounding.
    log_ratio = labels.logprobs.double() - labels.old_logprobs.double()
    if objective.whole_documents:
        log_ratio = labels.document_means(log_ratio)
    log_ratio = torch.where(label_present, log_ratio, 0)
    # The loss compares a float32 ratio with its bounds, and so does the clipped fraction; sums need no such rounding.
    exact_ratio = log_ratio.exp()
    counted = label_present.double()
    total, squares = Sum((exact_ratio * counted).sum()), Sum((exact_ratio.square() * counted).sum())
    metrics: dict[str, Metric] = {
        "old_logprobs": _document_mean(labels, labels.old_logprobs, present),
        "ratio_new_old": _document_mean(labels, exact_ratio, present),
        "kl_new_old": _document_mean(labels, log_ratio.expm1() - log_ratio, present),
    }
    if objective.policy.bounds is not None:
        low, high = objective.policy.bounds
        below, above = (ratio < low).float(), (ratio > high).float()
        metrics["clipped_ratio_fraction"] = _document_mean(labels, below + above, present)
        metrics["clipped_ratio_fraction_low"] = _document_mean(labels, below, present)
        metrics["clipped_ratio_fraction_high"] = _document_mean(labels, above, present)
    # Sums are logged only where there is something to sum: a run without log-probs has no ratio of 0.
    if bool(label_present.any()):
        metrics |= {"ratio_new_old_sum": total, "ratio_new_old_squared_sum": squares}
        metrics["effective_sample_size"] = Derived((total, squares), effective_sample_size)
    if percentiles:
        edges = LOG_RATIO_EDGES.to(log_ratio.device)
        metrics |= {
            f"log_ratio_p{percentile}": Histogram.of(log_ratio[label_present], edges, percentile)
            for percentile in LOG_RATIO_PERCENTILES
        }
    return metrics


def _advantages(labels: Labels, present: torch.Tensor) -> dict[str, Metric]:
    values = labels.advantages[present[labels.document]]
    return {
        "advantage": _document_mean(labels, labels.advantages, present),
        "max_advantage": Max(_largest(values)),
        "min_advantage": Min(-_largest(-values)),
    }


def _rewards(facts: DocumentFacts) -> dict[str, Metric]:
    values = facts.reward[facts.has_reward].double()
    return {
        "reward": Mean(values.sum(), facts.has_reward.sum()),
        "max_reward": Max(_largest(values)),
        "min_reward": Min(-_largest(-values)),
    }


def _staleness(labels: Labels, facts: DocumentFacts) -> dict[str, Metric]:
    staleness = (facts.documents_seen - facts.model_version).double()
    values = staleness[facts.has_version[labels.document]]
    return {
        "staleness": _document_mean(labels, staleness, facts.has_version),
        "max_staleness": Max(_largest(values)),
        "min_staleness": Min(-_largest(-values)),
    }
