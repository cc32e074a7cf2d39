"""Labels of random documents, given alike to the trainer's losses and to the float64 oracle.

Dimensions: T labels, D documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oracles.step import Document, LabelValues, complete_loss_config
from truestep.losses.corrections import Correction, OffPolicyMask
from truestep.losses.exploration import ClipCov, EntropyTarget, KlCov
from truestep.losses.label_losses import (
    Cispo,
    CrossEntropy,
    Dppo,
    Gmpo,
    Grpo,
    Gspo,
    LabelLoss,
    Reinforce,
    Sapo,
)
from truestep.losses.labels import Labels
from truestep.losses.objective import Denominator, Objective
from truestep.rollouts.fields import names_in_has
from truestep.types import StepTotals

DENOMINATORS: tuple[dict[str, Any], ...] = (
    {"normalize_by": "labels"},
    {"normalize_by": "documents"},
    {"normalize_by": "document_means"},
    {"normalize_by": "constant", "max_labels": 20},
)
# Ratios of `make_case` lie on both sides of every one of these.
LOSSES: tuple[dict[str, Any], ...] = (
    {"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    {"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 1.5},
    {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.12},
    {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.12, "dual_clip": 1.25},
    {"type": "reinforce"},
    {"type": "reinforce", "ratio_cap": 1.3},
    {"type": "cispo", "epsilon_low": 0.3, "epsilon_high": 0.2},
    {"type": "sapo", "tau_positive": 2.0, "tau_negative": 3.0},
    {"type": "gmpo", "epsilon_low": 0.2, "epsilon_high": 0.15},
    {"type": "dppo", "threshold": 0.05},
    {"type": "dppo", "divergence": "kl", "threshold": 0.01},
    {"type": "cross_entropy"},
)
# Constant weights on the policy loss, with c on both sides of their bounds. Each is tried with two losses.
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"correction": {"type": "truncate", "level": "label", "high": 1.2}},
    {"correction": {"type": "truncate", "level": "label", "low": 0.8, "high": 1.3}},
    {"correction": {"type": "mask", "level": "label", "low": 0.7, "high": 1.4}},
    {"correction": {"type": "reject", "level": "label", "low": 0.7, "high": 1.4}},
    {"correction": {"type": "truncate", "level": "document", "high": 1.5}},
    {"correction": {"type": "mask", "level": "document", "low": 0.4, "high": 2.0}},
    {"correction": {"type": "reject", "level": "document_mean", "low": 0.8, "high": 1.2}},
    {"off_policy_mask": 0.1},
    {"correction": {"type": "mask", "level": "document_mean", "low": 0.6, "high": 1.3}, "off_policy_mask": 0.0},
)
# Labels that are held back, with and without constant weights. The choice itself: tests/step/test_chosen.py.
EXPLORING: tuple[dict[str, Any], ...] = (
    {**LOSSES[1], "clip_cov": {"share": 0.3}},
    {**LOSSES[3], "clip_cov": {"share": 0.3}, "entropy_target": {"entropy": 1.0}, "entropy_bonus": 0.05},
    {**LOSSES[1], "kl_cov": {"share": 0.3, "weight": 0.7}},
    {**LOSSES[8], "kl_cov": {"share": 0.3, "weight": 0.7}, **CORRECTIONS[1]},
)
CORRECTED: tuple[dict[str, Any], ...] = tuple(
    {**loss, **correction}
    for number, correction in enumerate(CORRECTIONS)
    for loss in (LOSSES[1], (LOSSES[3], LOSSES[5], LOSSES[8], LOSSES[9])[number % 4])
)
COUNTS = (5, 0, 1, 9, 2, 0, 14, 3, 3, 7)


def loss_name(loss: dict[str, Any]) -> str:
    values = [item for value in loss.values() for item in (value.values() if isinstance(value, dict) else [value])]
    return "-".join(f"{value}" for value in values)


@dataclass(frozen=True)
class Case:
    """Documents of `counts` labels. Advantages of both signs and zero, one for each label."""

    counts: tuple[int, ...]
    logits: torch.Tensor  # [T, V] float64
    label_ids: torch.Tensor  # [T]
    old_logprobs: torch.Tensor  # [T]
    advantages: torch.Tensor  # [T]

    @property
    def chosen(self) -> torch.Tensor:  # [T] int64: every third label
        return (torch.arange(len(self.label_ids)) % 3 == 1).long()

    @property
    def document(self) -> torch.Tensor:  # [T]
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))

    @property
    def totals(self) -> StepTotals:
        return StepTotals(len(self.counts), sum(self.counts), 3 * sum(self.counts))


def make_case(
    counts: Sequence[int] = COUNTS, *, seed: int = 0, vocabulary: int = 11, per_token_advantages: bool = True
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    labels = sum(counts)
    document = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    logits = 1.5 * torch.randn(labels, vocabulary, generator=generator, dtype=torch.float64)
    label_ids = torch.randint(vocabulary, (labels,), generator=generator)
    logprobs = torch.log_softmax(logits, -1)[torch.arange(labels), label_ids]
    # A shift of the whole document, so that gspo's ratio leaves its bounds too, and one of each label.
    shift = 0.3 * torch.randn(len(counts), generator=generator, dtype=torch.float64)
    own = 0.3 * torch.randn(labels, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(counts), generator=generator, dtype=torch.float64)[document]
    if per_token_advantages:
        advantages = advantages + torch.randn(labels, generator=generator, dtype=torch.float64)
        advantages[::6] = 0
    else:
        advantages[document % 4 == 0] = 0
    return Case(tuple(counts), logits, label_ids, logprobs - shift[document] - own, advantages)


def label_loss(loss: dict[str, Any]) -> LabelLoss:
    """The loss of the oracle's options, whose defaults are those of docs/contract.md, section 6."""
    options = complete_loss_config(loss)
    epsilons = options["epsilon_low"], options["epsilon_high"]
    match options["type"]:
        case "grpo":
            return Grpo(*epsilons, options["dual_clip"])
        case "gspo":
            return Gspo(*epsilons, options["dual_clip"])
        case "reinforce":
            return Reinforce(options["ratio_cap"])
        case "cispo":
            return Cispo(*epsilons)
        case "sapo":
            return Sapo(options["tau_positive"], options["tau_negative"])
        case "gmpo":
            return Gmpo(*epsilons)
        case "dppo":
            return Dppo(options["divergence"], options["threshold"])
        case _:
            return CrossEntropy()


def make_objective(loss: dict[str, Any]) -> Objective:
    options = complete_loss_config(loss)
    correction, threshold = options["correction"], options["off_policy_mask"]
    target = options["entropy_target"] and {"rate": 0.005, "largest_weight": 0.1, **options["entropy_target"]}
    return Objective(
        label_loss(loss),
        Denominator(options["normalize_by"], options["max_labels"]),
        entropy_bonus=options["entropy_bonus"],
        entropy_denominator=options["entropy_normalize_by"] and Denominator(options["entropy_normalize_by"]),
        z_loss=options["z_loss"],
        gradient_divisor=options["gradient_divisor"] or 1.0,
        correction=None if correction is None else Correction(**correction),
        off_policy_mask=None if threshold is None else OffPolicyMask(threshold),
        entropy_target=EntropyTarget(**target) if target else None,
        clip_cov=ClipCov(low=1.0, high=5.0, **options["clip_cov"]) if options["clip_cov"] else None,
        kl_cov=KlCov(**options["kl_cov"]) if options["kl_cov"] else None,
    )


def labels_of(**known: Any) -> Labels:
    """Labels of which only some fields matter: what is not given is 0, and every document has every field."""
    count, documents = len(known["document"]), len(known["num_labels"])
    dtype = known["logprobs"].dtype
    per_label = {item.name: torch.zeros(count, dtype=dtype) for item in Labels.label_fields()}
    integers = {name: torch.zeros(count, dtype=torch.int64) for name in ("rows", "ids", "model_version", "chosen")}
    has = {name: torch.ones(documents, dtype=torch.bool) for name in names_in_has()}
    per_document = {
        "reward": torch.zeros(documents, dtype=dtype),
        "rewards": {},
        "truncated": torch.zeros(documents, dtype=torch.bool),
        "has": has,
        "document_labels": known["num_labels"],
        "counts": torch.ones(documents, dtype=torch.bool),
        "others_have_advantage": torch.zeros(documents, dtype=torch.bool),
    }
    per_label["sampler_logprobs"] = known.get("old_logprobs", per_label["sampler_logprobs"])
    return Labels(**per_label | integers | per_document | known)


def make_labels(case: Case, denominator: Denominator, dtype: torch.dtype = torch.float64) -> Labels:
    """As `step.runner` builds them of one micro-batch with every document of the step."""
    log_p = torch.log_softmax(case.logits, -1)
    num_labels = torch.tensor(case.counts)
    return labels_of(
        logprobs=log_p[torch.arange(len(log_p)), case.label_ids].to(dtype),
        entropy=-(log_p.exp() * log_p).sum(-1).to(dtype),
        logsumexp=case.logits.logsumexp(-1).to(dtype),
        old_logprobs=case.old_logprobs.to(dtype),
        advantages=case.advantages.to(dtype),
        chosen=case.chosen,
        document=case.document,
        weight=denominator.label_weights(num_labels[case.document], case.totals).to(dtype),
        num_labels=num_labels,
    )


def plain_labels(**vectors: Sequence[float]) -> Labels:
    """One document of labels in float32, with weight 1 unless given; whatever is not given is 0."""
    length = len(next(iter(vectors.values())))
    names = ("logprobs", "entropy", "logsumexp", "old_logprobs", "advantages", "weight")
    values = {name: torch.tensor(vectors.get(name, [float(name == "weight")] * length)) for name in names}
    return labels_of(**values, document=torch.zeros(length, dtype=torch.int64), num_labels=torch.tensor([length]))


def oracle_inputs(case: Case, logits: torch.Tensor) -> tuple[list[Document], list[list[LabelValues]]]:
    """The oracle's view of the same labels, on the graph of `logits`."""
    documents: list[Document] = []
    values: list[list[LabelValues]] = []
    start = 0
    for index, count in enumerate(case.counts):
        rows = range(start, start + count)
        start += count
        documents.append(
            Document(
                id=str(index),
                input_ids=[0] * (3 * count),
                positions=list(range(1, count + 1)),
                temperature=1.0,
                old_logprobs=case.old_logprobs[rows.start : rows.stop].tolist(),
                advantages=case.advantages[rows.start : rows.stop].tolist(),
                versions=None,
                reward=None,
                chosen=case.chosen[rows.start : rows.stop].bool().tolist(),
            )
        )
        values.append([_label_values(logits[row], int(case.label_ids[row])) for row in rows])
    return documents, values


def _label_values(z: torch.Tensor, label: int) -> LabelValues:
    logsumexp = torch.logsumexp(z, dim=0)
    entropy = logsumexp - (torch.exp(z - logsumexp) * z).sum()
    return LabelValues(z[label] - logsumexp, entropy, logsumexp)


def without(document: Document, *names: str) -> Document:
    return replace(document, **dict.fromkeys(names))
