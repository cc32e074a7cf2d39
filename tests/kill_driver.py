"""Trains by `truestep train` in child processes and kills each with SIGKILL, then lets one finish.

    python kill_driver.py CONFIG.yaml '[["seconds", 0.4], ["event", 17], ...]'

`seconds` kills after that time; `event` kills inside the child, just before its so-many-th opening, renaming or removal
of a file in the run's directory, so that a kill lies between any two changes to it; `command` kills just before
the so-many-th command is sent to a Redis server, and `answer` when it was carried out and its answer not yet read.
Each kill is said on the standard output when it has happened. Children are forked from a process
that has only imported: starting Python and torch ten times over would take a minute.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import truestep.train  # noqa: F401  (imported before the fork, and not in each child)
from truestep.cli import main

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


def _train(config: str, directory: str, kill: tuple[str, float] | None) -> int:
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    config, kills = sys.argv[1], json.loads(sys.argv[2])
    run_directory = str(Path(config).with_suffix(""))
    killed = []
    for kill in kills:
        status = _train(config, run_directory, tuple(kill))
        killed.append(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        print("killed" if killed[-1] else "ended", flush=True)
    final = os.waitstatus_to_exitcode(_train(config, run_directory, None))
    print(json.dumps({"killed": killed, "final": final}))
