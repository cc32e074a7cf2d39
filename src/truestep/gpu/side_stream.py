"""Work on a stream of its own, beside what a GPU was asked for before it.

The host waits for metrics, number by number. They need only what was known before the last backward pass. On a stream
of their own they are done long before that pass is, and the host has the next work ready when the GPU comes to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class Beside:
    def __init__(self, device: torch.device):
        self._device = device
        self._needed: Any = None  # the event after which the work may begin

    def here(self) -> None:
        """What `run` does needs only what was started before this call."""
        if self._device.type == "cuda":
            self._needed = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Do the work inside. Work that the host starts later waits for it, because it may take the memory that this
        work reads."""
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
