"""Runs work on a side CUDA stream.

The host waits for the values of metrics, but metrics do not depend on the last backward pass. On a side stream they are
ready long before that pass ends, so the host can queue the next work in time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class Beside:
    """Runs one piece of work on a side stream. The work waits for what was queued before `here`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._needed: Any = None  # the event after which the work may begin

    def here(self) -> None:
        """Record a point in the current stream, for which the work of `run` waits."""
        if self._device.type == "cuda":
            self._needed = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run the block on the side stream. On a CPU, or without a call of `here`, run it as usual. Later work on the
        current stream waits for the block, because it may reuse memory that the block reads."""
        if self._needed is None:
            yield
            return
        current, own = torch.cuda.current_stream(self._device), _stream(self._device)
        own.wait_event(self._needed)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            current.wait_stream(own)


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
