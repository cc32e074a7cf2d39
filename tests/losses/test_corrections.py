"""Corrections: their weights by hand, what they may never change, and documents whose labels lie on several ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.label_cases import CORRECTED, CORRECTIONS, loss_name, make_case, make_labels, make_objective, plain_labels
from truestep.losses.corrections import Correction, OffPolicyMask
from truestep.losses.labels import Labels

# Every sum over a document is of log-ratios, which the second rank of a test can give.
SUMS_LOG_RATIOS = [
    loss
    for loss in CORRECTED
    if make_objective(loss).whole_documents and loss["type"] != "gmpo" and loss.get("off_policy_mask") is None
]
RATIOS = [0.5, 1.0, 1.5, 4.0]


def labels_of_ratios(*ratios: float, advantages: float = 1.0) -> Labels:
    old = [-5.0 - math.log(ratio) for ratio in ratios]
    return plain_labels(logprobs=[-5.0] * len(ratios), old_logprobs=old, advantages=[advantages] * len(ratios))


@pytest.mark.parametrize(
    ("kind", "level", "low", "high", "wanted"),
    [
        ("truncate", "label", 0.0, 2.0, [0.5, 1.0, 1.5, 2.0]),
        ("truncate", "label", 0.6, 1.2, [0.6, 1.0, 1.2, 1.2]),
        ("mask", "label", 0.6, 2.0, [0.0, 1.0, 1.5, 0.0]),
        ("reject", "label", 0.6, 2.0, [0.0, 1.0, 1.0, 0.0]),
        ("truncate", "document", 0.0, 2.0, [2.0] * 4),  # the product is 3
        ("mask", "document", 0.6, 4.0, [3.0] * 4),
        ("reject", "document", 0.6, 2.0, [0.0] * 4),
        ("mask", "document_mean", 0.6, 4.0, [3.0**0.25] * 4),
        ("reject", "document_mean", 0.6, 1.3, [0.0] * 4),
    ],
)
def test_weights_by_hand(kind: str, level: str, low: float, high: float, wanted: list[float]) -> None:
    correction = Correction(kind, level, high, low)
    assert correction.weights(labels_of_ratios(*RATIOS)).tolist() == pytest.approx(wanted, rel=1e-5)


def test_bounds_are_inclusive() -> None:
    labels = plain_labels(logprobs=[-1.0, -1.0], old_logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
    assert Correction("reject", "label", 1.0, 1.0).weights(labels).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("threshold", "advantage", "wanted"), [(0.1, -1.0, 0.0), (0.1, 1.0, 1.0), (0.1, 0.0, 1.0), (0.8, -1.0, 1.0)]
)
def test_the_off_policy_mask_by_hand(threshold: float, advantage: float, wanted: float) -> None:
    """The policy is log 2 below the sampler, on average over the document."""
    labels = labels_of_ratios(0.25, 1.0, advantages=advantage)
    assert OffPolicyMask(threshold).weights(labels).tolist() == [wanted, wanted]


@pytest.mark.parametrize("log_ratio", [-9998.0, 9998.0])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=loss_name)
def test_an_importance_beyond_float32_is_a_number(correction: dict[str, Any], log_ratio: float) -> None:
    labels = plain_labels(logprobs=[-1.0, -2.0], old_logprobs=[-1.0 - log_ratio, -2.0], advantages=[-1.0, -1.0])
    weights = make_objective({"type": "grpo", **correction}).policy_weights(labels)
    assert weights is not None and bool(weights.isfinite().all())


@pytest.mark.parametrize("correction", CORRECTIONS, ids=loss_name)
def test_the_cases_lie_on_both_sides_of_every_bound(correction: dict[str, Any]) -> None:
    """Else the tests with these corrections would say nothing of them."""
    objective = make_objective({"type": "reinforce", **correction})
    sides: dict[float, set[bool]] = {}
    for seed in range(5):
        labels = make_labels(make_case(seed=seed), objective.denominator)
        for values, bound in objective.switches(labels):
            sides.setdefault(bound, set()).update((values > bound).tolist())
    assert sides and all(side == {False, True} for side in sides.values())


@settings(max_examples=40, deadline=None)
@given(loss=st.sampled_from(CORRECTED), seed=st.integers(0, 999))
def test_what_weighs_nothing_changes_nothing_else(loss: dict[str, Any], seed: int) -> None:
    """Weights lie between 0 and the bound. The other labels' coefficients are those of the uncorrected loss times the
    weight: no denominator has changed. Optional terms are not weighed."""
    case = make_case(seed=seed)
    options = {**loss, "entropy_bonus": 0.1, "z_loss": 0.01}
    corrected = make_objective(options)
    plain = make_objective({**options, "correction": None, "off_policy_mask": None})
    labels = make_labels(case, corrected.denominator)
    weights = corrected.policy_weights(labels)
    assert weights is not None
    most = loss.get("correction", {}).get("high", 1.0)
    assert bool(((weights >= 0) & (weights <= max(most, 1.0))).all())
    with_terms, without_terms = corrected.coefficients(labels, case.totals), plain.coefficients(labels, case.totals)
    torch.testing.assert_close(with_terms.c, without_terms.c * weights, rtol=1e-12, atol=1e-15)
    assert with_terms.b is not None and without_terms.b is not None
    assert torch.equal(with_terms.b, without_terms.b)
    torch.testing.assert_close(with_terms.a - with_terms.c, without_terms.a - without_terms.c, rtol=1e-9, atol=1e-12)
    terms, plain_terms = corrected.terms(labels, case.totals), plain.terms(labels, case.totals)
    torch.testing.assert_close(terms["policy_loss"], plain_terms["policy_loss"] * weights, rtol=1e-12, atol=1e-15)
    assert torch.equal(terms["entropy_bonus"], plain_terms["entropy_bonus"])


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(SUMS_LOG_RATIOS),
    seed=st.integers(0, 999),
    cut=st.integers(0, 44),
)
def test_pieces_of_documents_add_up(loss: dict[str, Any], seed: int, cut: int) -> None:
    """Two ranks, of which each has some of the labels and all documents' counts, as context ranks do."""
    case = make_case(seed=seed)
    objective = make_objective(loss)
    whole = make_labels(case, objective.denominator)
    wanted = objective.coefficients(whole, case.totals)
    pieces = [slice(0, cut), slice(cut, len(whole))]
    for piece, other in (pieces, pieces[::-1]):
        missing = replace(whole[other], reduce_documents=lambda sums: sums)

        def both(sums: torch.Tensor, missing: Labels = missing) -> torch.Tensor:
            return sums + missing.document_sums(missing.log_ratio)

        mine = objective.coefficients(replace(whole[piece], reduce_documents=both), case.totals)
        torch.testing.assert_close(mine.c, wanted.c[piece], rtol=1e-9, atol=1e-13)
