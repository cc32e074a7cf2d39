"""Memory that a trainer writes new weights to: files of a file system in memory, each with an index beside it.

A file is written again and again, since new pages of memory take longer than the copy. Who reads a file holds a shared
lock on it, and who writes it an exclusive one: what is being read is left alone, and another file is taken. The index
is written last, and removed before its file is written again. Locks end with their process.
"""

import fcntl
import json
import mmap
import os
import secrets
import shutil
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.errors import TruestepError
from truestep.transfer.checksum import ROW, Checksum, bytes_of

INDEX = ".weights.json"  # how an index's name ends
TOKEN = "token"  # a file by which a server shows that it sees this memory
_OWNER = "owner"  # a file that a living trainer holds a lock on
_PREFIX = "truestep-"
_ALIGNED = 64  # bytes
_MOST_THREADS = 4  # that copy: other cores have other work
_STRETCH = 1 << 22  # bytes of a tensor that a thread copies at a time


class MemoryFullError(TruestepError):
    """There is no room for the weights in memory."""


class SharedMemory:
    """A directory of memory that one process writes and others of the same machine read."""

    def __init__(self, parent: Path, cores: int = 1):
        """Make a directory in `parent`, for a process that may use so many cores. What processes that are gone have
        left there is removed."""
        _remove_abandoned(parent)
        self.path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        fresh = self.path.with_name(f".{self.path.name}")  # it has its name once it is locked
        fresh.mkdir(mode=0o700)
        self._owner = _locked(fresh / _OWNER, fcntl.LOCK_EX)
        fresh.rename(self.path)
        self.token = secrets.token_hex(16)
        (self.path / TOKEN).write_text(self.token, encoding="utf-8")
        self._slots: list[_Slot] = []
        self._current: _Slot | None = None
        self._writing: _Writing | None = None
        self.num_threads = min(_MOST_THREADS, cores)
        self._threads = ThreadPoolExecutor(self.num_threads, "copy weights")

    def begin(self, name: str, size: int) -> None:
        """Begin to write weights that take `size` bytes, the sum of their `room_of`."""
        self.abandon()
        slot = next((slot for slot in self._slots if slot is not self._current and slot.lock()), None)
        if slot is None:
            try:
                slot = _Slot(self.path / f"slot-{len(self._slots)}")
            except OSError as error:
                raise MemoryFullError(f"{self.path} has no room for another file: {error.strerror}") from error
            self._slots.append(slot)
        self._writing = _Writing(slot, name, self._threads)
        try:
            slot.make_room(size)
        except BaseException:
            self.abandon()
            raise

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors behind those that are there, and add up their checksums: some still when this returns. They must
        not change before `finish`, or `abandon`."""
        assert self._writing is not None
        self._writing.add({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})

    def finish(self) -> Path:
        """Show the weights to readers; give the path of their index."""
        assert self._writing is not None
        writing = self._writing
        writing.wait()
        self._writing = None
        index = self.path / f"{writing.name}{INDEX}"
        entry = {"slot": writing.slot.path.name, "tensors": writing.tensors}
        partial = index.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(entry), encoding="utf-8")
        except OSError as error:
            raise MemoryFullError(f"{self.path} has no room for the index of weights: {error.strerror}") from error
        finally:
            writing.slot.unlock()
        os.replace(partial, index)
        self._current, writing.slot.index = writing.slot, index
        return index

    def abandon(self) -> None:
        """Give up what was begun."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.stop()
            writing.slot.unlock()

    def close(self) -> None:
        """Remove everything. What is being read stays until its readers are done."""
        self.abandon()
        self._threads.shutdown()
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._owner)


class _Slot:
    """A file of memory, mapped."""

    def __init__(self, path: Path):
        self.path = path
        self.index: Path | None = None  # of the weights that are in it
        self._file = _locked(path, fcntl.LOCK_EX)
        self._size = 0
        self.content: Any = np.empty(0, dtype=np.uint8)

    def lock(self) -> bool:
        """Take it, unless somebody reads it. Its weights are gone then."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self.index is not None:
            self.index.unlink(missing_ok=True)
            self.index = None
        return True

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def make_room(self, size: int) -> None:
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._file, 0, size)  # a page that is not there when it is written ends the process
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise MemoryFullError(
                f"{self.path.parent.parent} has no room for {size / 1e9:.2f} GB of weights: {error.strerror}"
            ) from error
        self.content = np.frombuffer(mmap.mmap(self._file, size), dtype=np.uint8)
        self._size = size


class _Writing:
    """Weights that are being written: some are copied while the next ones are made."""

    def __init__(self, slot: _Slot, name: str, threads: ThreadPoolExecutor):
        self.slot, self.name, self._threads, self._end = slot, name, threads, 0
        self.tensors: dict[str, dict[str, Any]] = {}
        self._under_way: deque[list[tuple[str, list[Future[Checksum]]]]] = deque()  # what was added at a time

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        begins = []
        for tensor in tensors.values():
            begins.append(self._end)
            self._end += room_of(tensor.nbytes)
        if self._end > len(self.slot.content):
            self.slot.make_room(self._end + self._end // 8)
        self._under_way.append([])
        for begin, (name, tensor) in zip(begins, tensors.items(), strict=True):
            content = bytes_of(tensor)
            room = self.slot.content[begin : begin + len(content)]
            parts = [self._threads.submit(_copy, content, room, at) for at in range(0, len(content), _STRETCH)]
            self._under_way[-1].append((name, parts))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "begin": begin}
        self.wait(1)

    def wait(self, most: int = 0) -> None:
        """Wait until no more than so many additions are being copied, and note the checksums of the others."""
        while len(self._under_way) > most:
            for name, parts in self._under_way[0]:
                found = Checksum()
                for part in parts:
                    found.join(part.result())
                self.tensors[name]["checksum"] = str(found)
            self._under_way.popleft()

    def stop(self) -> None:
        """Leave nobody who still writes."""
        left = [part for added in self._under_way for _, parts in added for part in parts]
        for part in left:
            part.cancel()
        wait(left)


def room_of(nbytes: int) -> int:
    """Give the bytes that a tensor takes in a file."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _copy(content: Any, room: Any, start: int) -> Checksum:
    """Copy a stretch of a tensor, and compute its part of the checksum."""
    found, stretch = Checksum(start // ROW), slice(start, start + _STRETCH)
    found.add(content[stretch], room[stretch])
    return found


def _locked(path: Path, kind: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, kind)
    return file


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that are gone: their weights would take memory until the machine stops."""
    for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            file = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, or removed by now
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(file)
