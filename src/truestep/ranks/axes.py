"""The dimensions in which a run's ranks are laid out: one table, from which places, counts and groups are made.

rank = (((stage · replicas + replica) · data_shard + part) · context + run) · tensor + slice
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from truestep.errors import TruestepError


class RankError(TruestepError):
    """Ranks that cannot work together."""


@dataclass(frozen=True)
class Axis:
    """A dimension, named after its option in `parallel`."""

    name: str
    order: int  # of its digit in a rank's number, the most significant first
    # What its ranks have of the weights: all the same, a part each that is gathered where it is used, a slice each of
    # every layer, or some layers each.
    weights: Literal["same", "spread", "cut", "layers"]
    own_micro_batches: bool = False  # else its ranks compute each micro-batch together
    splits_tokens: bool = False  # between layers, each of its ranks has a share of a micro-batch's tokens
    default: int = 1

    @property
    def group(self) -> str:
        """The name of the group of ranks that have the weights in this way; several dimensions may share one."""
        return {"same": "replicate", "spread": "shard"}.get(self.weights, self.name)


# In the order of the options' messages.
AXES = (
    Axis("data_shard", 2, "spread", own_micro_batches=True, default=-1),
    Axis("data_replicate", 1, "same", own_micro_batches=True),
    Axis("context", 3, "spread", splits_tokens=True),
    Axis("tensor", 4, "cut", splits_tokens=True),
    Axis("pipeline", 0, "layers"),
)
_DIGITS = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.order))

# Dimensions by what their ranks share.
DATA = tuple(axis.name for axis in AXES if axis.own_micro_batches)
TOKENS = tuple(axis.name for axis in AXES if axis.splits_tokens)
TOGETHER = tuple(axis.name for axis in AXES if not axis.own_micro_batches and axis.weights != "layers")
CUT = tuple(axis.name for axis in AXES if axis.weights == "cut")
SPREAD = tuple(axis.name for axis in AXES if axis.weights == "spread")
# Ranks with a number of their own in each group, by the group's name: the dimensions of the device mesh.
MESH = {
    group: tuple(axis.name for axis in AXES if axis.group == group)
    for group in dict.fromkeys(axis.group for axis in sorted(AXES, key=lambda axis: axis.order))
}
# And those that compute a micro-batch together in one dimension of several in a group.
GROUPS = MESH | {axis.name: (axis.name,) for axis in AXES if not axis.own_micro_batches}
# The groups whose ranks have different parts of the weights: a sum over all weights is a sum over these.
WEIGHT_PARTS = tuple(dict.fromkeys(axis.group for axis in AXES if axis.weights != "same"))


@dataclass(frozen=True, init=False)
class RankLayout:
    """The number of ranks in each dimension."""

    sizes: tuple[int, ...]  # by AXES; -1: all that the rest leaves

    def __init__(self, **sizes: int):
        unknown = set(sizes) - set(_DIGITS)
        if unknown:
            raise TypeError(f"ranks have no dimension {min(unknown)}")
        object.__setattr__(self, "sizes", tuple(sizes.get(axis.name, axis.default) for axis in AXES))

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {axis.name: size for axis, size in zip(AXES, self.sizes, strict=True)}

    def over(self, size: int) -> "RankLayout":
        """Give data_shard what the rest leaves. Refuses a layout that does not make up the ranks."""
        sizes = self.by_name
        rest = math.prod(many for name, many in sizes.items() if name != "data_shard")
        options = [f"parallel.{name}: {many}" for name, many in sizes.items() if many not in (-1, 1)]
        if size % rest:
            makes = f" make a multiple of {rest}, which" if len(options) > 1 else ""
            raise RankError(f"{' x '.join(options)}{makes} does not divide the {size} ranks that were started")
        data_shard = size // rest if sizes["data_shard"] == -1 else sizes["data_shard"]
        if data_shard * rest != size:
            asked, need = data_shard * rest, "need" if len(options) > 1 else "needs"
            raise RankError(
                f"{' x '.join(options) or 'parallel.data_shard: 1'} {need} {asked} rank{'s' if asked > 1 else ''}, and "
                f"this run has {size}: start {asked} with torchrun --nproc-per-node, or set parallel.data_shard: -1"
            )
        return RankLayout(**sizes | {"data_shard": data_shard})

    def count(self, names: Collection[str]) -> int:
        """Count the ranks of these dimensions."""
        return math.prod(size for name, size in self.by_name.items() if name in names)

    def number(self, rank: int, names: Collection[str]) -> int:
        """Number a rank among those of these dimensions."""
        return self._number_at(self.places(rank), names)

    def places(self, rank: int) -> dict[str, int]:
        """Find a rank's place in each dimension."""
        places = {}
        for name in reversed(_DIGITS):
            rank, places[name] = divmod(rank, self.by_name[name])
        return places

    def rank_at(self, places: Mapping[str, int]) -> int:
        """Find the rank of these places: the first in every dimension that is not named."""
        return self._number_at(places, _DIGITS)

    def _number_at(self, places: Mapping[str, int], names: Collection[str]) -> int:
        number, sizes = 0, self.by_name
        for name in _DIGITS:
            if name in names:
                number = number * sizes[name] + places.get(name, 0)
        return number

    def groups(self, names: Collection[str]) -> list[list[int]]:
        """Divide all ranks into groups that differ in these dimensions alone, each and all in order."""
        others = [name for name in _DIGITS if name not in names]
        groups: dict[int, list[int]] = {}
        for rank in range(math.prod(self.sizes)):
            groups.setdefault(self.number(rank, others), []).append(rank)
        return list(groups.values())


def largest_slice(size: int, ranks: int) -> int:
    """Compute the size of a rank's slice where ranks divide something: the last ones may have less, or nothing."""
    return -(-size // ranks)


def slice_at(size: int, ranks: int, place: int) -> tuple[int, int]:
    """Find where the slice of the rank at that place begins, and how large it is."""
    most = largest_slice(size, ranks)
    start = min(most * place, size)
    return start, min(most, size - start)
