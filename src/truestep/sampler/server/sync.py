"""Write new weights where paused servers load them from: in memory that they share, or in a fresh directory."""

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from truestep.policy.policy import Policy
from truestep.policy.save import save_adapter, stream_policy
from truestep.policy.tensor_stream import TensorStream
from truestep.sampler.server.protocol import InferenceServer
from truestep.transfer.memory import MemoryFullError, SharedMemory, room_of

_PREFIX = "truestep-weights-"
_KEPT = 2  # the newest is being read, and a server that was away may still ask for the one before


@dataclass(frozen=True)
class Wanted:
    """The kinds of places that servers take weights from."""

    disk: bool = True
    memory: bool = False


@dataclass(frozen=True)
class Places:
    """The places of new weights."""

    disk: Path | None = None  # a directory
    memory: Path | None = None  # an index

    def of(self, server: InferenceServer) -> Path:
        """Give the place that a server takes them from."""
        place = self.memory if server.in_memory and self.memory is not None else self.disk
        assert place is not None, "weights are written wherever a server takes them from"
        return place


class WeightsDirectory:
    """A directory on a disk that the servers see too. One run writes it."""

    def __init__(self, path: Path, *, adapter_alone: bool = False):
        """Take a directory. `adapter_alone`: the servers have the model, and get the policy's adapter."""
        self.path = path.absolute()  # a server stands in another working directory
        self._adapter_alone = adapter_alone

    def write(self, policy: Policy, version: int, dtype: torch.dtype) -> Path:
        """Write weights under a name that no server has read before: an engine may know a file by its name. Every rank
        calls this with its part of them."""
        ranks = policy.weights.ranks
        name = ranks.share(lambda: f"{_PREFIX}{version:012d}-{secrets.token_hex(4)}")
        partial = self.path / f".{name}.partial"
        if self._adapter_alone and policy.adapter is not None:
            save_adapter(policy, policy.adapter, partial, dtype)
        else:
            stream_policy(policy, partial, dtype)
        return ranks.share(lambda: self._complete(partial, self.path / name))

    def _complete(self, partial: Path, final: Path) -> Path:
        os.replace(partial, final)
        self._remove_old(final)
        return final

    def _remove_old(self, newest: Path) -> None:
        """Remove old weights, those of an earlier start too, whatever their version: its documents were rolled back."""
        for leftover in self.path.glob(f".{_PREFIX}*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        weights = [path for path in self.path.glob(f"{_PREFIX}*") if path != newest]
        others = sorted(weights, key=lambda path: path.stat().st_mtime)
        for old in others[: len(others) - (_KEPT - 1)]:
            shutil.rmtree(old, ignore_errors=True)

    def clear(self) -> None:
        """Remove all weights; the run's checkpoints have them."""
        for path in self.path.glob(f"{_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # what others put there stays
            self.path.rmdir()


class Publisher:
    """Writes new weights to all places that servers take them from. Every rank has one."""

    def __init__(self, directory: WeightsDirectory, dtype: torch.dtype, *, memory_alone: bool = False):
        """Publish in `dtype`. `memory_alone`: weights for which memory has no room are an error."""
        self._directory, self._dtype, self.memory_alone = directory, dtype, memory_alone
        self._stream: TensorStream | None = None  # of the policy, when it was written to memory

    def write(self, policy: Policy, version: int, wanted: Wanted, memory: SharedMemory | None) -> Places:
        """Write weights. Every rank calls this with its part of them; the first one has the memory."""
        place, disk = None, wanted.disk
        if wanted.memory:
            try:
                place = self._write_in_memory(policy, version, memory)
            except MemoryFullError:
                if self.memory_alone:
                    raise
                disk = True
        return Places(self._directory.write(policy, version, self._dtype) if disk else None, place)

    def clear(self) -> None:
        """Remove what is on the disk; the run's checkpoints have it."""
        self._directory.clear()

    def _write_in_memory(self, policy: Policy, version: int, memory: SharedMemory | None) -> Path:
        ranks = policy.weights.ranks

        def of_first() -> SharedMemory:
            assert memory is not None
            return memory

        if self._stream is None or self._stream.policy is not policy:
            self._stream = TensorStream(policy, self._dtype)
        stream, name = self._stream, f"{version:012d}-{secrets.token_hex(4)}"
        ranks.share(lambda: of_first().begin(name, sum(room_of(entry.nbytes) for entry in stream.entries)))
        stream.give(lambda tensors: of_first().add(tensors))
        return ranks.share(lambda: of_first().finish())
