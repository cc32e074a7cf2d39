"""Whole records: read back as they were trained on, each step's once, whatever stops the run or harms a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from small_runs import file_config, kept_rows, quiet_trainer, read_lines, tell, write_lines, write_rollouts
from truestep.rollouts.digests import digest_of
from truestep.rollouts.documents import record_lines
from truestep.rollouts.fields import declare
from truestep.rollouts.files import load_documents
from truestep.rollouts.kept.records import RecordFiles, blocks_of, encode, roll_back
from truestep.rollouts.record import Checks, Needs
from truestep.types import DocumentScore, Rollout, StepPlan, Turn

Model = Callable[[str], Path]
KEEP = {"logging": {"rollouts": {"documents": "all"}}}


def some_documents(seed: int, count: int = 3) -> list[Rollout]:
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        size = int(generator.integers(4, 30))
        mask = generator.random(size) < 0.5
        mask[[0, 2]] = False
        values = np.where(mask, generator.normal(size=size), 0).astype(np.float32)
        several: dict[str, Any] = {"starts": (0, 2), "record_ids": (f"{number}a", f"{number}b")} if number else {}
        made.append(
            Rollout(
                f"d{seed}-{number}",
                generator.integers(0, 1000, size),
                mask,
                logprobs=np.where(mask, -np.abs(values), 0).astype(np.float32),
                advantages=values,
                reward=0.1,
                group_id="g",
                model_version=np.where(mask, 7, 0),
                fields={"w": values},
                token_fields={"routed_experts": generator.integers(0, 8, (size - (not number), 2, 2)).astype(np.uint8)},
                document_fields={"level": np.array(2)},
                turns=(Turn(2, 3, "assistant", 0.25),),
                metadata={"by_turn": [{"drawing": 0.5}]},
                **several,
            )
        )
    return made


def same(first: Rollout, second: Rollout) -> bool:
    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return {key: plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    return all(
        plain(getattr(first, item.name)) == plain(getattr(second, item.name)) for item in dataclasses.fields(Rollout)
    )


def test_documents_are_read_back_as_they_were(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, 1e9)
    for step in (1, 2, 5):
        files.append(step, encode(step, some_documents(step)))
    blocks = blocks_of(tmp_path)
    assert [block.step for block in blocks] == [1, 2, 5]
    for block in blocks:
        assert all(same(one, other) for one, other in zip(block.read(), some_documents(block.step), strict=True))


def test_what_a_kill_or_a_bad_disk_left_costs_its_own_step(tmp_path: Path) -> None:
    """Every length of the last block that a kill may leave; and a byte of each kind of a block's begin."""
    files = RecordFiles(tmp_path, 1e9)
    for step in (1, 2, 3):
        files.append(step, encode(step, some_documents(step)))
    (file,) = tmp_path.iterdir()
    whole, blocks = file.read_bytes(), blocks_of(tmp_path)
    for end in range(blocks[1].end, blocks[2].end, 7):
        file.write_bytes(whole[:end])
        assert [block.step for block in blocks_of(tmp_path)] == [1, 2]
        assert not roll_back(tmp_path, 2) and file.read_bytes() == whole[: blocks[1].end]
    for place in (0, 5, 9, 20):
        broken = bytearray(whole)
        broken[blocks[1].start + place] ^= 4
        file.write_bytes(broken)
        assert [block.step for block in blocks_of(tmp_path)] == [1, 3]


def test_a_step_stands_once_behind_a_restart(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, 1e9)
    for step in (1, 2, 3, 4):
        files.append(step, encode(step, some_documents(step)))
    assert not roll_back(tmp_path, 2)
    again = RecordFiles(tmp_path, 1e9)
    for step in (3, 4):
        again.append(step, encode(step, some_documents(10 + step)))
    blocks = blocks_of(tmp_path)
    assert [block.step for block in blocks] == [1, 2, 3, 4]
    assert [block.read()[0].id for block in blocks] == ["d1-0", "d2-0", "d13-0", "d14-0"]
    assert not roll_back(tmp_path, 0) and not list(tmp_path.iterdir())


def test_the_oldest_records_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.rollouts.kept import records

    monkeypatch.setattr(records, "_LARGEST", 1)  # a file for each step
    gone: list[int] = []
    size = len(encode(1, some_documents(1)))
    files = RecordFiles(tmp_path, 3.5 * size, gone.append)
    for step in range(1, 8):
        files.append(step, encode(step, some_documents(1)))
    kept = [block.step for block in blocks_of(tmp_path)]
    assert kept == [5, 6, 7] and gone == [1, 2, 3, 4]


def test_a_run_keeps_what_it_trained_on_once(tiny_model: Model, tmp_path: Path) -> None:
    """Through a stop and a restart behind a checkpoint; the report's rows stay as they were without it."""
    write_rollouts(tmp_path / "r.jsonl", 25)
    run, plain = tmp_path / "run", tmp_path / "plain"
    seen: dict[int, list[Rollout]] = {}

    def note(step: int, plan: StepPlan, scores: object) -> None:
        seen[step] = list(plan.documents)

    for name, sections in ((run, KEEP), (plain, {})):
        for steps in (3, 5):  # the second start goes on from the checkpoint that the first ended with
            config = file_config(
                tiny_model("llama"), tmp_path / "r.jsonl", name, schedule={"steps": steps}, checkpoint={"every": 2},
                **sections,
            )  # fmt: skip
            trainer = quiet_trainer(config)
            if name == run:
                tell(trainer, trained=note)
            trainer.run()
    blocks = blocks_of(run / "records")
    assert [block.step for block in blocks] == [1, 2, 3, 4, 5]
    for block in blocks:
        assert all(same(one, other) for one, other in zip(block.read(), seen[block.step], strict=True))
    assert kept_rows(run) == kept_rows(plain) and not (plain / "records").exists()
    ledgers = [read_lines(one / "ledger.jsonl") for one in (run, plain)]
    assert [{name: value for name, value in line.items() if name != "digests"} for line in ledgers[0]] == ledgers[1]


def test_a_full_disk_costs_records_and_not_the_run(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 15)

    def full(self: RecordFiles, step: int, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordFiles, "append", full)
    trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", **KEEP))
    trainer.run()
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 3 and not (tmp_path / "run" / "records").exists()


def test_records_are_rollout_files_again(tmp_path: Path) -> None:
    """A document's lines, read by the checks of rollout files, are what the digest says was trained on."""
    declared = declare({"w": {"level": "label"}, "level": {"level": "document", "dtype": "int64"}})
    checks = Checks(Needs(True, True, "none"), fields=declared)
    documents = some_documents(3, 6)
    scores = [
        DocumentScore(one.id, np.arange(one.num_labels, dtype=np.float32), np.ones(one.num_labels, np.float32))
        for one in documents
    ]
    lines = [line for one, score in zip(documents, scores, strict=True) for line in record_lines(one, score)]
    read = load_documents([write_lines(tmp_path / "d.jsonl", lines)], checks)
    assert not read.rejected
    assert [digest_of(one) for one in read.rollouts] == [digest_of(one) for one in documents]
    assert [value for line in lines[:1] for value in line["policy_logprobs"]] == list(range(documents[0].num_labels))
