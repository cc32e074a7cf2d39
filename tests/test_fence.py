"""A process that stood still while another took over its run goes on later, and writes nothing: no checkpoint, no line,
no weights of servers. So it is on a network disk, which takes the lock from a machine that it does not hear of; here
the file of the lock is replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save

from server.fake_vllm import FakeVllm
from server.models import make_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import file_hashes, read_lines, type_command, write_rollouts
from truestep.config.load import dump_config
from truestep.environments.printed import PrintedLog
from truestep.errors import MachineError
from truestep.metrics.sinks import JsonLines
from truestep.ranks.group import Ranks
from truestep.ranks.watch import ends_run
from truestep.rollouts.kept.keeper import RecordKeeper
from truestep.rollouts.stream.ids import SeenIds
from truestep.run import directory
from truestep.run.checkpoint.store import FOLDER, MANIFEST, CheckpointStore
from truestep.run.directory import LockedError, RunDirectory
from truestep.run.trainer import Trainer
from truestep.step.plan.plan import make_plan
from truestep.types import PutAside, Rejected

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
    RunDirectory(tmp_path, locks=False).check_owner()


def test_a_lock_whose_file_is_removed_is_held_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.lock()
    (tmp_path / ".lock").unlink()
    run.check_owner()

    def gone(handle: Any, how: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("fcntl.flock", gone)
    with pytest.raises(LockedError, match="is lost: Stale file handle"):
        run.check_owner()


@pytest.mark.parametrize("lasts", [False, True])
def test_an_error_of_a_network_disk_may_pass(lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, failures = RunDirectory(tmp_path), [errno.EIO, errno.ESTALE]
    run.lock()
    honest = Path.read_text

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == ".lock" and (lasts or failures):
            number = failures.pop() if failures else errno.EIO
            raise OSError(number, os.strerror(number))
        return honest(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(directory, "_UNSURE", 0.3)
    if lasts:
        with pytest.raises(LockedError, match="is lost: Input/output error"):
            run.check_owner()
    else:
        run.check_owner()
        assert not failures


def test_it_is_no_error_of_the_run_itself() -> None:
    """Its agent goes on, and may join the next generation."""
    assert issubclass(LockedError, MachineError) and not ends_run(LockedError("the lock is lost"))


def test_a_checkpoint_is_neither_begun_nor_completed(tmp_path: Path) -> None:
    old, new = taken_over(tmp_path)
    folder = tmp_path / "checkpoints"
    ours = CheckpointStore(folder, 1, None, "old", old.check_owner)
    theirs = CheckpointStore(folder, 1, None, "new", new.check_owner)
    theirs.prepare(3)
    with pytest.raises(LockedError):
        ours.prepare(3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step-00000003-new.partial"]


def image(who: str) -> Any:
    content = save({}, metadata={"who": who})
    return SimpleNamespace(parts=[], image=torch.tensor(list(content), dtype=torch.uint8))


def test_a_save_that_is_under_way_writes_no_part(tmp_path: Path) -> None:
    """Not even where both processes give their incomplete checkpoints the same name."""
    old, new = RunDirectory(tmp_path), RunDirectory(tmp_path)
    old.lock()
    ours = CheckpointStore(tmp_path / "checkpoints", 1, None, "", old.check_owner)
    ours.prepare(3)
    (tmp_path / ".lock").unlink()
    new.lock()
    theirs = CheckpointStore(tmp_path / "checkpoints", 1, None, "", new.check_owner)
    theirs.prepare(3)
    theirs.write_part(3, 0, image("new"), {"who": "new"})
    before = file_hashes(tmp_path)
    with pytest.raises(LockedError):
        ours.write_part(3, 0, image("old"), {"who": "old"})
    assert file_hashes(tmp_path) == before


def test_a_save_whose_files_were_removed_meanwhile_says_who_did(tmp_path: Path) -> None:
    """The other process takes the run between the look at the lock and the write."""
    old, new = RunDirectory(tmp_path), RunDirectory(tmp_path)
    old.lock()
    ours = CheckpointStore(tmp_path / "checkpoints", 1, None, "old", old.check_owner)
    theirs = CheckpointStore(tmp_path / "checkpoints", 1, None, "new", new.check_owner)
    ours.prepare(3)

    def look() -> None:
        old.check_owner()
        (tmp_path / ".lock").unlink()
        new.lock()
        theirs.prepare(3)

    ours._fence = look
    with pytest.raises(LockedError):
        ours.write_part(3, 0, image("old"), {"who": "old"})


def test_no_checkpoint_is_removed(tmp_path: Path) -> None:
    old, new = taken_over(tmp_path)
    for step in (1, 2, 3):
        for name in (f"{FOLDER}/state.json", MANIFEST):
            file = tmp_path / "checkpoints" / f"step-{step:08d}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    before = file_hashes(tmp_path)
    with pytest.raises(LockedError):
        CheckpointStore(tmp_path / "checkpoints", 1, None, "old", old.check_owner)._remove_old()
    assert file_hashes(tmp_path) == before
    CheckpointStore(tmp_path / "checkpoints", 1, None, "new", new.check_owner)._remove_old()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def written_by(run: RunDirectory) -> dict[str, Callable[[], None]]:
    """What a process may append to the files of its run."""
    line, plan = {"step": 1}, make_plan([], [[]], 0)
    ids, keeper = SeenIds(run.path / "ids", run.check_owner), RecordKeeper(run.path, 1.0, print, True, run.owned)
    ids.add("a")

    def keep() -> None:
        keeper.computing(1, plan)
        keeper.trained(1, plan, ())
        keeper.close()

    return {
        "ledger": lambda: run.record_step(1, plan),
        "documents put aside": lambda: run.record_put_aside(1, 0, [PutAside("a", "why")]),
        "metrics": lambda: JsonLines(run.metrics, run.check_owner).step(line),
        "evaluations": lambda: run.record_evaluation(line),
        "warnings": lambda: run.record_warning(line),
        "weights": lambda: run.record_weights(line),
        "rejected": lambda: run.record_rejected([Rejected("a", 1, "why")]),
        "printed": lambda: PrintedLog(run.printed, None, run.owned).add("rewards-0", "text"),
        "ids": lambda: ids.state() and None,
        "records": keep,
    }


@pytest.mark.parametrize("what", list(written_by(RunDirectory(Path("nowhere")))))
def test_no_file_of_the_run_is_written(what: str, tmp_path: Path) -> None:
    old, new = taken_over(tmp_path)
    before = file_hashes(tmp_path)
    with contextlib.suppress(LockedError):
        written_by(old)[what]()
    assert file_hashes(tmp_path) == before
    written_by(new)[what]()
    assert file_hashes(tmp_path) != before


def test_the_lock_is_kept_until_the_source_has_given_back_what_it_holds(tmp_path: Path) -> None:
    run, held = RunDirectory(tmp_path), list[bool]()
    run.lock()

    def close(finished: bool) -> None:
        with pytest.raises(LockedError):
            RunDirectory(tmp_path).lock()
        held.append(True)

    class Closed:
        def close(self, *arguments: Any) -> None: ...

    parts = {"directory": run, "ranks": Ranks(), "finished": True, "source": SimpleNamespace(close=close)}
    Trainer._close(SimpleNamespace(**parts, plans=Closed(), evaluator=None, saves=Closed(), memory=None))  # type: ignore[arg-type]
    RunDirectory(tmp_path).lock()
    assert held


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


def hashes(run: Path) -> dict[str, str]:
    """Of all files but those of checkpoints that are not complete. A process may stand still between its look at the
    lock and its next write, which goes to an incomplete checkpoint with its own start's name: no start reads it."""
    return {name: found for name, found in file_hashes(run).items() if not name.startswith("checkpoints/.")}


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
    assert process.exitcode == 1 and "was lost, and another process writes it" in said, said[-4000:]


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
        before = hashes(run)
        go_on(old, tmp_path / "old.log")
    assert hashes(run) == before
    assert [line["step"] for line in read_lines(run / "ledger.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_process_that_stood_still_gives_no_server_its_weights(tmp_path: Path) -> None:
    server, run = FakeVllm(make_model(tmp_path / "served", seed=100), NAME), tmp_path / "run"
    with serving(server) as url:
        sections = {"schedule": {"steps": 8}, "checkpoint": {"every": 2}}
        (tmp_path / "config.yaml").write_text(dump_config(server_config(tmp_path, [url], **sections)))
        with stopped_at(tmp_path / "config.yaml", run, 3, tmp_path / "old.log") as old:
            take_over(tmp_path / "config.yaml", run, tmp_path / "new.log")
            before, asked = hashes(run), len(server.asked)
            go_on(old, tmp_path / "old.log")
        assert hashes(run) == before
        later = {path.partition("?")[0] for path in server.paths[asked:]}
        assert not later & {"/pause", "/collective_rpc", "/start_weight_update", "/update_weights"}, later
