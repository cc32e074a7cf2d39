"""A watch over the ranks: one that stalls, fails or is gone is named, and the rest end.

A thread of each rank writes the number and name of its phase into the launcher's store and reads the others'. All ranks
go through the same phases in the same order, so the one with the lowest number is waited for.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from truestep.ranks.axes import RankError
from truestep.ranks.group import Ranks

_FAILED = "truestep/failed"
_DONE = "done"
_OF_MESSAGES = ("connection", "gloo", "nccl", "timed out", "broken pipe")
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
ENDED_BY_ANOTHER = 3  # the exit code of a rank that ends because of another


@dataclass(frozen=True)
class RankState:
    """The last known state of a rank."""

    rank: int
    number: int  # of its phase
    phase: str
    since: float  # seconds it has been in it
    silent: float  # seconds since it last said anything; a process that is there does so about every second
    place: str = ""  # in the code
    waits: bool = False  # in a call that waits for other ranks


def verdict(own: RankState, others: list[RankState], timeout: float, silence: float) -> str | None:
    """Say why the run has to end; None where it goes on."""
    others = [state for state in others if state.phase != _DONE]
    gone = [state for state in others if state.silent > silence]
    if gone:
        return "; ".join(
            f"rank {lost.rank} is gone: nothing was heard of it for {lost.silent:.0f} s, and last it was {lost.phase}"
            for lost in gone
        )
    if own.since <= timeout:
        return None
    everyone = [own, *others]
    slowest = min(state.number for state in everyone)
    late = sorted((state for state in everyone if state.number == slowest), key=lambda state: state.rank)
    if len(late) == len(everyone) and any(not state.waits for state in late):
        late = [state for state in late if not state.waits]
    names = "; ".join(
        f"rank {state.rank} has been {state.phase} for {state.since:.0f} s{state.place}" for state in late
    )
    others_wait = ", and the others wait for it" if len(late) < len(everyone) else ""
    return f"{names}{others_wait} (schedule.stall_timeout: {timeout:g})"


class Watch:
    """The watch of one rank: the main thread names its phases, and another thread compares them."""

    def __init__(self, ranks: Ranks, timeout: float):
        self._ranks, self._timeout = ranks, timeout
        self._number, self._phase, self._since = 0, "starting", time.monotonic()
        self._beat = min(1.0, timeout / 10)
        # A process that reads a large file may hold its threads up for a while: too soon would be worse than too late.
        self._silence = min(60.0, max(timeout, 2.0))
        self._stopped = threading.Event()
        self._heard: dict[int, tuple[str, float]] = {}  # what each rank last wrote, and when that was news here
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def phase(self, name: str) -> None:
        """Name what this rank does from now on: every rank names the same phases in the same order."""
        self._number, self._phase, self._since = self._number + 1, name, time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; an error inside, of any kind, ends every rank."""
        if self._ranks.size == 1:
            yield
            return
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10)
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
        self._report()

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _cause_elsewhere(self, error: BaseException) -> str | None:
        """Name the other rank that is behind an error of communication, if one is."""
        if not _raised_between_ranks(error):
            return None
        # That a connection broke is known already: a few beats without a word are enough.
        silence = min(self._silence, 5 * self._beat)
        deadline = time.monotonic() + silence + 5 * self._beat
        while time.monotonic() < deadline:  # a connection breaks at once; what broke it is known a little later
            reason = self._reason_to_end(silence)
            if reason is not None:
                return reason
            time.sleep(self._beat)
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(self._beat):
            reason = self._reason_to_end(self._silence)
            if reason is not None and not self._stopped.is_set():
                # The main thread may be inside a collective that nobody else will ever join: end the process at once.
                print(f"error: rank {self._ranks.rank} ends: {reason}", file=sys.stderr, flush=True)
                os._exit(ENDED_BY_ANOTHER)

    def _report(self) -> None:
        place, waits = _where()
        state = [self._number, self._phase, time.monotonic() - self._since, place, waits, time.time()]
        self._store.set(f"truestep/rank/{self._ranks.rank}", json.dumps(state))

    def _reason_to_end(self, silence: float) -> str | None:
        try:
            self._report()
            if self._store.check([_FAILED]):
                failed = json.loads(self._store.get(_FAILED))
                if failed["rank"] != self._ranks.rank:
                    return f"rank {failed['rank']} failed: {failed['error']}"
            others = self._others()
        except Exception as error:  # the store is gone, and with it the rank or launcher that held it
            return f"the launcher's store cannot be reached any more: {error}"
        own = RankState(self._ranks.rank, self._number, self._phase, time.monotonic() - self._since, 0.0, *_where())
        return verdict(own, others, self._timeout, silence)

    def _others(self) -> list[RankState]:
        now, others = time.monotonic(), []
        for rank in range(self._ranks.size):
            name = f"truestep/rank/{rank}"
            if rank == self._ranks.rank or not self._store.check([name]):
                continue
            report = self._store.get(name).decode()
            if self._heard.get(rank, ("", 0.0))[0] != report:
                self._heard[rank] = (report, now)  # by this process's clock: hosts need not agree on the time
            number, phase, since, place, waits, _ = json.loads(report)
            silent = now - self._heard[rank][1]
            others.append(RankState(rank, number, phase, since + silent, silent, place, waits))
        return others

    def _report_failure(self, error: str) -> None:
        try:
            self._report()
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


def _where() -> tuple[str, bool]:
    """Find where the main thread is in truestep's or the user's code, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith("<"):
            return f", at {os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}", waits
        waits |= file.startswith(_DISTRIBUTED)
        frame = frame.f_back
    return "", waits
