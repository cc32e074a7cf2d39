"""Checkpoints on disk: written under another name, synced, renamed. A kill at any instant leaves the last complete one.

A checkpoint is a Hugging Face directory (float32 weights) with a folder `truestep` in it:

    state.json               step, position in the data, random state
    optimizer.safetensors    by weight name
    random.safetensors       torch's random state
    carried.jsonl            documents taken from the source and not yet done with
    checksums.json           of all files, compared before a run goes on from them
"""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from truestep.checkpoint.checksums import write_checksums
from truestep.files import exact_object, read_exact_lines, sync_directory, sync_tree, write_json_lines
from truestep.policy.policy import Policy
from truestep.policy.save import save_policy
from truestep.policy.tensor_files import read_tensors, write_tensors
from truestep.progress import working
from truestep.randomness import random_state, random_tensors, restore_random
from truestep.rollouts.documents import document_line, read_document
from truestep.types import Rollout

_FOLDER = "truestep"


@dataclass(frozen=True)
class Progress:
    """The state of a run besides its weights."""

    step: int
    queue: dict[str, Any]
    carried: Sequence[Rollout]
    rejected_bytes: int  # the size of rejected.jsonl
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    ledger_bytes: int | None = None  # the size of ledger.jsonl; None in a checkpoint of an older version
    callbacks: dict[str, Any] = field(default_factory=dict)  # what they have to remember
    entropy_bonus: float | None = None  # its weight in the next step; None in a checkpoint of an older version


class CheckpointStore:
    def __init__(self, directory: Path, keep: int):
        self._directory = directory
        self._keep = keep

    def complete(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        return sorted(path for path in self._directory.glob("step-*") if (path / _FOLDER / "state.json").is_file())

    def before(self, checkpoint: Path) -> Path | None:
        """Find the complete checkpoint that a run goes on from if this one is removed."""
        return next((path for path in reversed(self.complete()) if path.name < checkpoint.name), None)

    def latest(self) -> Path | None:
        return next(reversed(self.complete()), None)

    def save(self, policy: Policy, progress: Progress) -> Path:
        """Save a checkpoint. Every rank calls this with its part of the weights; the first one writes."""
        ranks = policy.weights.ranks
        final = self._directory / f"step-{progress.step:08d}"
        if ranks.share(lambda: final in self.complete()):
            return final
        partial = self._directory / f".{final.name}.partial"
        ranks.share(self._prepare)
        size = 4 * sum(math.prod(piece.shape) for piece in policy.weights.pieces.values())
        size += sum(tensor.nbytes for tensor in progress.optimizer.values())
        with working("writing", "bytes written", size):
            save_policy(policy, partial)
            ranks.share(lambda: self._complete(partial, final, progress))
        return final

    def _prepare(self) -> None:
        """Make the directory, and remove what a kill left half-written or half-removed."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in self._directory.glob(".*.partial"):
            shutil.rmtree(leftover)

    def _complete(self, partial: Path, final: Path, progress: Progress) -> None:
        _write_progress(partial / _FOLDER, progress)
        write_checksums(partial)
        sync_tree(partial)
        if final.exists():
            shutil.rmtree(final)  # not complete: a copy that was cut short
        os.replace(partial, final)
        sync_directory(self._directory)
        self._remove_old()

    def _remove_old(self) -> None:
        for old in self.complete()[: -self._keep]:
            # Renamed first: a checkpoint half-removed must not look like one.
            doomed = old.with_name(f".{old.name}.partial")
            os.replace(old, doomed)
            shutil.rmtree(doomed)


def _write_progress(folder: Path, progress: Progress) -> None:
    folder.mkdir(parents=True)
    write_tensors(progress.optimizer, folder / "optimizer.safetensors")
    write_tensors(random_tensors(), folder / "random.safetensors")
    write_json_lines(folder / "carried.jsonl", [document_line(document) for document in progress.carried])
    state = {
        "step": progress.step,
        "queue": progress.queue,
        "rejected_bytes": progress.rejected_bytes,
        "ledger_bytes": progress.ledger_bytes,
        "random": random_state(),
        "entropy_bonus": progress.entropy_bonus,
    }
    if progress.callbacks:
        state["callbacks"] = progress.callbacks
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


def read_progress(checkpoint: Path) -> Progress:
    """Read a checkpoint's progress, and put the random state back."""
    folder = checkpoint / _FOLDER
    state = exact_object((folder / "state.json").read_bytes())
    restore_random(state["random"], read_tensors(folder / "random.safetensors"))
    return Progress(
        step=state["step"],
        queue=state["queue"],
        carried=[read_document(line) for line in read_exact_lines(folder / "carried.jsonl")],
        rejected_bytes=state["rejected_bytes"],
        ledger_bytes=state.get("ledger_bytes"),
        optimizer=read_tensors(folder / "optimizer.safetensors"),
        callbacks=state.get("callbacks", {}),
        entropy_bonus=state.get("entropy_bonus"),
    )
