"""The reward service: a pool of processes that rate completions in the background.

`submit` returns a future of the reward. Any failure of the reward affects only its completion, as the RewardError of
the future. A failed process is replaced.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from truestep.environments.printed import PrintedLog
from truestep.environments.process import SAME_PROCESS, LateRewardError, LostError, Worker, WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.environments.same_process import SameProcessWorker
from truestep.errors import TruestepError
from truestep.process import progress

_JOIN_SECONDS = 30.0
_NEVER_WORKED = 16  # if this many completions at the run's beginning all fail for the same reason, the reward is broken


_Worker = Worker | SameProcessWorker


def _worker(options: WorkerOptions, printed: Callable[[str], None] | None = None) -> _Worker:
    return SameProcessWorker(options) if options.isolation == SAME_PROCESS else Worker(options, printed)


class FailingRewardError(TruestepError):
    """A reward that failed on each of the first completions. Ends the run."""


class Rates(Protocol):
    """The interface of a reward service for samplers and evaluations."""

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        """Rate a completion in the background. `seed` identifies it and seeds the reward's random numbers."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Task:
    prompt: Prompt
    completion: str
    seed: str
    future: Future[Rating]

    @property
    def request(self) -> dict[str, Any]:
        prompt = self.prompt
        return {"prompt": prompt.prompt, "completion": self.completion, "fields": prompt.fields, "seed": self.seed}


def _settle(task: _Task, rating: Rating | BaseException) -> None:
    if isinstance(rating, BaseException):
        task.future.set_exception(rating)
    else:
        task.future.set_result(rating)
    progress.made("rewards")


class FirstOnes:
    """A check of a run's first completions or episodes. It ends the run if the reward never works."""

    most = _NEVER_WORKED

    def __init__(self, what: str = "completion", wrong: str = "one that is wrong gets 0") -> None:
        self._what, self._wrong = what, wrong
        self._reasons: list[str] | None = []  # failures so far; None once the reward has worked or failed differently
        self._lock = threading.Lock()

    def judge(self, rating: Rating | BaseException) -> Rating | BaseException:
        """Return the rating or error of a completion. If all first completions failed for the same reason, return a
        FailingRewardError."""
        with self._lock:
            if self._reasons is None or not isinstance(rating, RewardError | Rating):
                return rating
            if isinstance(rating, Rating) or (self._reasons and _kind(str(rating)) != _kind(self._reasons[0])):
                self._reasons = None
                return rating
            self._reasons.append(str(rating))
            if len(self._reasons) < _NEVER_WORKED:
                return rating
        trace = "" if rating.traceback is None else f"\n{rating.traceback}"
        return FailingRewardError(
            f"none of the first {_NEVER_WORKED} {self._what}s has a reward, and for the same reason: {rating}. "
            f"A reward must give a number for every {self._what}; {self._wrong}{trace}"
        )


def _kind(reason: str) -> str:
    """Return the first words of a reason: the kind of failure and the exception's type, without values."""
    words = reason.split()
    return " ".join(words[: words.index("raised", 2) + 2] if "raised" in words[2:4] else words[:3]).rstrip(":,")


class Rater:
    """A pool of workers that each rate one completion at a time.

    A worker is started only when all others are busy. The first completion of the run is rated alone, so that a failing
    reward is reported once, before it fails many times.
    """

    def __init__(
        self,
        options: WorkerOptions,
        workers: int,
        say: Callable[[str], None] | None = None,
        printed: PrintedLog | None = None,
    ):
        """`say` is called if the first completion fails; `printed` keeps the rewards' output."""
        self._options, self._most, self._say, self._printed = options, workers, say, printed
        self._first_ones = FirstOnes()
        self._held: list[_Task] | None = None  # tasks held back until the first completion is rated
        self._opened = False
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._idle = 0  # waiting threads, and those that were woken and have not yet taken a task
        self._closed = False

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        future: Future[Rating] = Future()
        task = _Task(prompt, completion, seed, future)
        with self._changed:
            if self._closed:
                raise RuntimeError("the rater is closed")
            if self._held is not None:
                self._held.append(task)
                return future
            if not self._opened:
                self._opened, self._held = True, []
                future.add_done_callback(self._open)
            self._tasks.append(task)
            self._call()
        return future

    def _open(self, first: Future[Rating]) -> None:
        """Release the held tasks, when the first completion is rated or cancelled."""
        if self._say is not None and not first.cancelled() and isinstance(error := first.exception(), RewardError):
            self._say(explain_failing(error))
        with self._changed:
            held, self._held = self._held or [], None
            for task in held:
                self._tasks.append(task)
                self._call()
            if self._closed:
                self._cancel()

    def close(self) -> None:
        """End all workers and cancel tasks that are not begun."""
        with self._changed:
            self._closed = True
            self._cancel()
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.ask_to_end()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _cancel(self) -> None:
        while self._tasks:
            self._tasks.popleft().future.cancel()

    def _call(self) -> None:
        """Wake or start a thread for a task that was added."""
        if self._idle >= len(self._tasks):
            self._changed.notify()
        elif len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name=f"rewards-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> _Task | None:
        """Wait for a task and take it. Returns None when the rater is closed."""
        with self._changed:
            while not self._tasks and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return self._tasks.popleft() if self._tasks else None

    def _work(self) -> None:
        """Run a thread of the pool: take tasks and rate them with the thread's own worker."""
        worker: _Worker | None = None
        try:
            while (task := self._next()) is not None:
                if task.future.set_running_or_notify_cancel():
                    worker = self._rate(worker, task)
        finally:
            self._end(worker)

    def _rate(self, worker: _Worker | None, task: _Task) -> _Worker | None:
        """Rate a completion with a worker, replacing it if it is lost. Returns the usable worker, if any.

        A worker may be lost because of state that earlier completions left in it. The task is then retried in a new
        worker and fails only if that worker is lost too. A timeout fails the task immediately, since a retry would take
        as long again.
        """
        rating: Rating | BaseException
        if worker is not None and not worker.usable():
            self._end(worker)
            worker = None
        try:
            worker = worker or self._start()
            rating = worker.rate(task.request)
        except LostError as error:
            rated = 0 if worker is None else worker.num_rated
            self._end(worker)
            if rated and not self._closed and not isinstance(error, LateRewardError):
                return self._rate(None, task)
            worker, rating = None, RewardError(str(error))
        except (RewardError, TypeError, ValueError, RecursionError) as error:  # JSON cannot hold a field
            rating = error
        except BaseException as error:  # passed on to the futures' callers
            self._end(worker)
            worker, rating = None, error
        _settle(task, self._first_ones.judge(rating))
        return worker

    def _start(self) -> _Worker:
        try:
            log, name = self._printed, threading.current_thread().name
            worker = _worker(self._options, None if log is None else partial(log.add, name))
        except OSError as error:
            raise LostError(f"no process could be started for the reward: {error}") from None
        with self._changed:
            self._workers.add(worker)
            closed = self._closed
        try:
            if closed:
                raise LostError("the run ends")
            worker.start()
        except (RewardError, LostError) as error:
            self._end(worker)
            raise LostError(str(error)) from None
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is None:
            return
        with self._changed:
            self._workers.discard(worker)
        worker.end()


def explain_failing(error: RewardError, what: str = "completion") -> str:
    """Return the warning that the first completion, or episode, failed, with the traceback."""
    trace = "" if error.traceback is None else "".join(f"\n  {line}" for line in error.traceback.splitlines())
    return f"warning: the first {what} of this run has no reward: {error}{trace}"


def check_reward(options: WorkerOptions, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
    """Import the reward in a worker, and check its signature against the prompts' fields. Raises RewardError."""
    worker = _worker(options)
    try:
        worker.start(fields)
    except LostError as error:
        raise RewardError(str(error)) from None
    finally:
        worker.end()
