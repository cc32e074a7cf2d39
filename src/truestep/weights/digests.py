"""Digests of weights' bits, for comparing two runs, or a run and its replay.

The digest of a weight is the sum of (2 i + 1) · bits(i) over its elements i, modulo 2^64, where bits(i) are the bits of
the element as an integer. It changes if one element changes or two different elements are swapped. It is a sum of
integers, so it depends neither on how ranks divide a weight nor on the order of additions.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from truestep.ranks.axes import WEIGHT_PARTS
from truestep.weights.protocol import Weights
from truestep.weights.tensor_parts import Box, own_box

log = logging.getLogger(__name__)

_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 26}  # elements per iteration; on a CPU they fit its cache
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Run:
    """Rows of consecutive elements of a weight. Row k begins at element `start + k · stride` of the whole weight; a
    stride of 0 says that there is one row."""

    start: int
    rows: int
    width: int
    stride: int


def run_of(box: Box, whole: Sequence[int]) -> Run | None:
    """Return the elements of a box as rows; None if the strides between its rows differ."""
    strides = [math.prod(whole[dimension + 1 :]) for dimension in range(len(whole))]
    start = sum(place * stride for place, stride in zip(box.start, strides, strict=True))
    cut = [d for d in range(len(whole)) if box.shape[d] != whole[d]]
    last = max(cut, default=0)  # later dimensions are not cut
    if len(whole) == 0 or last == 0:
        return Run(start, 1, box.numbers, 0)
    if any(box.shape[d] != whole[d] for d in range(1, last)):
        return None
    return Run(start, math.prod(box.shape[:last]), math.prod(box.shape[last:]), strides[last - 1])


def digest_of_box(part: torch.Tensor, box: Box, whole: Sequence[int]) -> torch.Tensor:  # [] int64
    """Compute the digest of a box of a weight, which may be cut in any dimensions."""
    if (run := run_of(box, whole)) is not None:
        return digest(part.contiguous(), run)
    stride = math.prod(whole[1:])
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for place, own in enumerate(part.reshape(box.shape), start=box.start[0]):
        # The number of element i of this slice is 2 (place · stride + i) + 1.
        bits = own.detach().contiguous().view(-1).view(_BITS[own.element_size()]).sum(dtype=torch.int64)
        total += digest_of_box(own, Box(box.start[1:], box.shape[1:]), whole[1:]) + 2 * place * stride * bits
    return total


def digest(part: torch.Tensor, run: Run) -> torch.Tensor:  # [] int64
    """Compute the digest of a part of a weight in plain torch. Digests of parts add up to the weight's digest."""
    bits = part.detach().reshape(-1).view(_BITS[part.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    at_once = min(_AT_ONCE.get(part.device.type, 1 << 20), len(bits))
    odd = 2 * torch.arange(at_once, device=part.device) + 1
    for first in range(0, len(bits), at_once or 1):
        some = bits[first : first + at_once].long()
        if run.rows == 1:
            total += (some * odd[: len(some)]).sum() + 2 * (first + run.start) * some.sum()
            continue
        place = torch.arange(first, first + len(some), device=part.device)
        place = place // run.width * run.stride + place % run.width
        total += (some * (2 * (place + run.start) + 1)).sum()
    return total


@dataclass
class Squares:
    """The squared norms of the gradients that this rank counts."""

    names: Sequence[str] = ()
    sums: torch.Tensor | None = None  # [names]

    def keep(self, names: Sequence[str], sums: torch.Tensor) -> None:
        self.names, self.sums = names, sums


@dataclass
class Trace:
    """The digests and norms of the weights after an update.

    On a GPU, `ask` launches kernels and `Answer.read` waits for them. If `read` is called a step later, it does not
    have to wait.
    """

    weights: Weights
    _runs: dict[str, Run | None] = field(default_factory=dict)
    _tables: dict[torch.dtype, Any] = field(default_factory=dict)
    _places: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)
    _kernel_fails: bool = False
    latest: "Answer | None" = None

    @cached_property
    def names(self) -> list[str]:
        """The names of the trained weights, the same on every rank."""
        return [name for name, piece in self.weights.pieces.items() if piece.trained]

    @cached_property
    def _counted(self) -> list[str]:
        """The names of the trained weights of which this rank counts a part."""
        weights, parts = self.weights, self._parts()
        return [
            name
            for name in self.names
            if name in parts and weights.pieces[name].counted_on(weights.ranks) and parts[name].numel()
        ]

    def _parts(self) -> Mapping[str, torch.Tensor]:
        # Masters in host memory may still be in flight, so the copies on the device are used instead.
        return self.weights.computed() if self.weights.masters_on_host else self.weights.master

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the parts of the trained weights that this rank counts."""
        parts = self._parts()
        return {name: parts[name].detach() for name in self._counted}

    @torch.no_grad()
    def ask(self, squares: "Squares | None" = None) -> None:
        """Start to compute the digests and norms of the weights. `squares`: the squared norms of the gradients that
        this rank counts. Every rank calls this after its part of an update."""
        weights, names, own = self.weights, self.names, self._own()
        digests = torch.zeros(len(names), dtype=torch.int64, device=weights.device)
        both = torch.zeros(2, len(names), dtype=torch.float64, device=weights.device)
        for some, sums, found in self._added_up(own):
            places = self._places_of(some)
            digests[places] = sums.to(digests.device)
            both[0, places] = found.to(both)
        if squares is not None and squares.sums is not None:
            both[1, self._places_of(squares.names)] = squares.sums.to(both)
        for group in WEIGHT_PARTS:
            weights.ranks.sum_over(group, digests)
            weights.ranks.sum_over(group, both)
        self.latest = Answer.of(names, digests, both)

    def now(self) -> dict[str, int]:
        """Return the digests of the current weights. Every rank calls this."""
        self.ask()
        assert self.latest is not None
        return self.latest.read().digests

    def _places_of(self, some: Sequence[str]) -> torch.Tensor:  # [some] int64
        """Return the places of weights in `names`, on the device."""
        if (key := tuple(some)) not in self._places:
            place = {name: number for number, name in enumerate(self.names)}
            self._places[key] = torch.tensor([place[name] for name in key], device=self.weights.device)
        return self._places[key]

    def _added_up(self, own: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor, torch.Tensor]]:
        """Return names of weights, with the digests of their parts and the sums of the parts' squares."""
        simple = {name: part.contiguous() for name, part in own.items() if self._run(name) is not None}
        odd = {name: part for name, part in own.items() if name not in simple}  # cut in two inner dimensions
        if self.weights.device.type == "cuda" and not self._kernel_fails:
            try:
                return [*self._by_kernel(simple), *self._plainly(odd)]
            except Exception:  # no Triton, or no compiler: a record of the step must not end the run
                self._kernel_fails = True
                log.warning("the Triton kernel of weights' digests fails; plain torch is used", exc_info=True)
        return self._plainly({**simple, **odd})

    def _plainly(self, own: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor, torch.Tensor]]:
        if not own:
            return []
        shapes = {name: self.weights.pieces[name].shape for name in own}
        digests = [
            digest_of_box(part, own_box(self.weights, name, shapes[name]), shapes[name]) for name, part in own.items()
        ]
        norms = torch._foreach_norm(list(own.values()), dtype=torch.float32)
        return [(list(own), torch.stack(digests), torch.stack(list(norms)).double().square())]

    def _run(self, name: str) -> Run | None:
        if name not in self._runs:
            shape = self.weights.pieces[name].shape
            self._runs[name] = run_of(own_box(self.weights, name, shape), shape)
        return self._runs[name]

    def _by_kernel(self, parts: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor, torch.Tensor]]:
        from truestep.weights.digest_kernel import Table  # needs Triton

        found = []
        for dtype in dict.fromkeys(part.dtype for part in parts.values()):
            some = {name: part for name, part in parts.items() if part.dtype == dtype}
            table = self._tables.get(dtype)
            if table is None or table.addresses != [part.data_ptr() for part in some.values()]:
                rows = [(run.width, run.stride, run.start) for name in some if (run := self._run(name)) is not None]
                table = self._tables[dtype] = Table(list(some.values()), rows)
            found.append((list(some), *table.add_up()))
        return found


@dataclass(frozen=True)
class Measured:
    """The digests and norms of weights, by name."""

    digests: dict[str, int]
    weight_norms: dict[str, float]
    gradient_norms: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """Digests and norms that are being copied to the host."""

    names: Sequence[str]
    sums: torch.Tensor
    squares: torch.Tensor
    there: Any = None  # the CUDA event after which they are valid

    @staticmethod
    def of(names: Sequence[str], sums: torch.Tensor, squares: torch.Tensor) -> "Answer":
        if sums.device.type != "cuda":
            return Answer(names, sums, squares)
        host = [
            torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            for value in (sums, squares)
        ]
        return Answer(names, host[0], host[1], torch.cuda.current_stream(sums.device).record_event())

    def read(self) -> Measured:
        if self.there is not None:
            self.there.synchronize()
        weights, gradients = self.squares.sqrt().tolist()
        numbers = [number % 2**64 for number in self.sums.tolist()]
        return Measured(
            *(dict(zip(self.names, values, strict=True)) for values in (numbers, weights, gradients)),
        )
