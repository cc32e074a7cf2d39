"""The chunked head against float64 autograd on materialised logits, at every chunk size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from head.head_cases import (
    DEVICES,
    Expected,
    expected,
    largest_difference,
    make_coefficients,
    make_rows,
    relative,
)
from head.plain import plain_statistics
from truestep.head import chunked, passes
from truestep.head.chunked import HeadResult, HeadRows, SharedDocuments, forward, forward_backward
from truestep.head.logits import HeadSettings
from truestep.types import Coefficients, RowStatistics


def with_settings(rows: HeadRows, **options: Any) -> HeadRows:
    return replace(rows, settings=replace(rows.settings, **options))


def buffer_for(rows: HeadRows) -> torch.Tensor:
    return torch.zeros_like(rows.weight, dtype=torch.promote_types(rows.weight.dtype, torch.float32))


def documents_of(labels: int) -> list[int]:
    """Numbers of labels: none, one, a few, and half of all in one document."""
    counts, left = [0, labels // 2], labels - labels // 2
    for count in itertools.cycle((1, 3, 0, 2)):
        if not left:
            return counts
        counts.append(min(count, left))
        left -= counts[-1]
    raise AssertionError


def run(
    rows: HeadRows, coefficients: Coefficients, buffer: torch.Tensor | None, *, whole_documents: bool = False
) -> HeadResult:
    """Through the loss's own interface: the coefficients of the rows it is asked for."""
    documents = documents_of(len(rows.label_ids)) if whole_documents else None
    return forward_backward(
        rows, lambda chunk, _: coefficients[chunk], document_labels=documents, weight_gradient=buffer
    )


def check(rows: HeadRows, result: HeadResult, buffer: torch.Tensor, wanted: Expected, tolerance: float) -> None:
    assert largest_difference(result.statistics.logprobs, wanted.logprobs) < tolerance
    assert largest_difference(result.statistics.entropy, wanted.entropy) < tolerance
    assert largest_difference(result.statistics.logsumexp, wanted.logsumexp) < tolerance
    assert result.hidden_gradient is not None
    assert result.hidden_gradient.shape == rows.hidden.shape
    assert relative(result.hidden_gradient, wanted.hidden_gradient) < tolerance
    assert relative(buffer, wanted.weight_gradient) < tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance", "softcap", "scale"),
    [(torch.float64, 1e-12, None, 1.0), (torch.float64, 1e-12, 2.0, 0.3), (torch.float32, 1e-5, 2.0, 0.3)],
)
def test_both_gradients_equal_autograd(
    dtype: torch.dtype, tolerance: float, softcap: float | None, scale: float
) -> None:
    for labels, vocabulary, equal, with_b in itertools.product((0, 1, 16), (1, 31), (False, True), (False, True)):
        settings = HeadSettings(softcap=softcap, scale=scale)
        rows = make_rows(labels, vocabulary, dtype=dtype, equal_temperatures=equal, settings=settings)
        coefficients = make_coefficients(labels, with_b=with_b, like=rows.hidden)
        wanted = expected(rows, coefficients)
        reference = plain_statistics(rows.hidden, rows.weight, rows.label_ids, rows.temperature, settings)
        assert largest_difference(reference.logprobs, wanted.logprobs) < tolerance
        for chunk, whole in itertools.product((1, 7, 16, 99, None), (False, True)):
            cut = with_settings(rows, chunk_size=chunk)
            buffer = buffer_for(cut)
            check(cut, run(cut, coefficients, buffer, whole_documents=whole), buffer, wanted, tolerance)
            assert largest_difference(forward(cut).logprobs, wanted.logprobs) < tolerance
            assert largest_difference(forward(cut).entropy, wanted.entropy) < tolerance


def test_no_label_gives_empty_float32_results_and_leaves_the_buffer() -> None:
    rows = make_rows(0, 5, dtype=torch.bfloat16)
    buffer = torch.full((5, 6), 3.0)
    result = run(rows, make_coefficients(0, like=rows.hidden), buffer)
    assert torch.equal(buffer, torch.full((5, 6), 3.0))
    assert result.hidden_gradient is not None
    assert result.hidden_gradient.shape == (0, 6)
    for values in (result.statistics.logprobs, result.statistics.entropy, forward(rows).logsumexp):
        assert values.shape == (0,)
        assert values.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_frozen_head_has_the_same_hidden_gradient(dtype: torch.dtype) -> None:
    rows = make_rows(11, 9, dtype=dtype, settings=HeadSettings(chunk_size=4))
    coefficients = make_coefficients(11, like=rows.hidden)
    trained, frozen = run(rows, coefficients, buffer_for(rows)), run(rows, coefficients, None)
    assert trained.hidden_gradient is not None
    assert frozen.hidden_gradient is not None
    assert torch.equal(trained.hidden_gradient, frozen.hidden_gradient)
    assert torch.equal(trained.statistics.logprobs, frozen.statistics.logprobs)


def test_the_weight_gradient_of_several_calls_adds_up() -> None:
    rows = make_rows(20, 7, settings=HeadSettings(chunk_size=3))
    coefficients = make_coefficients(20, like=rows.hidden)
    start = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    buffer = start.clone()
    for part in (slice(0, 1), slice(1, 9), slice(9, 9), slice(9, 20)):
        cut = {name: getattr(rows, name)[part] for name in ("hidden", "label_ids", "temperature")}
        run(replace(rows, **cut), coefficients[part], buffer)
    assert relative(buffer - start, expected(rows, coefficients).weight_gradient) < 1e-12


def test_inputs_are_left_alone() -> None:
    rows = make_rows(8, 5, settings=HeadSettings(chunk_size=3, softcap=2.0))
    coefficients = make_coefficients(8, like=rows.hidden)
    tensors = (rows.hidden, rows.weight, rows.temperature, rows.label_ids, *vars(coefficients).values())
    before = [tensor.clone() for tensor in tensors]
    run(rows, coefficients, buffer_for(rows))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_result_does_not_depend_on_the_chunk_size(softcap: float | None) -> None:
    rows = make_rows(50, 101, 32, dtype=torch.float32, settings=HeadSettings(softcap=softcap))
    coefficients = make_coefficients(50, like=rows.hidden)
    buffers, results = [], []
    for chunk in (50, 1, 7, 49, None):
        buffers.append(buffer_for(rows))
        results.append(run(with_settings(rows, chunk_size=chunk), coefficients, buffers[-1]))
    for buffer, result in zip(buffers[1:], results[1:], strict=True):
        assert largest_difference(result.statistics.logprobs, results[0].statistics.logprobs) < 5e-6
        assert relative(result.hidden_gradient, results[0].hidden_gradient) < 1e-6
        assert relative(buffer, buffers[0]) < 1e-6


class LossSpy:
    """Coefficients that say which rows they belong to, and a record of what was asked."""

    def __init__(self, coefficients: Coefficients):
        self.coefficients = coefficients
        self.asked: list[slice] = []
        self.statistics: list[RowStatistics] = []

    def __call__(self, rows: slice, statistics: RowStatistics) -> Coefficients:
        self.asked.append(rows)
        self.statistics.append(RowStatistics(*(value.clone() for value in vars(statistics).values())))
        return self.coefficients[rows]


@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 40])
def test_a_loss_of_whole_documents_is_asked_once_for_each_and_never_for_a_part(chunk: int) -> None:
    rows = make_rows(16, 5, settings=HeadSettings(chunk_size=chunk))
    coefficients = make_coefficients(16, like=rows.hidden)
    spy = LossSpy(coefficients)
    documents = documents_of(16)
    result = forward_backward(rows, spy, document_labels=documents, weight_gradient=None)
    wanted = expected(rows, coefficients)
    assert [row for asked in spy.asked for row in range(16)[asked]] == list(range(16))
    ends = {0, *itertools.accumulate(documents)}
    assert all({asked.start, asked.stop} <= ends for asked in spy.asked)
    for name in ("logprobs", "entropy", "logsumexp"):
        seen = torch.cat([getattr(statistics, name) for statistics in spy.statistics])
        assert largest_difference(seen, getattr(wanted, name)) < 1e-12
        assert torch.equal(seen, getattr(result.statistics, name))


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_a_loss_of_labels_is_asked_once_for_each_row(chunk: int) -> None:
    rows = make_rows(16, 5, settings=HeadSettings(chunk_size=chunk))
    spy = LossSpy(make_coefficients(16, like=rows.hidden))
    result = forward_backward(rows, spy, weight_gradient=None)
    assert [row for asked in spy.asked for row in range(16)[asked]] == list(range(16))
    assert all(len(range(16)[asked]) <= chunk for asked in spy.asked)
    seen = torch.cat([statistics.logprobs for statistics in spy.statistics])
    assert torch.equal(seen, result.statistics.logprobs)


@pytest.mark.parametrize(
    ("documents", "made_rows"),
    [(None, 20), ([3, 3, 4, 2, 0, 6, 1, 1], 20), ([2, 14, 4], 20 + 14), ([20], 40), ([7, 6, 7], 20 + 14)],
)
def test_each_row_of_logits_is_made_no_more_often_than_needed(
    documents: list[int] | None, made_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second time only for documents that are longer than a chunk of 6."""
    made: list[int] = []
    original = passes.raw_logits

    def spy(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        made.append(len(hidden))
        return original(hidden, *arguments)

    monkeypatch.setattr(passes, "raw_logits", spy)
    rows = make_rows(20, 9, settings=HeadSettings(chunk_size=6))
    coefficients = make_coefficients(20, like=rows.hidden)
    result = forward_backward(
        rows, lambda chunk, _: coefficients[chunk], document_labels=documents, weight_gradient=None
    )
    assert max(made) <= 6
    assert sum(made) == made_rows
    assert result.hidden_gradient is not None
    assert relative(result.hidden_gradient, expected(rows, coefficients).hidden_gradient) < 1e-12
    made.clear()
    run(with_settings(rows, chunk_size=20), make_coefficients(20, like=rows.hidden), None, whole_documents=True)
    assert made == [20], "one chunk has every label in it: no second pass"


@given(
    st.lists(st.integers(0, 12), max_size=12),
    st.integers(1, 30),
    st.integers(0, 5),
)
def test_chunks_of_whole_documents_are_few_and_of_like_length(counts: list[int], size: int, start: int) -> None:
    spans = chunked._spans(start, size, counts)
    ends = [start, *itertools.accumulate(counts, initial=start)]
    assert [span.start for span in spans] == [start, *(span.stop for span in spans)][: len(spans)]
    assert (spans[-1].stop if spans else start) == start + sum(counts)
    assert all(span.start in ends and span.stop in ends and span.stop > span.start for span in spans)

    def longest(cuts: tuple[int, ...]) -> int:
        """Of these runs; far too long where a run of several documents does not fit."""
        worst = 0
        for first, last in itertools.pairwise((0, *cuts, len(counts))):
            run = sum(counts[first:last])
            if run > size and sum(count > 0 for count in counts[first:last]) > 1:
                return 10**6
            worst = max(worst, min(run, size))
        return worst

    if counts and len(counts) <= 8 and sum(counts):
        possible = [
            (number + 1, longest(cuts))
            for number in range(len(counts))
            for cuts in itertools.combinations(range(1, len(counts)), number)
        ]
        fewest = min(number for number, worst in possible if worst < 10**6)
        assert len(spans) == fewest
        best = min(worst for number, worst in possible if number == fewest)
        assert max(min(span.stop - span.start, size) for span in spans) == best


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits(dtype: torch.dtype, whole: bool) -> None:
    """40 labels, vocabulary 60, hidden 2: the weight has 120 elements, a chunk of 3 rows 180, all logits 2,400."""
    settings = HeadSettings(chunk_size=3, softcap=4.0, fp32=True)
    rows = make_rows(40, 60, 2, dtype=dtype, settings=settings)
    coefficients, buffer = make_coefficients(40, like=rows.hidden), buffer_for(rows)
    with LargestTensor() as watch:
        run(rows, coefficients, buffer, whole_documents=whole)
        forward(rows)
    assert watch.largest == 3 * 60


def accumulate_in_bfloat16(rows: HeadRows, coefficients: Coefficients) -> torch.Tensor:
    """The mistake: each chunk's exact weight gradient, added in the weight's own type."""
    total = torch.zeros_like(rows.weight)
    for start in range(0, len(rows.label_ids), rows.rows_per_chunk):
        chunk = slice(start, start + rows.rows_per_chunk)
        one = torch.zeros_like(rows.weight, dtype=torch.float32)
        cut = {name: getattr(rows, name)[chunk] for name in ("hidden", "label_ids", "temperature")}
        run(replace(rows, **cut), coefficients[chunk], one)
        total += one.to(total.dtype)
    return total


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_are_accumulated_in_float32(device: str) -> None:
    """Many chunks and calls. A GPU rounds each logit's gradient once, to bfloat16, for its product: 2e-3, no more."""
    once = 1e-5 if device == "cpu" else 3e-3
    settings = HeadSettings(fp32=True, chunk_size=2)
    rows = make_rows(256, 150, 256, dtype=torch.bfloat16, device=device, settings=settings)
    coefficients = Coefficients(*(torch.ones(256, device=device), None, torch.ones(256, device=device)))
    wanted = expected(rows, coefficients)
    buffer = buffer_for(rows)
    assert buffer.dtype == torch.float32
    result = run(rows, coefficients, buffer)
    assert result.hidden_gradient is not None
    assert result.hidden_gradient.dtype == torch.float32
    many_chunks = relative(buffer, wanted.weight_gradient)
    assert many_chunks < once
    assert relative(result.hidden_gradient, wanted.hidden_gradient) < once
    few = buffer_for(rows)
    run(with_settings(rows, chunk_size=256), coefficients, few)
    assert many_chunks < 2 * relative(few, wanted.weight_gradient) + 1e-6, "the error must not grow with the chunks"
    for _ in range(7):
        run(rows, coefficients, buffer)
    assert relative(buffer, 8 * wanted.weight_gradient) < once
    assert relative(accumulate_in_bfloat16(rows, coefficients), wanted.weight_gradient) > 2 * once


@pytest.mark.parametrize("device", DEVICES)
def test_the_precision_holds_through_every_chunk_size(device: str) -> None:
    rows = make_rows(64, 2003, 512, dtype=torch.bfloat16, device=device, equal_temperatures=True)
    wanted = expected(rows, make_coefficients(64, like=rows.hidden))
    for chunk in (1, 7, 64, None):
        exact = forward(with_settings(rows, fp32=True, chunk_size=chunk))
        rounded = forward(with_settings(rows, fp32=False, chunk_size=chunk))
        assert exact.logprobs.dtype == torch.float32
        assert largest_difference(exact.logprobs, wanted.logprobs) < 1e-4
        assert largest_difference(rounded.logprobs, wanted.logprobs) > 1e-3


@pytest.mark.parametrize("chunk", [1, 3, 7, 40])
@pytest.mark.parametrize(
    ("lead", "whole", "tail"), [(0, [5, 0, 11], 0), (16, [], 0), (0, [], 16), (3, [1, 8], 4), (9, [], 7)]
)
def test_documents_that_other_ranks_share_are_asked_for_once_and_together(
    lead: int, whole: list[int], tail: int, chunk: int
) -> None:
    rows = make_rows(16, 5, settings=HeadSettings(chunk_size=chunk))
    coefficients = make_coefficients(16, like=rows.hidden)
    wanted = expected(rows, coefficients)
    asked: list[list[int]] = []

    def of_shared(index: torch.Tensor, statistics: RowStatistics) -> Coefficients:
        asked.append(index.tolist())
        assert largest_difference(statistics.logprobs, wanted.logprobs[index]) < 1e-12
        b = None if coefficients.b is None else coefficients.b[index]
        return Coefficients(coefficients.a[index], b, coefficients.c[index])

    spy, buffer = LossSpy(coefficients), torch.zeros_like(rows.weight)
    shared = SharedDocuments(lead, tail, of_shared)
    result = forward_backward(rows, spy, document_labels=whole, shared=shared, weight_gradient=buffer)
    check(rows, result, buffer, wanted, 1e-12)
    assert asked == [[*range(lead), *range(16 - tail, 16)]], "once, even for no rows: other ranks wait for it"
    assert [row for rows_asked in spy.asked for row in range(16)[rows_asked]] == list(range(lead, 16 - tail))
