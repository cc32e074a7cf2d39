"""The time of a step by part.

The metrics are `time/NAME`, in seconds of the first rank. They differ from run to run and between layouts, so a
comparison of two runs leaves out the metrics for which `of_the_machine` is true.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

PREFIX = "time/"
_PREFIXES = (PREFIX, "turn_time/", "tool_time/")  # the prefixes of all metrics that are times
# The parts of `step_time`, in the order of a step. `REST` is the time that no part accounts for.
PARTS = (
    *("sampling", "rating", "waiting", "reference", "exact"),
    *("forward", "head", "backward", "reduce", "check", "optimizer", "sync"),
)
REST = "other"
# Work between two steps. Its time is in the line of the later step, and is not part of `step_time`.
BETWEEN = ("evaluation", "save")

_OF_THE_MACHINE = frozenset(
    {
        *("tokens_per_second", "data_wait_time", "step_time", "seconds"),
        *("sampling_time", "rating_time", "sampling_idle_time", "sampled_tokens_per_second", "sampler_cache_use"),
        *("gpu_memory", "mfu"),
        *("generation", "ranks", "lost_seconds"),
    }
)


def of_the_machine(name: str) -> bool:
    """Tell whether a metric measures the machine (time, speed, memory), so that it differs between identical runs."""
    return name in _OF_THE_MACHINE or name.startswith(_PREFIXES)


class Stopwatch:
    """Adds up the seconds of named pieces of work. The time of a nested piece is not counted in the outer piece.

    On a GPU, CUDA events on the current stream mark the pieces, without synchronisation. `drain` leaves out the pieces
    that the GPU has not finished; the next call returns them.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device is not None and device.type == "cuda"
        self._device = device
        self._names: list[str] = []
        self._last: Any = None  # the last mark: the time or CUDA event at which the innermost piece began or resumed
        self._seconds: dict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self._mark()
        self._names.append(name)
        try:
            yield
        finally:
            self._mark()
            self._names.pop()

    def _mark(self) -> None:
        """Add the time since the last mark to the innermost piece."""
        if not self._gpu:
            now = time.perf_counter()
            if self._names:
                self._seconds[self._names[-1]] += now - self._last
            self._last = now
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        if self._names:
            self._pending.append((self._names[-1], self._last, event))
        self._last = event

    def drain(self) -> dict[str, float]:
        """Return the seconds of each piece since the last call, and reset them."""
        waiting = []
        for name, start, end in self._pending:
            if end.query():
                self._seconds[name] += start.elapsed_time(end) / 1000
            else:
                waiting.append((name, start, end))
        self._pending = waiting
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class StepTimes:
    """Collects the time of a step by part."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def line(self, step_time: float, waits: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
        """Return the `time/NAME` metrics of a finished step, and reset the times. `waits` has the metrics of waiting
        for documents, and `measured` the seconds of a `Stopwatch`."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        found = {**seconds, **measured}
        found |= {name: waits[f"{name}_time"] for name in ("sampling", "rating") if f"{name}_time" in waits}
        known = found.get("sampling", 0.0) + found.get("rating", 0.0)
        found["waiting"] = max(0.0, waits["data_wait_time"] - known)
        found[REST] = max(0.0, step_time - sum(found.get(name, 0.0) for name in PARTS))
        return {PREFIX + name: found[name] for name in (*PARTS, REST, *BETWEEN) if name in found}
