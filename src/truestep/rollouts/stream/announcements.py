"""Announcements to the senders of documents: new weights to sample with, and the end of training."""

from pathlib import Path

from truestep.metrics.observers import Observer
from truestep.rollouts.stream.transport import Transport


class Announcements(Observer):
    """An observer that announces each checkpoint (whose weights senders load) and the end of training."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._documents_seen = 0
        self._announced_step: int | None = None

    def updated(self, step: int, documents_seen: int) -> None:
        self._documents_seen = documents_seen

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        self._documents_seen = max(self._documents_seen, documents_seen)  # more steps may have finished since the save
        if step != self._announced_step:
            self._announced_step = step
            event = {"event": "weights_ready", "step": step, "documents_seen": documents_seen}
            self._transport.announce(event | {"path": str(checkpoint.resolve())})

    def ended(self, ended: str, finished: bool) -> None:
        if finished:
            self._transport.announce({"event": "training_finished", "documents_seen": self._documents_seen})
