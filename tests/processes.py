"""Processes by what stands in their commands: a number of an isolated reward's process means nothing outside."""

from __future__ import annotations

import contextlib
from pathlib import Path


def mentioning(text: object) -> list[int]:
    """Find the processes that have not ended and whose command has this text in it."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            ended = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
            if entry.name.isdigit() and not ended and str(text).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
