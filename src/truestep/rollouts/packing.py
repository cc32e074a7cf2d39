"""Packing: documents are divided into micro-batches within a token budget, and each becomes tensors. Deterministic."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from truestep.rollouts import fields
from truestep.rollouts.fields import Field, FieldError
from truestep.rollouts.prefixes import Forest
from truestep.text import printable
from truestep.types import Membership, PackedBatch, PackedLabels, PackedTokens, Rollout


def fill_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fill micro-batches one after another. A document that does not fit starts the next micro-batch."""
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = budget
        bins[-1].append(index)
        room -= length
    return bins


class _FirstWithRoom:
    """A segment tree of the room in each micro-batch. Finds the first with enough room in logarithmic time."""

    def __init__(self, count: int, budget: int):
        self._size = 1 << max(count - 1, 0).bit_length()
        # Node n holds the larger room of its children 2n and 2n + 1; the leaves are micro-batches.
        self._most = [budget] * (2 * self._size)

    def take(self, length: int) -> int:
        """Reserve `length` tokens in the first micro-batch with enough room, and return its number."""
        most, node = self._most, 1
        while node < self._size:
            node *= 2
            if most[node] < length:
                node += 1
        number = node - self._size
        most[node] -= length
        while node > 1:
            node //= 2
            left, right = most[2 * node], most[2 * node + 1]
            larger = left if left > right else right
            if most[node] == larger:
                break
            most[node] = larger
        return number


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack documents, longest first, each into the first micro-batch with room. This needs few micro-batches.

    Within a micro-batch documents keep their order. Micro-batches are sorted by their first document.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room = _FirstWithRoom(len(lengths), budget)
    for index in order:
        length = lengths[index]
        if length > budget:
            raise ValueError(f"document {index} of {length} tokens is longer than a micro-batch of {budget}")
        number = room.take(length)
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def balance(lengths: Sequence[int], costs: Sequence[float], budget: int, multiple: int) -> list[list[int]]:
    """Pack documents into few micro-batches of similar cost, their number a multiple of `multiple`, costliest first.

    Documents are placed costliest first, each into the cheapest micro-batch with room. If that needs more micro-batches
    than `first_fit_decreasing`, its packing is used instead, with the largest micro-batches halved.
    """
    least = max(-(-_least_bins(lengths, budget) // multiple), 1) * multiple
    bins = _evenly(lengths, costs, budget, least)
    if bins is None:
        first_fit = first_fit_decreasing(lengths, budget)
        most = -(-len(first_fit) // multiple) * multiple
        tries = (_evenly(lengths, costs, budget, count) for count in _counts_between(least, most, multiple))
        bins = next((bins for bins in tries if bins is not None), None)
        bins = split_to_multiple(first_fit, lengths, multiple) if bins is None else bins
    dearest = sorted(bins, key=lambda members: (-sum(costs[index] for index in members), members[:1]))
    return dearest if lengths else []


def _least_bins(lengths: Sequence[int], budget: int) -> int:
    """Return a lower bound of the number of micro-batches."""
    sizes = np.sort(np.asarray(lengths, dtype=np.int64))
    by_tokens = -(-int(sizes.sum()) // budget)
    # A micro-batch holds at most n documents that are longer than budget / (n + 1).
    by_number = (-(-(len(sizes) - int(np.searchsorted(sizes, budget // (n + 1), "right"))) // n) for n in range(1, 65))
    return max(by_tokens, *by_number)


def _counts_between(least: int, most: int, multiple: int) -> Iterator[int]:
    """Yield the numbers of micro-batches to try after `least`, up to `most`.

    The first eight are `multiple` apart. Then the distance doubles each time, to limit the tries of large steps.
    """
    count, step = least, multiple
    for tried in itertools.count(1):
        step *= 1 + (tried > 8)
        count += step
        if count > most:
            return
        yield count


def _evenly(lengths: Sequence[int], costs: Sequence[float], budget: int, count: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    open_bins = [(0.0, number) for number in range(count)]  # a heap by cost so far
    # A heap of micro-batches that lacked room for an earlier document, most room first. Because documents come roughly
    # in order of length, longest first, a micro-batch is set aside about once for each document that it takes. So the
    # time is not quadratic.
    set_aside: list[tuple[int, float, int]] = []
    prices = np.asarray(costs, np.float64)
    order = np.argsort(-prices, kind="stable")  # the costliest first
    columns = (order, np.asarray(lengths, np.int64)[order], prices[order])
    for index, length, price in zip(*(column.tolist() for column in columns), strict=True):
        while set_aside and -set_aside[0][0] >= length:
            _, cost, number = heapq.heappop(set_aside)
            heapq.heappush(open_bins, (cost, number))
        while open_bins and room[open_bins[0][1]] < length:
            cost, number = heapq.heappop(open_bins)
            heapq.heappush(set_aside, (-room[number], cost, number))
        if not open_bins:
            return None
        cost, number = open_bins[0]
        bins[number].append(index)
        room[number] -= length
        heapq.heapreplace(open_bins, (cost + price, number))
    return [sorted(members) for members in bins]


def split_to_multiple(bins: list[list[int]], lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Round the number of micro-batches up to a multiple by halving the largest, then by adding empty ones."""
    missing = -len(bins) % multiple
    heap = [(-sum(lengths[index] for index in members), position, members) for position, members in enumerate(bins)]
    heapq.heapify(heap)
    single: list[list[int]] = []  # micro-batches of one document, which cannot be halved
    position = len(bins)
    while missing and heap:
        _, _, members = heapq.heappop(heap)
        if len(members) == 1:
            single.append(members)
            continue
        for half in _halve(members, lengths):
            heapq.heappush(heap, (-sum(lengths[index] for index in half), position, half))
            position += 1
        missing -= 1
    filled = single + [members for _, _, members in heap]
    return sorted(filled, key=lambda members: members[0]) + [[] for _ in range(missing)]


def _halve(members: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split a micro-batch in two parts of similar token counts, in order."""
    running = list(itertools.accumulate(lengths[index] for index in members))
    cut = next(count for count, tokens in enumerate(running, start=1) if 2 * tokens >= running[-1])
    cut = min(cut, len(members) - 1)
    return members[:cut], members[cut:]


def pack(
    documents: Sequence[Rollout],
    pad_to_multiple: int = 1,
    declared: Sequence[Field] = (),
    of_tokens: Collection[str] = (),
    forest: Forest | None = None,
) -> PackedBatch:
    """Put documents of one sequence into the CPU tensors of one micro-batch.

    `declared` are the user's fields, `of_tokens` the names of the token-level fields to include. `forest` has the
    segments that the documents share; there, these fields must be equal too.
    """
    ids = [document.input_ids for document in documents]
    tokens = pack_tokens(ids, pad_to_multiple, forest)
    if of_tokens:
        starts = tokens.segments.numpy()
        asked = (field for field in (*fields.TABLE, *declared) if field.name in of_tokens)
        packed = {field.name: _at_tokens(documents, field, forest, starts, len(tokens)) for field in asked}
        tokens = dataclasses.replace(
            tokens, fields={name: values for name, values in packed.items() if values is not None}
        )
    labels = _pack_labels(documents, declared)
    if forest is not None:
        labels = dataclasses.replace(labels, rows=_shared_rows(documents, forest, tokens.segments.numpy()))
    return PackedBatch(tokens, labels)


def pack_tokens(
    documents: Sequence[np.ndarray], pad_to_multiple: int = 1, forest: Forest | None = None
) -> PackedTokens:
    """Concatenate the token ids of documents, or of the segments of `forest`, and append padding."""
    if forest is None:
        begins, runs = [0] * len(documents), list(documents)
    else:
        begins = [segment.start for segment in forest.segments]
        runs = [documents[segment.source][segment.start : segment.stop] for segment in forest.segments]
    ends = np.cumsum([len(run) for run in runs], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    # A micro-batch without documents still gets padding, because the model needs at least one token.
    padding = -total % pad_to_multiple if total else pad_to_multiple
    # Padding is a separate segment with positions from 0, like a document.
    pairs = zip((*begins, 0), (*map(len, runs), padding), strict=True)
    positions = [np.arange(begin, begin + length) for begin, length in pairs]
    segments = [0, *ends, *([total + padding] if padding else [])]
    sequences = None
    if forest is not None:
        sequences = torch.from_numpy(np.repeat([*forest.sequences, 0], [*map(len, runs), padding]))
    return PackedTokens(
        input_ids=torch.from_numpy(np.concatenate([*runs, np.zeros(padding, np.int64)])),
        position_ids=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        segments=torch.tensor(segments, dtype=torch.int32),
        num_segments=len(runs),
        parents=() if forest is None else tuple(segment.parent for segment in forest.segments),
        sequences=sequences,
    )


def _shared_rows(documents: Sequence[Rollout], forest: Forest, starts: np.ndarray) -> torch.Tensor:  # [T]
    """Return the packed position that predicts each label of the documents, in order."""
    rows = [np.zeros(0, np.int64)]
    for document, last in zip(documents, forest.last, strict=True):
        path = forest.path(last)
        ends = np.array([forest.segments[segment].stop for segment in path])
        # For each segment of the path: the packed position of its tokens minus their position in the document.
        shifts = np.array([starts[segment] - forest.segments[segment].start for segment in path])
        before = np.flatnonzero(document.loss_mask) - 1
        rows.append(before + shifts[np.searchsorted(ends, before, side="right")])
    return torch.from_numpy(np.concatenate(rows))


def _at_tokens(
    documents: Sequence[Rollout], field: Field, forest: Forest | None, starts: np.ndarray, total: int
) -> torch.Tensor | None:  # [S, ...]
    """Concatenate a token-level field, with `missing` where a document has no values.

    Returns None if no document has the field and its shape is not fixed.
    """
    found = [document.value(field.name) for document in documents]
    pairs = zip(documents, found, strict=True)
    shapes = {values.shape[1:]: document.id for document, values in pairs if values is not None}
    if len(shapes) > 1:
        first, second, *_ = ((list(shape), name) for shape, name in shapes.items())
        raise ValueError(
            f"{field.name} is {first[0]} for each token of {first[1]} and {second[0]} for each of {second[1]}"
        )
    if not shapes and any(isinstance(size, str) for size in field.shape):
        return None
    packed = np.full((total, *next(iter(shapes), field.shape)), field.missing, field.dtype)
    runs = [(number, 0, document.num_tokens) for number, document in enumerate(documents)]
    if forest is not None:
        runs = [(segment.source, segment.start, segment.stop) for segment in forest.segments]
    for at, (source, begin, end) in zip(starts, runs, strict=False):
        if (values := found[source]) is not None:
            own = values[begin:end]
            packed[at : at + len(own)] = own
    return torch.from_numpy(packed)


# Attributes of `PackedLabels`; True if the attribute has a value per label, False if per document.
_ATTRIBUTES = {item.name: bool(item.metadata.get("per_label")) for item in dataclasses.fields(PackedLabels)}


def _pack_labels(documents: Sequence[Rollout], declared: Sequence[Field]) -> PackedLabels:
    counts = np.array([np.count_nonzero(document.loss_mask) for document in documents], dtype=np.int64)
    # Indices of labels in the concatenated tokens: each field is concatenated and then indexed once.
    places = np.flatnonzero(_end_to_end([document.loss_mask for document in documents], np.bool_))
    attributes: dict[str, torch.Tensor] = {}
    others: dict[str, dict[str, torch.Tensor]] = {"label": {}, "document": {}}
    has: dict[str, torch.Tensor] = {}
    for field in fields.packed(declared):
        found = [document.value(field.name) for document in documents]
        there = [values is not None for values in found]
        if field.required and not all(there):
            raise _missing(documents[there.index(False)], field)
        if field.has:
            has[field.name] = torch.tensor(there, dtype=torch.bool)
        if field.level == "document":
            packed = np.array([field.missing if value is None else value for value in found], dtype=field.dtype)
        elif not any(there):
            packed = np.full(len(places), field.missing, field.dtype)
        else:
            packed = _end_to_end(_filled(documents, found, field), field.dtype)[places]
        name = field.among_labels
        if name not in _ATTRIBUTES:
            others[field.level][name] = torch.from_numpy(packed)
            continue
        spread = field.level == "document" and _ATTRIBUTES[name]
        attributes[name] = torch.from_numpy(np.repeat(packed, counts) if spread else packed)
    return PackedLabels(
        rows=torch.from_numpy(places - 1),
        ids=torch.from_numpy(_end_to_end([_scored(document) for document in documents], np.int64)[places]),
        document=torch.from_numpy(np.repeat(np.arange(len(documents)), counts)),
        num_labels=torch.from_numpy(counts),
        **_memberships(documents, counts),
        rewards={
            name: torch.tensor([document.rewards.get(name, math.nan) for document in documents], dtype=torch.float32)
            for name in sorted({name for document in documents for name in document.rewards})
        },
        has=has,
        fields=others["label"],
        document_fields=others["document"],
        **attributes,
    )


def _scored(document: Rollout) -> np.ndarray:
    return document.input_ids if document.targets is None else document.targets


def _memberships(sequences: Sequence[Rollout], counts: np.ndarray) -> dict[str, torch.Tensor]:
    """Return, for each sequence, the facts about its whole document that its labels need."""
    found = [sequence.membership for sequence in sequences]
    if not any(found):
        alone = torch.ones(len(counts), dtype=torch.bool)
        return {"document_labels": torch.from_numpy(counts), "counts": alone, "others_have_advantage": ~alone}
    pairs = [one or Membership(int(count), True, False) for one, count in zip(found, counts, strict=True)]
    return {
        "document_labels": torch.tensor([one.num_labels for one in pairs]),
        "counts": torch.tensor([one.counts for one in pairs]),
        "others_have_advantage": torch.tensor([one.others_have_advantage for one in pairs]),
    }


def _end_to_end(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")


def _filled(documents: Sequence[Rollout], found: Sequence[Any], field: Field) -> list[np.ndarray]:
    """Return a field's array for each document, filled with `missing` if the document lacks it."""
    return [
        np.full(document.num_tokens, field.missing, field.dtype) if values is None else values
        for document, values in zip(documents, found, strict=True)
    ]


def _missing(document: Rollout, field: Field) -> FieldError:
    return FieldError(
        f"document {printable(document.id)} has no {field.name}, which data.fields declares without a default: it was "
        "read before that was declared"
    )
