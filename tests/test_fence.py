"""A process that stood still while another took over its run goes on later, and writes nothing: no checkpoint, no line,
no weights of servers. So it is on a network disk, which takes the lock from a machine that it does not hear of; here
the file of the lock is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.fake_vllm import FakeVllm
from server.models import make_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import file_hashes, read_lines, type_command, write_rollouts
from truestep.config.load import dump_config
from truestep.errors import MachineError
from truestep.ranks.watch import ends_run
from truestep.run.checkpoint.store import CheckpointStore
from truestep.run.directory import LockedError, RunDirectory

STEPS = 40


def taken_over(path: Path) -> tuple[RunDirectory, RunDirectory]:
    """Two that each hold the lock of a run."""
    old, new = RunDirectory(path), RunDirectory(path)
    old.lock()
    (path / ".lock").unlink()
    new.lock()
    return old, new


def test_the_owner_of_a_run_is_the_last_that_locked_it(tmp_path: Path) -> None:
    old, new = taken_over(tmp_path)
    new.check_owner()
    with pytest.raises(LockedError, match=rf"was lost, and another process writes it \(process {os.getpid()} on "):
        old.check_owner()
    (tmp_path / ".lock").unlink()
    with pytest.raises(LockedError, match="is lost: No such file"):
        new.check_owner()
    RunDirectory(tmp_path, locks=False).check_owner()


def test_it_is_no_error_of_the_run_itself() -> None:
    """Its agent goes on, and may join the next generation."""
    assert issubclass(LockedError, MachineError) and not ends_run(LockedError("the lock is lost"))


def test_a_checkpoint_is_neither_begun_nor_completed(tmp_path: Path) -> None:
    old, new = taken_over(tmp_path)
    folder = tmp_path / "checkpoints"
    ours = CheckpointStore(folder, 1, None, "-old", old.check_owner)
    theirs = CheckpointStore(folder, 1, None, "-new", new.check_owner)
    theirs.prepare(3)
    with pytest.raises(LockedError):
        ours.prepare(3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step-00000003-new.partial"]


def wait_for(what: Callable[[], bool], process: BaseProcess, log: Path) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline and process.is_alive(), log.read_text()[-4000:]
        time.sleep(0.005)


@contextmanager
def stopped_at(config: Path, run: Path, step: int, log: Path) -> Iterator[BaseProcess]:
    """A run whose process stands still behind a step."""
    process = type_command(["train", str(config)], log)
    metrics = run / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= step, process, log)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.join()


def take_over(config: Path, run: Path, log: Path) -> None:
    (run / ".lock").unlink()
    process = type_command(["train", str(config)], log)
    process.join(240)
    assert process.exitcode == 0, log.read_text()[-4000:]


def go_on(process: BaseProcess, log: Path) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    process.join(120)
    said = log.read_text()
    # A save that was under way finds that its directory was removed.
    assert process.exitcode == 1 and ("was lost, and another process writes it" in said or ".partial" in said)


def files_of(run: Path) -> dict[str, str]:
    return {name: found for name, found in file_hashes(run).items() if not name.endswith(".partial")}


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 5, 8])
def test_a_process_that_stood_still_writes_nothing(step: int, tiny_model: Any, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 5 * STEPS)
    run = tmp_path / "run"
    config = {
        "model": {"path": str(tiny_model("llama")), "dtype": "float32"},
        "data": {"path": str(tmp_path / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": 5},
        "checkpoint": {"directory": str(run), "every": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with stopped_at(tmp_path / "config.yaml", run, step, tmp_path / "old.log") as old:
        take_over(tmp_path / "config.yaml", run, tmp_path / "new.log")
        before = files_of(run)
        go_on(old, tmp_path / "old.log")
    assert files_of(run) == before
    assert [line["step"] for line in read_lines(run / "ledger.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_process_that_stood_still_gives_no_server_its_weights(tmp_path: Path) -> None:
    server, run = FakeVllm(make_model(tmp_path / "served", seed=100), NAME), tmp_path / "run"
    with serving(server) as url:
        sections = {"schedule": {"steps": 8}, "checkpoint": {"every": 2}}
        (tmp_path / "config.yaml").write_text(dump_config(server_config(tmp_path, [url], **sections)))
        with stopped_at(tmp_path / "config.yaml", run, 3, tmp_path / "old.log") as old:
            take_over(tmp_path / "config.yaml", run, tmp_path / "new.log")
            before, asked = files_of(run), len(server.asked)
            go_on(old, tmp_path / "old.log")
        assert files_of(run) == before
        later = {path.partition("?")[0] for path in server.paths[asked:]}
        assert not later & {"/pause", "/collective_rpc", "/start_weight_update", "/update_weights"}, later
