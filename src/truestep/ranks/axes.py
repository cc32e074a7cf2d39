"""The dimensions in which a run's ranks are laid out. Coordinates, counts and groups follow from one table.

rank = (((stage · replicas + replica) · data_shard + part) · context + run) · tensor + slice

A derived dimension adds no ranks: it divides the ranks of other dimensions. The N expert ranks of a group are
neighbours: their numbers (part · context + run) · tensor + slice differ only in the remainder modulo N.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from truestep.errors import TruestepError


class RankError(TruestepError):
    """The ranks cannot work together; the message says why."""


@dataclass(frozen=True)
class Axis:
    """A dimension, named after its option in `parallel`."""

    name: str
    order: int  # position of its digit in a rank's number, 0: the most significant
    # What its ranks have of the weights: all the same; a shard each, gathered before use; a slice each of every layer;
    # or some layers each.
    weights: Literal["same", "spread", "cut", "layers"]
    own_micro_batches: bool = False  # False: its ranks compute each micro-batch together
    splits_tokens: bool = False  # between layers, each of its ranks has a share of a micro-batch's tokens
    default: int = 1

    @property
    def group(self) -> str:
        """The name of the dimension's process group. Dimensions with equal `weights` may share a group."""
        return {"same": "replicate", "spread": "shard"}.get(self.weights, self.name)


# In the order in which messages name the options.
AXES = (
    Axis("data_shard", 2, "spread", own_micro_batches=True, default=-1),
    Axis("data_replicate", 1, "same", own_micro_batches=True),
    Axis("context", 3, "spread", splits_tokens=True),
    Axis("tensor", 4, "cut", splits_tokens=True),
    Axis("pipeline", 0, "layers"),
)
# Derived dimensions, by name, and the dimensions whose ranks each divides: their digits are the last ones.
DERIVED = {"expert": ("data_shard", "context", "tensor")}
_DIGITS = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.order))

# Sets of dimensions, by properties.
DATA = tuple(axis.name for axis in AXES if axis.own_micro_batches)
TOKENS = tuple(axis.name for axis in AXES if axis.splits_tokens)
TOGETHER = tuple(axis.name for axis in AXES if not axis.own_micro_batches and axis.weights != "layers")
CUT = tuple(axis.name for axis in AXES if axis.weights == "cut")
SPREAD = tuple(axis.name for axis in AXES if axis.weights == "spread")
# The dimensions of the device mesh: for each group's name, the axes that it spans.
MESH = {
    group: tuple(axis.name for axis in AXES if axis.group == group)
    for group in dict.fromkeys(axis.group for axis in sorted(AXES, key=lambda axis: axis.order))
}
# All groups: also one for each axis whose ranks compute a micro-batch together.
GROUPS = MESH | {axis.name: (axis.name,) for axis in AXES if not axis.own_micro_batches}
# The groups whose ranks have different parts of the weights: a sum over all weights is reduced over these.
WEIGHT_PARTS = tuple(dict.fromkeys(axis.group for axis in AXES if axis.weights != "same"))


@dataclass(frozen=True, init=False)
class RankLayout:
    """The number of ranks in each dimension."""

    sizes: tuple[int, ...]  # in the order of AXES; -1: as many as the other dimensions leave
    derived: tuple[int, ...]  # in the order of DERIVED

    def __init__(self, **sizes: int):
        unknown = set(sizes) - {*_DIGITS, *DERIVED}
        if unknown:
            raise TypeError(f"ranks have no dimension {min(unknown)}")
        object.__setattr__(self, "sizes", tuple(sizes.get(axis.name, axis.default) for axis in AXES))
        object.__setattr__(self, "derived", tuple(sizes.get(name, 1) for name in DERIVED))

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {axis.name: size for axis, size in zip(AXES, self.sizes, strict=True)}

    @cached_property
    def every(self) -> dict[str, int]:
        """The size of each dimension, also of derived ones."""
        return self.by_name | dict(zip(DERIVED, self.derived, strict=True))

    def over(self, size: int) -> "RankLayout":
        """Return the layout for `size` ranks, with data_shard -1 replaced. Raise `RankError` if it does not fit
        them."""
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
        layout = RankLayout(**self.every | {"data_shard": data_shard})
        layout._check_derived()
        return layout

    def _check_derived(self) -> None:
        for name, many in zip(DERIVED, self.derived, strict=True):
            divided = [axis.name for axis in AXES if axis.name in DERIVED[name] and self.by_name[axis.name] > 1]
            if self.count(DERIVED[name]) % many:
                ranks = " x ".join(f"parallel.{axis}: {self.by_name[axis]}" for axis in divided)
                raise RankError(
                    f"parallel.{name}: {many} does not divide the ranks that have parts of the weights: "
                    f"{ranks or 'parallel.data_shard: 1'}"
                )
            tensor = self.by_name["tensor"]
            if many > 1 and many % tensor:
                raise RankError(f"parallel.{name}: {many} is not a multiple of parallel.tensor: {tensor}")

    def count(self, names: Collection[str]) -> int:
        """Return the number of ranks in these dimensions."""
        return math.prod(size for name, size in self.by_name.items() if name in names)

    def number(self, rank: int, names: Collection[str]) -> int:
        """Return a rank's number among the ranks of these dimensions."""
        return self._number_at(self.places(rank), names)

    def derived_place(self, rank: int, name: str) -> tuple[int, int]:
        """Return the number of a rank's group along a derived dimension, among those of its stage and replica, and its
        place in the group."""
        return divmod(self.number(rank, DERIVED[name]), self.every[name])

    def places(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate in each dimension."""
        places = {}
        for name in reversed(_DIGITS):
            rank, places[name] = divmod(rank, self.by_name[name])
        return places

    def rank_at(self, places: Mapping[str, int]) -> int:
        """Return the rank with these coordinates; a missing coordinate is 0."""
        return self._number_at(places, _DIGITS)

    def _number_at(self, places: Mapping[str, int], names: Collection[str]) -> int:
        number, sizes = 0, self.by_name
        for name in _DIGITS:
            if name in names:
                number = number * sizes[name] + places.get(name, 0)
        return number

    def groups(self, names: Collection[str]) -> list[list[int]]:
        """Divide all ranks into groups whose ranks differ only in these dimensions, in order of rank."""
        others = [name for name in _DIGITS if name not in names]
        groups: dict[int, list[int]] = {}
        for rank in range(math.prod(self.sizes)):
            groups.setdefault(self.number(rank, others), []).append(rank)
        return list(groups.values())


def largest_slice(size: int, ranks: int) -> int:
    """Return the size of the largest slice of `size` items over ranks; the last slices may be smaller or empty."""
    return -(-size // ranks)


def slice_at(size: int, ranks: int, place: int) -> tuple[int, int]:
    """Return the first item and the size of a rank's slice; `place` is the rank's number among `ranks`."""
    most = largest_slice(size, ranks)
    start = min(most * place, size)
    return start, min(most, size - start)
