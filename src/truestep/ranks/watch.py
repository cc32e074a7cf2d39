"""A watch over the ranks: one that stands still, fails or is gone is named, and all end. A slow one is let be.

A thread of each rank writes into the launcher's store what the rank does, how long ago it last made progress, and where
in the code it is; and reads the others' entries. A run of one process is watched as well: its disk or its source may
stand still.
"""

import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from truestep.gpu import marks
from truestep.process import progress
from truestep.ranks.axes import RankError
from truestep.ranks.group import Ranks
from truestep.ranks.place import Place, find_place
from truestep.ranks.processes import Activity, Identity

_FAILED = "truestep/failed"
_ENDED = "truestep/ended"
_DONE = "done"
_OF_MESSAGES = ("connection", "gloo", "nccl", "timed out", "broken pipe")
_OF_AN_END = ("closed", "reset by peer", "broken pipe", "remote worker")
_CAUSE_SHOWS = 30.0  # seconds
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_MOST_READ = 64  # entries that a rank reads in a second: each rank reads those of all others
ENDED_BY_ANOTHER = 3  # the exit code of a rank that ends because of another
STALLED = 1  # and of one that stands still itself

Waits = Literal["", "ranks", "device"]


@dataclass(frozen=True)
class RankState:
    """The last known state of a rank."""

    rank: int
    number: int  # of its phase
    phase: str
    since: float  # seconds it has been in it
    idle: float  # seconds since it last made progress
    silent: float = 0.0  # seconds since it last said anything; a process that is there does so about every second
    place: str = ""  # in the code
    waits: Waits = ""  # for other ranks, or for its device, which may be waiting for them
    waiting_for: str = ""
    process: Literal["there", "stopped", "gone", "unknown"] = "unknown"

    @property
    def story(self) -> str:
        waits = f", waiting for {self.waiting_for}" if self.waiting_for else ""
        device = ", waiting for its device" if self.waits == "device" and not waits else ""
        place = f", at {self.place}" if self.place else ""
        stopped = ", its process stopped by a signal" if self.process == "stopped" else ""
        doing = f"{self.phase} for {self.since:.0f} s{waits}{device}{place}{stopped}"
        return f"has made no progress for {self.idle:.0f} s, {doing}"


def verdict(
    own: RankState, others: Sequence[RankState], timeout: float, silence: float, grace: float = 0.0
) -> str | None:
    """Say why the run has to end; None where it goes on. A source that tells more of what it waited for has so many
    seconds of `grace` to say it."""
    others = [state for state in others if state.phase != _DONE]
    gone = [state for state in others if _is_gone(state, silence)]
    if gone:
        return "; ".join(_farewell(lost) for lost in gone)
    everyone = [own, *others]
    still = [state for state in everyone if state.idle > timeout + grace]
    # One that waits for nobody is what the others wait for, whatever they still do meanwhile.
    late = [state for state in still if not state.waits or len(everyone) == 1]
    if not late and len(still) == len(everyone):
        slowest = min(state.number for state in everyone)
        late = [state for state in everyone if state.number == slowest]
        late = [state for state in late if state.waits == "device"] or late
    if not late:
        return None
    option = f"(schedule.stall_timeout: {timeout:g})"
    if len(everyone) == 1:
        return f"the run {own.story} {option}"
    names = "; ".join(f"rank {state.rank} {state.story}" for state in sorted(late, key=lambda state: state.rank))
    rest = [state for state in everyone if state not in late]
    others_wait = ", and the others wait for it" if rest and all(state.waits for state in rest) else ""
    return f"{names}{others_wait} {option}"


def _is_gone(state: RankState, silence: float) -> bool:
    # A process that is there and silent may hold its threads up, as one that reads a large file does, or be stopped.
    return state.process == "gone" or (state.process == "unknown" and state.silent > silence)


def _farewell(lost: RankState) -> str:
    how = "its process has ended" if lost.process == "gone" else f"nothing was heard of it for {lost.silent:.0f} s"
    return f"rank {lost.rank} is gone: {how}, and last it was {lost.phase}"


@dataclass
class _Heard:
    """The last entry of another rank, and what is known of it beside."""

    entry: str
    at: float  # by this process's clock: hosts need not agree on the time
    process: Identity
    activity: Activity | None = None  # looked at once it is silent
    moved: float | None = None  # when it last did anything since it is silent

    def begin_anew(self, now: float) -> None:
        """Count its silence from now on: nobody listened."""
        self.at = now

    def look(self, now: float, computes: bool) -> None:
        """Look at what the process does that says nothing."""
        if self.activity is None:
            self.activity = Activity(self.process.number)
        elif self.activity.since_last(own_computing=computes):
            self.moved = now


class Watch:
    """The watch of one rank: the main thread names its phases, and another thread compares all ranks."""

    def __init__(self, ranks: Ranks, timeout: float):
        self._ranks, self._timeout = ranks, timeout
        self._grace = min(5.0, max(2.0, timeout / 10))
        self._number, self._phase, self._since = 0, "starting", time.monotonic()
        self._beat = min(max(1.0, ranks.size / _MOST_READ), timeout / 10)
        self._stopped = threading.Event()
        self._heard: dict[int, _Heard] = {}
        self._process = Identity.own()
        self._activity: Activity | None = None
        self._looked = time.monotonic()
        self._store: dist.Store | None = None  # of several ranks
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watch")

    @property
    def doing(self) -> str:
        """The phase that this rank is in."""
        return self._phase

    def phase(self, name: str) -> None:
        """Name what this rank does from now on: every rank names the same phases in the same order."""
        self._number, self._phase, self._since = self._number + 1, name, time.monotonic()
        progress.phase(name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; an error inside, of any kind, ends every rank."""
        progress.made("phases")  # what was before is nobody's fault
        if self._ranks.size > 1:
            self._store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=10),
            )
        self._thread.start()
        try:
            yield
        except BaseException as error:
            self._stop()
            cause = self._cause_elsewhere(error)
            if cause is not None:
                raise RankError(cause) from error
            self._report_failure(f"{type(error).__name__}: {error}")
            raise
        self._stop()
        self.phase(_DONE)
        if self._store is not None:
            self._report(self._own())

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _cause_elsewhere(self, error: BaseException) -> str | None:
        """Name the other rank that is behind an error of communication, if one is."""
        if self._store is None or not _raised_between_ranks(error):
            return None
        # That a connection broke is known already: a few beats without a word are enough. Where its other end closed
        # it, there is a cause, and a busy machine may take long to show it.
        silence = 5 * self._beat
        closed = any(word in str(error).lower() for word in _OF_AN_END)
        deadline = time.monotonic() + max(2 * silence, _CAUSE_SHOWS if closed else 0.0)
        while time.monotonic() < deadline:  # a connection breaks at once; what broke it is known a little later
            progress.made("looks for a cause")  # a rank that looks for another's end does not stand still itself
            reason = self._reason_to_end(silence)[0]
            if reason is not None:
                return reason
            time.sleep(self._beat)
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(self._beat):
            reason, code = self._reason_to_end(self._timeout)
            if reason is not None and not self._stopped.is_set():
                # The main thread may be inside a call that never returns: end the process at once.
                name = f"rank {self._ranks.rank} ends: " if self._ranks.size > 1 else ""
                print(f"error: {name}{reason}", file=sys.stderr, flush=True)
                os._exit(code)

    def _reason_to_end(self, silence: float) -> tuple[str | None, int]:
        """Say why this rank has to end, and with which exit code; None where it goes on."""
        own = self._own()
        if self._store is None:
            return verdict(own, [], self._timeout, silence, self._grace), STALLED
        try:
            self._report(own)
            told = self._told()
            if told is not None:
                return told, ENDED_BY_ANOTHER
            reason = verdict(own, self._others(), self._timeout, silence, self._grace)
            if reason is not None:
                told = self._told()  # one that is gone may have said why, and only now
                if told is not None:
                    return told, ENDED_BY_ANOTHER
                self._store.set(_ENDED, json.dumps(reason))  # or the others would see that this rank is gone
        except Exception as error:  # the store is gone, and with it the rank or launcher that held it
            return f"the launcher's store cannot be reached any more: {error}", ENDED_BY_ANOTHER
        return reason, STALLED if own.idle > self._timeout and not own.waits else ENDED_BY_ANOTHER

    def _told(self) -> str | None:
        """Give the reason that another rank has left for all."""
        assert self._store is not None
        if self._store.check([_ENDED]):
            return str(json.loads(self._store.get(_ENDED)))
        if self._store.check([_FAILED]):
            failed = json.loads(self._store.get(_FAILED))
            if failed["rank"] != self._ranks.rank:
                return f"rank {failed['rank']} failed: {failed['error']}"
        return None

    def _own(self) -> RankState:
        """Look at this process: it makes progress if it says so, and if it computes, reads or writes."""
        now = time.monotonic()
        if now - self._looked > max(10 * self._beat, 2.0):
            # This thread could not run, as where a call holds all threads up or the process was stopped: now it can.
            progress.made("returns")
            for heard in self._heard.values():
                heard.begin_anew(now)
        self._looked = now
        place = find_place()
        device = marks.outstanding()
        waits: Waits = "ranks" if place.waits else "device" if device else ""
        if progress.idle() > self._beat:  # else there is nothing to ask
            self._look_at_process(place, computes=not waits)
        else:
            self._activity = None
        waiting = [what for what in progress.waits() if what != progress.OTHER_RANKS]
        return RankState(
            self._ranks.rank,
            self._number,
            self._phase,
            now - self._since,
            progress.idle(),
            place=place.text,
            waits=waits,
            waiting_for=waiting[-1] if waiting else "",
            process="there",
        )

    def _look_at_process(self, place: Place, computes: bool) -> None:
        if place.debugged:
            progress.made("looks by a debugger")
        if self._activity is None:
            self._activity = Activity()
            return
        for kind, amount in self._activity.since_last(own_computing=computes).items():
            progress.made(kind, amount)

    def _report(self, own: RankState) -> None:
        assert self._store is not None
        # The time makes every entry another one, by which others see that this process is there.
        entry = {"state": dataclasses.asdict(own), "process": dataclasses.asdict(self._process), "time": time.time()}
        self._store.set(f"truestep/rank/{self._ranks.rank}", json.dumps(entry))

    def _others(self) -> list[RankState]:
        assert self._store is not None
        others = []
        for rank in range(self._ranks.size):
            name = f"truestep/rank/{rank}"
            if rank == self._ranks.rank or not self._store.check([name]):
                continue
            entry, now = self._store.get(name).decode(), time.monotonic()
            read = json.loads(entry)
            known = self._heard.get(rank)
            if known is None or known.entry != entry:
                known = self._heard[rank] = _Heard(entry, now, Identity(**read["process"]))
            others.append(self._judge(RankState(**read["state"]), known, now))
        return others

    def _judge(self, said: RankState, heard: _Heard, now: float) -> RankState:
        """Add to what a rank said of itself what is seen of its process since then."""
        silent = now - heard.at
        process = heard.process.look()
        idle = said.idle + silent
        if silent > 3 * self._beat and process == "there":
            # It may hold its threads up while it computes or reads.
            heard.look(now, computes=not said.waits)
            if heard.moved is not None:
                idle = now - heard.moved
        return dataclasses.replace(said, since=said.since + silent, idle=idle, silent=silent, process=process)

    def _report_failure(self, error: str) -> None:
        if self._store is None:
            return
        try:
            self._report(self._own())
            if not self._store.check([_FAILED]):
                self._store.set(_FAILED, json.dumps({"rank": self._ranks.rank, "error": error}))
        except Exception as unreachable:
            print(f"rank {self._ranks.rank}: the others could not be told: {unreachable}", file=sys.stderr)


def _raised_between_ranks(error: BaseException) -> bool:
    """True if a call of torch.distributed raised the error, or a message that it had under way."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    # What waits for a message sent earlier has no frame there: its words alone say what it is.
    inside = any(file.startswith(_DISTRIBUTED) for file in files)
    return isinstance(error, RuntimeError) and (inside or any(word in str(error).lower() for word in _OF_MESSAGES))
