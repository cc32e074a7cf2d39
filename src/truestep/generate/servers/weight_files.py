"""Writes new weights where servers read them: to a new directory, or to the trainer's host memory."""

import contextlib
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
_DIGITS = 8  # a run's name has this many hex digits for its machine, and this many for its directory
_KEPT = 2  # the newest version, and the one before, which a recovered server may still load


class WeightsDirectory:
    """A directory on a disk that the servers see too. Several runs may write to it: each run's name is part of the
    names of its weights. What a killed run has left is removed when the run is started again."""

    def __init__(self, path: Path, *, run: Path | None = None, adapter_alone: bool = False):
        """`run`: the run's own directory; its name is derived from it. `adapter_alone`: write the adapter alone, for
        servers that have the base model."""
        self.path = path.absolute()  # a server has another working directory
        self._run = f"{_digest(socket.gethostname())}{_digest(str((run or path).resolve()))}"
        self._adapter_alone = adapter_alone

    def write(self, policy: Policy, version: int, dtype: torch.dtype) -> Path:
        """Write weights under a new name, since a server may cache files by their names. All ranks call this, each with
        its shard of the weights."""
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
        return f"{_PREFIX}{version:012d}-{self._run}-{secrets.token_hex(4)}"

    def _weights_of(self, run: str) -> list[Path]:
        return list(self.path.glob(f"{_PREFIX}*-{run}-*"))

    def _partials_of(self, run: str) -> list[Path]:
        return list(self.path.glob(f".{_PREFIX}*-{run}-*.partial"))

    def _complete(self, partial: Path, final: Path) -> Path:
        os.replace(partial, final)
        self._remove_old(final)
        return final

    def _remove_old(self, newest: Path) -> None:
        """Remove all but the newest weights by time, not by version: after a restart, versions may go back."""
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
        with contextlib.suppress(OSError):  # the directory has other files
            self.path.rmdir()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


class Publisher:
    """Writes new weights where servers take them from. Every rank has one."""

    def __init__(self, directory: WeightsDirectory, dtype: torch.dtype, *, sends: bool = False):
        """Publish in `dtype`. `sends`: write to host memory, for sending by NCCL, and not to the directory."""
        self._directory, self._dtype, self._sends = directory, dtype, sends
        self._stream: TensorStream | None = None  # stream of the policy that was copied last
        self._copies: HostCopies | None = None  # filled on the first rank

    def write(self, policy: Policy, version: int) -> Path | HostWeights | None:
        """Write weights. All ranks call this, each with its shard. In host memory only the first rank has them; the
        other ranks get None."""
        return self._copy(policy, version) if self._sends else self._directory.write(policy, version, self._dtype)

    def close(self, finished: bool) -> None:
        """Remove the weights on disk if the run has finished, since its checkpoints have them."""
        if finished:
            self._directory.clear()

    def _copy(self, policy: Policy, version: int) -> HostWeights | None:
        ranks = policy.weights.ranks
        if self._stream is None or self._stream.policy is not policy:
            self._stream = TensorStream(policy, self._dtype)
        copies = self._copies = self._copies or HostCopies(policy.device)
        entries = self._stream.entries
        ranks.share(lambda: copies.begin(entries))
        self._stream.give(copies.add)
        return copies.finish(f"{version:012d}-{secrets.token_hex(4)}") if ranks.first else None
