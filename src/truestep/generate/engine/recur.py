"""Recurrent operations over the states of sequences. `truestep.model.mixers.recurrence` calls `recur` of a pass.

Operations are identified by the order in which a pass calls them. Each finds its states in the cache, by slot, and
writes the new ones back.

Dimensions: D prompt chunks of a pass, R rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from truestep.generate.engine.cache import PagedCache
from truestep.model.mixers.recurrence import Call, Recurrence, Spans


@dataclass(frozen=True)
class States:
    """The states of one operation."""

    pool: torch.Tensor  # [states + 1, *shape]
    place: torch.Tensor | None  # [1] its address on the device, for kernels


def in_torch(recurrence: Recurrence, call: Call, states: States, slots: torch.Tensor) -> Any:
    """Compute one token of each row from the states in its slot, and replace these by the new ones."""
    output, new = recurrence.step(call, states.pool.index_select(0, slots))
    states.pool.index_copy_(0, slots, new)
    return output


@dataclass
class PassStates:
    """The states of all operations in a pass."""

    cache: PagedCache
    slots: torch.Tensor  # slots of the states, of prompt chunks [D] or rows [R]
    calls: int = 0  # operations called so far

    def next(self, module: torch.nn.Module) -> States:
        pools, places, number = self.cache.states, self.cache.state_places, self.calls
        if number == len(pools):
            raise RuntimeError(f"{type(module).__name__} has more recurrent calls than in the trial pass")
        self.calls += 1
        return States(pools[number], None if places is None else places[number : number + 1])


@dataclass
class RowStates(PassStates):
    """The states of a decode pass."""

    advance: Callable[..., Any] = in_torch  # same signature as `in_torch`

    def recur(self, module: torch.nn.Module, recurrence: Recurrence, call: Call) -> Any:
        """Compute one token of each row. This is captured in a CUDA graph, so it must not read host memory."""
        return self.advance(recurrence, call, self.next(module), self.slots)


@dataclass
class ChunkStates(PassStates):
    """The states of a prefill pass."""

    segments: torch.Tensor = field(kw_only=True)  # [D + 1] int32 cumulative lengths of the chunks
    longest: int = field(kw_only=True)
    spans: Spans = field(kw_only=True)  # each chunk's begin and end, on the host
    first: torch.Tensor | None = field(kw_only=True)  # [D] True: the chunk begins its prompt; None: all do

    def recur(self, module: torch.nn.Module, recurrence: Recurrence, call: Call) -> Any:
        """Compute prompt chunks, each from the state at the end of its prompt's previous chunk."""
        pool, initial = self.next(module).pool, None
        if self.first is not None:
            initial = pool.index_select(0, self.slots)
            initial.masked_fill_(self.first.view(-1, *[1] * (initial.ndim - 1)), 0)
        output, final = recurrence.packed(call, self.segments, self.longest, self.spans, initial)
        pool.index_copy_(0, self.slots, final)
        return output


@dataclass
class RecordedStates:
    """Records the states of a trial pass of some tokens, each of which is a sequence of its own."""

    tokens: int
    calls: list[tuple[torch.nn.Module, Recurrence, Call]] = field(default_factory=list)

    def recur(self, module: torch.nn.Module, recurrence: Recurrence, call: Call) -> Any:
        self.calls.append((module, recurrence, call))
        return recurrence.packed(call, *_each_alone(self.tokens, _device_of(call)), None)[0]


def _each_alone(tokens: int, device: torch.device) -> tuple[torch.Tensor, int, Spans]:
    spans = tuple((at, at + 1) for at in range(tokens))
    return torch.arange(tokens + 1, dtype=torch.int32, device=device), 1, spans


def _device_of(call: Call) -> torch.device:
    return next(value.device for value in call.arguments.values() if isinstance(value, torch.Tensor))
