"""Checkpoints as tests look at them: whole tensors by name, and saves that are waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from truestep.model.policy import Policy
from truestep.run.checkpoint.saves import Saves
from truestep.run.checkpoint.store import CheckpointStore, Progress
from truestep.step.update.optimizer import optimizer_parts
from truestep.weights.protocol import Weights
from truestep.weights.tensor_parts import STATE, WEIGHT, Box, StoredTensors, TensorPart

Tensors = dict[str, torch.Tensor]


def read_all(checkpoint: Path, prefix: str) -> Tensors:
    stored = StoredTensors(checkpoint)
    return {name: stored.read_whole(key) for name, key in stored.named(prefix).items()}


def read_weights(checkpoint: Path) -> Tensors:
    """The weights by the names of the model's parameters."""
    return read_all(checkpoint, WEIGHT)


def read_states(checkpoint: Path) -> Tensors:
    """The optimizer's state as NAME.KIND."""
    return read_all(checkpoint, STATE)


def latest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def save(store: CheckpointStore, policy: Policy, progress: Progress, state: Iterable[TensorPart] = ()) -> Path:
    """Save and wait until the checkpoint is complete."""
    saves = Saves(store, policy.weights.ranks)
    complete = saves.begin(policy, state, progress, 0) or saves.finish()
    assert complete is not None
    return complete.path


def joined(parts: Iterable[TensorPart]) -> Tensors:
    """Whole tensors of the parts of all ranks, each number of which is there once."""
    whole: Tensors = {}
    filled: dict[str, int] = {}
    for part in parts:
        tensor = whole.setdefault(part.key, torch.zeros(part.whole, dtype=part.values.dtype))
        place = tuple(slice(start, start + size) for start, size in zip(part.start, part.values.shape, strict=True))
        tensor[place] = part.values
        if part.whole:
            filled[part.key] = filled.get(part.key, 0) + part.values.numel()
    assert all(whole[key].numel() == count for key, count in filled.items())
    return whole


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> Tensors:
    """The optimizer's whole state on the first rank, as NAME.KIND."""
    own = [TensorPart(p.key, p.whole, p.start, p.values.clone()) for p in optimizer_parts(optimizer, weights)]
    gathered = weights.ranks.gather(own)
    if not weights.ranks.first:
        return {}
    return {key.removeprefix(STATE): value for key, value in joined(part for rank in gathered for part in rank).items()}


class Held:
    """Whole tensors of an optimizer's state in memory, as a checkpoint gives them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = {STATE + name: value for name, value in tensors.items()}

    def keys(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, key: str) -> torch.Size:
        return self._tensors[key].shape

    def read(self, key: str, box: Box) -> torch.Tensor:
        whole = Box((0,) * len(self.shape(key)), tuple(self.shape(key)))
        return self._tensors[key][box.inside(whole)].clone()
