"""A checkpoint to a Hugging Face directory that is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints import read_weights, save
from documents import same_bits
from small_runs import word_model
from truestep.model.loading.load import load_policy
from truestep.run.checkpoint.store import CheckpointStore, Progress
from truestep.run.directory import RunDirectory
from truestep.tools.export import ExportError, export

export_module = import_module("truestep.tools.export")  # the package has the function of this name

Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with checkpoints of steps 1 and 2, in bfloat16 compute."""
    base = tmp_path_factory.mktemp("export")
    policy = load_policy(word_model(base / "model"), dtype="bfloat16", device="cpu")
    store = CheckpointStore(RunDirectory(base / "run").checkpoints, keep=5)
    for step in (1, 2):
        with torch.no_grad():
            for master in policy.weights.master.values():
                master += step / 300
        save(store, policy, Progress(step, {}, [], 0))
    return base / "run"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_latest_checkpoint_of_a_run(run: Path, tmp_path: Path, dtype: str) -> None:
    checkpoint = export(run, tmp_path / "deep" / "out", dtype)
    assert checkpoint.name == "step-00000002"
    out, masters = tmp_path / "deep" / "out", read_weights(checkpoint)
    tensors = load_file(out / "model.safetensors")
    assert set(tensors) == set(masters)
    for name, tensor in tensors.items():
        assert same_bits(tensor, masters[name].to(getattr(torch, dtype))), name
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert not (out / "truestep").exists(), "the optimizer's state is not exported"
    assert (out / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_one_checkpoint_by_its_name(run: Path, tmp_path: Path) -> None:
    first = RunDirectory(run).checkpoints / "step-00000001"
    assert export(first, tmp_path / "out", "float32") == first
    exported, saved = load_file(tmp_path / "out" / "model.safetensors"), read_weights(first)
    assert all(same_bits(exported[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("kind", ["directory", "file", "empty"])
def test_an_output_that_is_there_is_not_touched(run: Path, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
    if kind == "directory":
        (output / "config.json").write_text("mine")
    before = {path: path.read_text() if path.is_file() else None for path in tmp_path.rglob("*")}
    with pytest.raises(ExportError, match="exists already"):
        export(run, output, "float32")
    assert {path: path.read_text() if path.is_file() else None for path in tmp_path.rglob("*")} == before


def test_a_directory_of_checkpoints_names_one(run: Path, tmp_path: Path) -> None:
    """A session saves into such a directory."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    with pytest.raises(ExportError, match=rf"It holds checkpoints: name one, such as {newest}$"):
        export(run / "checkpoints", tmp_path / "out", "float32")


def test_what_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    incomplete = tmp_path / "run"
    shutil.copytree(run, incomplete, ignore=shutil.ignore_patterns("state.json"))
    for source in (tmp_path / "absent", tmp_path, incomplete):
        with pytest.raises(ExportError, match="neither a checkpoint nor a run's directory"):
            export(source, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["begin", "end", "rename"])
def test_a_failure_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: str
) -> None:
    real = export_module._write

    def interrupted(model: object, checkpoint: Path, directory: Path, *options: object) -> None:
        if at == "begin":
            (directory / "model.safetensors").write_bytes(b"half")
        else:
            real(model, checkpoint, directory, *options)
        raise error

    def no_rename(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if at == "rename":
            patch.setattr(os, "replace", no_rename)
        else:
            patch.setattr(export_module, "_write", interrupted)
        with pytest.raises(type(error)):
            export(run, tmp_path / "out", "float32")
    assert list(tmp_path.iterdir()) == []
    export(run, tmp_path / "out", "float32")


def test_a_kill_leaves_no_output(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill cleans nothing up, and still there is no output: the same command works again."""
    real = export_module._write

    def killed(*arguments: object) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_write", killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            export(run, tmp_path / "out", "float32")
    assert [path.name.startswith(".out") for path in tmp_path.iterdir()] == [True]
    export(run, tmp_path / "out", "float32")
    load_policy(tmp_path / "out", device="cpu")


def test_an_export_is_on_the_disk_before_it_has_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, at_rename, fsync, rename = set[str](), set[str](), os.fsync, os.replace

    def watched(handle: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        if Path(target).name == "out":
            at_rename.update(synced)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "replace", renamed)
    export(run, tmp_path / "out", "float32")
    assert at_rename >= {file.name for file in (tmp_path / "out").iterdir()}
