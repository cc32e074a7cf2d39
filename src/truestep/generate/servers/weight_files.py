"""Write new weights where paused servers get them from: a fresh directory, or the trainer's host memory."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
from pathlib import Path

import torch

from truestep.files.disks import writing
from truestep.generate.servers.host_copies import HostCopies, HostWeights
from truestep.model.policy import Policy
from truestep.model.save import save_adapter, stream_policy
from truestep.model.tensor_stream import TensorStream

_PREFIX = "truestep-weights-"
_LOCK = ".truestep-run-"  # what the names of locks begin with
_DIGITS = 8  # of a run's name: of its machine, and as many of its directory
_KEPT = 2  # the newest is being read, and a server that was away may still ask for the one before


class WeightsDirectory:
    """A directory on a disk that the servers see too. Several runs may write to it: each knows its own weights by their
    names, and holds a lock for as long as it lives. What a run of this machine that is gone has left is removed."""

    def __init__(self, path: Path, *, run: Path | None = None, adapter_alone: bool = False):
        """Take a directory for the run in the directory `run`. `adapter_alone`: the servers have the model, and get the
        policy's adapter."""
        self.path = path.absolute()  # a server stands in another working directory
        self._run = f"{_digest(socket.gethostname())}{_digest(str((run or path).resolve()))}"
        self._adapter_alone = adapter_alone
        self._lock: int | None = None

    def write(self, policy: Policy, version: int, dtype: torch.dtype) -> Path:
        """Write weights under a name that no server has read before: an engine may know a file by its name. Every rank
        calls this with its part of them."""
        ranks = policy.weights.ranks
        name = ranks.share(lambda: self._new_name(version))
        partial = self.path / f".{name}.partial"
        if self._adapter_alone and policy.adapter is not None:
            save_adapter(policy, policy.adapter, partial, dtype)
        else:
            stream_policy(policy, partial, dtype)
        return ranks.share(lambda: self._complete(partial, self.path / name))

    def _new_name(self, version: int) -> str:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                self._lock = _hold(_lock_of(self.path, self._run), anyway=True)
                if self._lock is None:  # another process is this run, as far as its names tell
                    self._run = f"{self._run[:_DIGITS]}{secrets.token_hex(_DIGITS // 2)}"
        self._remove_abandoned()
        return f"{_PREFIX}{version:012d}-{self._run}-{secrets.token_hex(4)}"

    def _remove_abandoned(self) -> None:
        """Remove what runs of this machine have left that were killed. A lock on a network's disk may be seen by one
        machine alone, so other machines' are left."""
        for lock in self.path.glob(f"{_LOCK}{self._run[:_DIGITS]}*"):
            run = lock.name.removeprefix(_LOCK)
            if run != self._run and (held := _hold(lock, anyway=False)) is not None:
                for path in (*self._weights_of(run), *self._partials_of(run)):
                    shutil.rmtree(path, ignore_errors=True)
                lock.unlink(missing_ok=True)
                os.close(held)

    def _weights_of(self, run: str) -> list[Path]:
        return list(self.path.glob(f"{_PREFIX}*-{run}-*"))

    def _partials_of(self, run: str) -> list[Path]:
        return list(self.path.glob(f".{_PREFIX}*-{run}-*.partial"))

    def _complete(self, partial: Path, final: Path) -> Path:
        os.replace(partial, final)
        self._remove_old(final)
        return final

    def _remove_old(self, newest: Path) -> None:
        """Remove old weights, those of an earlier start too, whatever their version: its documents were rolled back."""
        for leftover in self._partials_of(self._run):
            shutil.rmtree(leftover, ignore_errors=True)
        weights = [path for path in self._weights_of(self._run) if path != newest]
        others = sorted(weights, key=lambda path: path.stat().st_mtime)
        for old in others[: len(others) - (_KEPT - 1)]:
            shutil.rmtree(old, ignore_errors=True)

    def clear(self) -> None:
        """Remove all weights of the run; its checkpoints have them."""
        for path in self._weights_of(self._run):
            shutil.rmtree(path, ignore_errors=True)
        if self._lock is not None:
            _lock_of(self.path, self._run).unlink(missing_ok=True)
        self.let_go()
        with contextlib.suppress(OSError):  # what others put there stays
            self.path.rmdir()

    def let_go(self) -> None:
        """Let another start of the run, or any run of this machine, remove the weights."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


def _lock_of(directory: Path, run: str) -> Path:
    return directory / f"{_LOCK}{run}"


def _hold(lock: Path, *, anyway: bool) -> int | None:
    """Hold a run's lock for as long as this process lives, or the file is open; None where another process does. Where
    the file system has no locks it is held `anyway`, or not."""
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError) and anyway:
                return file
            os.close(file)
            return None
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # it was removed meanwhile


class Publisher:
    """Writes new weights where servers take them from. Every rank has one."""

    def __init__(self, directory: WeightsDirectory, dtype: torch.dtype, *, sends: bool = False):
        """Publish in `dtype`. `sends`: to host memory, from which they are sent, and not to the directory."""
        self._directory, self._dtype, self._sends = directory, dtype, sends
        self._stream: TensorStream | None = None  # of the policy, when it was copied last
        self._copies: HostCopies | None = None  # of the first rank

    def write(self, policy: Policy, version: int) -> Path | HostWeights | None:
        """Write weights. Every rank calls this with its part of them. What is sent, the first one has; others: None."""
        return self._copy(policy, version) if self._sends else self._directory.write(policy, version, self._dtype)

    def close(self, finished: bool) -> None:
        """Remove what is on the disk if the run has finished: its checkpoints have it."""
        self._directory.clear() if finished else self._directory.let_go()

    def _copy(self, policy: Policy, version: int) -> HostWeights | None:
        ranks = policy.weights.ranks
        if self._stream is None or self._stream.policy is not policy:
            self._stream = TensorStream(policy, self._dtype)
        copies = self._copies = self._copies or HostCopies(policy.device)
        entries = self._stream.entries
        ranks.share(lambda: copies.begin(entries))
        self._stream.give(copies.add)
        return copies.finish(f"{version:012d}-{secrets.token_hex(4)}") if ranks.first else None
