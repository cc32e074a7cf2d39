"""A source of documents that others send: each is trained on once, whatever dies and starts again.

A checkpoint holds the transport's place and every document that came before that place and was not yet taken. Messages
are acknowledged when the checkpoint that holds them is complete; later ones are given again after a restart.
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from truestep.rollouts.record import Checks
from truestep.rollouts.source import Interrupted, SourceError, never, refuse_other_kind
from truestep.rollouts.stream.intake import Intake
from truestep.rollouts.stream.transport import Transport, TransportError
from truestep.types import PutAside, Rejected, Rollout

_LOOK = 1.0  # seconds that one look for messages waits at most
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts to reach what cannot be reached


class StreamSource:
    """Documents in the order in which they became usable; the ledger logs this order."""

    plans_ahead = False  # more documents may only be sent when a step's weights are out

    def __init__(self, transport: Transport, checks: Checks, stall_timeout: float):
        self._transport = transport
        self._intake = Intake(checks)
        self._stall_timeout = stall_timeout
        self.asked_to_stop: Callable[[], bool] = never
        self._documents_seen = 0
        # Where the transport stood when documents were taken, by how many the policy will have seen with them.
        self._places: dict[int, dict[str, Any]] = {}
        self._seen_with_taken = 0
        self._announced_step: int | None = None

    def peek(self, count: int) -> list[Rollout]:
        """Wait for the next `count` documents; there are fewer only where the sender has announced the end."""
        self._wait_for(count)
        return list(islice(self._intake.ready, count))

    def take(self, count: int, documents_seen: int) -> list[Rollout]:
        self._wait_for(count)
        ready = self._intake.ready
        taken = [ready.popleft() for _ in range(min(count, len(ready)))]
        self._seen_with_taken = documents_seen + len(taken)
        return taken

    def _wait_for(self, count: int) -> None:
        """Wait until so many documents are ready or the data ends. Only a usable document counts as a sign of life."""
        intake, alive, pause = self._intake, time.monotonic(), _FIRST_PAUSE
        trouble: str | None = None
        rejected_before = len(intake.rejected)
        while len(intake.ready) < count:
            if self._transport.ended:
                intake.finish()
                return
            if self.asked_to_stop():
                raise Interrupted
            left = alive + self._stall_timeout - time.monotonic()
            if left <= 0:
                raise SourceError(self._stalled(count, len(intake.rejected) - rejected_before, trouble))
            try:
                messages = self._transport.fetch(count - len(intake.ready), min(left, _LOOK))
            except TransportError as error:
                trouble = str(error)
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            trouble, pause = None, _FIRST_PAUSE
            accepted = intake.accepted
            for message in messages:
                intake.add(message)
            if intake.accepted > accepted:
                alive = time.monotonic()

    def _stalled(self, count: int, rejected: int, trouble: str | None) -> str:
        waiting, groups = self._intake.in_open_groups
        notes = [
            f"{self._transport.name} gave no document for {self._stall_timeout:g} s (schedule.stall_timeout)",
            f"{len(self._intake.ready)} of the {count} documents that the step waits for are there",
            f"in groups that are not complete: {waiting} in {groups} (data.group_size)" if waiting else None,
            f"rejected meanwhile: {rejected}, see rejected.jsonl" if rejected else None,
            trouble or self._transport.hint(),
        ]
        return "; ".join(note for note in notes if note)

    def state(self) -> dict[str, Any]:
        place = self._transport.state()
        # The first is what the checkpoint of these documents holds: asked again, more may have been read for the next.
        self._places.setdefault(self._seen_with_taken, place)
        return {"transport": place, "documents": self._intake.state()}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_kind("data.source", "transport", state)
        self._transport.restore(state["transport"])
        self._intake.restore(state["documents"])
        self._transport.acknowledge(state["transport"])  # the checkpoint is complete; who made it may not have got here
        self._places = {0: state["transport"]}

    def drain_rejected(self) -> list[Rejected]:
        rejected, self._intake.rejected = self._intake.rejected, []
        return rejected

    def drain_put_aside(self) -> list[PutAside]:
        put_aside, self._intake.put_aside = self._intake.put_aside, []
        return put_aside

    def updated(self, documents_seen: int) -> None:
        self._documents_seen = documents_seen

    def checkpointed(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        self._documents_seen = documents_seen
        held = max((seen for seen in self._places if seen <= documents_seen), default=None)
        if held is not None:
            self._transport.acknowledge(self._places[held])
            self._places = {seen: place for seen, place in self._places.items() if seen >= held}
        if step != self._announced_step:
            self._announced_step = step
            event = {"event": "weights_ready", "step": step, "documents_seen": documents_seen}
            self._transport.announce(event | {"path": str(checkpoint.resolve())})

    def close(self, finished: bool) -> None:
        if finished:
            self._transport.announce({"event": "training_finished", "documents_seen": self._documents_seen})
        self._transport.close()
