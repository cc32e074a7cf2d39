"""Runs that die in the middle of a save, or of a publication: the part of tests that ranks run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks.cases import train_all
from truestep.files import tensors as tensor_files
from truestep.generate.servers.host_copies import HostCopies
from truestep.generate.servers.servers import Servers
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.run.checkpoint import store
from truestep.run.checkpoint.staging import Staged
from truestep.run.checkpoint.store import CheckpointStore
from truestep.weights.protocol import Weights

MOMENTS = ("staging", "writing", "written", "completing", "manifest", "renamed", "removing")
OF_FIRST = ("completing", "manifest", "renamed", "removing")  # what the first rank alone does


_died = Path()  # a file that says so


def _die() -> None:
    _died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def _die_too() -> None:
    """End with the rank that is killed, as its machine would; alone, a rank waits for a while."""
    while not _died.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, die: Callable[[], None]) -> None:
    honest = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        die()
        return honest(*arguments, **options)

    setattr(owner, name, called)


def _after(owner: Any, name: str, die: Callable[[], None]) -> None:
    honest = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        result = honest(*arguments, **options)
        die()
        return result

    setattr(owner, name, called)


def _in_staging(die: Callable[[], None]) -> None:
    honest = Staged._pieces

    def pieces(self: Staged) -> Any:
        for number, piece in enumerate(honest(self)):
            if number == len(self.parts) // 2:
                die()
            yield piece

    Staged._pieces = pieces  # type: ignore[method-assign]


def _in_writing(die: Callable[[], None]) -> None:
    honest = CheckpointStore.write_part

    def write_part(self: CheckpointStore, *arguments: Any) -> Any:
        written, piece = tensor_files._Written, tensor_files._PIECE
        write, calls = written._write, 0

        def some(one: Any, content: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                die()
            return write(one, content)

        written._write, tensor_files._PIECE = some, tensor_files._PAGE  # type: ignore[method-assign]
        try:
            return honest(self, *arguments)
        finally:
            written._write, tensor_files._PIECE = write, piece  # type: ignore[method-assign]

    CheckpointStore.write_part = write_part  # type: ignore[method-assign]


def die_at(moment: str, number: int) -> None:
    """Have this process killed when it comes to a moment of a save for the so-many-th time."""
    seen = 0

    def die() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            _die()

    {
        "staging": lambda: _in_staging(die),
        "writing": lambda: _in_writing(die),
        "written": lambda: _after(CheckpointStore, "write_part", die),
        "completing": lambda: _before(CheckpointStore, "write_rest", die),
        "manifest": lambda: _after(store, "write_checksums", die),
        "renamed": lambda: _before(CheckpointStore, "_remove_old", die),
        "removing": lambda: _before(store.shutil, "rmtree", die),
        "gathering": lambda: _before(Weights, "on_first", die),
        "adding": lambda: _before(HostCopies, "add", die),
        "shown": lambda: _after(HostCopies, "finish", die),
        "sent": lambda: _after(Servers, "send", die),
        "named": lambda: _before(WeightsDirectory, "_complete", die),
    }[moment]()


def train_until_killed(config: dict[str, Any], moment: str, rank: int, number: int) -> None:
    global _died
    _died = Path(config["checkpoint"]["directory"]).with_suffix(".died")
    _died.unlink(missing_ok=True)
    if int(os.environ["RANK"]) == rank:
        die_at(moment, number)
    else:
        threading.Thread(target=_die_too, daemon=True).start()
    train_all([config])
