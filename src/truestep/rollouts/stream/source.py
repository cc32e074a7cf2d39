"""The source of streamed documents. Each document is trained on once, whichever process is killed and restarted.

A checkpoint holds the run's place in the stream, and the documents that were already read from the stream but not yet
used in a step. Messages are acknowledged when a checkpoint that holds them is complete. Later messages are delivered
again after a restart.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from truestep.process import progress
from truestep.rollouts.record import Checks
from truestep.rollouts.source import Interrupted, SourceError, Taken, never, refuse_other_kind
from truestep.rollouts.stream.ids import SeenIds
from truestep.rollouts.stream.intake import Intake
from truestep.rollouts.stream.reading import Arrived, Reading
from truestep.rollouts.stream.transport import Transport
from truestep.types import Rejected, Rollout

_LOOK = 0.25  # seconds between checks of `asked_to_stop`
_MOST_REJECTED = 1000  # rejected records in memory


class StreamSource:
    """A source of streamed documents, in the order in which they became ready. The ledger logs this order."""

    plans_ahead = False  # senders may wait for a step's weights before they send more documents
    waits_for_checkpoints = True  # a checkpoint announces new weights to the senders

    def __init__(
        self,
        transport: Transport,
        checks: Checks,
        stall_timeout: float,
        ids: SeenIds,
        group_timeout: float | None = None,
        reading: Reading | None = None,  # tests pass a reading with their own clock
    ):
        self._transport = transport
        self._intake = Intake(checks, ids, group_timeout)
        self._reading = reading or Reading(transport, checks)
        self._stall_timeout = stall_timeout
        self.asked_to_stop: Callable[[], bool] = never
        self.put_rejected: Callable[[Sequence[Rejected]], None] | None = None
        # The place after the last message taken from the reading; the transport's place is further ahead.
        self._place = copy.deepcopy(transport.state())
        self._version = 0  # counts changes of the intake
        # The places in checkpoints, by the number of documents seen including those taken.
        self._places: dict[int, dict[str, Any]] = {}
        self._seen_with_taken = 0

    def peek(self, count: int) -> list[Rollout]:
        """Wait for the next `count` documents (fewer only at the end of the data). Returns them without taking them."""
        self._wait_for(count)
        return list(islice(self._intake.ready, count))

    def take(self, count: int, documents_seen: int) -> Taken:
        self._wait_for(count)
        ready = self._intake.ready
        documents = [ready.popleft() for _ in range(min(count, len(ready)))]
        self._version += 1
        self._seen_with_taken = documents_seen + len(documents)
        return replace(self.aside(), documents=documents)

    def aside(self) -> Taken:
        intake = self._intake
        aside = Taken((), intake.rejected, intake.put_aside)
        intake.rejected, intake.put_aside = [], []
        return aside

    def _wait_for(self, count: int) -> None:
        """Wait until `count` documents are ready or the data ends. Only accepted documents reset the stall timeout."""
        try:
            self._receive(count)
        except BaseException:
            self._hand_over_rejected()
            raise

    def _hand_over_rejected(self) -> None:
        if self.put_rejected is not None:
            rejected, self._intake.rejected = self._intake.rejected, []
            self.put_rejected(rejected)

    def _receive(self, count: int) -> None:
        intake, alive = self._intake, time.monotonic()
        rejected_before, accepted = intake.num_rejected, intake.accepted
        if len(intake.ready) >= count:
            return
        with progress.waiting_for(f"documents of {self._transport.name}"):
            while len(intake.ready) < count:
                if self.asked_to_stop():
                    raise Interrupted
                left = alive + self._stall_timeout - time.monotonic()
                if left <= 0:
                    raise SourceError(self._stalled(count, intake.num_rejected - rejected_before))
                arrived = self._reading.next(min(left, _LOOK))
                self._version += 1
                if arrived is not None:
                    self._add(arrived)
                elif self._reading.ended:
                    intake.finish()
                    return
                else:
                    intake.expire(self._reading.clock)
                if intake.accepted > accepted:
                    progress.made("documents received", intake.accepted - accepted)
                    alive, accepted = time.monotonic(), intake.accepted

    def _add(self, arrived: Arrived) -> None:
        if arrived.outcome is not None:
            self._intake.add(arrived.message, arrived.outcome, arrived.clock)
        if arrived.message.mark is not None:
            self._transport.advance(self._place, arrived.message.mark)
        if len(self._intake.rejected) >= _MOST_REJECTED:
            self._hand_over_rejected()

    def _stalled(self, count: int, rejected: int) -> str:
        waiting, groups = self._intake.in_open_groups
        records, unfinished = self._intake.in_open_documents
        notes = [
            f"{self._transport.name} gave no document for {self._stall_timeout:g} s (schedule.stall_timeout)",
            f"{len(self._intake.ready)} of the {count} documents that the step waits for are there",
            f"in groups that are not complete: {waiting} in {groups} (data.group_size)" if waiting else None,
            f"of documents that are not complete: {records} records of {unfinished} (sequences)" if records else None,
            f"rejected meanwhile: {rejected}, see rejected.jsonl" if rejected else None,
            self._reading.trouble or self._transport.hint(),
        ]
        return "; ".join(note for note in notes if note)

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that builds the state for a checkpoint.

        It must be called before documents of the next step are received. Steps that are not saved copy nothing.
        """
        version, seen = self._version, self._seen_with_taken

        def state() -> dict[str, Any]:
            if self._version != version:
                raise RuntimeError("the state of a stream was asked for when documents of a later step had been taken")
            place = copy.deepcopy(self._place)
            # Keep the first place: it is the one in the checkpoint, and a later call may find more messages read.
            self._places.setdefault(seen, place)
            return {"transport": place, "documents": self._intake.state()}

        return state

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_kind("data.source", "transport", state)
        self._transport.restore(state["transport"])
        self._intake.restore(state["documents"])
        self._place = copy.deepcopy(state["transport"])
        self._places = {0: state["transport"]}

    def checkpointed(self, documents_seen: int) -> None:
        held = max((seen for seen in self._places if seen <= documents_seen), default=None)
        if held is not None:
            self._transport.acknowledge(self._places[held])
            self._places = {seen: place for seen, place in self._places.items() if seen >= held}

    def close(self, finished: bool) -> None:
        self._reading.close()
        self._intake.close()
        self._transport.close()
