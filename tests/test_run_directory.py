"""The files of a run, rolled back to the step that a restart goes on from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from documents import make_documents
from truestep.files.whole import append_json_line, read_json_lines
from truestep.rollouts.digests import digest_of
from truestep.run.directory import RunDirectory, RunError
from truestep.step.plan.plan import make_plan
from truestep.types import PutAside, Rejected

DOCUMENTS = make_documents([3, 4, 5])


def made(path: Path, steps: int, *, evaluate_every: int = 2) -> RunDirectory:
    """As a run of so many steps leaves it: an evaluation of the first weights, one rejected record a step."""
    directory = RunDirectory(path)
    directory.record_evaluation({"step": 0, "reward": 0.0})
    for step in range(1, steps + 1):
        directory.record_rejected([Rejected("a.jsonl", step, "bad")])
        directory.record_step(step, make_plan(DOCUMENTS, [[0, 1], [2]], 3 * (step - 1)))
        append_json_line(directory.metrics, {"step": step, "loss": step / 3})
        if step % evaluate_every == 0:
            directory.record_evaluation({"step": step, "reward": 1.0})
    return directory


def steps_of(file: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(file)]


@pytest.mark.parametrize("step", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "lo', b'{"step": 8}', b'{"step": 2, "los\xc3'])
def test_exactly_the_lines_up_to_the_step_stay(tmp_path: Path, step: int, torn: bytes) -> None:
    directory = made(tmp_path, 7)
    files = (directory.ledger, directory.metrics, directory.evaluations, directory.rejected)
    before = {file: file.read_bytes().splitlines(keepends=True) for file in files}
    for file in files:
        with file.open("ab") as stream:
            stream.write(torn)
    directory.roll_back(step, rejected_bytes=sum(map(len, before[directory.rejected][:step])))
    for file in (directory.ledger, directory.metrics):
        assert file.read_bytes().splitlines(keepends=True) == before[file][:step]
    assert directory.rejected.read_bytes().splitlines(keepends=True) == before[directory.rejected][:step]
    assert steps_of(directory.evaluations) == [0, *range(2, min(step, 7) + 1, 2)]
    assert directory.last_evaluated() == min(step, 7) // 2 * 2
    assert directory.rejected_bytes() == sum(map(len, before[directory.rejected][: min(step, 7)]))
    # What follows begins on a line of its own.
    append_json_line(directory.metrics, {"step": step + 1})
    assert steps_of(directory.metrics) == [*range(1, min(step, 7) + 1), step + 1]


def test_the_beginning_of_a_run_is_empty(tmp_path: Path) -> None:
    directory = made(tmp_path, 3)
    directory.roll_back(0, 0)
    for file in (directory.ledger, directory.metrics, directory.evaluations, directory.rejected):
        assert file.read_bytes() == b""
    assert directory.last_evaluated() is None


def test_what_was_put_aside_behind_a_step_stays_if_its_checkpoint_holds_it(tmp_path: Path) -> None:
    for step, held in ((0, False), (0, True), (3, False), (3, True), (3, None)):
        directory = made(tmp_path / f"{step}-{held}", step)
        before = directory.ledger_bytes()
        directory.record_put_aside(step, 3 * step, [PutAside("late", "it was")])
        after = directory.ledger_bytes()
        directory.record_step(step + 1, make_plan(DOCUMENTS, [[0, 1], [2]], 3 * step))
        directory.roll_back(step, 0, {False: before, True: after, None: None}[held])
        assert directory.ledger_bytes() == (before if held is False else after)
        # A ledger that was changed by hand since, and whose sizes mean nothing, loses no step.
        directory.roll_back(step, 0, 1)
        assert [number for number in steps_of(directory.ledger) if number] == list(range(1, step + 1))


def test_a_directory_without_files(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "none")
    directory.roll_back(3, 2)
    assert directory.last_evaluated() is None
    assert directory.rejected_bytes() == 0
    directory.record_rejected([])
    assert not (tmp_path / "none").exists()


def test_a_ledger_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    digests = [digest_of(document) for document in DOCUMENTS]
    for given in (None, digests):
        directory.record_step(4, make_plan(DOCUMENTS, [[2], [0, 1]], 30), digests=given)
    line = {
        "step": 4,
        "documents": ["d0", "d1", "d2"],
        "num_documents": 3,
        "num_labels": sum(document.num_labels for document in DOCUMENTS),
        "documents_seen": 33,
    }
    found = [json.loads(line) for line in directory.ledger.read_text().splitlines()]
    assert found == [line, line | {"digests": digests}]


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.lock()
    first.lock()  # its own lock is no obstacle
    with pytest.raises(RunError, match=rf"run is being written by another process \(process {os.getpid()} on "):
        second.lock()
    first.unlock()
    second.lock()


def test_a_directory_that_cannot_be_written_to_is_named_and_none_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place, why in (
        (tmp_path / "file" / "run", f"{tmp_path / 'file'} is a file"),
        (tmp_path / "file", f"{tmp_path / 'file'} is a file"),
        (Path("/proc/run"), "No such file or directory"),
    ):
        with pytest.raises(RunError) as caught:
            RunDirectory(place).check()
        assert (
            str(caught.value)
            == f"checkpoint.directory: {place} cannot be written to: {why}; name a directory that you may write to"
        )
    RunDirectory(tmp_path / "a" / "run").check()
    (tmp_path / "b").mkdir()
    RunDirectory(tmp_path / "b").check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "file"]


def test_the_lines_of_every_file_are_put_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, synced, honest = made(tmp_path, 2), set[str](), os.fsync
    directory.record_warning({"step": 1})
    names = {file.name for file in tmp_path.glob("*.jsonl")}
    assert names == {"ledger.jsonl", "metrics.jsonl", "evaluation.jsonl", "rejected.jsonl", "warnings.jsonl"}

    def fsync(handle: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        honest(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    directory.sync()
    assert synced == names
