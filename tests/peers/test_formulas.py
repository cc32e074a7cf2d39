"""Our objectives against verl's and prime-rl's formulas, written anew from their documentation as plain loops.

Neither package runs without a GPU stack, so the loops stand for them: one label after another, autograd's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from peers.test_trl import Pair, Tensors, make_tensors, our_result

# A label's loss from its log-prob and the places of its completion and token.
LabelLoss = Callable[[Tensor, Tensors, int, int], Tensor]


@dataclass(frozen=True)
class Formula:
    name: str
    label_loss: LabelLoss
    aggregate: str  # verl's loss_agg_mode; prime-rl divides by the step's tokens: token-mean
    ours: dict[str, Any]


def verl_clip(low: float, high: float, c: float) -> LabelLoss:
    """verl's vanilla loss: max of the two products, and for A < 0 at most -c A (`clip_ratio_c`)."""

    def loss(logprob: Tensor, given: Tensors, row: int, at: int) -> Tensor:
        advantage = given.advantages[row]
        ratio = (logprob - given.old[row, at]).clamp(-20, 20).exp()
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
        return torch.minimum(-advantage * c, clipped) if advantage < 0 else clipped

    return loss


def verl_gspo(low: float, high: float) -> LabelLoss:
    """verl's `loss_mode: gspo`: the completion's mean ratio, whose slope is that of the label alone."""

    def loss(logprob: Tensor, given: Tensors, row: int, at: int) -> Tensor:
        mask, advantage = given.mask[row], given.advantages[row]
        difference = (given.logprobs(given.logits)[row] - given.old[row])[mask]
        ratio = (logprob - logprob.detach() + difference.mean().detach()).exp()
        return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))

    return loss


def weighed_by_rollout_is(inner: LabelLoss, threshold: float) -> LabelLoss:
    """verl's `rollout_is: token`: a constant weight, the ratio of old policy and sampler, cut at the threshold."""

    def loss(logprob: Tensor, given: Tensors, row: int, at: int) -> Tensor:
        weight = (given.old[row, at] - given.sampler[row, at]).exp().clamp(max=threshold)
        return inner(logprob, given, row, at) * weight

    return loss


def with_low_var_kl(inner: LabelLoss, coefficient: float) -> LabelLoss:
    """verl's `kl_loss_type: low_var_kl`."""

    def loss(logprob: Tensor, given: Tensors, row: int, at: int) -> Tensor:
        distance = given.reference[row, at] - logprob
        return inner(logprob, given, row, at) + coefficient * (distance.exp() - distance - 1).clamp(-10, 10)

    return loss


def prime_rl(low: float, high: float) -> LabelLoss:
    """prime-rl's default without its term kl_tau: ρA but where the probability has moved too far outward."""

    def loss(logprob: Tensor, given: Tensors, row: int, at: int) -> Tensor:
        advantage, old = given.advantages[row], given.old[row, at]
        moved = float(logprob.detach().exp() - old.exp())
        masked = moved > high if advantage > 0 else moved < -low
        return torch.zeros_like(logprob) if masked else -advantage * (logprob - old).exp()

    return loss


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
DUAL = {"type": "grpo", **CLIP, "dual_clip": 1.5}
FORMULAS = (
    Formula("verl, token-mean", verl_clip(0.2, 0.28, 1.5), "token-mean", DUAL),
    Formula(
        "verl, seq-mean-token-sum",
        verl_clip(0.2, 0.28, 1.5),
        "seq-mean-token-sum",
        {**DUAL, "normalize_by": "documents"},
    ),
    Formula(
        "verl, seq-mean-token-mean",
        verl_clip(0.2, 0.28, 1.5),
        "seq-mean-token-mean",
        {**DUAL, "normalize_by": "document_means"},
    ),
    Formula(
        "verl, gspo",
        verl_gspo(0.1, 0.15),
        "seq-mean-token-mean",
        {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    Formula(
        "verl, rollout_is: token",
        weighed_by_rollout_is(verl_clip(0.2, 0.28, 1.5), 1.1),
        "token-mean",
        {**DUAL, "old_logprobs": "recompute", "correction": {"type": "truncate", "level": "label", "high": 1.1}},
    ),
    Formula(
        "verl, low_var_kl",
        with_low_var_kl(verl_clip(0.2, 0.28, 1.5), 0.2),
        "token-mean",
        {**DUAL, "kl_reference": {"weight": 0.2, "estimator": "k3"}},
    ),
    Formula(
        "prime-rl, default mask",
        prime_rl(0.03, 0.03),
        "token-mean",
        {"type": "dppo", "divergence": "tv", "threshold": 0.03},
    ),
)


def plain_loss(formula: Formula, given: Tensors, logits: Tensor) -> Tensor:
    """Loop over completions and their labels, and aggregate as the trainer does."""
    log_p = torch.log_softmax(logits, -1)
    sums, means, count = [], [], 0
    for row in range(len(given.ids)):
        places = given.mask[row].nonzero()[:, 0].tolist()
        losses = [formula.label_loss(log_p[row, at, given.ids[row, at]], given, row, at) for at in places]
        count += len(losses)
        sums.append(sum(losses, torch.zeros(())))
        means.append(sums[-1] / max(len(losses), 1))
    if formula.aggregate == "token-mean":
        return sum(sums, torch.zeros(())) / count
    return sum(sums if formula.aggregate == "seq-mean-token-sum" else means, torch.zeros(())) / len(sums)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
def test_loss_and_gradient_are_the_formulas(formula: Formula) -> None:
    given = make_tensors(seed=1)
    logits = given.logits.clone().requires_grad_()
    theirs = plain_loss(formula, given, logits)
    (wanted,) = torch.autograd.grad(theirs, logits)
    theirs = theirs.detach()
    loss, gradient = our_result(Pair(formula.name, {}, formula.ours), given)
    difference = float((gradient - wanted).norm() / wanted.norm())
    assert difference <= 1e-5 and abs(float(loss - theirs)) <= 1e-5 * max(abs(float(theirs)), 1e-2), difference


def test_another_formula_is_told_apart() -> None:
    """A bound that is off by a hundredth is no agreement."""
    given = make_tensors(seed=1)
    logits = given.logits.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(plain_loss(FORMULAS[0], given, logits), logits)
    _, gradient = our_result(Pair("", {}, {**DUAL, "epsilon_low": 0.19}), given)
    _, masked = our_result(Pair("", {}, {"type": "dppo", "threshold": 0.2}), given)
    assert float((gradient - wanted).norm() / wanted.norm()) > 1e-3 < float((masked - wanted).norm() / wanted.norm())
