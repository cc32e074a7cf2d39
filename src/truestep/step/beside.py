"""Work on a stream of its own, beside what the host has asked a GPU for since.

Metrics wait for the device, number by number. They need what was known before the last backward pass, so there is no
need to wait for that pass: on a stream of their own they are done long before it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class Beside:
    def __init__(self, device: torch.device):
        self._device, self._needed = device, None

    _needed: Any

    def here(self) -> None:
        """The work needs nothing that the host asks for after this."""
        if self._device.type == "cuda":
            self._needed = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Do the work inside. What the host asks for after it waits for it: it may take the memory of what was read."""
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
