"""Exports a checkpoint as a Hugging Face directory."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from truestep.config.load import load_config
from truestep.errors import TruestepError
from truestep.files.disks import writing
from truestep.files.whole import read_json_lines, sync_directory, sync_tree
from truestep.metrics.best import Best
from truestep.model.adapter import Adapter, AdapterSource, is_adapters, merged
from truestep.model.adapter_files import base_of, is_adapter, write_adapter
from truestep.model.loading.read import read_model
from truestep.model.save import model_files, read_companions, saved_buffers, write_weights
from truestep.model.towers import whole_adapter
from truestep.process import progress
from truestep.run.checkpoint.comparison import find_damage
from truestep.run.checkpoint.store import CheckpointStore
from truestep.run.directory import RunDirectory
from truestep.weights.finite import not_finite, some
from truestep.weights.lazy import Unread, place_buffers


class ExportError(TruestepError):
    pass


def export(
    source: Path,
    output: Path,
    dtype: str,
    trust_remote_code: bool = False,
    *,
    model: Path | None = None,
    adapter_alone: bool = False,
    best: bool = False,
) -> Path:
    """Export the checkpoint at `source`, or the latest one of the run there, to `output`, atomically. Return the
    checkpoint. With `best`, it is the run's best one by its checkpoint.keep_best. An adapter is merged into its base
    model, at `model` or where the checkpoint says; with `adapter_alone` it is written alone, in peft's format."""
    checkpoint = _best_of(source) if best else _checkpoint_of(source)
    adapter = AdapterSource(path=checkpoint) if is_adapter(checkpoint) else None
    base = checkpoint if adapter is None else model or base_of(checkpoint)
    if adapter is None and (model is not None or adapter_alone):
        raise ExportError(f"{checkpoint} is a whole model: --model and --adapter are for the checkpoints of an adapter")
    if not (base / "config.json").is_file():
        raise ExportError(
            f"{checkpoint} is an adapter of the model at {base}, which does not exist: give its new path with --model"
        )
    if output.exists():
        raise ExportError(f"{output} exists already; name a directory that does not exist")
    if (damage := find_damage(checkpoint)) is not None:
        raise ExportError(f"the checkpoint {checkpoint} cannot be exported: {damage}")
    progress.phase("loading the checkpoint")
    whole, attached = read_model(base, trust_remote_code, adapter)
    kind: torch.dtype = getattr(torch, dtype)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left over from a killed process with the same id
    try:
        progress.phase("exporting")
        with progress.working("writing", "bytes written"), writing(partial):
            if adapter_alone and attached is not None:
                weights = {name: _values(weight) for name, weight in whole.named_parameters() if is_adapters(name)}
                values = _finite({name: weight.to(kind) for name, weight in weights.items()})
                write_adapter(partial, *whole_adapter(whole, attached, values), base)
            else:
                partial.mkdir(parents=True)
                _write(whole, attached, base, partial, kind)
            sync_tree(partial)
        os.replace(partial, output)
        sync_directory(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def _write(model: Any, adapter: Adapter | None, source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write the model's files, with a few of its weights in memory at a time. An adapter is merged into them."""
    for name, content in model_files(model, read_companions(source), dtype).items():
        (directory / name).write_bytes(content)
    weights = dict(model.named_parameters())
    place_buffers(model, torch.device("cpu"))

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = {name: _values(weights[name]) for name in names}
        if adapter is not None:
            return _finite(merged(tensors, adapter, dtype))
        return _finite({name: tensor.to(dtype) for name, tensor in tensors.items()})

    write_weights(model, weights, read, saved_buffers(model), directory)


def _finite(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Raise `ExportError` if tensors in their final dtype are not finite: the largest float16 number is 65,504."""
    if odd := not_finite(tensors.items()):
        dtype = str(tensors[odd[0]].dtype).removeprefix("torch.")
        raise ExportError(
            f"nothing is exported: {some(odd)} would have values that are not finite, in {dtype}. "
            "Name a wider --dtype, or another checkpoint"
        )
    return tensors


def _values(weight: torch.Tensor) -> torch.Tensor:
    return weight.read() if isinstance(weight, Unread) else weight.detach()


def _checkpoint_of(source: Path) -> Path:
    if (source / "config.json").is_file() or is_adapter(source):
        return source
    latest = CheckpointStore(RunDirectory(source).checkpoints, keep=1).latest()
    if latest is None:
        inside = sorted(path.parent for path in source.glob("step-*/*config.json"))  # where a Session saved
        hint = f". It holds checkpoints: name one, such as {inside[-1]}" if inside else ""
        raise ExportError(f"{source} is neither a checkpoint nor a run's directory with a complete checkpoint{hint}")
    return latest


def _best_of(source: Path) -> Path:
    """Return the best checkpoint of a run's directory, by the metric that its config.yaml names."""
    run, known = RunDirectory(source), best_known(source)
    best = CheckpointStore(run.checkpoints, 1, known).best()
    if best is None:
        raise ExportError(
            f"{source} has no complete checkpoint with a {known.metric} in evaluation.jsonl, of an evaluation in "
            "which every completion was rated"
        )
    return best


def best_known(source: Path) -> Best:
    """Return the evaluations of a run's directory by the metric of its checkpoint.keep_best."""
    run = RunDirectory(source)
    if not run.config.is_file():
        raise ExportError(f"--best is for a run's directory: {source} has no config.yaml")
    metric = load_config(run.config).checkpoint.keep_best
    if metric is None:
        raise ExportError(
            f"{source} keeps no best checkpoint, since its checkpoint.keep_best is null. Name a checkpoint of "
            f"{run.checkpoints}, or leave out --best for the newest"
        )
    return Best(metric, read_json_lines(run.evaluations))
