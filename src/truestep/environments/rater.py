"""The reward service: processes of a run that rate completions, beside whatever else it does.

A completion is handed over with `submit` and its reward comes later. What a reward does wrong, in whatever way, costs
its completion and is the RewardError of its future. A process that went wrong is replaced.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from truestep.environments.batch_size import MOST, Pace
from truestep.environments.printed import PrintedLog
from truestep.environments.process import LateRewardError, LostError, Worker, WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.errors import TruestepError
from truestep.process import progress

_JOIN_SECONDS = 30.0
_NEVER_WORKED = 16  # completions of a run's first; if all fail alike, the reward is at fault, and not the completions


class FailingRewardError(TruestepError):
    """The error of a reward that has not worked once. It ends the run."""


class Rates(Protocol):
    """What samplers and evaluations need of a reward service."""

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        """Have a completion rated. `seed` names it, and decides what its reward draws from Python's random numbers."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Task:
    prompt: Prompt
    completion: str
    seed: str
    future: Future[Rating]
    begun: bool = False  # a worker is at it, as far as is known; nobody can cancel it


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


class _FirstOnes:
    """The first completions of a run, which show whether the reward works at all."""

    def __init__(self) -> None:
        self._reasons: list[str] | None = []  # until one has a reward
        self._lock = threading.Lock()

    def judge(self, rating: Rating | BaseException) -> Rating | BaseException:
        """Note what became of a completion; give the error that ends the run in its place where none ever works."""
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
            f"none of the first {_NEVER_WORKED} completions has a reward, and for the same reason: {rating}. A reward "
            f"must give a number for every completion; one that is wrong gets 0{trace}"
        )


def _kind(reason: str) -> str:
    """Tell reasons apart by what happened and by the type of what was raised, whatever the values are."""
    words = reason.split()
    return " ".join(words[:4] if words[2:3] == ["raised"] else words[:3]).rstrip(":,")


class Rater:
    """Workers that each rate one completion at a time; where that takes no time, many are sent to one ahead. A worker
    is started only when those that there are have work. The first completion of all is rated alone: where the reward
    fails, this is said once, and before it has failed a hundred times."""

    def __init__(
        self,
        options: WorkerOptions,
        workers: int,
        say: Callable[[str], None] | None = None,
        printed: PrintedLog | None = None,
    ):
        """Take the reward, the number of its processes, whom to tell that it fails on the first completion, and where
        what it prints is kept."""
        self._options, self._most, self._say, self._printed = options, workers, say, printed
        self._first_ones = _FirstOnes()
        self._held: list[_Task] | None = None  # until the first completion is rated
        self._opened = False
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()
        self._pace = Pace()
        self._idle = 0  # threads that wait
        self._called = 0  # threads that were woken or started and have not looked at the tasks yet
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
        """Have the others rated, now that the first one is or never will be."""
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
        """End every worker. What is not rated yet never will be."""
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
        """Call a thread, unless those that were called will take all that waits."""
        if len(self._tasks) <= self._called * self._pace.batch:
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
        """Wait for completions and take some; none when the run ends."""
        with self._changed:
            self._called -= called
            while not self._tasks and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
                self._called -= 1
            taken = [self._tasks.popleft() for _ in range(min(len(self._tasks), most, self._pace.batch))]
            if self._tasks:
                self._call()
            return taken

    def _put_back(self, tasks: Collection[_Task]) -> None:
        """Have completions rated before all others, by whichever thread is free."""
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
        """Rate what comes, with one worker at a time; a thread waits for its worker alone."""
        worker: Worker | None = None
        called = True
        try:
            # A worker's first completion is alone: if the worker is lost, that one is to blame.
            while tasks := self._next(called, MOST if worker is not None and worker.num_rated else 1):
                called = False
                worker = self._rate(worker, deque(task for task in tasks if _wanted(task)))
        finally:
            self._end(worker)

    def _rate(self, worker: Worker | None, tasks: deque[_Task]) -> Worker | None:
        """Rate with this worker, or with another where it is lost; give the one that is still good.

        A worker that has rated others before may be lost by what these left in it. So the completion is rated once
        more, in a new one, and only there it is to blame. Not if it took too long: it would take as long again. Those
        behind it, which no worker has begun, are put back.
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
        except BaseException as error:  # the one who waits must hear of it
            self._end(worker)
            worker = None
            for task in tasks:
                _settle(task, error)
        return worker

    def _rate_by(self, worker: Worker, tasks: deque[_Task]) -> None:
        """Rate by one worker; what is left of the tasks where it is lost begins with the one that it was at."""
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
            worker = Worker(self._options, self._pace, None if log is None else partial(log.add, name))
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


def explain_failing(error: RewardError) -> str:
    """Word that the reward fails on the first completion, with where it raised."""
    trace = "" if error.traceback is None else "".join(f"\n  {line}" for line in error.traceback.splitlines())
    return f"warning: the first completion of this run has no reward: {error}{trace}"


def check_reward(options: WorkerOptions, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
    """Import the reward in a process of its own, as the run will, and hold its signature against the names of the
    prompts' fields; a RewardError says what is wrong."""
    worker = Worker(options)
    try:
        worker.start(fields)
    except LostError as error:
        raise RewardError(str(error)) from None
    finally:
        worker.end()
