"""Rewards in processes of their own: one that hangs or crashes costs its completion and nothing else."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError

# Starting a process and importing the user's module is not the reward's own time.
_START_SECONDS = 120.0


class RewardPool:
    """Processes that each rate one completion at a time. `rate` may be called from as many threads."""

    def __init__(self, reward: str, workers: int, timeout: float):
        self._reward, self._timeout = reward, timeout
        # Last in, first out: another process is started only when those that there are have work.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._started: list[_Worker] = []

    def rate(self, prompt: Prompt, completion: str) -> float:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._reward)
                self._started.append(worker)
            return worker.rate(prompt, completion, self._timeout)
        finally:
            if worker is not None and not worker.alive:
                self._end(worker)
                worker = None
            self._idle.put(worker)

    def _end(self, worker: "_Worker") -> None:
        worker.kill()
        if worker in self._started:
            self._started.remove(worker)

    def close(self) -> None:
        for worker in list(self._started):
            self._end(worker)


class _Worker:
    def __init__(self, reward: str):
        # Neither forked from the trainer, whose threads and GPU do not survive it, nor by multiprocessing, which would
        # run the user's main script again.
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "truestep.environments.reward_worker", reward, str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self.alive = True
        self._ready = False

    def rate(self, prompt: Prompt, completion: str, timeout: float) -> float:
        try:
            if not self._ready:
                self._receive(_START_SECONDS, "did not start")
                self._ready = True
            self._connection.send((prompt, completion))
            value: float = self._receive(timeout, f"took longer than sampler.reward_timeout: {timeout:g} s")
            return value
        except (EOFError, OSError) as error:
            self.alive = False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise RewardError(f"the reward ended its process (exit code {self._process.returncode})") from error

    def _receive(self, timeout: float, late: str) -> Any:
        if not self._connection.poll(timeout):
            self.alive = False
            raise RewardError(f"the reward {late}")
        value, problem = self._connection.recv()
        if problem is not None:
            raise RewardError(problem)
        return value

    def kill(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._connection.close()
