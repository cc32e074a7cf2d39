"""The reward service: processes of a run that rate completions, beside whatever else it does.

A completion is handed over with `submit` and its reward comes later. What a reward does wrong, in whatever way, costs
its completion and is the RewardError of its future. A process that went wrong is replaced.
"""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from truestep import progress
from truestep.environments.process import LateRewardError, LostError, Worker, WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError

_JOIN_SECONDS = 30.0


class Rates(Protocol):
    """What samplers and evaluations need of a reward service."""

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[float]:
        """Have a completion rated. `seed` names it, and decides what its reward draws from Python's random numbers."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class _Task:
    prompt: Prompt
    completion: str
    seed: str
    future: Future[float]


class Rater:
    """Workers that each rate one completion at a time. One is started only when those that there are have work."""

    def __init__(self, options: WorkerOptions, workers: int):
        self._options, self._most = options, workers
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()
        self._idle = 0
        self._closed = False

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[float]:
        future: Future[float] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the rater is closed")
            self._tasks.append(_Task(prompt, completion, seed, future))
            if len(self._tasks) > self._idle and len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=f"rewards-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._changed.notify()
        return future

    def close(self) -> None:
        """End every worker. What is not rated yet never will be."""
        with self._changed:
            self._closed = True
            while self._tasks:
                self._tasks.popleft().future.cancel()
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.ask_to_end()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _next(self) -> _Task | None:
        with self._changed:
            self._idle += 1
            while not self._tasks and not self._closed:
                self._changed.wait()
            self._idle -= 1
            return self._tasks.popleft() if self._tasks else None

    def _work(self) -> None:
        """Rate what comes, with one worker at a time; a thread waits for its worker alone."""
        worker: Worker | None = None
        try:
            while (task := self._next()) is not None:
                if not task.future.set_running_or_notify_cancel():
                    continue
                try:
                    worker, value = self._rate(worker, task)
                except _Failed as failed:
                    worker = failed.worker
                    task.future.set_exception(RewardError(failed.reason))
                except BaseException as error:  # the one who waits must hear of it
                    self._end(worker)
                    worker = None
                    task.future.set_exception(error)
                else:
                    task.future.set_result(value)
                progress.made("rewards")
        finally:
            self._end(worker)

    def _rate(self, worker: Worker | None, task: _Task) -> tuple[Worker, float]:
        """Rate with this worker, or with another where it is lost.

        A worker that has rated others before may be lost by what these left in it. So the completion is rated once
        more, in a new one, and only there it is to blame. Not if it took too long: it would take as long again.
        """
        if worker is not None and not worker.usable():
            self._end(worker)
            worker = None
        request = {
            "prompt": task.prompt.prompt,
            "completion": task.completion,
            "fields": task.prompt.fields,
            "seed": task.seed,
        }
        while True:
            worker = worker or self._start()
            fresh = worker.num_rated == 0
            try:
                return worker, worker.rate(request)
            except RewardError as error:
                raise _Failed(worker, str(error)) from None
            except LostError as error:
                late = isinstance(error, LateRewardError)
                self._end(worker)
                worker = None
                if fresh or late or self._closed:
                    raise _Failed(None, str(error)) from None

    def _start(self) -> Worker:
        try:
            worker = Worker(self._options)
        except OSError as error:
            raise _Failed(None, f"no process could be started for the reward: {error}") from None
        with self._changed:
            self._workers.add(worker)
            closed = self._closed
        try:
            if closed:
                raise LostError("the run ends")
            worker.start()
        except (RewardError, LostError) as error:
            self._end(worker)
            raise _Failed(None, str(error)) from None
        return worker

    def _end(self, worker: Worker | None) -> None:
        if worker is None:
            return
        with self._changed:
            self._workers.discard(worker)
        worker.end()


class _Failed(Exception):  # noqa: N818  (it carries a reason, and the worker that is still good)
    def __init__(self, worker: Worker | None, reason: str):
        self.worker, self.reason = worker, reason


def check_reward(options: WorkerOptions) -> None:
    """Import the reward in a process of its own, as the run will; a RewardError says why it cannot be."""
    worker = Worker(options)
    try:
        worker.start()
    except LostError as error:
        raise RewardError(str(error)) from None
    finally:
        worker.end()
