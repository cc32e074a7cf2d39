"""Attention with shared prefixes: copies keys and values to the path of each segment.

A segment's path is the tokens of its ancestors and its own, in order. With the keys and values of the paths, attention
is one call of any kernel that allows more keys than queries. Such kernels count positions from the end, so windows,
soft caps and sinks need no change. A token of a shared segment has one copy in the path of each descendant; its
gradient is the sum over the copies, in float32.

Dimensions: S tokens of the micro-batch, G segments, P tokens of all paths, C copies of segments in paths.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truestep.types import sent

Span = tuple[int, int]


@dataclass  # not frozen: see `PackedLayout`
class Paths:
    """The paths of a micro-batch's segments, with indices on the model's device."""

    bounds: torch.Tensor  # [G + 1] int32 cumulative lengths of paths
    longest: int
    spans: tuple[Span, ...]  # each path's begin and end, on the host
    source: torch.Tensor  # [P] int64 index into S
    # For the sum over copies: each token's segment, the first token of each segment, and the copies of each segment,
    # `copies[first[segment]:first[segment + 1]]`.
    segment: torch.Tensor  # [S] int32
    starts: torch.Tensor  # [G] int32
    first: torch.Tensor  # [G + 1] int32
    copies: torch.Tensor  # [C] int32 index into P
    levels: "tuple[Level, ...]"
    restore: torch.Tensor  # [S] int64 index of each token in the concatenated tokens of all levels

    @property
    def index(self) -> list[torch.Tensor]:
        """The indices that `gather_paths` and `sum_paths` take."""
        return [self.source, self.segment, self.starts, self.first, self.copies]

    def gather(self, values: torch.Tensor) -> torch.Tensor:  # [S, ...] -> [P, ...]
        """Copy the values of tokens to the paths."""
        gathered: torch.Tensor = _gather(values, self.index)
        return gathered


@dataclass(frozen=True)
class Level:
    """The segments with the same number of ancestors. Recurrent layers compute one level at a time."""

    tokens: torch.Tensor  # [tokens of the level] int64 index into S
    segments: torch.Tensor  # int32 cumulative lengths, on the model's device
    longest: int
    spans: tuple[Span, ...]
    parents: torch.Tensor | None  # index of each segment's parent in the level before; None: the first level


def make_paths(spans: Sequence[Span], parents: Sequence[int], device: torch.device) -> Paths:
    """Make the paths of segments. A parent comes before its children; -1: no parent. A span without an entry in
    `parents` is padding."""
    parents = [*parents, *[-1] * (len(spans) - len(parents))]
    paths: list[list[int]] = []
    for number, parent in enumerate(parents):
        paths.append([number] if parent < 0 else [*paths[parent], number])
    lengths = np.array([end - start for start, end in spans], np.int64)
    owner = np.array([segment for path in paths for segment in path], np.int64)  # [C] the segment of each copy
    ends = np.cumsum(lengths[owner])
    begins = ends - lengths[owner]
    bounds = np.concatenate([[0], ends[np.cumsum([len(path) for path in paths]) - 1]])
    starts = np.array([start for start, _ in spans], np.int64)
    source = np.arange(ends[-1]) + np.repeat(starts[owner] - begins, lengths[owner])
    order = np.argsort(owner, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(spans)))])

    levels = _levels(spans, parents, [len(path) - 1 for path in paths], device)

    def there(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return sent(torch.from_numpy(values).to(dtype), device)

    return Paths(
        bounds=there(bounds),
        longest=int(np.diff(bounds).max()),
        spans=tuple(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)),
        source=there(source, torch.int64),
        segment=there(np.repeat(np.arange(len(spans)), lengths)),
        starts=there(starts),
        first=there(first),
        copies=there(begins[order]),
        levels=levels,
        restore=torch.argsort(torch.cat([level.tokens for level in levels])),
    )


def _levels(
    spans: Sequence[Span], parents: Sequence[int], depths: Sequence[int], device: torch.device
) -> tuple[Level, ...]:
    levels = []
    place: dict[int, int] = {}  # a segment's index in its level
    for depth in range(max(depths) + 1):
        members = [number for number, of in enumerate(depths) if of == depth]
        place |= {number: index for index, number in enumerate(members)}
        ends = np.cumsum([0, *(spans[number][1] - spans[number][0] for number in members)]).tolist()
        own = tuple(itertools.pairwise(ends))
        tokens = torch.cat([torch.arange(*spans[number]) for number in members])
        above = torch.tensor([place[parents[number]] for number in members]) if depth else None
        levels.append(
            Level(
                tokens=sent(tokens, device),
                segments=sent(torch.tensor(ends, dtype=torch.int32), device),
                longest=max(end - start for start, end in own),
                spans=own,
                parents=None if above is None else sent(above, device),
            )
        )
    return tuple(levels)


@torch.library.custom_op("truestep::gather_paths", mutates_args=())
def _gather(values: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
    return values.index_select(0, index[0])


@_gather.register_fake
def _(values: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
    return values.new_empty(len(index[0]), *values.shape[1:])


@torch.library.custom_op("truestep::sum_paths", mutates_args=())
def sum_paths(gradient: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
    """Add up the copies of each token, [P, ...] -> [S, ...], in float32 or wider."""
    source, segment, *of_copies = index
    if gradient.device.type == "cuda":
        from truestep.model.mixers.paths_kernel import sum_on_gpu

        return sum_on_gpu(gradient, segment, *of_copies)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    total = wide.new_zeros(len(segment), *gradient.shape[1:])
    return total.index_add_(0, source, wide).to(gradient.dtype)


@sum_paths.register_fake
def _(gradient: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
    return gradient.new_empty(len(index[1]), *gradient.shape[1:])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, list[torch.Tensor]], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, list[None]]:
    index = list(ctx.saved_tensors)  # read once: with activation checkpointing, saved tensors can be read only once
    return sum_paths(gradient.contiguous(), index), [None] * len(index)


_gather.register_autograd(_backward, setup_context=_keep)
