"""The export of a checkpoint as a Hugging Face directory."""

import os
import shutil
from pathlib import Path

import torch

from truestep.checkpoint.checksums import find_damage
from truestep.checkpoint.store import CheckpointStore
from truestep.errors import TruestepError
from truestep.files import sync_directory, sync_tree
from truestep.policy.adapter_files import base_of, is_adapter
from truestep.policy.loading.load import load_policy
from truestep.policy.model.adapter import AdapterSource
from truestep.policy.save import save_adapter, save_policy
from truestep.run_directory import RunDirectory


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
) -> Path:
    """Write `output`, which is then whole or absent, and return the checkpoint that was exported. An adapter is merged
    into its model, which is at `model` or where the checkpoint says; or it is written alone, as peft does."""
    checkpoint = _checkpoint_of(source)
    adapter = AdapterSource(path=checkpoint) if is_adapter(checkpoint) else None
    base = checkpoint if adapter is None else model or base_of(checkpoint)
    if adapter is None and (model is not None or adapter_alone):
        raise ExportError(f"{checkpoint} is a whole model: --model and --adapter are for the checkpoints of an adapter")
    if not (base / "config.json").is_file():
        raise ExportError(f"{checkpoint} is the adapter of a model at {base}, which is not there: name it with --model")
    if output.exists():
        raise ExportError(f"{output} is there already; name a directory that is not")
    if (damage := find_damage(checkpoint)) is not None:
        raise ExportError(f"the checkpoint {checkpoint} cannot be exported: {damage}")
    policy = load_policy(base, device="cpu", trust_remote_code=trust_remote_code, adapter=adapter)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        if adapter_alone and policy.adapter is not None:
            save_adapter(policy, policy.adapter, partial, getattr(torch, dtype))
        else:
            save_policy(policy, partial, getattr(torch, dtype))
        sync_tree(partial)
        os.replace(partial, output)
        sync_directory(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def _checkpoint_of(source: Path) -> Path:
    if (source / "config.json").is_file() or is_adapter(source):
        return source
    latest = CheckpointStore(RunDirectory(source).checkpoints, keep=1).latest()
    if latest is None:
        raise ExportError(f"{source} is neither a checkpoint nor a run's directory with a complete checkpoint")
    return latest
