"""The five losses and their slopes: against the oracle, against autograd of the formula, and on the very bounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from losses.label_cases import (
    LOSSES,
    Case,
    label_loss,
    loss_name,
    make_case,
    make_labels,
    make_objective,
    plain_labels,
)
from oracles.step import clipped_loss, complete_loss_config
from truestep.losses.label_losses import Cispo, Grpo, Gspo, LabelTerm, Reinforce, clipped_surrogate, round_bounds
from truestep.losses.objective import Denominator

EPSILONS = [(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.1, 0.7), (0.0, 0.0), (1.0, 4.0)]


def formula(loss: dict[str, Any], case: Case, logprobs: torch.Tensor) -> torch.Tensor:  # [T] -> [T]
    """The losses of docs/contract.md, section 6, in torch, differentiable in `logprobs`."""
    options = complete_loss_config(loss)
    ratio, advantages = (logprobs - case.old_logprobs).exp(), case.advantages
    if options["type"] == "cross_entropy":
        return -logprobs
    if options["type"] == "gspo":
        ones = [torch.full((count, count), 1 / count, dtype=torch.float64) for count in case.counts if count]
        mean = torch.block_diag(*ones)
        ratio, advantages = (mean @ (logprobs - case.old_logprobs)).exp(), mean @ advantages
    if options["type"] == "reinforce":
        return -ratio.detach().clamp(max=options["ratio_cap"] or math.inf) * advantages * logprobs
    low, high = round_bounds(options["epsilon_low"], options["epsilon_high"])
    if options["type"] == "cispo":
        return -ratio.detach().clamp(low, high) * advantages * logprobs
    value = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if options["dual_clip"]:
        value = torch.where(advantages < 0, torch.minimum(value, -options["dual_clip"] * advantages), value)
    return value


@pytest.mark.parametrize("loss", LOSSES, ids=loss_name)
@pytest.mark.parametrize("per_token", [True, False])
def test_loss_and_slope_equal_autograd_of_the_formula(loss: dict[str, Any], per_token: bool) -> None:
    for seed in range(5):
        case = make_case(seed=seed, per_token_advantages=per_token)
        labels = make_labels(case, Denominator("labels"))
        logprobs = labels.logprobs.clone().requires_grad_()
        wanted = formula(loss, case, logprobs)
        # gspo's slope is that of the document's whole loss, all labels weighing the same.
        (slope,) = torch.autograd.grad(wanted.sum(), logprobs)
        term = label_loss(loss)(labels)
        torch.testing.assert_close(term.loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(term.slope, slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if "epsilon_low" in loss], ids=loss_name)
def test_the_cases_lie_on_both_sides_of_both_bounds(loss: dict[str, Any]) -> None:
    """Else the tests here would say nothing of clipping."""
    low, high = label_loss(loss).bounds or (math.nan, math.nan)
    seen = set()
    for seed in range(5):
        labels = make_labels(make_case(seed=seed), Denominator("labels"))
        advantages = labels.document_means(labels.advantages) if loss["type"] == "gspo" else labels.advantages
        for ratio, advantage in zip(
            label_loss(loss).log_ratio(labels).exp().tolist(), advantages.tolist(), strict=True
        ):
            sign = (advantage > 0) - (advantage < 0)
            seen.add((sign, "below" if ratio < low else "above" if ratio > high else "inside"))
    signs = (-1, 1) if loss["type"] == "gspo" else (-1, 0, 1)
    assert seen >= set(itertools.product(signs, ("below", "inside", "above")))


def test_bounds_are_rounded_to_float32() -> None:
    for low, high in EPSILONS:
        assert round_bounds(low, high) == (float(np.float32(1 - low)), float(np.float32(1 + high)))


def around(bound: float) -> list[float]:
    """The float32 before the bound, the bound, and the float32 after it."""
    at = np.float32(bound)
    assert float(at) == bound
    return [float(np.nextafter(at, np.float32(-1))), bound, float(np.nextafter(at, np.float32(1e9)))]


@pytest.mark.parametrize(("epsilon_low", "epsilon_high"), EPSILONS)
@pytest.mark.parametrize("advantage", [2.5, -1.75, 0.0])
def test_the_edge_of_clipping_in_float32(epsilon_low: float, epsilon_high: float, advantage: float) -> None:
    """On the bound and within, the slope is -ρA; one float32 beyond it, on the clipped side alone, it is 0."""
    low, high = round_bounds(epsilon_low, epsilon_high)
    ratios = [*around(low), *around(high)]
    term = clipped_surrogate(torch.tensor(ratios), torch.full((6,), advantage), (low, high), None)
    for ratio, loss, slope in zip(ratios, term.loss.tolist(), term.slope.tolist(), strict=True):
        clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
        effective = min(ratio, high) if advantage > 0 else max(ratio, low)
        assert loss == float(np.float32(-effective * advantage)), ratio
        assert slope == (0.0 if clipped else float(np.float32(-ratio * advantage))), ratio
        # And the oracle, which decides case by case, agrees.
        at = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
        options = complete_loss_config({"type": "grpo", "epsilon_low": epsilon_low, "epsilon_high": epsilon_high})
        value = clipped_loss(at, advantage, options)
        oracle = torch.autograd.grad(value, at)[0].item() * ratio if value.requires_grad else 0.0
        assert (loss, slope) == (pytest.approx(value.item(), rel=2e-7), pytest.approx(oracle, rel=2e-7))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("kind", [Grpo, Gspo])
def test_on_policy_labels_learn_even_with_epsilon_zero(advantage: float, kind: type[Grpo] | type[Gspo]) -> None:
    labels = plain_labels(logprobs=[-1.3, -0.1, -7.77], old_logprobs=[-1.3, -0.1, -7.77], advantages=[advantage] * 3)
    term = kind(0.0, 0.0)(labels)
    assert term.slope.tolist() == [-advantage] * 3
    assert term.loss.tolist() == [-advantage] * 3


@pytest.mark.parametrize("c", [1.5, 1.1, 3.0])
def test_the_edge_of_dual_clip(c: float) -> None:
    """c not a float32 (1.1) is rounded to one, like the bounds."""
    ratios = around(float(np.float32(c)))
    term = clipped_surrogate(torch.tensor(ratios), torch.full((3,), -2.0), round_bounds(0.2, 0.05), c)
    assert term.slope.tolist() == [2 * ratios[0], 2 * ratios[1], 0.0]
    assert term.loss.tolist() == [2 * ratios[0], 2 * ratios[1], 2 * ratios[1]]
    positive = clipped_surrogate(torch.tensor(ratios), torch.full((3,), 2.0), round_bounds(0.2, 5.0), c)
    assert positive.slope.tolist() == [-2 * ratio for ratio in ratios], "dual_clip is for negative advantages alone"


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_ratios_of_zero_and_infinity(dual_clip: float | None) -> None:
    ratio = torch.tensor([math.inf, 0.0, math.inf, 0.0, math.inf, 0.0])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 0.0, 0.0])
    low, high = bounds = round_bounds(0.2, 0.28)
    term = clipped_surrogate(ratio, advantages, bounds, dual_clip)
    unclipped = math.inf if dual_clip is None else 2 * dual_clip
    assert term.loss.tolist() == [pytest.approx(-2 * high), 0.0, unclipped, pytest.approx(2 * low), 0.0, 0.0]
    assert term.slope.tolist() == [0.0, 0.0, math.inf if dual_clip is None else 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
def test_a_zero_advantage_is_never_nan(log_ratio: float) -> None:
    """exp(200) is infinite in float32, and 0 · inf is NaN."""
    labels = plain_labels(logprobs=[-1.0, -1.0], old_logprobs=[-1.0 - log_ratio] * 2, advantages=[0.0, 0.0])
    epsilons = (0.2, 0.2)
    for loss in (Grpo(*epsilons), Grpo(*epsilons, 2.0), Gspo(*epsilons), Reinforce(), Reinforce(3.0), Cispo(*epsilons)):
        term: LabelTerm = loss(labels)
        assert term.loss.abs().tolist() == [0.0, 0.0], loss
        assert term.slope.abs().tolist() == [0.0, 0.0], loss


def test_importance_is_capped_and_clipped_on_both_sides() -> None:
    ratios = [0.0, 0.5, 1.0, 2.0, math.inf]
    logprobs = [-1.0] * 5
    old = [-1.0 - math.log(ratio) if ratio else 1e4 for ratio in ratios]
    labels = plain_labels(logprobs=logprobs, old_logprobs=[*old[:-1], -1e4], advantages=[3.0] * 5)
    assert Reinforce(1.5)(labels).slope.tolist() == pytest.approx([0.0, -1.5, -3.0, -4.5, -4.5])
    assert Cispo(0.2, 0.75)(labels).slope.tolist() == pytest.approx([-2.4, -2.4, -3.0, -5.25, -5.25])
    assert Cispo(0.2, 0.75)(labels).loss.tolist() == pytest.approx([2.4, 2.4, 3.0, 5.25, 5.25])


@pytest.mark.parametrize("normalize_by", ["labels", "documents", "document_means", "constant"])
@pytest.mark.parametrize("dual_clip", [None, 1.25])
def test_gspo_slope_through_the_document_mean(normalize_by: str, dual_clip: float | None) -> None:
    """The loss is a function of every log-prob of the document: differentiated as such, weights included."""
    loss = {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.12, "dual_clip": dual_clip}
    loss |= {"normalize_by": normalize_by, "max_labels": 20 if normalize_by == "constant" else None}
    case = make_case()
    objective = make_objective(loss)
    labels = make_labels(case, objective.denominator)
    logprobs = labels.logprobs.clone().requires_grad_()
    total = (formula(loss, case, logprobs) * labels.weight).sum()
    (wanted,) = torch.autograd.grad(total, logprobs)
    term = objective.label_loss(labels)
    assert float((term.loss * labels.weight).sum()) == pytest.approx(float(total.detach()), rel=1e-12)
    torch.testing.assert_close(term.slope * labels.weight, wanted, rtol=1e-12, atol=1e-15)
    assert 0 < (term.slope == 0).sum() < len(wanted), "some documents are clipped and some are not"


def test_only_gspo_needs_whole_documents() -> None:
    assert {loss["type"] for loss in LOSSES if label_loss(loss).whole_documents} == {"gspo"}


@pytest.mark.parametrize("loss", LOSSES, ids=loss_name)
def test_no_label_at_all(loss: dict[str, Any]) -> None:
    labels = make_labels(make_case((0, 0)), Denominator("document_means"))
    term = label_loss(loss)(labels)
    assert term.loss.shape == term.slope.shape == (0,)


@pytest.mark.parametrize("loss", LOSSES, ids=loss_name)
def test_float32_labels_stay_within_rounding(loss: dict[str, Any]) -> None:
    """Labels come in float32; a document's mean must not cost digits, nor change the type."""
    case = make_case((1, 20_000, 0, 300), vocabulary=3)
    narrow = label_loss(loss)(make_labels(case, Denominator("labels"), torch.float32))
    exact = label_loss(loss)(make_labels(case, Denominator("labels")))
    assert narrow.loss.dtype == narrow.slope.dtype == torch.float32
    # A ratio within rounding of a bound may fall on its other side; 20,000 random ones have none or two there.
    different = (narrow.slope.double() - exact.slope).abs() > 2e-6 * (1 + exact.slope.abs())
    assert int(different.sum()) <= 2
    torch.testing.assert_close(narrow.loss.double(), exact.loss, rtol=2e-6, atol=2e-6)
