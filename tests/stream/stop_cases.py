"""Runs that are asked to stop at an exact instant, on ranks of their own."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from truestep.config.schema import Config
from truestep.ranks.watch import Watch
from truestep.rollouts.parts import PartedSource
from truestep.rollouts.stream.reading import Reading
from truestep.rollouts.stream.source import StreamSource
from truestep.run.train import train
from truestep.run.trainer import Trainer

_CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


@dataclass(frozen=True)
class Instant:
    """An instant on the first rank, and the ranks that get a signal then.

    `what` is a phase of the run; or, counted by `number`: `taken` (the run has taken so many messages), `arrived` (so
    many were read ahead, and no more are until the signal is there), `changed` (just before such a change to a file of
    the checkpoints), `peeked` (a look at documents in parts, which are those of a later step than the one in hand).
    """

    what: str
    number: int = 1
    ranks: tuple[int, ...] = (0, 1)


class Stop:
    """Sends the signals of one run when its instant has come."""

    def __init__(self, instant: Instant, processes: list[int]):
        self._instant, self._processes = instant, processes
        self._seen = 0
        self.came = False
        self.asked = threading.Event()

    def at(self, what: str) -> None:
        if self.came or what != self._instant.what:
            return
        self._seen += 1
        if self._seen < self._instant.number:
            return
        self.came = True
        for rank in self._instant.ranks:
            os.kill(self._processes[rank], signal.SIGTERM)
        if 0 in self._instant.ranks:  # in the main thread, the handler has run before this is called
            assert self.asked.wait(100), "the first rank was asked to stop"


_current: list[Stop] = []  # on the first rank: of the run that is under way


def _at(what: str) -> None:
    for stop in _current:
        stop.at(what)


def _before(owner: type, name: str, what: Callable[..., str]) -> None:
    honest = getattr(owner, name)

    def noticed(*arguments: Any, **named: Any) -> Any:
        _at(what(*arguments))
        return honest(*arguments, **named)

    setattr(owner, name, noticed)


def _after(owner: type, name: str, what: Callable[..., str]) -> None:
    honest = getattr(owner, name)

    def noticed(*arguments: Any, **named: Any) -> Any:
        result = honest(*arguments, **named)
        _at(what(*arguments))
        return result

    setattr(owner, name, noticed)


def _notice_changes() -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _CHANGES and f"{os.sep}checkpoints{os.sep}" in str(arguments[0]):
            _at("changed")

    sys.addaudithook(hook)


def _notice_asking() -> None:
    honest = Trainer.ask_to_stop

    def asked(self: Trainer, number: int) -> None:
        honest(self, number)
        for stop in _current:
            stop.asked.set()

    Trainer.ask_to_stop = asked  # type: ignore[method-assign]


def _processes(folder: Path) -> list[int]:
    """Learn the numbers of both ranks' processes."""
    (folder / f"{os.environ['RANK']}.new").write_text(str(os.getpid()))
    (folder / f"{os.environ['RANK']}.new").rename(folder / os.environ["RANK"])
    files = [folder / str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    deadline = time.monotonic() + 200
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return [int(file.read_text()) for file in files]


def stop_all(runs: list[tuple[dict[str, Any], Instant]], folder: str) -> None:
    """Start each run and stop it at its instant, one after another: starting processes is what takes the time."""
    # Between runs, and before a rank has come to its first step: another rank may be there already.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes = _processes(Path(folder))
    _notice_asking()
    if os.environ["RANK"] == "0":
        _after(Watch, "phase", lambda _, name: name)
        _after(StreamSource, "_add", lambda *_: "taken")
        _before(Reading, "_add", lambda *_: "arrived")
        _before(PartedSource, "peek", lambda *_: "peeked")
        _notice_changes()
    for config, instant in runs:
        _current[:] = [Stop(instant, processes)] if os.environ["RANK"] == "0" else []
        trainer = train(Config.model_validate(config), Console(file=io.StringIO()))
        for stop in _current:
            assert stop.came, f"{instant} never came"
        assert trainer.stopped_by == signal.SIGTERM or os.environ["RANK"] != "0", f"{instant} came too late"
