"""The export of a checkpoint as a Hugging Face directory."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from truestep.checkpoint.checksums import find_damage
from truestep.checkpoint.store import CheckpointStore
from truestep.errors import TruestepError
from truestep.files import sync_directory, sync_tree
from truestep.policy.loading.load import read_model
from truestep.policy.save import model_files, read_companions, saved_buffers, write_weights
from truestep.policy.weights.unread import Unread, place_buffers
from truestep.run_directory import RunDirectory


class ExportError(TruestepError):
    pass


def export(source: Path, output: Path, dtype: str, trust_remote_code: bool = False) -> Path:
    """Write `output`, which is then whole or absent, and return the checkpoint that was exported."""
    checkpoint = _checkpoint_of(source)
    if output.exists():
        raise ExportError(f"{output} is there already; name a directory that is not")
    if (damage := find_damage(checkpoint)) is not None:
        raise ExportError(f"the checkpoint {checkpoint} cannot be exported: {damage}")
    model = read_model(checkpoint, trust_remote_code)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process of the same number that was killed
    try:
        partial.mkdir(parents=True)
        _write(model, checkpoint, partial, getattr(torch, dtype))
        sync_tree(partial)
        os.replace(partial, output)
        sync_directory(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def _write(model: Any, checkpoint: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write the model's files, reading a few of its weights at a time."""
    for name, content in model_files(model, read_companions(checkpoint), dtype).items():
        (directory / name).write_bytes(content)
    weights = dict(model.named_parameters())
    place_buffers(model, torch.device("cpu"))

    def read(name: str) -> torch.Tensor:
        weight = weights[name]
        return (weight.read() if isinstance(weight, Unread) else weight.detach()).to(dtype)

    write_weights(model, weights, read, saved_buffers(model), directory)


def _checkpoint_of(source: Path) -> Path:
    if (source / "config.json").is_file():
        return source
    latest = CheckpointStore(RunDirectory(source).checkpoints, keep=1).latest()
    if latest is None:
        raise ExportError(f"{source} is neither a checkpoint nor a run's directory with a complete checkpoint")
    return latest
