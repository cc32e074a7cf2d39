"""Trains by `truestep train` in child processes and kills each with SIGKILL, then lets one finish.

    with Driver(Path("config.yaml"), [("seconds", 0.4), ("event", 17), ...]) as driver:
        driver.wait()

`seconds` kills after that time; `event` kills inside the child, just before its so-many-th opening, renaming or removal
of a file in the run's directory, so that a kill lies between any two changes to it; `command` kills just before
the so-many-th command is sent to a Redis server, and `answer` when it was carried out and its answer not yet read.
Each kill is said in a file beside the configuration when it has happened. The driver is forked from a process that has
imported all it needs, and forks its children: starting Python and torch ten times over would take a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

import truestep.run.train  # noqa: F401  (imported before the fork, and not in each child)
from truestep.commands.cli import main
from truestep.ranks.forks import fork_context

Kill = tuple[str, float]

_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def _kill_at_event(number: int, directory: str) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _EVENTS and directory in str(arguments[0]):
            seen += 1
            if seen == number:
                _kill_self()

    sys.addaudithook(hook)


def _kill_at_command(number: int, moment: str) -> None:
    from redis.connection import Connection

    method = "send_packed_command" if moment == "command" else "read_response"
    original, seen = getattr(Connection, method), 0

    def counted(self: Connection, *arguments: object, **options: object) -> object:
        nonlocal seen
        seen += 1
        if seen == number:
            if moment == "answer":
                time.sleep(0.05)  # the server is done with it
            _kill_self()
        return original(self, *arguments, **options)

    setattr(Connection, method, counted)


def _train(config: str, directory: str, kill: Kill | None) -> int:
    """The exit status of a child that trains, as `waitpid` gives it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    log = os.open(str(Path(config).with_suffix(".log")), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if kill is not None and kill[0] == "event":
        _kill_at_event(int(kill[1]), directory)
    elif kill is not None and kill[0] in ("command", "answer"):
        _kill_at_command(int(kill[1]), kill[0])
    elif kill is not None:
        threading.Timer(kill[1], _kill_self).start()
    try:
        main(["train", config], prog_name="truestep")
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    os._exit(0)


def _drive(config: str, kills: list[Kill], said: str) -> None:
    os.setsid()  # so that all can be ended together
    torch.set_num_threads(1)
    directory = str(Path(config).with_suffix(""))
    killed = []
    with open(said, "w", encoding="utf-8", buffering=1) as file:
        for kill in kills:
            status = _train(config, directory, kill)
            killed.append(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
            print("killed" if killed[-1] else "ended", file=file)
        final = os.waitstatus_to_exitcode(_train(config, directory, None))
        print(json.dumps({"killed": killed, "final": final}), file=file)


class Driver:
    """Nothing that it started is left when the context ends."""

    def __init__(self, config: Path, kills: Sequence[Kill]):
        self._said = config.with_suffix(".kills")
        self.log = config.with_suffix(".log")
        self.process = fork_context().Process(target=_drive, args=(str(config), list(kills), str(self._said)))

    def __enter__(self) -> Driver:
        self.process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def said(self) -> list[str]:
        """A line for each kill that has happened, and at the end what became of them."""
        return self._said.read_text(encoding="utf-8").splitlines() if self._said.exists() else []

    def wait(self, seconds: float = 500) -> dict[str, object]:
        """Whether each kill met a process that ran, and the exit code of the last start, which was let be."""
        self.process.join(seconds)
        last_words = self.log.read_text(encoding="utf-8")[-2000:] if self.log.exists() else ""
        assert self.process.exitcode == 0, (self.process.exitcode, self.said(), last_words)
        return json.loads(self.said()[-1])
