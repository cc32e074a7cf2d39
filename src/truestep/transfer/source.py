"""Weights that lie in memory, as who reads them finds them: kept from being overwritten as long as they are read."""

import fcntl
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

MapFile = Callable[[Path, int], mmap.mmap]


class TransferError(Exception):
    """Weights that cannot be taken, and why."""


class Opened:
    """Weights of an index, under a lock of their file."""

    def __init__(self, index: Path, map_file: MapFile, flags: int = os.O_RDONLY):
        slot = index.parent / _read(index)["slot"]
        self._file = os.open(slot, flags | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            described = _read(index)  # what is read now stays: its file was free, and is locked
            self.tensors = dict(_tensors(described["tensors"], map_file(slot, self._file)))
        except BlockingIOError as error:
            os.close(self._file)
            raise TransferError(f"{index} is gone: other weights are being written in its place") from error
        except BaseException:
            self._unlock()
            raise
        self.checksums = {name: entry["checksum"] for name, entry in described["tensors"].items()}

    def close(self) -> None:
        self.tensors.clear()
        self._unlock()

    def _unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # a mapping holds on to the file that it was made of, and to its locks
        os.close(self._file)


class Files:
    """Files of memory, each mapped once: mapping them anew costs more than a copy."""

    def __init__(self, access: int = mmap.ACCESS_COPY, then: Callable[[mmap.mmap], None] = lambda mapped: None):
        """Map files by `access`, and call `then` with each that is mapped. Private copies by default: whoever writes
        into a tensor changes no other reader's."""
        self._access, self._then = access, then
        self._mapped: dict[Path, tuple[int, int, mmap.mmap]] = {}

    def __call__(self, path: Path, file: int) -> mmap.mmap:
        facts = os.fstat(file)
        known = self._mapped.get(path)
        if known is None or known[:2] != (facts.st_ino, facts.st_size):
            known = (facts.st_ino, facts.st_size, mmap.mmap(file, facts.st_size, access=self._access))
            self._then(known[2])
            self._mapped[path] = known
        return known[2]

    def clear(self) -> None:
        self._mapped.clear()


def weights_of(index: Path, files: Files) -> Opened:
    """Read weights that this process may write to as well, and does not."""
    return Opened(index, files, os.O_RDWR)


def _read(index: Path) -> Any:
    try:
        return json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise TransferError(f"{index} cannot be read: {error.strerror}") from error


def _tensors(entries: dict[str, Any], content: mmap.mmap) -> Iterable[tuple[str, torch.Tensor]]:
    for name, entry in entries.items():
        dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
        if math.prod(shape):
            flat = torch.frombuffer(content, dtype=dtype, count=math.prod(shape), offset=entry["begin"])
            yield name, flat.view(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype)
