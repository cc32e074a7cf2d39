"""Checkpoints on disk: written under another name, synced, then renamed. A kill at any time leaves the last checkpoint
complete.

A checkpoint is a directory with the files of a Hugging Face model without its weights (if only an adapter is trained, a
directory in peft's format), and a folder `truestep`:

    part-00003.safetensors   rank 3's part of the weights and of the optimizer's state
    tensors.json             the place of each part of each tensor
    random-00003.json        rank 3's random state
    carried.jsonl            documents taken from the source and not finished yet
    state.json               step, position in the data
    checksums.json           checksums of all files, written last and compared before a run resumes
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from truestep.files.disks import writing
from truestep.files.tensors import write_image
from truestep.files.whole import exact_object, json_line, read_exact_lines, sync_directory, sync_tree, write_whole
from truestep.metrics.best import Best, step_by_name
from truestep.model import towers
from truestep.model.adapter import Adapter, is_adapters
from truestep.model.adapter_files import write_adapter
from truestep.model.policy import Policy
from truestep.model.save import model_files, saved_buffers, write_weights
from truestep.process.progress import working
from truestep.process.randomness import restore_encoded
from truestep.rollouts.documents import document_line, read_document
from truestep.run.checkpoint.checksums import MANIFEST, RunningChecksums, write_checksums
from truestep.run.checkpoint.staging import Staged
from truestep.types import Rollout
from truestep.weights.tensor_parts import (
    BUFFER,
    FOLDER,
    WEIGHT,
    StoredTensors,
    TensorPart,
    describe_parts,
    part_name,
    weight_parts,
    write_index,
)

DAMAGED = "damaged-"  # the prefix of a damaged checkpoint's name


@dataclass(frozen=True)
class Progress:
    """The state of a run in a checkpoint, besides its weights and its optimizer."""

    step: int
    queue: dict[str, Any]
    carried: Sequence[Rollout]
    rejected_bytes: int  # the size of rejected.jsonl
    ledger_bytes: int | None = None  # the size of ledger.jsonl
    callbacks: dict[str, Any] = field(default_factory=dict)  # the states of callbacks and the learning rate factor
    entropy_bonus: float | None = None  # the weight in the next step


@dataclass(frozen=True)
class ModelFiles:
    """The files of a Hugging Face directory in a checkpoint."""

    model: Any  # the model or this rank's part of it, which has the names of weights in Hugging Face files
    weights: Sequence[str]  # the names of the whole model's weights, or of the adapter's
    buffers: Mapping[str, torch.Tensor]
    others: Mapping[str, bytes]
    adapter: tuple[Adapter, Path] | None = None  # saved without its base model; the path is the base model's
    with_weights: bool = False  # write the files of weights too

    @staticmethod
    def of(policy: Policy) -> "ModelFiles":
        if policy.adapter is not None:
            names = [name for name in policy.weights.pieces if is_adapters(name)]
            return ModelFiles(policy.model, names, {}, {}, (policy.adapter, policy.path))
        buffers = {**policy.buffers, **saved_buffers(policy.model)}
        others = model_files(policy.model, policy.companions) | towers.record(policy.model)
        return ModelFiles(policy.model, list(policy.weights.pieces), buffers, others)

    def write(self, checkpoint: Path) -> None:
        for name, content in self.others.items():
            (checkpoint / name).write_bytes(content)
        stored = StoredTensors(checkpoint)

        def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return {name: stored.read_whole(WEIGHT + name).float() for name in names}

        if self.adapter is not None:
            adapter, base = self.adapter
            write_adapter(checkpoint, *towers.whole_adapter(self.model, adapter, read(self.weights)), base)
        elif self.with_weights:
            buffers = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}
            write_weights(self.model, self.weights, read, buffers, checkpoint)


@dataclass(frozen=True)
class Written:
    """The files that a rank wrote: their entries in the manifest, and the places of tensor parts in them."""

    files: Mapping[str, Mapping[str, Any]]
    tensors: bytes  # from `describe_parts`
    problem: str | None = None  # why a copy in memory is missing
    missing: bool = False  # no copy in memory was made


def step_of(checkpoint: Path) -> int:
    """Return the step of a complete checkpoint."""
    step = step_by_name(checkpoint)
    assert step is not None, checkpoint
    return step


class CheckpointStore:
    """The checkpoints of a run, complete or being written."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        best: Best | None = None,
        mark: str = "",
        fence: Callable[[], None] = lambda: None,
    ):
        self._directory = directory
        self._keep = keep
        self._best = best or Best()
        # In the names of this start's incomplete checkpoints: a rank of another start cannot write into them.
        self._mark = mark and f"-{mark}"
        self._under_way: Path | None = None  # the checkpoint that is written, or was written last
        self._fence = fence  # raises if another process writes the run

    def complete(self) -> list[Path]:
        """List the complete checkpoints, oldest first. Directories with other names, such as copies, do not count."""
        found = self._directory.glob("step-*")
        return sorted(path for path in found if step_by_name(path) is not None and _is_complete(path))

    def newest(self) -> list[Path]:
        """List the newest complete checkpoints, as many as the run keeps. An older checkpoint is there only because it
        is the best."""
        return self.complete()[-self._keep :]

    def before(self, checkpoint: Path) -> Path | None:
        """Return the newest complete checkpoint that is older than this one."""
        return next((path for path in reversed(self.complete()) if path.name < checkpoint.name), None)

    def latest(self) -> Path | None:
        return next(reversed(self.complete()), None)

    @property
    def keeps_best(self) -> bool:
        return self._best.metric is not None

    def best(self) -> Path | None:
        """Return the checkpoint whose evaluation was best; None if the run keeps none."""
        return self._best.checkpoint(self.complete())

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Record an evaluation, whose value decides which checkpoint is the best."""
        self._best.add(line)

    def evaluated_before(self, values: Mapping[int, float]) -> None:
        """Record the values of earlier evaluations, by step."""
        self._best.values.update(values)

    def wants(self, step: int) -> bool:
        """Return whether a checkpoint after this step would be the best one."""
        under_way = [] if self._under_way is None else [self._under_way]
        return self._best.is_best(step, [*self.complete(), *under_way])

    def final(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        return self._directory / f".step-{step:08d}{self._mark}.partial"

    def put_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint, so that no run resumes from it but its files are kept."""
        return checkpoint.rename(checkpoint.with_name(DAMAGED + checkpoint.name))

    def prepare(self, step: int) -> None:
        """Make the directory of a new checkpoint. Remove checkpoints that a kill left half-written or half-removed."""
        self._under_way = self.final(step)
        with self._fenced(), writing(self.partial(step)):
            self._directory.mkdir(parents=True, exist_ok=True)
            for leftover in self._directory.glob(".*.partial"):
                self._fence()
                shutil.rmtree(leftover)
            (self.partial(step) / FOLDER).mkdir(parents=True)

    def write_part(self, step: int, rank: int, staged: Staged, random: dict[str, Any]) -> Written:
        """Write a rank's part of a checkpoint and its random state."""
        folder = self.partial(step) / FOLDER
        file, checksums = folder / part_name(rank), RunningChecksums()
        size = sum(part.values.nbytes for part in staged.parts)
        with self._fenced(), working("writing a checkpoint", "bytes written", size):
            write_image(staged.image, file, watch=checksums.add)
            with writing(folder / random_name(rank)):
                (folder / random_name(rank)).write_text(json.dumps(random), encoding="utf-8")
        return Written({f"{FOLDER}/{file.name}": checksums.entry()}, describe_parts(file, staged.parts))

    def written(self, parts: Sequence[Written]) -> bool:
        return True

    def stands(self, step: int) -> None: ...

    def not_written(self, error: Exception) -> Written:
        raise error

    def write_rest(self, progress: Progress, model: "ModelFiles", parts: Sequence[Written]) -> Path:
        """Write the other files of a checkpoint, the manifest last. Then rename the checkpoint, and remove old ones."""
        partial, final = self.partial(progress.step), self.final(progress.step)
        with self._fenced(), writing(partial):
            write_index(partial / FOLDER, [part.tensors for part in parts])
            self._fence()  # another process may have taken over the run while this one hung between two files
            model.write(partial)
            self._fence()
            _write_progress(partial / FOLDER, progress)
            self._fence()
            write_checksums(partial, {name: entry for part in parts for name, entry in part.files.items()})
            sync_tree(partial)
            self._fence()
            if final.exists():
                shutil.rmtree(final)  # incomplete, such as a copy that the user interrupted
            os.replace(partial, final)
        sync_directory(self._directory)
        with self._fenced():
            self._remove_old()
        return final

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        """Raise if another process writes the run. It may have removed the checkpoint that this one was writing."""
        self._fence()
        try:
            yield
        except OSError:
            self._fence()
            raise

    def _remove_old(self) -> None:
        best = self.best()
        for old in self.complete()[: -self._keep]:
            if old == best:
                continue
            self._fence()
            # Renamed first: a half-removed directory must not look like a checkpoint.
            doomed = old.with_name(f".{old.name}.partial")
            os.replace(old, doomed)
            shutil.rmtree(doomed)


def policy_parts(policy: Policy) -> Iterator[TensorPart]:
    """Yield the parts of a policy that this rank writes: its weights, and on the first rank the model's buffers."""
    parts = weight_parts(policy.weights)
    if policy.adapter is not None:  # the base weights are frozen
        yield from (part for part in parts if is_adapters(part.key))
        return
    yield from parts
    if policy.weights.ranks.first:
        for name, buffer in {**policy.buffers, **saved_buffers(policy.model)}.items():
            yield TensorPart(BUFFER + name, tuple(buffer.shape), (0,) * buffer.ndim, buffer.detach())


def _is_complete(path: Path) -> bool:
    return (path / FOLDER / "state.json").is_file() and (path / MANIFEST).is_file()


_RANDOM = "random-"


def random_name(rank: int) -> str:
    return f"{_RANDOM}{rank:05d}.json"


def is_random(name: str) -> bool:
    """Tell whether a file of `FOLDER` has the random state of a rank."""
    return name.startswith(_RANDOM)


def _write_progress(folder: Path, progress: Progress) -> None:
    for name, content in progress_files(progress).items():
        write_whole(folder / name, content)


def progress_files(progress: Progress) -> dict[str, bytes]:
    state = {
        "step": progress.step,
        "queue": progress.queue,
        "rejected_bytes": progress.rejected_bytes,
        "ledger_bytes": progress.ledger_bytes,
        "entropy_bonus": progress.entropy_bonus,
    }
    if progress.callbacks:
        state["callbacks"] = progress.callbacks
    carried = "".join(json_line(document_line(document)) for document in progress.carried)
    return {"carried.jsonl": carried.encode(), "state.json": json.dumps(state).encode()}


def read_progress(checkpoint: Path, rank: int = 0) -> Progress:
    """Read a checkpoint's progress, and restore a rank's random state."""
    folder = checkpoint / FOLDER
    state = exact_object((folder / "state.json").read_bytes())
    own = folder / random_name(rank)
    # A rank that the checkpoint's run did not have takes the random state of the first rank.
    restore_encoded(exact_object((own if own.is_file() else folder / random_name(0)).read_bytes()))
    return Progress(
        step=state["step"],
        queue=state["queue"],
        carried=[read_document(line) for line in read_exact_lines(folder / "carried.jsonl")],
        rejected_bytes=state["rejected_bytes"],
        ledger_bytes=state["ledger_bytes"],
        callbacks=state.get("callbacks", {}),
        entropy_bonus=state["entropy_bonus"],
    )
