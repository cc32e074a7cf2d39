"""A server's side of weights in memory: it maps them, checks every tensor beside its work, and then loads them."""

import fcntl
import json
import math
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from truestep.transfer.checksum import checksum
from truestep.transfer.memory import TOKEN

UNDER_WAY, CHECKED, FAILED = ".checking", ".checked", ".failed"  # how the names of marks end
NOT_TAKEN = "the model did not take"  # in an error that would come again
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], Collection[str] | None]


class TransferError(Exception):
    """Weights that cannot be taken, and why."""


class Receiver:
    """Takes weights from one trainer's memory."""

    def __init__(self) -> None:
        self._mapped: dict[Path, tuple[int, int, mmap.mmap]] = {}  # mapping them anew costs more than a copy
        self._staged: _Staged | None = None

    def connect(self, directory: str, token: str) -> None:
        """Show that the trainer's memory is seen here."""
        self.release()
        self._mapped.clear()
        try:
            found = (Path(directory) / TOKEN).read_text(encoding="utf-8")
        except OSError as error:
            raise TransferError(f"{directory} cannot be read here: {error.strerror}") from error
        if found != token:
            raise TransferError(f"{directory} is here the memory of another machine or run")

    def stage(self, index: str, marks: str) -> None:
        """Begin to check weights, and return. A mark in the directory `marks` says how far it is."""
        self.release()
        self._staged = _Staged(Path(index), Path(marks), self._map)
        self._staged.begin()

    def load(self, index: str, load: Load) -> set[str]:
        """Give the staged weights to `load`; return the names of their tensors."""
        staged = self._staged
        if staged is None or str(staged.index) != index:
            raise TransferError(f"{index} was not staged: this is another process than the one that was asked to")
        try:
            return staged.give(load)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of what is staged."""
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def _map(self, path: Path, file: int) -> mmap.mmap:
        facts = os.fstat(file)
        known = self._mapped.get(path)
        if known is None or known[:2] != (facts.st_ino, facts.st_size):
            # Private: whoever writes into a tensor changes no other server's.
            known = (facts.st_ino, facts.st_size, mmap.mmap(file, facts.st_size, access=mmap.ACCESS_COPY))
            self._mapped[path] = known
        return known[2]


class _Staged:
    """Weights that are being checked, or are checked and wait to be loaded."""

    def __init__(self, index: Path, marks: Path, map_file: Callable[[Path, int], mmap.mmap]):
        self.index = index
        self._mark = marks / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._error: BaseException | None = None
        self._ended = False
        slot = index.parent / _read(index)["slot"]
        self._file = os.open(slot, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            described = _read(index)  # what is read now stays: its file was free, and is locked
            self._tensors = dict(_tensors(described["tensors"], map_file(slot, self._file)))
        except BlockingIOError as error:
            os.close(self._file)
            raise TransferError(f"{index} is gone: other weights are being written in its place") from error
        except BaseException:
            self._unlock()
            raise
        self._sums = {name: entry["checksum"] for name, entry in described["tensors"].items()}
        self._thread = threading.Thread(target=self._check, name="check weights", daemon=True)

    def begin(self) -> None:
        self._mark.with_suffix(UNDER_WAY).touch()
        self._thread.start()

    def _check(self) -> None:
        try:
            for name, tensor in self._tensors.items():
                if self._ended:
                    return
                if (found := checksum(tensor)) != self._sums[name]:
                    raise TransferError(f"{name} arrived with checksum {found}, and {self._sums[name]} was sent")
        except BaseException as error:
            self._error = error
        text = "" if self._error is None else str(self._error) or repr(self._error)
        try:
            under_way = self._mark.with_suffix(UNDER_WAY)
            under_way.write_text(text, encoding="utf-8")
            under_way.rename(self._mark.with_suffix(CHECKED if self._error is None else FAILED))
        except OSError:
            pass  # the trainer waits no longer

    def give(self, load: Load) -> set[str]:
        self._thread.join()
        if self._error is not None:
            raise TransferError(str(self._error)) from self._error
        given: set[str] = set()

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._tensors.items():
                given.add(name)
                yield name, tensor

        load(each())
        if missing := self._tensors.keys() - given:
            raise TransferError(f"{NOT_TAKEN} {len(missing)} tensors of {len(self._tensors)}, such as {min(missing)}")
        return given

    def close(self) -> None:
        self._ended = True
        if self._thread.ident is not None:
            self._thread.join()
        self._tensors.clear()
        self._unlock()

    def _unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # a mapping holds on to the file that it was made of, and to its locks
        os.close(self._file)


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
