"""A watch over the ranks: if a rank stalls, fails or is gone, all ranks end and name it. A slow rank ends nothing.

A thread of each rank writes the rank's phase, the time since its last progress, and its line of code into the
launcher's store, and reads the other ranks' entries. A run of one process is watched too, because its disk or its
source may hang.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from truestep.errors import MachineError, TruestepError
from truestep.gpu import marks
from truestep.process import progress
from truestep.ranks.elastic import SHARES_STORE, Agent, RankLostError
from truestep.ranks.group import Ranks
from truestep.ranks.place import CodeLocation, find_place
from truestep.ranks.processes import Activity, Identity

_FAILED = "truestep/failed"
_ENDED = "truestep/ended"
_DONE = "done"
_OF_MESSAGES = ("connection", "gloo", "nccl", "timed out", "broken pipe")
_OF_AN_END = ("closed", "reset by peer", "broken pipe", "remote worker")
# Seconds to wait for the cause of a closed connection. An agent kills its workers 30 s after it told them to end, and
# the cause must be written before.
_CAUSE_SHOWS = 20.0
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_MOST_READ = 64  # most entries that a rank reads in a second; each rank reads those of all others
# In a run whose ranks come and go: seconds without an entry from a rank of another machine, or without an answer from
# rank 0's store, after which it counts as gone. A live rank is silent while a call holds the GIL.
_SILENCE = 60.0
_HOLDS_STORE = 30.0  # most seconds that the first rank waits for the other ranks to end before it ends itself
ENDED_BY_ANOTHER = 3  # exit code of a rank that ends because of another rank
STALLED = 1  # exit code of a rank that has stalled

Waits = Literal["", "ranks", "device"]


@dataclass(frozen=True)
class RankState:
    """The last known state of a rank."""

    rank: int
    number: int  # of its phase, counted from the start of the run
    phase: str
    since: float  # seconds since the phase began
    idle: float  # seconds since it last made progress
    silent: float = 0.0  # seconds since its last entry; a live process writes one about every second
    place: str = ""  # line of code
    waits: Waits = ""  # what it waits for: other ranks, or its device, which may be waiting for other ranks
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
    """Return why the run has to end, or None. `grace`: additional seconds for a source that has its own timeout, since
    its error is more precise."""
    others = [state for state in others if state.phase != _DONE]
    gone = [state for state in others if _is_gone(state, silence)]
    if gone:
        return "; ".join(_farewell(lost) for lost in gone)
    everyone = [own, *others]
    late = stalled(everyone, timeout + grace)
    if not late:
        return None
    option = f"(schedule.stall_timeout: {timeout:g})"
    if len(everyone) == 1:
        return f"the run {own.story} {option}"
    names = "; ".join(f"rank {state.rank} {state.story}" for state in sorted(late, key=lambda state: state.rank))
    rest = [state for state in everyone if state not in late]
    others_wait = ", and the others wait for it" if rest and all(state.waits for state in rest) else ""
    return f"{names}{others_wait} {option}"


def stalled(everyone: Sequence[RankState], timeout: float) -> list[RankState]:
    """Return the ranks that the run stalls on."""
    still = [state for state in everyone if state.idle > timeout]
    # A stalled rank that does not wait is the cause, even if other ranks still make progress.
    late = [state for state in still if not state.waits or len(everyone) == 1]
    if not late and len(still) == len(everyone):
        slowest = min(state.number for state in everyone)
        late = [state for state in everyone if state.number == slowest]
        late = [state for state in late if state.waits == "device"] or late
    return late


def lost_ranks(own: RankState, others: Sequence[RankState], timeout: float, silence: float) -> list[int]:
    """If `verdict` ends the run, return the ranks that count as failures of their agents: those whose processes have
    ended, or those that others wait for. Silence is no failure, since a connection or a machine may be the cause."""
    others = [state for state in others if state.phase != _DONE]
    if any(_is_gone(state, silence) for state in others):
        return [state.rank for state in others if state.process == "gone"]
    late = stalled([own, *others], timeout)
    return [state.rank for state in late] if len(late) <= len(others) else []


def _is_gone(state: RankState, silence: float) -> bool:
    # A live process is silent if a call holds the GIL, such as the read of a large file, or if a signal stopped it.
    return state.process == "gone" or (state.process == "unknown" and state.silent > silence)


def _farewell(lost: RankState) -> str:
    how = "its process has ended" if lost.process == "gone" else f"nothing was heard of it for {lost.silent:.0f} s"
    return f"rank {lost.rank} is gone: {how}, and last it was {lost.phase}"


@dataclass
class _Heard:
    """The last entry of another rank, and the observed activity of its process."""

    entry: str
    at: float  # when it was read, by this process's clock, because hosts' clocks may differ
    process: Identity
    activity: Activity | None = None  # measured once the rank is silent
    moved: float | None = None  # when the silent process was last active

    def begin_anew(self, now: float) -> None:
        """Count the rank's silence from now on, because this rank could not read entries."""
        self.at = now

    def look(self, now: float, computes: bool) -> None:
        """Measure the activity of a silent rank's process."""
        if self.activity is None:
            self.activity = Activity(self.process.number)
        elif self.activity.since_last(own_computing=computes):
            self.moved = now


def _beat(ranks: int, timeout: float) -> float:
    """Return the seconds after which a rank reads the others' entries again."""
    return min(max(1.0, ranks / _MOST_READ), timeout / 10)


def longest_silence(ranks: int, timeout: float) -> float:
    """Return the seconds without news of the other ranks after which a rank has ended, in a run whose ranks come and
    go. `ranks`: the number of ranks."""
    beat = _beat(ranks, timeout)
    return min(timeout, max(_SILENCE, 5 * beat)) + 2 * beat


class Watch:
    """The watch of one rank: the main thread names its phases, and another thread compares all ranks."""

    def __init__(self, ranks: Ranks, timeout: float, agent: Agent | None = None):
        self._ranks, self._timeout, self._agent = ranks, timeout, agent
        # Called by the watch's thread before it ends the process, with the reason, and True if the run is over for all.
        self.before_exit: Callable[[str, bool], None] = lambda reason, over: None
        self.lost: list[int] = []  # the ranks that failed, as far as it is known
        self.over = False  # True: a rank has failed in a way that would fail again after a restart
        self._grace = min(5.0, max(2.0, timeout / 10))
        self._number, self._phase, self._since = 0, "starting", time.monotonic()
        self._beat = _beat(ranks.size, timeout)
        self._silence = timeout if agent is None else min(timeout, max(_SILENCE, 5 * self._beat))
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._answers = 0  # how often the store has answered
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
        """Begin a phase. All ranks have the same phases in the same order."""
        self._number, self._phase, self._since = self._number + 1, name, time.monotonic()
        progress.phase(name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; an error inside, of any kind, ends every rank."""
        progress.made("phases")  # the time before does not count as a stall
        if self._ranks.size > 1:
            self._store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=10),
            )
            with contextlib.suppress(Exception):  # the watch finds what is wrong with the store
                self._report(self._own())  # at once: without a report, the others would not know of this rank
        self._thread.start()
        if self._agent is not None:
            threading.Thread(target=self._guard, args=(self._agent,), daemon=True, name="guard").start()
        try:
            yield from self._watched()
        finally:
            self._ended.set()

    def _watched(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._stop()
            cause = self._cause_elsewhere(error)
            if cause is not None:
                raise RankLostError(cause, self._next) from error
            self._report_failure(error)
            raise
        self._stop()
        self.phase(_DONE)
        if self._store is not None:
            self._report(self._own())
            self._hold_store()

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def end_all(self, reason: str) -> None:
        """Tell all ranks to end for this reason, because this rank ends."""
        with contextlib.suppress(Exception):  # the store is gone, or it ends with this process, which other ranks see
            if self._store is not None and not self._store.check([_ENDED]):
                self._store.set(_ENDED, json.dumps({"reason": reason, "lost": []}))

    @property
    def _next(self) -> str:
        """The end of a message, which says what comes next if the run goes on without the lost rank."""
        if self._agent is None or self.over:
            return ""
        return f"; the next generation begins when the launcher has {self._agent.least} agents or more"

    @property
    def _holds_store(self) -> bool:
        """True if the store ends with this process. Otherwise the launcher holds it."""
        return self._ranks.first and self._ranks_hold_store

    @property
    def _ranks_hold_store(self) -> bool:
        """True if the first rank holds the store, in a run whose ranks come and go."""
        return self._agent is not None and os.environ.get(SHARES_STORE) != str(True)

    def _hold_store(self) -> None:
        """Wait until the other ranks are done, if the store ends with this process."""
        deadline = time.monotonic() + _HOLDS_STORE
        while self._holds_store and time.monotonic() < deadline:
            others = self._others()
            if all(state.phase == _DONE or state.process == "gone" for state in others):
                break
            time.sleep(self._beat / 10)

    def _cause_elsewhere(self, error: BaseException) -> str | None:
        """Return the message that names another rank as the cause of a communication error, or None."""
        if self._store is None or not raised_between_ranks(error):
            return None
        # After a connection error, a rank without an entry for a few beats is gone. If the other end closed the
        # connection, its cause may take long to be written on a busy machine.
        silence = 5 * self._beat
        closed = any(word in str(error).lower() for word in _OF_AN_END)
        deadline = time.monotonic() + max(2 * silence, _CAUSE_SHOWS if closed else 0.0)
        while time.monotonic() < deadline:  # the cause is known a little later than the error
            progress.made("looks for a cause")  # so that this rank does not count as stalled
            reason = self._reason_to_end(silence)[0]
            if reason is not None:
                return reason
            time.sleep(self._beat)
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(self._beat):
            reason, code = self._reason_to_end(self._silence)
            if reason is not None and not self._stopped.is_set():
                self._exit(reason, code)

    def _guard(self, agent: Agent) -> None:
        """End the process if its launcher has ended, or if the store does not answer. The watch itself may wait for the
        store for ever, if the process or the machine of rank 0 hangs."""
        answers, waited = 0, 0.0
        while not self._ended.wait(self._beat):
            if answers != self._answers:
                answers, waited = self._answers, 0.0
            elif self._ranks_hold_store and not self._ranks.first:
                waited += self._beat  # not by the clock, which goes on while this process is stopped
            if agent.gone:
                self._exit("its launcher has ended", ENDED_BY_ANOTHER)
            if waited > self._silence:
                self._exit(f"the store of rank 0 has not answered for {waited:.0f} s", ENDED_BY_ANOTHER)

    def _exit(self, reason: str, code: int) -> None:
        """End the process at once: the main thread may be inside a call that never returns."""
        name = f"rank {self._ranks.rank} ends: " if self._ranks.size > 1 else ""
        print(f"error: {name}{reason}{self._next}", file=sys.stderr, flush=True)
        self.before_exit(reason, self.over)
        os._exit(code)

    def _reason_to_end(self, silence: float) -> tuple[str | None, int]:
        """Return why this rank has to end, or None, and the exit code."""
        own = self._own()
        if self._store is None:
            return verdict(own, [], self._timeout, silence, self._grace), STALLED
        try:
            self._report(own)
            told = self._told()
            if told is not None:
                return told, ENDED_BY_ANOTHER
            others = self._others()
            reason = verdict(own, others, self._timeout, silence, self._grace)
            if reason is not None:
                told = self._told()  # a rank that is gone may have written its reason only now
                if told is not None:
                    return told, ENDED_BY_ANOTHER
                self.lost = lost_ranks(own, others, self._timeout + self._grace, silence)
                # Otherwise the others would blame this rank for being gone.
                self._store.set(_ENDED, json.dumps({"reason": reason, "lost": self.lost}))
        except Exception as error:  # the launcher or rank that hosted the store is gone
            holder = "the launcher's store"
            if self._ranks_hold_store:
                holder, self.lost = "the store of rank 0", [0]
            return f"{holder} cannot be reached any more: {error}", ENDED_BY_ANOTHER
        return reason, STALLED if own.idle > self._timeout and not own.waits else ENDED_BY_ANOTHER

    def _told(self) -> str | None:
        """Return the reason to end that another rank has written to the store, or None."""
        assert self._store is not None
        if self._store.check([_ENDED]):
            ended = json.loads(self._store.get(_ENDED))
            self.lost = ended["lost"]
            return str(ended["reason"])
        if self._store.check([_FAILED]):
            failed = json.loads(self._store.get(_FAILED))
            self.over = failed["over"]
            if failed["rank"] != self._ranks.rank:
                self.lost = [failed["rank"]]
                return f"rank {failed['rank']} failed: {failed['error']}"
        return None

    def _own(self) -> RankState:
        """Return this rank's state. If it reported no progress, computing, reads and writes count as progress."""
        now = time.monotonic()
        if now - self._looked > max(10 * self._beat, 2.0):
            # This thread could not run, because a call held the GIL or the process was stopped.
            progress.made("returns")
            for heard in self._heard.values():
                heard.begin_anew(now)
        self._looked = now
        place = find_place()
        device = marks.outstanding()
        waits: Waits = "ranks" if place.waits else "device" if device else ""
        if progress.idle() > self._beat:
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

    def _look_at_process(self, place: CodeLocation, computes: bool) -> None:
        if place.debugged:
            progress.made("looks by a debugger")
        if self._activity is None:
            self._activity = Activity()
            return
        for kind, amount in self._activity.since_last(own_computing=computes).items():
            progress.made(kind, amount)

    def _report(self, own: RankState) -> None:
        assert self._store is not None
        # The time makes each entry different, so that the other ranks see that this process is alive.
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
        self._answers += 1
        return others

    def _judge(self, said: RankState, heard: _Heard, now: float) -> RankState:
        """Update a rank's entry by the time since it was written, and by the observed activity of its process."""
        silent = now - heard.at
        process = heard.process.look()
        idle = said.idle + silent
        if silent > 3 * self._beat and process == "there":
            # A call may hold the GIL while the process computes or reads.
            heard.look(now, computes=not said.waits)
            if heard.moved is not None:
                idle = now - heard.moved
        return dataclasses.replace(said, since=said.since + silent, idle=idle, silent=silent, process=process)

    def _report_failure(self, error: BaseException) -> None:
        if self._store is None:
            return
        failed = {"rank": self._ranks.rank, "error": f"{type(error).__name__}: {error}", "over": ends_run(error)}
        try:
            self._report(self._own())
            if not self._store.check([_FAILED]):
                self._store.set(_FAILED, json.dumps(failed))
            if self._holds_store:
                time.sleep(3 * self._beat)  # the others read it meanwhile
        except Exception as unreachable:
            print(f"rank {self._ranks.rank}: the others could not be told: {unreachable}", file=sys.stderr)


def ends_run(error: BaseException) -> bool:
    """Tell whether an error would recur on any ranks, as errors of the configuration, the data or the training do."""
    return isinstance(error, TruestepError) and not isinstance(error, RankLostError | MachineError)


def raised_between_ranks(error: BaseException) -> bool:
    """Return True if a call of torch.distributed raised the error, or one of its messages in flight failed."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    # An error of an asynchronous message has no frame in torch.distributed, so its text is searched.
    inside = any(file.startswith(_DISTRIBUTED) for file in files)
    return isinstance(error, RuntimeError) and (inside or any(word in str(error).lower() for word in _OF_MESSAGES))
