"""Checks that numbers are finite: those of any tensor, and those of all trained weights after an update."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from truestep.ranks.axes import MESH
from truestep.ranks.group import Ranks
from truestep.text import printable
from truestep.weights.protocol import Weights

LARGEST = 1.8e19  # float32 cannot hold the square of much more


class Extremes:
    """Collects the smallest and the largest number of pieces of tensors, where these lie. Only `not_finite` waits."""

    def __init__(self) -> None:
        self._found: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}

    def add(self, name: str, piece: torch.Tensor) -> None:
        if piece.numel() and piece.is_floating_point():
            self._found.setdefault(piece.dtype, []).extend((name, end) for end in piece.detach().aminmax())

    def not_finite(self) -> list[str]:
        """Name the tensors that have a number which is not finite."""
        odd: dict[str, None] = {}
        for found in self._found.values():
            ends = torch.stack([end for _, end in found]).tolist()
            odd |= {name: None for (name, _), end in zip(found, ends, strict=True) if not math.isfinite(end)}
        return list(odd)


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Name the tensors that have a number which is not finite."""
    extremes = Extremes()
    for name, tensor in named:
        extremes.add(name, tensor)
    return extremes.not_finite()


def named_by_all(ranks: Ranks, names: Sequence[str]) -> list[str]:
    """Join the names that ranks give, of which each has a part of the tensors. Every rank calls this. A rank without
    others, as `verify` makes one to see how a model is cut, has its own names alone."""
    parts = [names] if ranks.host is None else ranks.gather(list(names))
    return list(dict.fromkeys(name for part in parts for name in part))


def some(names: Sequence[str]) -> str:
    """Write the first name, and how many more there are."""
    more = len(names) - 1
    rest = f" and {more} more tensor{'s' if more > 1 else ''}" if more else ""
    return f"{printable(names[0])}{rest}"


class UpdateCheck:
    """Looks at all trained weights after an update, as the model computes with them.

    A GPU is asked at once, and its answer is copied to the host meanwhile, so that an update waits for nothing. On a
    CPU the weights are looked at when `ruined` is called. A tensor is ruined where its norm is not finite in float32:
    it has a number that is not, or numbers about `LARGEST`, with which a model computes nothing that is finite.
    """

    def __init__(self, weights: Weights):
        self._weights = weights
        self.learning_rate = 0.0  # of the last update
        self._asked = False  # an update was made since the last answer
        self._answer: torch.Tensor | None = None  # the sum of all norms, over all ranks; in host memory
        self._there: Any = None  # the event after which it is there

    @property
    def costs_nothing(self) -> bool:
        """Tell whether the answer comes beside the computation."""
        return self._weights.device.type == "cuda"

    def ask(self, learning_rate: float) -> None:
        """Note an update at this learning rate, and have a GPU look. Every rank calls this after its part of it."""
        self.learning_rate, self._asked = learning_rate, True
        if self.costs_nothing:
            total = self._total()
            self._answer = torch.empty((), pin_memory=True).copy_(total, non_blocking=True)
            self._there = torch.cuda.current_stream(total.device).record_event()

    @torch.no_grad()
    def _total(self) -> torch.Tensor:
        """Sum up the norms of all weights of all ranks."""
        weights = self._weights
        parts = [part for part in weights.computed().values() if part.numel()]
        total = torch.stack(_norms(parts)).sum().float() if parts else torch.zeros((), device=weights.device)
        for group in MESH if weights.ranks.size > 1 else ():
            weights.ranks.sum_over(group, total)
        return total

    def ruined(self) -> list[str]:
        """Name the tensors that the last update ruined, on any rank. Every rank calls this, before another update; only
        the first call after `ask` waits for the device, if that is not there yet."""
        if not self._asked:
            return []
        self._asked = False
        if self._there is not None:
            self._there.synchronize()
        answer, self._answer = self._answer, None
        if math.isfinite(float(self._total() if answer is None else answer)):
            return []
        here = {name: part for name, part in self._weights.computed().items() if part.numel()}
        norms = torch.stack(_norms(list(here.values()))).tolist() if here else []
        odd = [name for name, norm in zip(here, norms, strict=True) if not math.isfinite(norm)]
        return named_by_all(self._weights.ranks, odd)


def _norms(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch._foreach_norm([part.detach() for part in parts]))


def largest(named: Mapping[str, torch.Tensor], ranks: Ranks) -> tuple[float, str]:
    """Find the largest absolute value of tensors, of which each rank has a part, and the name of its tensor."""
    own = (0.0, "")
    for name, part in named.items():
        if part.numel():
            size = float(torch.stack(part.detach().aminmax()).abs().max())
            own = max(own, (math.inf if math.isnan(size) else size, name))
    return max(ranks.gather(own))
