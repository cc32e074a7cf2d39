"""The division of documents into micro-batches of a token budget, and of a micro-batch into tensors. Deterministic."""

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from truestep.types import OPTIONAL_FIELDS, PackedBatch, PackedLabels, PackedTokens, Rollout


def fill_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fill micro-batches one after another: a document that no longer fits begins the next."""
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = budget
        bins[-1].append(index)
        room -= length
    return bins


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fill few micro-batches: the longest document first, each into the first micro-batch that has room.

    Within a micro-batch documents keep their order, and micro-batches are in order of their first document.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        if length > budget:
            raise ValueError(f"document {index} of {length} tokens is longer than a micro-batch of {budget}")
        for number, space in enumerate(room):
            if length <= space:
                bins[number].append(index)
                room[number] -= length
                break
        else:
            bins.append([index])
            room.append(budget - length)
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def balance(lengths: Sequence[int], costs: Sequence[float], budget: int, multiple: int) -> list[list[int]]:
    """Make micro-batches of near equal cost, the costliest first: as few as hold all, but a multiple of `multiple`.

    The costliest document goes first, each into the cheapest micro-batch that has room. Where that needs more
    micro-batches than `first_fit_decreasing`, those are taken and the largest are halved.
    """
    first_fit = first_fit_decreasing(lengths, budget)
    most = -(-len(first_fit) // multiple) * multiple
    least = math.ceil(math.ceil(sum(lengths) / budget) / multiple) * multiple
    for count in range(max(least, multiple), most + 1, multiple):
        bins = _evenly(lengths, costs, budget, count)
        if bins is not None:
            break
    else:
        bins = split_to_multiple(first_fit, lengths, multiple)
    dearest = sorted(bins, key=lambda members: (-sum(costs[index] for index in members), members[:1]))
    return dearest if lengths else []


def _evenly(lengths: Sequence[int], costs: Sequence[float], budget: int, count: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    heap = [(0.0, number) for number in range(count)]  # by cost so far
    for index in sorted(range(len(lengths)), key=lambda index: (-costs[index], index)):
        full = []
        while heap and room[heap[0][1]] < lengths[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, number = heapq.heappop(heap)
        bins[number].append(index)
        room[number] -= lengths[index]
        for entry in (*full, (cost + costs[index], number)):
            heapq.heappush(heap, entry)
    return [sorted(members) for members in bins]


def split_to_multiple(bins: list[list[int]], lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Round the number of micro-batches up to a multiple by halving the largest; empty ones where documents run out."""
    missing = -len(bins) % multiple
    heap = [(-sum(lengths[index] for index in members), position, members) for position, members in enumerate(bins)]
    heapq.heapify(heap)
    single: list[list[int]] = []  # cannot be halved
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
    """Cut in two parts of near equal tokens; the order is kept."""
    running = list(accumulate(lengths[index] for index in members))
    cut = next(count for count, tokens in enumerate(running, start=1) if 2 * tokens >= running[-1])
    cut = min(cut, len(members) - 1)
    return members[:cut], members[cut:]


def pack(documents: Sequence[Rollout], pad_to_multiple: int = 1) -> PackedBatch:
    """Lay documents end to end as the tensors of one micro-batch, on the host."""
    tokens = pack_tokens([document.input_ids for document in documents], pad_to_multiple)
    return PackedBatch(tokens, _pack_labels(documents, tokens.segments.numpy().astype(np.int64)))


def pack_tokens(documents: Sequence[np.ndarray], pad_to_multiple: int = 1) -> PackedTokens:
    """Lay the token ids of documents end to end, and padding behind them."""
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    # A micro-batch without documents is one of padding: a model has to have something to run on.
    padding = -total % pad_to_multiple if total else pad_to_multiple
    # Positions of padding count on from 0 like a document's: it is a segment of its own.
    positions = [np.arange(length) for length in (*map(len, documents), padding)]
    segments = [0, *ends, *([total + padding] if padding else [])]
    return PackedTokens(
        input_ids=torch.from_numpy(np.concatenate([*documents, np.zeros(padding, np.int64)])),
        position_ids=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        segments=torch.tensor(segments, dtype=torch.int32),
        num_documents=len(documents),
    )


def _pack_labels(documents: Sequence[Rollout], starts: np.ndarray) -> PackedLabels:
    counts = np.array([document.num_labels for document in documents], dtype=np.int64)
    positions = [np.flatnonzero(document.loss_mask) for document in documents]
    rows = [start + at - 1 for start, at in zip(starts[: len(documents)], positions, strict=True)]
    temperatures = np.array([document.temperature for document in documents], dtype=np.float32)
    return PackedLabels(
        rows=torch.from_numpy(np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)),
        document=torch.from_numpy(np.repeat(np.arange(len(documents)), counts)),
        temperature=torch.from_numpy(np.repeat(temperatures, counts)),
        **{
            item.name: _at_labels(documents, item.metadata["rollout_field"], item.metadata["dtype"])
            for item in PackedLabels.label_fields()
            if item.metadata["rollout_field"] is not None
        },
        num_labels=torch.from_numpy(counts),
        reward=torch.tensor([document.reward or 0.0 for document in documents], dtype=torch.float32),
        rewards={
            name: torch.tensor([document.rewards.get(name, math.nan) for document in documents], dtype=torch.float32)
            for name in sorted({name for document in documents for name in document.rewards})
        },
        truncated=torch.tensor([bool(document.truncated) for document in documents], dtype=torch.bool),
        has={
            name: torch.tensor([getattr(document, name) is not None for document in documents], dtype=torch.bool)
            for name in OPTIONAL_FIELDS
        },
    )


def _at_labels(documents: Sequence[Rollout], name: str, dtype: type) -> torch.Tensor:
    """Read a per-token field at the labels of all documents; 0 where a document lacks it."""
    parts: list[np.ndarray] = [np.zeros(0, dtype)]
    for document in documents:
        values, mask = getattr(document, name), document.loss_mask
        parts.append(np.zeros(int(mask.sum()), dtype) if values is None else values[mask].astype(dtype))
    return torch.from_numpy(np.concatenate(parts))
