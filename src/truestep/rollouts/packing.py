"""Documents into micro-batches of a token budget, and a micro-batch into tensors. Deterministic in its inputs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch

from truestep.types import PackedBatch, Rollout, StepPlan


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Few micro-batches: the longest document first, each into the first micro-batch that has room.

    Within a micro-batch documents keep their given order, and micro-batches are in order of their first document.
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
    """A multiple of micro-batches, no more than documents need, of near equal cost; the costliest come first.

    The costliest document first, each into the cheapest micro-batch that has room. Where that needs more micro-batches
    than filling them one after another, they are filled and the largest are halved.
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
    done: list[list[int]] = []
    position = len(bins)
    while missing and heap:
        _, _, members = heapq.heappop(heap)
        if len(members) == 1:
            done.append(members)
            continue
        halves = _halve(members, lengths)
        for half in halves:
            heapq.heappush(heap, (-sum(lengths[index] for index in half), position, half))
            position += 1
        missing -= 1
    whole = done + [members for _, _, members in heap]
    return sorted(whole, key=lambda members: members[0]) + [[] for _ in range(missing)]


def _halve(members: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two parts of near equal tokens, order kept."""
    total = sum(lengths[index] for index in members)
    running, cut = 0, 1
    for count, index in enumerate(members[:-1], start=1):
        running += lengths[index]
        cut = count
        if 2 * running >= total:
            break
    return members[:cut], members[cut:]


def _per_label(documents: Sequence[Rollout], name: str, dtype: np.dtype | type) -> np.ndarray:
    """A per-token field at the labels of all documents; 0 where a document lacks it."""
    parts = []
    for document in documents:
        values = getattr(document, name)
        mask = document.loss_mask
        parts.append(np.zeros(int(mask.sum()), dtype) if values is None else values[mask].astype(dtype))
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def pack(plan: StepPlan, micro_batch: Sequence[int], pad_to_multiple: int = 1) -> PackedBatch:
    """The tensors of one micro-batch of a plan, on the host."""
    documents = [plan.documents[index] for index in micro_batch]
    lengths = [document.num_tokens for document in documents]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = int(starts[-1])
    # A micro-batch without documents is one of padding: a model has to have something to run on.
    padding = -tokens % pad_to_multiple if tokens else pad_to_multiple
    segments = np.append(starts, tokens + padding) if padding else starts
    # Positions of padding count on from 0 like a document's: it is a segment of its own.
    positions = [np.arange(length) for length in (*lengths, padding)]
    counts = np.array([document.num_labels for document in documents], dtype=np.int64)
    label_positions = [np.flatnonzero(document.loss_mask) for document in documents]
    rows = [start + at - 1 for start, at in zip(starts[:-1], label_positions, strict=True)]

    def tensor(values: np.ndarray | Sequence) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def flags(name: str) -> torch.Tensor:
        return torch.tensor([getattr(document, name) is not None for document in documents], dtype=torch.bool)

    input_ids = [*(document.input_ids for document in documents), np.zeros(padding, np.int64)]
    return PackedBatch(
        input_ids=tensor(np.concatenate(input_ids)),
        position_ids=tensor(np.concatenate(positions).astype(np.int64)),
        segments=tensor(segments.astype(np.int32)),
        label_rows=tensor(np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)),
        label_ids=tensor(_per_label(documents, "input_ids", np.int64)),
        label_document=tensor(np.repeat(np.arange(len(documents)), counts)),
        temperature=tensor(np.repeat(np.array([d.temperature for d in documents], dtype=np.float32), counts)),
        old_logprobs=tensor(_per_label(documents, "logprobs", np.float32)),
        advantages=tensor(_per_label(documents, "advantages", np.float32)),
        model_version=tensor(_per_label(documents, "model_version", np.int64)),
        plan_index=tensor(np.array(micro_batch, dtype=np.int64)),
        num_labels=tensor(counts),
        reward=torch.tensor([d.reward or 0.0 for d in documents], dtype=torch.float32),
        has_logprobs=flags("logprobs"),
        has_advantages=flags("advantages"),
        has_version=flags("model_version"),
        has_reward=flags("reward"),
    )
