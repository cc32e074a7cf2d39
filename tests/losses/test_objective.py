"""The whole objective: its coefficients against autograd of the oracle's loss in the logits, and its denominators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from losses.label_cases import (
    CORRECTED,
    DENOMINATORS,
    EXPLORING,
    LOSSES,
    Case,
    loss_name,
    make_case,
    make_labels,
    make_objective,
    oracle_inputs,
    plain_labels,
)
from oracles.step import complete_loss_config, loss_terms, sum_terms
from truestep.head.chunked import HeadRows, forward_backward
from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import CrossEntropy
from truestep.losses.objective import Denominator, Objective
from truestep.types import Coefficients, RowStatistics, StepTotals

EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"entropy_bonus": 0.3},
    {"z_loss": 0.02},
    {"entropy_bonus": -0.1, "z_loss": 0.1},
    {"entropy_bonus": 0.3, "entropy_normalize_by": "labels"},
    {"entropy_bonus": 0.3, "entropy_normalize_by": "document_means", "z_loss": 0.02},
)


def oracle_gradient(case: Case, loss: dict[str, Any]) -> tuple[dict[str, float], torch.Tensor]:
    """The sum of each term, and the gradient in the logits [T, V] of all of them together."""
    logits = case.logits.clone().requires_grad_()
    terms = loss_terms(*oracle_inputs(case, logits), complete_loss_config(loss))
    (gradient,) = torch.autograd.grad(sum_terms(terms), logits)
    sums: dict[str, float] = {}
    for name, term in terms:
        sums[name] = sums.get(name, 0.0) + term.item()
    return sums, gradient


def gradient_of_logits(coefficients: Coefficients, case: Case) -> torch.Tensor:  # [T, V]
    log_p = torch.log_softmax(case.logits, -1)
    b = 0 if coefficients.b is None else coefficients.b[:, None]
    one_hot = torch.nn.functional.one_hot(case.label_ids, case.logits.shape[1])
    return log_p.exp() * (coefficients.a[:, None] + b * log_p) - coefficients.c[:, None] * one_hot


@pytest.mark.parametrize("loss", LOSSES + CORRECTED + EXPLORING, ids=loss_name)
@pytest.mark.parametrize("denominator", DENOMINATORS, ids=loss_name)
def test_coefficients_equal_autograd_of_the_whole_loss(loss: dict[str, Any], denominator: dict[str, Any]) -> None:
    case = make_case(seed=3)
    for extra in EXTRAS:
        options = loss | denominator | extra
        objective = make_objective(options)
        labels = make_labels(case, objective.denominator)
        sums, wanted = oracle_gradient(case, options)
        coefficients = objective.coefficients(labels, case.totals)
        torch.testing.assert_close(gradient_of_logits(coefficients, case), wanted, rtol=1e-10, atol=1e-14)
        assert (coefficients.b is None) == ("entropy_bonus" not in options)
        terms = {name: float(term.sum()) for name, term in objective.terms(labels, case.totals).items()}
        assert terms == {name: pytest.approx(value, rel=1e-11, abs=1e-14) for name, value in sums.items()}


@pytest.mark.parametrize("loss", LOSSES + CORRECTED + EXPLORING, ids=loss_name)
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_the_head_and_the_objective_together_equal_autograd(loss: dict[str, Any], chunk: int | None) -> None:
    """Documents are cut by the chunks, and a loss of whole documents does not notice."""
    case = make_case(seed=4)
    options = loss | {"entropy_bonus": 0.2, "z_loss": 0.01, "normalize_by": "document_means"}
    objective = make_objective(options)
    labels = make_labels(case, objective.denominator)
    vocabulary = case.logits.shape[1]
    weight = torch.eye(vocabulary, dtype=torch.float64)
    settings = HeadSettings(chunk_size=chunk)
    rows = HeadRows(case.logits, weight, case.label_ids, torch.ones(len(case.label_ids)), settings)

    def ask(chunk: slice, statistics: RowStatistics) -> Coefficients:
        given = {name: getattr(statistics, name) for name in ("logprobs", "entropy", "logsumexp")}
        return objective.coefficients(replace(labels[chunk], **given), case.totals)

    buffer = torch.zeros_like(weight)
    counts = labels.num_labels.tolist() if objective.whole_documents else None
    result = forward_backward(rows, ask, document_labels=counts, weight_gradient=buffer)
    _, wanted = oracle_gradient(case, options)
    assert result.hidden_gradient is not None
    torch.testing.assert_close(result.hidden_gradient, wanted, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(buffer, wanted.T @ case.logits, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("divisor", ["deepspeed", 4.0])
@pytest.mark.parametrize("loss", LOSSES, ids=loss_name)
def test_a_divisor_divides_the_gradient_and_not_the_loss(loss: dict[str, Any], divisor: float | str) -> None:
    case = make_case()
    options = loss | {"entropy_bonus": 0.3, "z_loss": 0.02}
    plain = make_objective(options)
    divided = make_objective(options | {"gradient_divisor": divisor})
    labels = make_labels(case, plain.denominator)
    before, after = plain.coefficients(labels, case.totals), divided.coefficients(labels, case.totals)
    for name in ("a", "b", "c"):
        number = len(case.counts) if divisor == "deepspeed" else divisor
        torch.testing.assert_close(getattr(after, name) * number, getattr(before, name), rtol=1e-12, atol=0)
    for name, term in plain.terms(labels, case.totals).items():
        assert torch.equal(term, divided.terms(labels, case.totals)[name])


def test_denominators_by_hand() -> None:
    """Three labels of documents with 1, 4 and 4 labels; the step has 5 documents and 20 labels, most of them in other
    micro-batches."""
    num_labels, totals = torch.tensor([1, 4, 4]), StepTotals(num_documents=5, num_labels=20, num_tokens=1000)
    for denominator, wanted in [
        (Denominator("labels"), [1 / 20] * 3),
        (Denominator("documents"), [1 / 5] * 3),
        (Denominator("document_means"), [1 / 5, 1 / 20, 1 / 20]),
        (Denominator("constant", max_labels=8), [1 / 40] * 3),
    ]:
        weights = denominator.label_weights(num_labels, totals)
        assert weights.dtype == torch.float64
        assert weights.tolist() == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize("denominator", DENOMINATORS, ids=loss_name)
def test_a_step_without_labels_or_documents_divides_by_nothing(denominator: dict[str, Any]) -> None:
    case = make_case((0, 0, 0))
    objective = make_objective({"type": "gspo", "entropy_bonus": 0.1, **denominator})
    for totals in (case.totals, StepTotals(0, 0, 0)):
        labels = make_labels(case, objective.denominator)
        assert objective.denominator.label_weights(torch.zeros(0, dtype=torch.int64), totals).shape == (0,)
        assert objective.coefficients(labels, totals).a.shape == (0,)
        assert sum(float(term.sum()) for term in objective.terms(labels, totals).values()) == 0


def test_an_unknown_denominator_is_an_error() -> None:
    with pytest.raises(ValueError, match="normalize_by: tokens"):
        Denominator("tokens").label_weights(torch.ones(1), StepTotals(1, 1, 1))


def test_a_label_by_hand() -> None:
    """Cross-entropy with both extras, of one label with logπ = -2, H = 1.5, logsumexp = 4 and weight 1/10."""
    objective = Objective(
        CrossEntropy(), Denominator("labels"), entropy_bonus=0.5, z_loss=0.25, gradient_divisor="deepspeed"
    )
    labels = plain_labels(logprobs=[-2.0], entropy=[1.5], logsumexp=[4.0], weight=[0.1])
    totals = StepTotals(num_documents=2, num_labels=10, num_tokens=10)
    terms = {name: term.tolist() for name, term in objective.terms(labels, totals).items()}
    approximately = {"policy_loss": 0.2, "entropy_bonus": -0.075, "z_loss": 0.4}
    assert terms == {name: [pytest.approx(value, rel=1e-6)] for name, value in approximately.items()}
    coefficients = objective.coefficients(labels, totals)
    # weight 1/20: a = 1/20 + b·1.5 + 2·0.25·4/20, b = 0.5/20, c = 1/20
    assert coefficients.a.tolist() == [pytest.approx(0.05 + 0.025 * 1.5 + 0.1)]
    assert coefficients.b is not None
    assert coefficients.b.tolist() == [pytest.approx(0.025)]
    assert coefficients.c.tolist() == [pytest.approx(0.05)]


@pytest.mark.parametrize("loss", LOSSES + CORRECTED + EXPLORING, ids=loss_name)
@pytest.mark.parametrize("denominator", DENOMINATORS, ids=loss_name)
def test_micro_batches_add_up_to_the_step(loss: dict[str, Any], denominator: dict[str, Any]) -> None:
    """A micro-batch has some of the documents and the step's totals; its coefficients are those of the whole step."""
    case = make_case(seed=6)
    objective = make_objective(loss | denominator | {"z_loss": 0.1, "gradient_divisor": "deepspeed"})
    whole = make_labels(case, objective.denominator)
    wanted = objective.coefficients(whole, case.totals)
    for documents in (range(4), range(4, 6), range(6, 10), range(5, 6)):
        rows = slice(sum(case.counts[: documents.start]), sum(case.counts[: documents.stop]))
        num_labels = whole.num_labels[documents.start : documents.stop]
        document = case.document[rows] - documents.start
        weight = objective.denominator.label_weights(num_labels[document], case.totals)
        part = replace(whole[rows], document=document, num_labels=num_labels, weight=weight)
        mine = objective.coefficients(part, case.totals)
        torch.testing.assert_close(mine.a, wanted.a[rows], rtol=1e-13, atol=0)
        torch.testing.assert_close(mine.c, wanted.c[rows], rtol=1e-13, atol=0)
