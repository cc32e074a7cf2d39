"""The losses and their slopes: against the oracle, against autograd of the formula, and on the very bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
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
from truestep.losses.label_losses import (
    Cispo,
    Dppo,
    Gmpo,
    Grpo,
    Gspo,
    LabelTerm,
    Reinforce,
    Sapo,
    clipped_surrogate,
    round_bounds,
)
from truestep.losses.objective import Denominator

EPSILONS = [(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.1, 0.7), (0.0, 0.0), (1.0, 4.0)]


def formula(loss: dict[str, Any], case: Case, logprobs: torch.Tensor) -> torch.Tensor:  # [T] -> [T]
    """The losses of docs/contract.md, section 6, in torch, differentiable in `logprobs`."""
    options = complete_loss_config(loss)
    ratio, advantages = (logprobs - case.old_logprobs).exp(), case.advantages
    if options["type"] == "cross_entropy":
        return -logprobs
    ones = [torch.full((count, count), 1 / count, dtype=torch.float64) for count in case.counts if count]
    mean = torch.block_diag(*ones)
    log_ratio = (logprobs - case.old_logprobs).detach()
    own = (logprobs - logprobs.detach()).exp()  # 1, with the slope of a label in its own log-prob
    if options["type"] == "gspo":
        ratio = (mean @ log_ratio).exp() * own
    if options["type"] == "gmpo":
        low, high = float(np.float32(-options["epsilon_low"])), float(np.float32(options["epsilon_high"]))
        effective = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
        effective = torch.where(advantages == 0, 0, effective)
        learns = torch.where(effective == log_ratio, own, 1.0)
        return -(mean @ effective).exp() * learns * advantages
    if options["type"] == "sapo":
        tau = torch.where(advantages < 0, options["tau_negative"], options["tau_positive"] * torch.ones_like(ratio))
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantages
    if options["type"] == "dppo":
        new, old = logprobs.detach().exp(), case.old_logprobs.exp()
        moved = (new - old).abs()
        if options["divergence"] == "kl":
            moved = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
        outward = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
        return torch.where(outward & (moved > options["threshold"]), 0.0, -ratio * advantages)
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
        (slope,) = torch.autograd.grad(wanted.sum(), logprobs)
        term = label_loss(loss)(labels)
        torch.testing.assert_close(term.loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(term.slope, slope, rtol=1e-12, atol=1e-12)


BOUNDED = [loss for loss in LOSSES if loss["type"] in ("grpo", "gspo", "cispo")]


@pytest.mark.parametrize("loss", BOUNDED, ids=loss_name)
def test_the_cases_lie_on_both_sides_of_both_bounds(loss: dict[str, Any]) -> None:
    """Else the tests here would say nothing of clipping."""
    low, high = label_loss(loss).bounds or (math.nan, math.nan)
    seen = set()
    for seed in range(5):
        labels = make_labels(make_case(seed=seed), Denominator("labels"))
        for ratio, advantage in zip(
            label_loss(loss).log_ratio(labels).exp().tolist(), labels.advantages.tolist(), strict=True
        ):
            sign = (advantage > 0) - (advantage < 0)
            seen.add((sign, "below" if ratio < low else "above" if ratio > high else "inside"))
    assert seen >= set(itertools.product((-1, 0, 1), ("below", "inside", "above")))


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
    clipped = (Grpo(*epsilons), Grpo(*epsilons, 2.0), Gspo(*epsilons), Cispo(*epsilons), Gmpo(*epsilons))
    for loss in (*clipped, Reinforce(), Reinforce(3.0), Sapo(1.0, 1.05), Dppo("tv", 0.2), Dppo("kl", 0.05)):
        term: LabelTerm = loss(labels)
        assert term.loss.abs().tolist() == [0.0, 0.0], loss
        assert term.slope.abs().tolist() == [0.0, 0.0], loss


def test_importance_is_capped_and_clipped_on_both_sides() -> None:
    ratios = [0.0, 0.5, 1.0, 2.0, math.inf]
    logprobs = [-1.0] * 5
    old = [-1.0 - math.log(ratio) if ratio else 1e4 for ratio in ratios]
    labels = plain_labels(logprobs=logprobs, old_logprobs=[*old[:-1], -1e4], advantages=[3.0] * 5)
    # The first and the last are beyond the clamp: their loss is capped, and they have no gradient.
    assert Reinforce(1.5)(labels).slope.tolist() == pytest.approx([0.0, -1.5, -3.0, -4.5, 0.0], abs=1e-6)
    assert Cispo(0.2, 0.75)(labels).slope.tolist() == pytest.approx([0.0, -2.4, -3.0, -5.25, 0.0])
    assert Cispo(0.2, 0.75)(labels).loss.tolist() == pytest.approx([2.4, 2.4, 3.0, 5.25, 5.25])


WHOLE = [loss for loss in LOSSES if loss["type"] in ("gspo", "gmpo")]


@pytest.mark.parametrize("normalize_by", ["labels", "documents", "document_means", "constant"])
@pytest.mark.parametrize("loss", WHOLE, ids=loss_name)
def test_slopes_through_the_document_mean(normalize_by: str, loss: dict[str, Any]) -> None:
    """With one advantage a document the loss is a function of every log-prob of it: finite differences of the sum."""
    loss = loss | {"normalize_by": normalize_by, "max_labels": 20 if normalize_by == "constant" else None}
    case = make_case(per_token_advantages=False)
    objective = make_objective(loss)
    labels = make_labels(case, objective.denominator)
    term = objective.label_loss(labels)

    def total(logprobs: torch.Tensor) -> float:
        return float((objective.label_loss(replace(labels, logprobs=logprobs)).loss * labels.weight).sum())

    step = 1e-6
    for index in range(len(labels.logprobs)):
        moved = torch.zeros_like(labels.logprobs)
        moved[index] = step
        difference = (total(labels.logprobs + moved) - total(labels.logprobs - moved)) / (2 * step)
        assert difference == pytest.approx(float(term.slope[index] * labels.weight[index]), rel=1e-6, abs=1e-10)
    assert 0 < (term.slope == 0).sum() < len(term.slope), "some are clipped and some are not"


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in WHOLE], ids=loss_name)
def test_slopes_of_labels_are_finite_differences_of_their_losses(loss: dict[str, Any]) -> None:
    labels = make_labels(make_case(seed=2), Denominator("labels"))
    term, step = label_loss(loss)(labels), 1e-6
    up, down = (label_loss(loss)(replace(labels, logprobs=labels.logprobs + sign * step)) for sign in (1, -1))
    differences = (up.loss - down.loss) / (2 * step)
    if loss["type"] in ("reinforce", "cispo"):  # the ratio counts as a constant, which its differences do not know
        differences = term.loss / labels.logprobs
    torch.testing.assert_close(term.slope, differences, rtol=1e-6, atol=1e-9)


def test_which_losses_need_whole_documents() -> None:
    assert {loss["type"] for loss in LOSSES if label_loss(loss).whole_documents} == {"gspo", "gmpo"}


# Both are beyond the clamp: on the side where a clip would have kept the gradient, and on the other.
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss["type"] != "cross_entropy"], ids=loss_name)
@pytest.mark.parametrize("log_ratio", [-9998.0, -20.5, 20.5, 9998.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_log_ratio_beyond_the_clamp_has_no_gradient(loss: dict[str, Any], log_ratio: float, advantage: float) -> None:
    """An old log-prob of -9999 gives a finite loss, no gradient, and is counted."""
    labels = plain_labels(logprobs=[-1.0], old_logprobs=[-1.0 - log_ratio], advantages=[advantage])
    term = label_loss(loss)(labels)
    assert bool(term.loss.isfinite()) and term.slope.tolist() == [0.0]
    assert term.clamped is not None
    within = loss["type"] == "gmpo" and log_ratio * advantage > 0  # its own clip came first
    assert term.clamped.tolist() == [not within]


@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if loss["type"] not in ("sapo", "cross_entropy")], ids=loss_name
)
def test_clipped_labels_are_those_whose_gradient_is_not_the_unclipped_one(loss: dict[str, Any]) -> None:
    """The unclipped gradient: the same loss with bounds that no ratio reaches."""
    wide = {"epsilon_low": 50.0, "epsilon_high": 50.0, "dual_clip": None, "ratio_cap": None, "threshold": 1e9}
    free = {**loss, **{name: value for name, value in wide.items() if name in loss}}
    for seed in range(3):
        labels = make_labels(make_case(seed=seed), Denominator("labels"))
        term, unclipped = label_loss(loss)(labels), label_loss(free)(labels)
        assert term.clipped is not None
        changed = (
            term.slope != unclipped.slope if loss["type"] != "gmpo" else (term.slope == 0) & (labels.advantages != 0)
        )
        assert torch.equal(term.clipped, changed)
        assert loss == {"type": "reinforce"} or 0 < int(changed.sum()) < len(changed)


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
