"""Saves in the background: what is staged is what is written, one save at a time, and what fails is told to all."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from checkpoints import latest, read_states, read_weights
from documents import same_bits
from ranks.cases import on_ranks
from ranks.test_train_over_ranks import config as over_ranks
from small_runs import file_config, file_hashes, quiet_trainer, tell, write_rollouts
from truestep.config.schema import Config
from truestep.ranks.axes import RankError
from truestep.ranks.group import ALONE
from truestep.run.callbacks import Callback, Run
from truestep.run.checkpoint.saves import Report, Saves, _UnderWay
from truestep.run.checkpoint.staging import Staged
from truestep.run.checkpoint.store import CheckpointStore, Progress
from truestep.run.train import train
from truestep.run.trainer import Trainer

Model = Callable[[str], Path]


@pytest.fixture
def config(tiny_model: Model, tmp_path: Path) -> Callable[..., Config]:
    write_rollouts(tmp_path / "r.jsonl", 40)

    def make(run: str, **checkpoint: Any) -> Config:
        given = {"every": 2, "keep": 9, **checkpoint}
        return file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / run, checkpoint=given)

    return make


class Disk:
    """Holds each writing of a part up until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.free, self.writing, self.most = threading.Event(), 0, 0
        honest = CheckpointStore.write_part

        def write_part(store: CheckpointStore, *arguments: Any) -> Any:
            self.writing += 1
            self.most = max(self.most, self.writing)
            self.free.wait(60)
            try:
                return honest(store, *arguments)
            finally:
                self.writing -= 1

        monkeypatch.setattr(CheckpointStore, "write_part", write_part)


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_show_in_it(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still from step 2 to step 4, whose save waits for the first one."""
    quiet_trainer(config("quick")).run()
    trainer, seen = quiet_trainer(config("slow")), []
    disk = Disk(monkeypatch)

    def look(*_: object) -> None:
        seen.append((trainer.step + 1, trainer.saves.under_way, trainer.checkpoints.latest()))
        if trainer.step == 3:  # in the middle of step 4
            threading.Timer(0.3, disk.free.set).start()

    tell(trainer, gradient=look)
    trainer.run()
    assert seen[2:4] == [(3, True, None), (4, True, None)], "two more steps were made meanwhile"
    assert disk.most == 1, "one save at a time"
    for step in (2, 4, 6, 8):
        slow, quick = (tmp_path / run / "checkpoints" / f"step-{step:08d}" for run in ("slow", "quick"))
        assert file_hashes(slow) == file_hashes(quick), step


def test_the_run_s_files_are_on_the_disk_before_a_checkpoint_counts_and_no_step_waits_for_them(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes from step 2 to step 4 for them."""
    trainer, free, seen, synced = quiet_trainer(config("run")), threading.Event(), [], set[str]()
    honest = os.fsync

    def slow(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        if name == "ledger.jsonl" and not free.is_set():
            assert threading.current_thread() is not threading.main_thread()
            assert free.wait(60)
        if trainer.checkpoints.latest() is None:
            synced.add(name.replace("-00000001-00000002", ""))
        honest(handle)

    def look(*_: object) -> None:
        seen.append((trainer.step + 1, trainer.saves.under_way, trainer.checkpoints.latest()))
        if trainer.step == 3:
            free.set()

    monkeypatch.setattr(os, "fsync", slow)
    tell(trainer, gradient=look)
    trainer.run()
    assert seen[2:4] == [(3, True, None), (4, True, None)], "two more steps were made meanwhile"
    assert {"ledger.jsonl", "metrics.jsonl"} <= synced
    assert any(name.endswith(".parquet") for name in synced), f"what is kept of rollouts too: {synced}"


def test_a_disk_that_refuses_the_run_s_files_ends_the_run(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, honest = quiet_trainer(config("run")), os.fsync

    def refuse(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("ledger.jsonl"):
            raise OSError("input/output error")
        honest(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="input/output error"):
        trainer.run()
    assert trainer.checkpoints.latest() is None


def test_without_a_copy_later_steps_would_show(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: parts that are written as they are then, since nothing copies them."""
    quiet_trainer(config("quick")).run()
    trainer = quiet_trainer(config("slow"))
    disk = Disk(monkeypatch)
    monkeypatch.setattr("truestep.run.checkpoint.staging.replace", lambda part, values: part)
    monkeypatch.setattr(Staged, "_pieces", lambda _: iter(()))
    tell(trainer, gradient=lambda *_: disk.free.set() if trainer.step == 3 else None)
    trainer.run()
    slow, quick = (read_weights(tmp_path / run / "checkpoints" / "step-00000002") for run in ("slow", "quick"))
    assert not all(same_bits(slow[name], value) for name, value in quick.items())


@pytest.mark.parametrize("waits", [True, False])
def test_an_update_waits_until_what_it_changes_is_copied(
    waits: bool, config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of step 2 is held up until step 3 is about to change the weights. A planted fault: nothing waits."""
    quiet_trainer(config("quick")).run()
    trainer, free, honest = quiet_trainer(config("slow")), threading.Event(), Staged.copy

    def slow(staged: Staged) -> None:
        assert free.wait(60)
        honest(staged)

    def look(*_: object) -> None:
        if trainer.step == 2:  # in the middle of step 3
            threading.Timer(0.3, free.set).start()

    monkeypatch.setattr(Staged, "copy", slow)
    if not waits:
        monkeypatch.setattr(Staged, "before_update", lambda _: None)
    tell(trainer, gradient=look)
    trainer.run()
    slow_one, quick = (read_weights(tmp_path / run / "checkpoints" / "step-00000002") for run in ("slow", "quick"))
    assert all(same_bits(slow_one[name], value) for name, value in quick.items()) == waits


FAILS = """
import sys
import torch
from truestep.step import learner
from truestep.run.checkpoint import staging
from truestep.commands.cli import main

made, clipped = staging.{owner}, []

def fail(*arguments):
    clipped.append(arguments)
    if len(clipped) == 2:
        raise RuntimeError("planted")
    return 1.0

def slow(*arguments, **options):
    much = torch.zeros(2**28, dtype=torch.uint8)
    for _ in range(100):
        much.fill_(0)
    return made(*arguments, **options)

staging.{owner} = slow
learner.clip_scale = fail
main(["train", sys.argv[1]])
"""


@pytest.mark.long
@pytest.mark.parametrize(("owner", "every"), [("zeros_on_host", 5), ("Staged.copy", 1)])
def test_a_run_that_fails_beside_a_save_ends_with_its_own_message(
    owner: str, every: int, config: Callable[..., Config], tmp_path: Path
) -> None:
    """A thread in torch's code aborts a process that ends."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config("run", every=every).model_dump(mode="json", exclude_unset=True)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FAILS.format(owner=owner), str(file)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "planted" in ended.stderr
    assert "terminate called" not in ended.stderr
    assert ended.returncode == 1


def test_a_run_that_ends_does_not_wait_for_all_of_a_copy(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, copied, honest = quiet_trainer(config("run", every=1)), [0], Staged._pieces

    def slow(staged: Staged) -> Iterator[Any]:
        for piece in honest(staged):
            time.sleep(0.5)
            copied[0] += 1
            yield piece

    def fail(*_: object) -> None:
        if trainer.step == 1:  # in the middle of step 2
            raise RuntimeError("planted")

    monkeypatch.setattr(Staged, "_pieces", slow)
    tell(trainer, gradient=fail)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.run()
    assert copied[0] < 8, "of 84"
    assert not [thread for thread in threading.enumerate() if thread.name == "save" and thread.is_alive()]
    assert trainer.checkpoints.latest() is None


def stopped_in_step(trainer: Trainer, step: int) -> None:
    tell(trainer, gradient=lambda *_: os.kill(os.getpid(), signal.SIGTERM) if trainer.step == step else None)


def test_a_signal_saves_within_the_grace(config: Callable[..., Config], tmp_path: Path) -> None:
    trainer = quiet_trainer(config("run", grace=50.0))
    stopped_in_step(trainer, 4)
    assert trainer.run() == "stopped by a signal (SIGTERM) after step 5; the same command goes on from here"
    assert latest(tmp_path / "run").name == "step-00000005"


@pytest.mark.parametrize("slow", ["disk", "step"])
def test_after_the_grace_the_last_complete_checkpoint_is_kept_and_named(
    slow: str, config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_trainer(config("whole", every=3)).run()
    trainer = quiet_trainer(config("run", every=3, grace=0.4))
    disk = Disk(monkeypatch)
    disk.free.set()

    def look(*_: object) -> None:
        under_way = trainer.saves._under_way
        if under_way is not None and under_way.task is not None:
            under_way.task.wait(None)  # so that the first checkpoint is complete by then
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            disk.free.clear() if slow == "disk" else time.sleep(0.5)

    tell(trainer, gradient=look)
    ended = trainer.run()
    kept = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert ended == (
        "stopped by a signal (SIGTERM) after step 5; it could not be saved within checkpoint.grace: 0.4, so the same "
        f"command goes on from {kept}"
    )
    assert not trainer.finished and latest(tmp_path / "run") == kept
    disk.free.set()
    quiet_trainer(config("run", every=3)).run()
    assert file_hashes(latest(tmp_path / "run")) == file_hashes(latest(tmp_path / "whole"))


def test_a_callback_hears_of_a_checkpoint_before_the_next_step(config: Callable[..., Config], tmp_path: Path) -> None:
    """What it does then must not depend on how fast a disk is."""
    heard: list[str] = []

    class Hears(Callback):
        def on_step(self, run: Run, metrics: Any) -> None:
            heard.append(f"step {run.step}")

        def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
            heard.append(checkpoint.name[-1])

    train(config("run", every=3), Console(file=io.StringIO()), callbacks=[Hears()])
    assert heard == ["step 1", "step 2", "step 3", "3", "step 4", "step 5", "step 6", "6", "step 7", "step 8", "8"]


def train_with_a_full_disk(options: dict[str, Any], rank: int) -> None:
    """Train, with no space for what this rank writes of the second checkpoint."""
    honest, saves = CheckpointStore.write_part, 0

    def write_part(store: CheckpointStore, *arguments: Any) -> Any:
        nonlocal saves
        saves += 1
        if saves == 2 and int(os.environ["RANK"]) == rank:
            raise OSError(28, "No space left on device", "a part")
        return honest(store, *arguments)

    CheckpointStore.write_part = write_part  # type: ignore[method-assign]
    train(Config.model_validate(options), Console(file=io.StringIO()))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_write_ends_all_and_leaves_the_checkpoint_before(
    rank: int, tiny_model: Model, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 42)
    options = over_ranks(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run")
    with pytest.raises(RankError, match="No space left on device"):
        on_ranks(2, train_with_a_full_disk, options, rank)
    assert latest(tmp_path / "run").name == "step-00000002"
    assert read_states(latest(tmp_path / "run"))


def test_a_save_goes_on_when_all_ranks_have_written() -> None:
    written: Any = SimpleNamespace(result=None)
    completed: list[Any] = []
    store: Any = SimpleNamespace(
        written=lambda parts: True,
        stands=lambda step: None,
        write_rest=lambda progress, model, parts: completed.append(parts) or Path("kept"),
        final=lambda step: Path(f"step-{step}"),
    )
    saves = Saves(store, ALONE)
    saves._model = SimpleNamespace()  # type: ignore[assignment]
    saves._under_way = _UnderWay(Progress(3, {}, [], 0), 6, written)
    assert saves.hear([Report(True), Report(False)]) is None
    assert not saves._under_way.completing and not completed
    assert saves.hear([Report(True), Report(True)]) is None
    assert saves._under_way.completing and saves._under_way.task is not None
    saves._under_way.task.wait()
    assert saves.hear([Report(False), Report(True)]) is None and saves.under_way
    complete = saves.hear([Report(True), Report(True)])
    assert complete is not None and (complete.step, complete.documents_seen) == (3, 6) and not saves.under_way
