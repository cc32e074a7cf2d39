"""Ranks that are started once a session and run one case after another.

A case gets ranks as good as new: the environment, the random numbers and the import path of a process that has just
been started, and the functions and values of all modules that a case may have put its own in the place of. Only groups
of ranks, imported modules and what torch has warmed up stay from the case before. Ranks of which one fails or does not
end in time are replaced.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.ranks import launch
from truestep.ranks.axes import RankError

_MOST = 7  # ranks that are kept, in all: each has some hundred MB of its own
_ROOT = Path(__file__).parents[2]
_DEATH_SIGNAL = 1  # of prctl
_CHANCE = 20.0  # seconds that ranks have to notice that their fellow has failed
# Modules whose functions a case may replace, beside everything in truestep's own. Torch's values are its own affair.
_FOREIGN = ("torch", "torch.distributed", "torch.distributed.distributed_c10d", "os", "shutil", "time", "threading")


class Pool:
    """So many ranks, each a process that waits for its next case."""

    def __init__(self, size: int):
        ends = [Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in ends]
        arguments = [[theirs for _, theirs in ends]]
        self._processes, self._folder, self._store = launch.start_ranks(size, _serve, arguments)
        for _, theirs in ends:
            theirs.close()

    def run(self, target: Callable[..., None], arguments: Sequence[Any], timeout: float) -> None:
        """Run a case on every rank. Where one fails, the pool is closed."""
        deadline = time.monotonic() + timeout
        written = [self._console(rank).stat().st_size for rank in range(self._size) if self._console(rank).exists()]
        written += [0] * (self._size - len(written))
        for connection in self._connections:
            connection.send((target, tuple(arguments), os.getcwd(), list(sys.path)))
        busy, failed = dict(enumerate(self._connections)), []
        while busy and time.monotonic() < deadline:
            ready = wait(list(busy.values()), timeout=max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank, connection in busy.items() if connection in ready]:
                try:
                    busy.pop(rank).recv()
                except (EOFError, OSError):
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _CHANCE)
        if failed or busy:
            raise self._error(list(busy), sorted(failed), written)

    def signal(self, number: signal.Signals) -> None:
        """Stop ranks that have no case, or let them go on: gloo's threads look without end at connections that others
        have closed, and would take a third of the machine from the other tests."""
        for process in self._processes:
            os.kill(process.pid, number)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _size(self) -> int:
        return len(self._processes)

    def _console(self, rank: int) -> Path:
        return self._folder / str(rank)

    def _error(self, stuck: list[int], failed: list[int], written: list[int]) -> RankError:
        """Close the pool; say of each rank what `truestep.ranks.launch` says of one that was started for a case."""
        for rank in failed:
            self._processes[rank].join()
        codes = {rank: self._processes[rank].exitcode for rank in failed}
        lines = [
            f"rank {rank}: {line}"
            for rank in range(self._size)
            for line in _text_behind(self._console(rank), written[rank]).splitlines()[-12:]
        ]
        self.close()
        what = f"ranks that failed, with their exit codes: {codes}; ranks that were stuck: {stuck}"
        return RankError("\n".join([what, *lines]))


def _text_behind(console: Path, begin: int) -> str:
    return console.read_bytes()[begin:].decode(errors="replace") if console.is_file() else ""


_pools: dict[int, Pool] = {}  # by their sizes, the one that was used last at the end


def run_ranks(
    size: int,
    target: Callable[..., None],
    arguments: Sequence[Any] = (),
    *,
    timeout: float = 600.0,
    environment: dict[str, str] | None = None,
) -> None:
    """Run `target(*arguments)` as `truestep.ranks.launch.run_ranks` does, on the session's ranks.

    A case whose arguments are functions gets ranks of its own, since these may change what a later case finds. So does
    one with its own environment variables, which modules may read when they are imported.
    """
    if environment or any(callable(argument) for argument in arguments):
        launch.run_ranks(size, target, arguments, timeout=timeout, environment=environment)
        return
    if (pool := _pools.pop(size, None)) is None:
        pool = Pool(size)
    else:
        pool.signal(signal.SIGCONT)
    pool.run(target, arguments, timeout)
    pool.signal(signal.SIGSTOP)
    _pools[size] = pool
    while sum(_pools) > _MOST:
        _pools.pop(next(iter(_pools))).close()


@atexit.register
def close() -> None:
    """End all ranks. Those of a session that is killed end by themselves: the other end of their pipe is gone."""
    while _pools:
        _pools.popitem()[1].close()


def _serve(connections: list[Connection]) -> None:
    rank = int(os.environ["RANK"])
    for number, other in enumerate(connections):
        if number != rank:
            other.close()
    connection = connections[rank]
    _end_with_the_session()
    gc.freeze()  # else each collection would copy all that the process has from the one that it was forked from
    fresh = _Fresh()
    while True:
        try:
            target, arguments, directory, path = connection.recv()
        except EOFError:
            return
        fresh.restore()
        os.chdir(directory)
        sys.path[:] = path
        before = _attributes()
        target(*arguments)
        del target, arguments
        _put_back(before)
        connection.send("done")


def _end_with_the_session() -> None:
    """End this process when its session is gone: a stopped process cannot see the end of its pipe.

    The kernel kills it when Python's fork server, its parent, ends. That server ends when the other end of its pipe is
    closed everywhere; Python gives each process that it starts a copy of that end, so this process closes its own."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _Fresh:
    """What a process that has just been started has, to be put back before a case."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._random = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        _forget_modules_of_cases()
        gc.collect()


def _forget_modules_of_cases() -> None:
    """Two cases may each write a reward into a file of the same name."""
    written, ours = tempfile.gettempdir(), (sys.prefix, str(_ROOT))  # this clone may stand there too
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(written) and not file.startswith(ours):
            del sys.modules[name]


_Owner = Any  # a module or a class


def _attributes() -> list[tuple[_Owner, dict[str, Any]]]:
    """What could be replaced by a case's own: attributes of modules, and of the classes that are made there."""
    found: list[tuple[_Owner, dict[str, Any]]] = []
    for name, module in list(sys.modules.items()):
        if name in _FOREIGN:
            found.append((module, {key: value for key, value in vars(module).items() if callable(value)}))
        elif name.partition(".")[0] == "truestep":
            found.append((module, dict(vars(module))))
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            found += [(one, dict(vars(one))) for one in classes if one.__module__ == name]
    return found


def _put_back(before: list[tuple[_Owner, dict[str, Any]]]) -> None:
    for owner, attributes in before:
        now = dict(vars(owner))
        for name, value in attributes.items():
            if now.get(name) is not value and not name.startswith("__"):
                setattr(owner, name, value)
        if isinstance(owner, type):  # a class's own in the place of one that it inherits
            for name in now.keys() - attributes.keys():
                if not name.startswith("_"):
                    delattr(owner, name)
