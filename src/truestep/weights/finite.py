"""Checks that tensors are finite, and that all trained weights are finite after an update."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from truestep.ranks.axes import MESH
from truestep.ranks.group import Ranks
from truestep.text import printable
from truestep.weights.protocol import Weights

LARGEST = 1.8e19  # about the largest float32 whose square is finite in float32


class Extremes:
    """Collects the minimum and maximum of tensors on their device. Only `not_finite` needs a host-device sync."""

    def __init__(self) -> None:
        # By dtype and device: an optimizer may have its step count on the host and states on the GPU.
        self._found: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}

    def add(self, name: str, piece: torch.Tensor) -> None:
        if piece.numel() and piece.is_floating_point():
            found = self._found.setdefault((piece.dtype, piece.device), [])
            found.extend((name, end) for end in piece.detach().aminmax())

    def not_finite(self) -> list[str]:
        """Return the names of tensors with values that are not finite."""
        odd: dict[str, None] = {}
        for found in self._found.values():
            ends = torch.stack([end for _, end in found]).tolist()
            odd |= {name: None for (name, _), end in zip(found, ends, strict=True) if not math.isfinite(end)}
        return list(odd)


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors with values that are not finite."""
    extremes = Extremes()
    for name, tensor in named:
        extremes.add(name, tensor)
    return extremes.not_finite()


def named_by_all(ranks: Ranks, names: Sequence[str]) -> list[str]:
    """Gather the names found on all ranks, without duplicates. Every rank calls this. `verify` makes `Ranks` without a
    process group, which only describe a layout; for these, return this rank's own names."""
    parts = [names] if ranks.host is None else ranks.gather(list(names))
    return list(dict.fromkeys(name for part in parts for name in part))


def some(names: Sequence[str]) -> str:
    """Format the first name, and the number of further names."""
    more = len(names) - 1
    rest = f" and {more} more tensor{'s' if more > 1 else ''}" if more else ""
    return f"{printable(names[0])}{rest}"


class UpdateCheck:
    """Checks that all trained weights, in the compute dtype, are finite after an update.

    On a GPU, the check is launched with the update, and its result is copied to pinned memory without a host-device
    sync. On a CPU, the check runs when `ruined` is called. A tensor is ruined if its norm is not finite in float32: it
    has a value that is not finite, or values about as large as `LARGEST`, whose products overflow.
    """

    def __init__(self, weights: Weights):
        self._weights = weights
        self.learning_rate = 0.0  # the rate of the last update
        self._asked = False  # True if there was an update since the last call of `ruined`
        self._answer: torch.Tensor | None = None  # the sum of all norms over all ranks, in pinned memory
        self._there: Any = None  # the CUDA event after which `_answer` is valid

    @property
    def costs_nothing(self) -> bool:
        """True on a GPU, where the check runs asynchronously."""
        return self._weights.device.type == "cuda"

    def ask(self, learning_rate: float) -> None:
        """Record an update, and launch the check on a GPU. Every rank calls this after its part of the update."""
        self.learning_rate, self._asked = learning_rate, True
        if self.costs_nothing:
            total = self._total()
            self._answer = torch.empty((), pin_memory=True).copy_(total, non_blocking=True)
            self._there = torch.cuda.current_stream(total.device).record_event()

    @torch.no_grad()
    def _total(self) -> torch.Tensor:
        """Sum the norms of all weights over all ranks."""
        weights = self._weights
        parts = [part for part in weights.computed().values() if part.numel()]
        norms = torch._foreach_norm(parts) if parts else (torch.zeros((), device=weights.device),)
        total = torch.stack(norms).sum(dtype=torch.float32)
        for group in MESH if weights.ranks.size > 1 else ():
            weights.ranks.sum_over(group, total)
        return total

    def ruined(self) -> list[str]:
        """Return the names of tensors that the last update ruined on any rank. Every rank calls this before the next
        update. The first call after `ask` waits for the device; further calls return an empty list."""
        if not self._asked:
            return []
        self._asked = False
        if self._there is not None:
            self._there.synchronize()
        answer, self._answer = self._answer, None
        if math.isfinite(float(self._total() if answer is None else answer)):
            return []
        here = {name: part for name, part in self._weights.computed().items() if part.numel()}
        with torch.no_grad():
            norms = torch.stack(list(torch._foreach_norm(list(here.values())))).tolist() if here else []
        odd = [name for name, norm in zip(here, norms, strict=True) if not math.isfinite(norm)]
        return named_by_all(self._weights.ranks, odd)


def largest(named: Mapping[str, torch.Tensor], ranks: Ranks) -> tuple[float, str]:
    """Return the largest absolute value of tensors over all ranks, and the tensor's name."""
    own = (0.0, "")
    for name, part in named.items():
        if part.numel():
            size = float(torch.stack(part.detach().aminmax()).abs().max())
            own = max(own, (math.inf if math.isnan(size) else size, name))
    return max(ranks.gather(own))
