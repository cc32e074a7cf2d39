"""The export of a checkpoint as a Hugging Face directory."""

import os
import shutil
from pathlib import Path

import torch

from truestep import progress
from truestep.checkpoint.checksums import find_damage
from truestep.checkpoint.store import CheckpointStore
from truestep.errors import TruestepError
from truestep.files import sync_directory, sync_tree
from truestep.policy.loading.load import load_policy
from truestep.policy.save import save_policy
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
    progress.phase("loading the checkpoint")
    policy = load_policy(checkpoint, device="cpu", trust_remote_code=trust_remote_code)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        progress.phase("exporting")
        with progress.working("writing", "bytes written"):
            save_policy(policy, partial, getattr(torch, dtype))
            sync_tree(partial)
        os.replace(partial, output)
        sync_directory(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def _checkpoint_of(source: Path) -> Path:
    if (source / "config.json").is_file():
        return source
    latest = CheckpointStore(RunDirectory(source).checkpoints, keep=1).latest()
    if latest is None:
        raise ExportError(f"{source} is neither a checkpoint nor a run's directory with a complete checkpoint")
    return latest
