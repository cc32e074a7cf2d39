"""The head, computed one chunk of rows at a time, so that only one chunk's logits exist. Chunks do not change results.

    hidden rows ──GEMM──> logits chunk ──statistics──> loss ──> coefficients ──in place──> dL/dlogits
                                                     d hidden <──GEMM──┴──GEMM──> d weight

Each chunk needs three matrix products, which is the minimum. If the loss needs whole documents, chunks end at document
boundaries. Only a document that is longer than a chunk, or that is shared with other ranks, needs a separate pass for
its statistics first: a fourth product for its rows. Rows whose coefficients are all zero skip the backward products.

Dimensions: T labels, H hidden, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truestep.gpu.pinned_counter import count_true
from truestep.head.logits import HeadSettings, Rows, wide
from truestep.head.passes import Gradient, HeadPasses, passes_for
from truestep.head.vocab_parallel import ShardedPasses, VocabularyShard
from truestep.types import Coefficients, RowStatistics

# Takes a range of rows and their statistics; returns the coefficients of the gradient.
LossFunction = Callable[[slice, RowStatistics], Coefficients]

# The same, with indices of the rows in place of a range.
SharedLossFunction = Callable[[torch.Tensor, RowStatistics], Coefficients]

# Rows with a gradient are gathered before the backward products if at most this share of the rows has one. With more,
# the gather costs more than it saves.
_WORTH_GATHERING = 0.75


@dataclass(frozen=True)
class HeadRows(Rows):
    """The T rows of a micro-batch that predict labels. Prompt, masked and padding tokens never go through the head."""

    settings: HeadSettings
    shard: VocabularyShard | None = None  # set if `weight` is sharded over the vocabulary

    @property
    def passes(self) -> HeadPasses:
        local = passes_for(self.settings, self.hidden, self.weight)
        return local if self.shard is None else ShardedPasses(local, self.shard)

    @property
    def rows_per_chunk(self) -> int:
        device = self.hidden.device
        rows = self.settings.rows_per_chunk(
            len(self.label_ids), self.weight.shape[0], self.passes.bytes_per_logit, device
        )
        # Ranks communicate in every chunk, so all need the same number of chunks even if their free memory differs.
        if self.shard is None or self.settings.chunk_size is not None:
            return rows
        return self.shard.least(rows, device)

    def forward(self, rows: slice, *, keep: bool) -> tuple[Any, RowStatistics]:
        """Compute the statistics of a range of rows and, with `keep`, the input of `backward`."""
        return self.passes.forward(self[rows], keep)

    def backward(self, rows: slice, kept: Any, statistics: RowStatistics, coefficients: Coefficients) -> Gradient:
        return self.passes.gradient(kept, statistics, self[rows], coefficients)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.hidden[rows], self.weight, self.label_ids[rows], self.temperature[rows])


@dataclass(frozen=True)
class HeadResult:
    statistics: RowStatistics  # [T]
    hidden_gradient: torch.Tensor  # [T, H] float32


@dataclass(frozen=True)
class SharedDocuments:
    """Documents whose labels are on several ranks: the first `lead` and the last `tail` rows of this rank.

    `loss` sums over these ranks, so each rank must call it exactly once, with all of its shared rows, even if it has
    none.
    """

    lead: int
    tail: int
    loss: SharedLossFunction


def forward(
    head: HeadRows, *, document_labels: Sequence[int] | None = None, shared: SharedDocuments | None = None
) -> RowStatistics:
    """Compute only the statistics, in the same chunks as `forward_backward` with the same arguments."""
    size, count = head.rows_per_chunk, len(head.label_ids)
    spans = [slice(0, count)]
    if document_labels is not None and shared is None:
        spans = _spans(0, size, document_labels)
    elif document_labels is not None and shared is not None:
        inside = _spans(shared.lead, size, document_labels)
        spans = [slice(0, shared.lead), *inside, slice(count - shared.tail, count)]
    return _join([part for span in spans for part in _parts(head, span, size)], head)


def forward_backward(
    head: HeadRows,
    loss: LossFunction,
    *,
    weight_gradient: torch.Tensor | None,
    document_labels: Sequence[int] | None = None,
    shared: SharedDocuments | None = None,
) -> HeadResult:
    """Compute the statistics and the gradients of `loss`. Return the gradient of the hidden states, and add the
    gradient of the weight to `weight_gradient` (None: the head is frozen).

    Pass `document_labels`, the number of labels of each document in order, if the loss needs whole documents. It is
    then called only with all labels of a document at once. They do not include the documents of `shared`.
    """
    size = head.rows_per_chunk
    gradient = torch.zeros_like(head.hidden, dtype=wide(head.hidden.dtype))
    statistics = []
    for span, span_coefficients in _runs(head, loss, size, document_labels, shared):
        for rows in _cut(span, size):
            place = slice(rows.start - span.start, rows.stop - span.start)
            coefficients = None if span_coefficients is None else span_coefficients[place]
            statistics.append(_chunk(head, rows, loss, coefficients, gradient, weight_gradient))
    if head.shard is not None:
        head.shard.sum(gradient)
    return HeadResult(_join(statistics, head), gradient)


def _runs(
    head: HeadRows, loss: LossFunction, size: int, document_labels: Sequence[int] | None, shared: SharedDocuments | None
) -> Iterator[tuple[slice, Coefficients | None]]:
    """Yield consecutive ranges of rows. If the loss of a range depends on labels in other chunks or ranks, yield its
    coefficients too, from a separate forward pass; else None."""
    count = len(head.label_ids)
    if document_labels is None:
        yield slice(0, count), None
    elif shared is None:
        yield from _whole_documents(head, loss, size, document_labels, 0)
    else:
        spans = slice(0, shared.lead), slice(count - shared.tail, count)
        rows = torch.cat([torch.arange(span.start, span.stop, device=head.label_ids.device) for span in spans])
        coefficients = shared.loss(rows, _join([_statistics(head, span, size) for span in spans], head))
        yield spans[0], coefficients[: shared.lead]
        yield from _whole_documents(head, loss, size, document_labels, shared.lead)
        yield spans[1], coefficients[shared.lead :]


def _whole_documents(
    head: HeadRows, loss: LossFunction, size: int, document_labels: Sequence[int], start: int
) -> Iterator[tuple[slice, Coefficients | None]]:
    for span in _spans(start, size, document_labels):
        fits = span.stop - span.start <= size
        yield span, None if fits else loss(span, _statistics(head, span, size))


def _chunk(
    head: HeadRows,
    rows: slice,
    loss: LossFunction,
    coefficients: Coefficients | None,
    gradient: torch.Tensor,
    weight_gradient: torch.Tensor | None,
) -> RowStatistics:
    """Run one chunk forward and backward. Its logits are freed on return, so only one chunk's logits exist at a
    time."""
    kept, statistics = head.forward(rows, keep=True)
    if coefficients is None:
        coefficients = loss(rows, statistics)
    # One host-device sync per chunk. The previous chunk's products still run meanwhile.
    active = coefficients.active
    count = count_true(active)
    if not count:
        return statistics
    logits_gradient = head.backward(rows, kept, statistics, coefficients)
    hidden, out = head.hidden[rows], gradient[rows]
    if count <= _WORTH_GATHERING * len(active):
        index = active.logical_not().argsort(stable=True)[:count]  # unlike `nonzero`, needs no second synchronisation
        logits_gradient, hidden = logits_gradient.select_(index), hidden[index]
        some = out.new_empty(hidden.shape)
        logits_gradient.of_hidden_(head.weight, some)
        out.index_copy_(0, index, some)
    else:
        logits_gradient.of_hidden_(head.weight, out)
    if weight_gradient is not None:
        logits_gradient.add_of_weight_(weight_gradient, hidden)
    return statistics


def _spans(start: int, size: int, document_labels: Sequence[int]) -> list[slice]:
    """Group whole documents into the fewest ranges of at most `size` rows; a longer document is a range by itself.
    Among these groupings, choose one whose longest range is as short as possible: matrix products of a short last range
    would be inefficient."""
    fewest = len(_runs_of_at_most(size, start, document_labels))
    sizes = range(1, size)
    least = bisect_left(sizes, -fewest, key=lambda most: -len(_runs_of_at_most(most, start, document_labels)))
    return _runs_of_at_most(sizes[least] if least < len(sizes) else size, start, document_labels)


def _runs_of_at_most(size: int, start: int, document_labels: Sequence[int]) -> list[slice]:
    spans: list[slice] = []
    end = start
    for count in document_labels:
        if end > start and end + count - start > size:
            spans.append(slice(start, end))
            start = end
        end += count
    return [*spans, slice(start, end)] if end > start else spans


def _cut(span: slice, size: int) -> list[slice]:
    return [slice(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]


def _statistics(head: HeadRows, span: slice, size: int) -> RowStatistics:
    return _join(_parts(head, span, size), head)


def _parts(head: HeadRows, span: slice, size: int) -> list[RowStatistics]:
    return [head.forward(rows, keep=False)[1] for rows in _cut(span, size)]


def _join(parts: list[RowStatistics], head: HeadRows) -> RowStatistics:
    if not parts:
        nothing = head.hidden.new_empty(0, dtype=wide(head.hidden.dtype))
        return RowStatistics(nothing, nothing, nothing)
    return RowStatistics(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.entropy for part in parts]),
        torch.cat([part.logsumexp for part in parts]),
    )
