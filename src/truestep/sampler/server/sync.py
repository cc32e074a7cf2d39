"""Write new weights to a fresh directory, from which paused servers load them."""

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from truestep.policy.policy import Policy
from truestep.policy.save import save_policy

_PREFIX = "truestep-weights-"
_KEPT = 2  # the newest is being read, and a server that was away may still ask for the one before


class WeightsDirectory:
    """A directory on a disk that the servers see too. One run writes it."""

    def __init__(self, path: Path):
        self.path = path.absolute()  # a server stands in another working directory

    def write(self, policy: Policy, version: int, dtype: torch.dtype) -> Path:
        """Write weights under a name that no server has read before: an engine may know a file by its name."""
        name = f"{_PREFIX}{version:012d}-{secrets.token_hex(4)}"
        partial = self.path / f".{name}.partial"
        self.path.mkdir(parents=True, exist_ok=True)
        save_policy(policy, partial, dtype)
        if policy.facts.tied:
            _write_head(policy, partial, dtype)
        os.replace(partial, self.path / name)
        self._remove_old(self.path / name)
        return self.path / name

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


def _write_head(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    """Give a tied head a file of its own.

    A tied tensor is saved once, under its input's name. vLLM on a CPU keeps a copy of the head, packed for its
    products, and packs it anew only where the head has an entry of its own.
    """
    name = "lm_head.weight"
    file = "model-lm-head.safetensors"
    head = policy.head_weight.detach().to(dtype).cpu().contiguous()
    save_file({name: head}, directory / file, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"][name] = file
        index.write_text(json.dumps(listed), encoding="utf-8")
