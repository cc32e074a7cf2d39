"""The loss term of every label, and its weight: docs/contract.md, sections 6 and 7."""

from typing import Any, Protocol

import torch
from torch import Tensor

from truestep.verify.oracle.records import Document
from truestep.verify.oracle.values import LabelValues

Metric = tuple[float, float]  # the value, and the same sum with the absolute values of its terms

LOSS_TYPES = ("grpo", "gspo", "reinforce", "cispo", "cross_entropy")
DEFAULT_EPSILONS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
KNOWN_OPTIONS = {
    "type", "epsilon_low", "epsilon_high", "dual_clip", "ratio_cap", "normalize_by", "max_labels",
    "gradient_divisor", "entropy_bonus", "z_loss", "metrics", "custom",
}  # fmt: skip


class CustomTerms(Protocol):
    """A user's loss, by its own formula. The gradient is autograd's, and not the slope that the user gives."""

    whole_documents: bool
    bounds: tuple[float, float] | None

    def losses(self, document: Document, labels: list[LabelValues]) -> list[Tensor]:
        """Compute l_t of every label of one document, on the autograd graph."""


def complete_loss_config(options: dict[str, Any]) -> dict[str, Any]:
    """Fill the options up with their defaults, and refuse what the oracle does not compute."""
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
        "normalize_by": "document_means" if kind == "gspo" else "labels",
        "max_labels": None,
        "gradient_divisor": None,
        "entropy_bonus": 0.0,
        "z_loss": 0.0,
    }
    complete = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    complete["whole_documents"] = kind == "gspo" or (custom is not None and custom.whole_documents)
    complete["bounds"] = None if custom is None else custom.bounds
    if kind in DEFAULT_EPSILONS:
        complete["bounds"] = clip_bounds(complete)
    return complete


def loss_terms(
    documents: list[Document], values: list[list[LabelValues]], loss_config: dict[str, Any]
) -> list[tuple[str, Tensor]]:
    """List (name of the contribution, weight * term) for every label, all divisions done; the loss is their sum."""
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
            weight = ratio.item()  # a number, which has no gradient: sg()
            if loss_config["ratio_cap"] is not None:
                weight = min(weight, loss_config["ratio_cap"])
            losses.append(-weight * advantage * label.logprob)
        else:  # cispo
            low, high = clip_bounds(loss_config)
            weight = min(max(ratio.item(), low), high)
            losses.append(-weight * advantage * label.logprob)
    return losses


def clipped_loss(ratio: Tensor, advantage: float, loss_config: dict[str, Any]) -> Tensor:
    """Compute -min(rho A, clip(rho) A), then for A < 0 min(that, -c A), case by case.

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
    """Round to the nearest float32, in which "exactly on a bound" is decided."""
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
