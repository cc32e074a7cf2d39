"""Our objectives against TRL's own `_compute_loss` on the same tensors: loss and gradient.

Dimensions: B completions, T tokens of the longest one, N labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from losses.label_cases import labels_of
from peers.installed import needs_peers, run_worker
from truestep.config.schema import Config
from truestep.run.assemble.step import make_objective
from truestep.types import StepTotals

LENGTH, VOCABULARY = 12, 11
TOLERANCE = 1e-5
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
GRPO = {"type": "grpo", **CLIP}


@dataclass(frozen=True)
class Pair:
    """The same objective in both: TRL's settings and our loss section."""

    name: str
    theirs: dict[str, Any]
    ours: dict[str, Any]
    correction: str | None = None  # TRL's vllm_importance_sampling_mode
    old: bool = True  # old log-probs are given; otherwise both take their own


def corrected(mode: str, **correction: Any) -> Pair:
    ours = {**GRPO, "old_logprobs": "recompute", "correction": correction}
    return Pair(mode, {"loss_type": "bnpo", "use_vllm": True, **CLIP}, ours, mode.partition(" ")[0])


PAIRS = (
    Pair("grpo", {"loss_type": "grpo", **CLIP}, {**GRPO, "normalize_by": "document_means"}),
    Pair("bnpo", {"loss_type": "bnpo", **CLIP}, GRPO),
    Pair("dapo", {"loss_type": "dapo", **CLIP}, GRPO),
    Pair(
        "dr_grpo",
        {"loss_type": "dr_grpo", "max_completion_length": 20, **CLIP},
        {**GRPO, "normalize_by": "constant", "max_labels": 20},
    ),
    Pair(
        "cispo",
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"type": "cispo", "epsilon_low": 1.0, "epsilon_high": 0.3},
    ),
    Pair(
        "sapo",
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        {"type": "sapo", "tau_positive": 2.0, "tau_negative": 3.0, "normalize_by": "document_means"},
    ),
    Pair(
        "luspo, sequence",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", **CLIP},
        {"type": "gspo", "normalize_by": "documents", **CLIP},
    ),
    Pair(
        "grpo, sequence",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIP},
        {"type": "gspo", **CLIP},
    ),
    Pair("delta", {"loss_type": "bnpo", "delta": 1.5, **CLIP}, {**GRPO, "dual_clip": 1.5}),
    Pair("beta", {"loss_type": "bnpo", "beta": 0.3, **CLIP}, {**GRPO, "kl_reference": {"weight": 0.3}}),
    Pair(
        "beta, bias correction",
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True, **CLIP},
        {**GRPO, "kl_reference": {"weight": 0.3, "estimator": "unbiased"}, "normalize_by": "document_means"},
    ),
    Pair(
        "off-policy mask",
        {"loss_type": "bnpo", "off_policy_mask_threshold": 0.05, **CLIP},
        {**GRPO, "off_policy_mask": 0.05},
    ),
    Pair("entropy_coef", {"loss_type": "dapo", "entropy_coef": 0.1, **CLIP}, {**GRPO, "entropy_bonus": 0.1}),
    Pair(
        "entropy_coef beside another denominator",
        {"loss_type": "grpo", "entropy_coef": 0.1, **CLIP},
        {**GRPO, "normalize_by": "document_means", "entropy_bonus": 0.1, "entropy_normalize_by": "labels"},
    ),
    Pair("own old log-probs", {"loss_type": "bnpo", **CLIP}, {**GRPO, "old_logprobs": "recompute"}, old=False),
    corrected("token_truncate", type="truncate", level="label", high=1.2),
    corrected("token_truncate from below too", type="truncate", level="label", low=0.9, high=1.2),
    corrected("token_mask", type="mask", level="label", low=0.8, high=1.3),
    corrected("sequence_truncate", type="truncate", level="document", high=1.4),
    corrected("sequence_mask", type="mask", level="document", low=0.5, high=1.8),
    Pair(
        "everything",
        {
            "loss_type": "grpo",
            "beta": 0.2,
            "delta": 1.4,
            "off_policy_mask_threshold": 0.05,
            "use_vllm": True,
            "entropy_coef": 0.1,
            **CLIP,
        },
        {
            **GRPO,
            "entropy_bonus": 0.1,
            "entropy_normalize_by": "labels",
            "dual_clip": 1.4,
            "old_logprobs": "recompute",
            "off_policy_mask": 0.05,
            "normalize_by": "document_means",
            "kl_reference": {"weight": 0.2},
            "correction": {"type": "mask", "level": "document", "low": 0.5, "high": 1.8},
        },
        "sequence_mask",
    ),
)


@dataclass(frozen=True)
class Tensors:
    """Completions of several lengths with spans of tool output, in float32; one has no label."""

    logits: torch.Tensor  # [B, T, V]
    ids: torch.Tensor  # [B, T]
    completion_mask: torch.Tensor  # [B, T]
    tool_mask: torch.Tensor  # [B, T]
    old: torch.Tensor  # [B, T]
    sampler: torch.Tensor  # [B, T]
    reference: torch.Tensor  # [B, T]
    advantages: torch.Tensor  # [B]

    @property
    def mask(self) -> torch.Tensor:  # [B, T] bool
        return (self.completion_mask * self.tool_mask).bool()

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # [B, T]
        return torch.log_softmax(logits, -1).gather(-1, self.ids[..., None])[..., 0]


def make_tensors(lengths: Sequence[int] = (12, 5, 0, 9, 1, 7, 10, 3) * 4, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    logits = 1.5 * noise(count, LENGTH, VOCABULARY)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    completion = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    tool = (torch.rand(count, LENGTH, generator=generator) > 0.2).long()
    own = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
    # Shifts of whole documents, so that their means leave the bounds too.
    old = own + 0.25 * noise(count, LENGTH) + 0.25 * noise(count, 1)
    sampler = old + 0.1 * noise(count, LENGTH) + 0.05 * noise(count, 1)
    reference = own + 0.3 * noise(count, LENGTH)
    return Tensors(logits, ids, completion, tool, old, sampler, reference, noise(count))


def their_ratio(pair: Pair, tensors: Tensors) -> torch.Tensor:
    """TRL's `importance_sampling_ratio`, which it makes before the loss, as its documentation has it."""
    correction = pair.ours["correction"]
    difference = (tensors.old - tensors.sampler) * tensors.mask
    if str(pair.correction).startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio, low, high = difference.exp(), correction.get("low", 0.0), correction["high"]
    if "truncate" in str(pair.correction):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def their_inputs(pair: Pair, tensors: Tensors) -> dict[str, torch.Tensor]:
    inputs = {
        "logits": tensors.logits,
        "prompt_ids": torch.zeros(len(tensors.ids), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(tensors.ids), 2, dtype=torch.int64),
        "completion_ids": tensors.ids,
        "completion_mask": tensors.completion_mask,
        "tool_mask": tensors.tool_mask,
        "advantages": tensors.advantages,
        "ref_per_token_logps": tensors.reference,
        "num_items_in_batch": tensors.mask.sum(),
    }
    if pair.old:
        inputs["old_per_token_logps"] = tensors.old
    if pair.correction is not None:
        inputs |= {"sampling_per_token_logps": tensors.sampler, "importance_sampling_ratio": their_ratio(pair, tensors)}
    return inputs


def our_result(pair: Pair, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Our loss, and our gradient in the logits [B, T, V]."""
    objective = make_objective(Config.model_validate({"model": {"path": "m"}, "loss": pair.ours}))
    mask = tensors.mask
    document, num_labels = mask.nonzero()[:, 0], mask.sum(-1)
    totals = StepTotals(len(mask), int(mask.sum()), 0)
    log_p = torch.log_softmax(tensors.logits, -1)[mask]  # [N, V]
    recomputed = pair.ours.get("old_logprobs") == "recompute"
    labels = labels_of(
        logprobs=tensors.logprobs(tensors.logits)[mask],
        entropy=-(log_p.exp() * log_p).sum(-1),
        logsumexp=tensors.logits.logsumexp(-1)[mask],
        old_logprobs=(tensors.sampler if recomputed else tensors.old)[mask],
        recomputed_logprobs=tensors.old[mask],
        reference_logprobs=tensors.reference[mask],
        advantages=tensors.advantages[document],
        document=document,
        weight=objective.denominator.label_weights(num_labels[document], totals).float(),
        num_labels=num_labels,
    )
    if not pair.old:
        labels.has["recomputed_logprobs"].fill_(False)  # type: ignore[attr-defined]
    labels = objective.prepare(labels)
    coefficients = objective.coefficients(labels, totals)
    b = 0 if coefficients.b is None else coefficients.b[:, None]
    one_hot = torch.nn.functional.one_hot(tensors.ids[mask], VOCABULARY)
    gradient = torch.zeros_like(tensors.logits)
    gradient[mask] = log_p.exp() * (coefficients.a[:, None] + b * log_p) - coefficients.c[:, None] * one_hot
    return torch.stack([term.sum() for term in objective.terms(labels, totals).values()]).sum(), gradient


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """All of TRL's results, of one process."""
    given = [(pair.theirs, their_inputs(pair, make_tensors())) for pair in PAIRS]
    made = run_worker("trl_worker.py", given, tmp_path_factory.mktemp("trl"))
    return {pair.name: result for pair, result in zip(PAIRS, made, strict=True)}


@pytest.mark.nightly
@needs_peers
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_loss_and_gradient_are_trls(pair: Pair, theirs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    loss, gradient = our_result(pair, make_tensors())
    their_loss, their_gradient = theirs[pair.name]
    assert float(their_gradient.norm()) > 1e-3
    difference = float((gradient - their_gradient).norm() / their_gradient.norm())
    of_loss = abs(float(loss - their_loss)) / max(abs(float(their_loss)), 1e-2)
    print(f"{pair.name}: loss {of_loss:.1e}, gradient {difference:.1e}")
    assert difference <= TOLERANCE and of_loss <= TOLERANCE


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_every_bound_of_a_pair_has_labels_on_both_sides(pair: Pair) -> None:
    """Else the two would agree whatever a clip or a mask does. It needs no package."""
    tensors = make_tensors()
    looser = {"epsilon_low": 0.9, "epsilon_high": 9.0, "dual_clip": 50.0, "off_policy_mask": 9.0}
    changed: dict[str, Any] = {name: value for name, value in looser.items() if name in pair.ours}
    if pair.ours["type"] == "cispo":
        del changed["epsilon_low"]  # it has no lower bound
    if not pair.old:  # all ratios are 1
        changed = {}
    if "correction" in pair.ours:
        changed["correction"] = pair.ours["correction"] | {"high": 99.0}
    _, gradient = our_result(pair, tensors)
    for name, value in changed.items():
        _, other = our_result(Pair(pair.name, {}, pair.ours | {name: value}, pair.correction, pair.old), tensors)
        assert float((other - gradient).norm() / gradient.norm()) > 1e-3, name
