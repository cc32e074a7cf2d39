"""Write new weights to a fresh directory, from which paused servers load them."""

import contextlib
import os
import secrets
import shutil
from pathlib import Path

import torch

from truestep.policy.policy import Policy
from truestep.policy.save import save_adapter, stream_policy

_PREFIX = "truestep-weights-"
_KEPT = 2  # the newest is being read, and a server that was away may still ask for the one before


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
