"""Real small disks: a tmpfs that one process alone sees, in namespaces of its own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from truestep.commands.cli import main
from truestep.ranks.forks import fork_context

_NEW_NAMESPACES = 0x10000000 | 0x00020000  # of users, and of mounts
_REMOUNT, READ_ONLY = 32, 1  # flags of mount
_libc = ctypes.CDLL(None, use_errno=True)


def _system(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _mount(place: Path, size: int, flags: int = 0) -> None:
    _system("mount", b"tmpfs", os.fsencode(place), b"tmpfs", flags, f"size={size}".encode())


def _leave() -> None:
    """Go to namespaces of users and mounts in which this process may mount."""
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    _system("unshare", _NEW_NAMESPACES)
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)


def _run(place: str, rounds: Sequence[Sequence[Any]], results: str) -> None:
    torch.set_num_threads(1)
    _leave()
    found: list[dict[str, Any]] = []
    for number, (size, arguments, *flags) in enumerate(rounds):
        _mount(Path(place), size, (_REMOUNT if number else 0) | sum(flags))
        console = Path(results).with_suffix(f".{number}")
        written = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        code: Any = 0
        try:
            main(list(arguments), prog_name="truestep")
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 70
        tree = {
            str(file.relative_to(place)): file.read_text("utf-8", errors="replace") if file.suffix == ".jsonl" else ""
            for file in sorted(Path(place).rglob("*"))
            if file.is_file()
        }
        found.append({"code": code or 0, "said": console.read_text("utf-8", errors="replace"), "files": tree})
        Path(results).write_text(json.dumps(found), encoding="utf-8")


def on_disk(place: Path, rounds: Sequence[Sequence[Any]], results: Path) -> list[dict[str, Any]]:
    """Run commands one after another with a tmpfs at `place`, which has so many bytes in each round (a third number:
    flags of mount). Give the exit code of each, what it said, and the files that were there after it."""
    place.mkdir(parents=True, exist_ok=True)
    process = fork_context().Process(target=_run, args=(str(place), [list(each) for each in rounds], str(results)))
    process.start()
    process.join(240)
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    found: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    assert len(found) == len(rounds), f"it ended with {process.exitcode} after {len(found)} commands: {found[-1:]}"
    return found


def can_mount() -> bool:
    """Tell whether this machine lets a process mount a disk of its own."""
    process = fork_context().Process(target=_leave)
    process.start()
    process.join(60)
    return process.exitcode == 0
