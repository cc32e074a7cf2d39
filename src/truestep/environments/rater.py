"""The reward service: a pool of processes that rate completions in the background.

`submit` returns a future of the reward. Any failure of the reward affects only its completion, as the RewardError of
the future. A failed process is replaced.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from truestep.environments.batch_size import MOST, BatchSizer
from truestep.environments.printed import PrintedLog
from truestep.environments.process import LateRewardError, LostError, Worker, WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.errors import TruestepError
from truestep.process import progress

_JOIN_SECONDS = 30.0
_NEVER_WORKED = 16  # if the first so many completions of a run all fail alike, the reward is at fault


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
    begun: bool = False  # presumably in a worker; can no longer be cancelled


def _wanted(task: _Task) -> bool:
    if task.future.cancelled():
        _begin(task)
        return False
    return True


def _begin(task: _Task) -> None:
    if not task.begun:
        task.begun = True
        task.future.set_running_or_notify_cancel()


def _settle(task: _Task, rating: Rating | BaseException) -> None:
    _begin(task)
    if not task.future.cancelled():
        if isinstance(rating, BaseException):
            task.future.set_exception(rating)
        else:
            task.future.set_result(rating)
    progress.made("rewards")


class FirstOnes:
    """A check of a run's first completions, or episodes: it fails the run if the reward never works."""

    most = _NEVER_WORKED

    def __init__(self, what: str = "completion", wrong: str = "one that is wrong gets 0") -> None:
        self._what, self._wrong = what, wrong
        self._reasons: list[str] | None = []  # failures so far; None once the reward has worked or failed differently
        self._lock = threading.Lock()

    def judge(self, rating: Rating | BaseException) -> Rating | BaseException:
        """Return the rating or error of a completion, or a FailingRewardError if all first completions failed alike."""
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
    """A pool of workers that each rate one completion at a time. Fast rewards get many requests ahead.

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
        self._workers: set[Worker] = set()
        self._sizer = BatchSizer()
        self._idle = 0  # waiting threads
        self._called = 0  # threads that were woken or started and have not yet taken tasks
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
            self._tasks.extend(held)
            if self._closed:
                self._cancel()
            for _ in held:
                self._call()

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
        """Wake or start a thread, unless the threads already called can take all tasks."""
        if len(self._tasks) <= self._called * self._sizer.batch:
            return
        if self._idle > self._called:
            self._called += 1
            self._changed.notify()
        elif len(self._threads) < self._most:
            self._called += 1
            thread = threading.Thread(target=self._work, name=f"rewards-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self, called: bool, most: int) -> list[_Task]:
        """Wait for tasks and take some. Returns an empty list when the rater is closed."""
        with self._changed:
            self._called -= called
            while not self._tasks and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
                self._called -= 1
            taken = [self._tasks.popleft() for _ in range(min(len(self._tasks), most, self._sizer.batch))]
            if self._tasks:
                self._call()
            return taken

    def _put_back(self, tasks: Collection[_Task]) -> None:
        """Put tasks at the front of the queue."""
        with self._changed:
            self._tasks.extendleft(reversed(list(tasks)))
            if self._closed:
                self._cancel()
            for _ in tasks:
                self._call()

    def _put_back_all_but_first(self, tasks: deque[_Task]) -> None:
        self._put_back(list(tasks)[1:])
        while len(tasks) > 1:
            tasks.pop()

    def _work(self) -> None:
        """Run a thread of the pool: take tasks and rate them with the thread's own worker."""
        worker: Worker | None = None
        called = True
        try:
            # A new worker gets a single task: if the worker is lost, that task is the cause.
            while tasks := self._next(called, MOST if worker is not None and worker.num_rated else 1):
                called = False
                worker = self._rate(worker, deque(task for task in tasks if _wanted(task)))
        finally:
            self._end(worker)

    def _rate(self, worker: Worker | None, tasks: deque[_Task]) -> Worker | None:
        """Rate tasks with a worker, replacing it if it is lost. Returns the usable worker, if any.

        A worker may be lost because of state that earlier completions left in it. The task is then retried in a new
        worker and fails only if that worker is lost too. A timeout fails the task immediately, since a retry would take
        as long again. Tasks behind it, which no worker has begun, are put back.
        """
        try:
            while tasks:
                if worker is not None and not worker.usable():
                    self._end(worker)
                    worker = None
                if worker is None:
                    self._put_back_all_but_first(tasks)
                try:
                    worker = worker or self._start()
                    self._rate_by(worker, tasks)
                except LostError as error:
                    final = worker is None or worker.num_rated == 0 or isinstance(error, LateRewardError)
                    self._end(worker)
                    worker = None
                    if tasks and (final or self._closed):
                        _settle(tasks.popleft(), self._first_ones.judge(RewardError(str(error))))
                    elif tasks:
                        self._put_back_all_but_first(tasks)
                        continue
                    self._put_back(tasks)
                    tasks.clear()
        except BaseException as error:  # passed on to the futures' callers
            self._end(worker)
            worker = None
            for task in tasks:
                _settle(task, error)
        return worker

    def _rate_by(self, worker: Worker, tasks: deque[_Task]) -> None:
        """Rate tasks with one worker and remove them. If the worker is lost, its current task is first in `tasks`."""
        requests = [
            {
                "prompt": task.prompt.prompt,
                "completion": task.completion,
                "fields": task.prompt.fields,
                "seed": task.seed,
            }
            for task in tasks
        ]
        given = list(tasks)
        _begin(given[0])
        for index, rating in worker.rate(requests):
            tasks.remove(given[index])
            if rating is None:
                self._put_back([given[index]])
                continue
            _settle(given[index], self._first_ones.judge(rating))
            if tasks:
                _begin(tasks[0])

    def _start(self) -> Worker:
        try:
            log, name = self._printed, threading.current_thread().name
            worker = Worker(self._options, self._sizer, None if log is None else partial(log.add, name))
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

    def _end(self, worker: Worker | None) -> None:
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
    worker = Worker(options)
    try:
        worker.start(fields)
    except LostError as error:
        raise RewardError(str(error)) from None
    finally:
        worker.end()
