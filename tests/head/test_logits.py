"""The parts of the head, each against float64: logits, their statistics, their gradient, the two backward products."""

from __future__ import annotations

import itertools

import pytest
import torch

from head.head_cases import (
    DEVICES,
    expected,
    largest_difference,
    logits_of,
    make_coefficients,
    make_rows,
    relative,
    scalar_with_gradient,
)
from truestep.head import logits as head_logits
from truestep.head.logits import (
    HeadSettings,
    LogitsGradient,
    logits_gradient_,
    row_statistics,
    scaled_logits,
)
from truestep.types import Coefficients

SETTINGS = [HeadSettings(softcap=softcap, scale=scale) for softcap in (None, 1.5, 30.0) for scale in (1.0, 0.25, 3.0)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logits_are_softcapped_scaled_and_divided_by_the_temperature(settings: HeadSettings) -> None:
    rows = make_rows(9, 13, settings=settings)
    wanted = logits_of(rows, rows.hidden, rows.weight)
    assert largest_difference(scaled_logits(rows.hidden, rows.weight, rows.temperature, settings), wanted) < 1e-13
    narrow = scaled_logits(rows.hidden.float(), rows.weight.float(), rows.temperature, settings)
    assert narrow.dtype == torch.float32
    assert relative(narrow, wanted) < 1e-6


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 17])
@pytest.mark.parametrize("labels", [0, 1, 8])
def test_statistics_of_a_row_by_plain_loops(labels: int, vocabulary: int) -> None:
    z = torch.randn(labels, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    label_ids = torch.arange(labels) % vocabulary
    statistics = row_statistics(z, label_ids)
    for row in range(labels):
        total = sum(float(value.exp()) for value in z[row])
        p = [float(value.exp()) / total for value in z[row]]
        label = int(label_ids[row])
        assert float(statistics.logsumexp[row]) == pytest.approx(torch.tensor(total).double().log().item(), abs=1e-6)
        assert float(statistics.logprobs[row].exp()) == pytest.approx(p[label], rel=1e-12)
        entropy = -sum(q * float(torch.tensor(q, dtype=torch.float64).log()) for q in p)
        assert float(statistics.entropy[row]) == pytest.approx(entropy, abs=1e-12)
    assert len(statistics.logprobs) == labels


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("with_b", [True, False])
def test_gradient_of_logits_is_autograds(settings: HeadSettings, with_b: bool) -> None:
    for vocabulary, labels in itertools.product((1, 2, 13), (0, 1, 9)):
        rows = make_rows(labels, vocabulary, settings=settings, seed=vocabulary)
        coefficients = make_coefficients(labels, with_b=with_b, like=rows.hidden)
        product = (rows.hidden @ rows.weight.T).requires_grad_()
        z = logits_of(rows, product, torch.eye(vocabulary, dtype=torch.float64))
        (wanted,) = torch.autograd.grad(scalar_with_gradient(z, rows.label_ids, coefficients), product)
        mine = z.detach().clone()
        statistics = row_statistics(mine, rows.label_ids)
        result = logits_gradient_(mine, statistics.logsumexp, rows.label_ids, rows.temperature, coefficients, settings)
        assert result.data_ptr() == mine.data_ptr() or not labels, "written over the logits"
        assert largest_difference(result, wanted) < 1e-12


@pytest.mark.parametrize("softcap", [None, 50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_stay_finite(softcap: float | None, dtype: torch.dtype) -> None:
    """p underflows to 0 nearly everywhere, and 0 · log p with log p = -2e4 is 0, not NaN."""
    product = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4], [0.0, 88.0, -104.0]], dtype=dtype)
    label_ids, temperature = torch.tensor([1, 0, 2, 1]), torch.ones(4)
    settings = HeadSettings(softcap=softcap)
    z = scaled_logits(product, torch.eye(3, dtype=dtype), temperature, settings)
    statistics = row_statistics(z, label_ids)
    wanted = logits_of(
        make_rows(4, 3, settings=settings, equal_temperatures=True), product.double(), torch.eye(3).double()
    )
    log_p = torch.log_softmax(wanted, -1)
    # A float32 of size 1e4 has steps of 1e-3: no float32 logsumexp is closer.
    tolerance = 2e-3 if dtype == torch.float32 else 1e-11
    assert largest_difference(statistics.logprobs, log_p.gather(-1, label_ids[:, None])[:, 0]) < tolerance
    assert largest_difference(statistics.entropy, -(log_p.exp() * log_p).sum(-1)) < tolerance
    ones = torch.ones(4, dtype=dtype)
    for b in (None, ones, -3 * ones):
        coefficients = Coefficients(ones, b, 2 * ones)
        gradient = logits_gradient_(z.clone(), statistics.logsumexp, label_ids, temperature, coefficients, settings)
        assert torch.isfinite(gradient).all()
    p = log_p.exp()
    if softcap is None:
        one_hot = torch.nn.functional.one_hot(label_ids, 3)
        assert largest_difference(gradient, p * (1 - 3 * log_p) - 2 * one_hot) < 3 * tolerance


@pytest.mark.parametrize("b", [None, 0.0])
def test_zero_coefficients_give_a_zero_gradient(b: float | None) -> None:
    for settings in SETTINGS:
        rows = make_rows(4, 5, settings=settings)
        z = scaled_logits(rows.hidden * 1e4, rows.weight, rows.temperature, settings)
        zeros = torch.zeros(4, dtype=torch.float64)
        coefficients = Coefficients(zeros, None if b is None else zeros, zeros)
        logsumexp = row_statistics(z, rows.label_ids).logsumexp
        gradient = logits_gradient_(z, logsumexp, rows.label_ids, rows.temperature, coefficients, settings)
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_blocks_of_an_upcast_weight_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabulary 37 in blocks of 1, 5 and all rows."""
    rows = make_rows(6, 37, 16, dtype=torch.bfloat16)
    coefficients = make_coefficients(6, like=rows.hidden)
    wanted = expected(rows, coefficients)
    settings = HeadSettings(fp32=True)
    for block_rows in (1, 5, 36, 37, 100):
        monkeypatch.setattr(head_logits, "_BLOCK_BYTES", block_rows * 4 * 16)
        z = scaled_logits(rows.hidden, rows.weight, rows.temperature, settings)
        assert z.dtype == torch.float32
        statistics = row_statistics(z, rows.label_ids)
        assert largest_difference(statistics.logprobs, wanted.logprobs) < 1e-5
        logits_gradient_(z, statistics.logsumexp, rows.label_ids, rows.temperature, coefficients, settings)
        back = torch.full(rows.hidden.shape, torch.nan)
        LogitsGradient(z).of_hidden_(rows.weight, back)
        assert relative(back, wanted.hidden_gradient) < 1e-5


def test_weight_gradient_is_added_to_what_is_there() -> None:
    buffer = torch.full((3, 2), 10.0)
    LogitsGradient(torch.tensor([[1.0, 0.0, 2.0]])).add_of_weight_(buffer, torch.tensor([[3.0, -1.0]]))
    assert buffer.tolist() == [[13.0, 9.0], [10.0, 10.0], [16.0, 8.0]]


def test_chunk_size_is_the_option_or_bounded_by_memory() -> None:
    cpu = torch.device("cpu")
    assert HeadSettings(chunk_size=7).rows_per_chunk(100, 151_936, 4, cpu) == 7
    chosen = HeadSettings().rows_per_chunk(1000, 151_936, 4, cpu)
    assert chosen * 151_936 * 4 <= 2**26
    assert 1000 % chosen == 0 or 1000 % chosen > chosen // 2, "no small chunk is left over"
    assert HeadSettings().rows_per_chunk(10, 2**40, 4, cpu) == 1
    assert HeadSettings().rows_per_chunk(0, 5, 4, cpu) == 1


def test_the_automatic_chunk_size_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(3):
            HeadSettings().rows_per_chunk(77, 54_321, 4, torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records] == [
        "logits_chunk_size: auto is 77 rows of 54321 logits on cpu"
    ]


# The precision of docs/contract.md, section 5, given the same bfloat16 hidden states and weight.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_float32_head_is_within_1e_4_and_a_bfloat16_head_is_not(device: str, seed: int) -> None:
    rows = make_rows(96, 4001, 768, seed=seed, dtype=torch.bfloat16, device=device, equal_temperatures=True)
    wanted = expected(rows, make_coefficients(96, like=rows.hidden))

    def error(fp32: bool) -> float:
        z = scaled_logits(rows.hidden, rows.weight, rows.temperature, HeadSettings(fp32=fp32))
        assert z.dtype == torch.float32
        return largest_difference(row_statistics(z, rows.label_ids).logprobs, wanted.logprobs)

    assert error(fp32=True) < 1e-4
    assert 1e-3 < error(fp32=False) < 3e-2


@pytest.mark.parametrize("device", DEVICES)
def test_a_float32_head_keeps_its_precision_under_softcap_scale_and_temperature(device: str) -> None:
    settings = HeadSettings(fp32=True, softcap=5.0, scale=0.7)
    rows = make_rows(64, 2003, 512, dtype=torch.bfloat16, device=device, settings=settings)
    wanted = expected(rows, make_coefficients(64, like=rows.hidden))
    statistics = row_statistics(scaled_logits(rows.hidden, rows.weight, rows.temperature, settings), rows.label_ids)
    assert largest_difference(statistics.logprobs, wanted.logprobs) < 1e-4
    assert largest_difference(statistics.entropy, wanted.entropy) < 1e-4


@pytest.mark.parametrize("split", [False, True])
def test_rows_of_a_gradient_are_selected_where_they_lie(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of three rows: none is written over before it has moved."""
    monkeypatch.setattr(head_logits, "_BLOCK_BYTES", 3 * 7 * 4)
    generator = torch.Generator().manual_seed(0)
    for rows in range(1, 30):
        parts = [torch.randn(rows, 7, generator=generator) for _ in range(2 if split else 1)]
        index = (torch.rand(rows, generator=generator) < 0.6).nonzero().flatten()
        copies = [part.clone() for part in parts]
        selected = LogitsGradient(*parts).select_(index)
        assert torch.equal(selected.high, copies[0][index])
        assert selected.high.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        if split:
            assert selected.low is not None and torch.equal(selected.low, copies[1][index])
