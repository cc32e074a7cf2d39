"""A kill at any instant leaves the last complete checkpoint usable, and what is read is what was saved."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import read_states, read_weights
from checkpoints import save as save_checkpoint
from documents import make_documents, same_bits, same_document
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.process.randomness import random_state, random_tensors, restore_random
from truestep.run.checkpoint import store as store_module
from truestep.run.checkpoint.comparison import find_damage
from truestep.run.checkpoint.staging import Staging
from truestep.run.checkpoint.store import CheckpointStore, Progress, read_progress
from truestep.weights.tensor_parts import STATE, TensorPart

Made = Callable[[str], Path]


@pytest.fixture
def policy(tiny_model: Made) -> Policy:
    policy = load_policy(tiny_model("llama"), device="cpu")
    set_step(policy, 0)
    return policy


def set_step(policy: Policy, step: int) -> None:
    """Weights by which a checkpoint can be told."""
    with torch.no_grad():
        for master in policy.weights.master.values():
            master.fill_(1 + step)


def progress(step: int) -> Progress:
    return Progress(
        step=step,
        queue={"documents_seen": 3 * step, "micro_batches": [[0], [1]], "source": {"position": step}},
        carried=make_documents([3, 5], seed=step),
        rejected_bytes=step,
    )


def states(step: int) -> dict[str, torch.Tensor]:
    """The state of an optimizer."""
    return {
        "model.norm.weight.exp_avg": torch.arange(4.0) / 3 + step,
        "model.norm.weight.step": torch.tensor(step),
        "model.norm.weight.codes": torch.arange(7, dtype=torch.int8).view(7, 1) + step,
        "lm_head.weight.empty": torch.zeros(0, 3),
    }


def save(store: CheckpointStore, policy: Policy, step: int) -> Path:
    set_step(policy, step)
    parts = [TensorPart(STATE + k, tuple(v.shape), (0,) * v.ndim, v.clone()) for k, v in states(step).items()]
    return save_checkpoint(store, policy, progress(step), parts)


def check(checkpoint: Path, step: int) -> None:
    """That it is whole, weights and all."""
    weights = read_weights(checkpoint)
    assert len(weights) == 21
    assert all((weight == 1 + step).all() for weight in weights.values())
    assert (checkpoint / "config.json").is_file()
    read, expected = read_progress(checkpoint), progress(step)
    assert (read.step, read.queue, read.rejected_bytes) == (step, expected.queue, expected.rejected_bytes)
    assert all(same_document(one, other) for one, other in zip(read.carried, expected.carried, strict=True))
    found = read_states(checkpoint)
    assert set(found) == set(states(step))
    assert all(same_bits(found[name], tensor) for name, tensor in states(step).items())
    assert find_damage(checkpoint) is None


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(policy: Policy, tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path / "deep" / "checkpoints", keep)
    assert store.latest() is None
    for step in (2, 4, 9, 10, 100):
        path = save(store, policy, step)
        assert store.latest() == path
    newest = [f"step-{step:08d}" for step in (2, 4, 9, 10, 100)][-keep:]
    assert steps_in(tmp_path / "deep" / "checkpoints") == newest
    assert [path.name for path in store.complete()] == newest
    check(path, 100)
    assert load_policy(path, device="cpu").vocabulary_size == policy.vocabulary_size


def test_what_is_incomplete_is_no_checkpoint(policy: Policy, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    first = save(store, policy, 1)
    shutil.copytree(first, tmp_path / "step-00000002", ignore=shutil.ignore_patterns("checksums.json"))
    shutil.copytree(first, tmp_path / ".step-00000003.partial")
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert store.complete() == [first]
    assert store.latest() == first
    check(save(store, policy, 4), 4)
    check(save(store, policy, 2), 2)
    assert not (tmp_path / ".step-00000003.partial").exists()
    assert (tmp_path / "notes.txt").is_file()


def test_a_step_is_saved_once(policy: Policy, tmp_path: Path) -> None:
    """The end of a run may fall on a step that was saved already."""
    store = CheckpointStore(tmp_path, 2)
    path = save(store, policy, 3)
    files = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert save(store, policy, 3) == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == files


class Killed(BaseException):
    """No `except Exception` sees it, as none sees a kill."""


class Disk:
    """Every operation of a save that touches the disk, counted; dies in the middle of the chosen one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, die_at: int):
        self.done, self.die_at = 0, die_at
        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (os, "fdatasync"),
            (shutil, "rmtree"),
            (Path, "write_bytes"),
            (Path, "write_text"),
            (Path, "mkdir"),
            (store_module, "write_image"),
            (Staging, "stage"),
        ):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            number, self.done = self.done, self.done + 1
            if number != self.die_at:
                return real(*arguments, **options)
            half = Path(arguments[0]) if name == "rmtree" else None
            if half is not None:
                (half / "truestep" / "part-00000.safetensors").unlink(missing_ok=True)  # removed in part
            elif name in ("write_bytes", "write_text"):
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])  # written in part
            raise Killed

        return operation


def operations_of_a_save(policy: Policy, directory: Path, keep: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, -1)
        save(CheckpointStore(directory, keep), policy, 3)
    return disk.done


def test_a_kill_at_any_instant(policy: Policy, tmp_path: Path) -> None:
    keep = 2
    begun = tmp_path / "begun"
    for step in (1, 2):
        save(CheckpointStore(begun, keep), policy, step)
    shutil.copytree(begun, tmp_path / "counted")
    total = operations_of_a_save(policy, tmp_path / "counted", keep)
    assert total > 20
    outcomes = []
    for die_at in range(total):
        directory = Path(shutil.copytree(begun, tmp_path / f"killed-{die_at}"))
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, die_at)
            with pytest.raises(Killed):
                save(CheckpointStore(directory, keep), policy, 3)
        store = CheckpointStore(directory, keep)
        latest = store.latest()
        assert latest is not None
        outcomes.append(read_progress(latest).step)
        for checkpoint in store.complete():  # an older one, half removed, must not look like one either
            check(checkpoint, read_progress(checkpoint).step)
        check(save(store, policy, 4), 4)  # and the run goes on, over what the kill left
        assert len(steps_in(directory)) == keep
        assert store.complete() == sorted(directory.iterdir())
        shutil.rmtree(directory)
    assert outcomes == sorted(outcomes), "once the new one is there it stays"
    assert set(outcomes) == {2, 3}


def test_a_failed_save_is_told(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    store = CheckpointStore(tmp_path, 1)
    first = save(store, policy, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_image", full)
        with pytest.raises(OSError, match="no space left"):
            save(store, policy, 2)
    assert store.latest() == first
    check(first, 1)


def test_the_directory_that_a_resumed_run_was_read_from_may_go(policy: Policy, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    resumed = load_policy(save(store, policy, 1), device="cpu")
    for step in (2, 3, 4):
        check(save(store, resumed, step), step)


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(3), np.random.normal(), *torch.randn(3).tolist()]


def test_random_state_goes_on(policy: Policy, tmp_path: Path) -> None:
    """Python's, numpy's and torch's, with the second half of a pair of normal numbers in waiting."""
    random.gauss(0, 1)
    np.random.normal()
    path = save(CheckpointStore(tmp_path, 1), policy, 1)
    expected = draws()
    assert draws() != expected
    read_progress(path)
    assert draws() == expected


def test_random_state_of_this_moment() -> None:
    state, tensors = random_state(), random_tensors()
    expected = draws()
    restore_random(state, tensors)
    assert draws() == expected


def test_files_are_on_the_disk_before_a_name_says_so(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint gets its name when all of its files are synced, and older ones go when the name is."""
    store, order = CheckpointStore(tmp_path, 1), list[tuple[str, str]]()
    save(store, policy, 1)
    fsync, rename, remove = os.fsync, os.replace, shutil.rmtree

    def synced(handle: int) -> None:
        order.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        order.append(("rename", str(target)))
        rename(source, target)

    def removed(path: Path, *arguments: Any, **options: Any) -> None:
        order.append(("remove", str(path)))
        remove(path, *arguments, **options)

    for owner, name, watched in ((os, "fsync", synced), (os, "replace", renamed), (shutil, "rmtree", removed)):
        monkeypatch.setattr(owner, name, watched)
    final = save(store, policy, 2)
    named = order.index(("rename", str(final)))
    partial = str(store.partial(2))
    before = {path.removeprefix(partial) for kind, path in order[:named] if kind == "sync"}
    assert before >= {f"/{file.relative_to(final)}" for file in final.rglob("*") if file.is_file()}
    after = [step for step in order[named + 1 :] if step[0] != "rename"]
    assert after[0] == ("sync", str(tmp_path)) and after[-1][0] == "remove"
