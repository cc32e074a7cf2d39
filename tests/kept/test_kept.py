"""Rollouts that a run keeps: which, what is said of each, and files that a restart rolls back and nothing harms."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from small_runs import (
    file_config,
    quiet_trainer,
    read_lines,
    said,
    sampled_config,
    sort_prompts,
    tell,
    tokenised_model,
    word_model,
    write_lines,
    write_rollouts,
)
from tiny import label_positions
from truestep.config.schema import Config
from truestep.rollouts.kept import files
from truestep.rollouts.kept.reader import Reader
from truestep.rollouts.kept.rows import choose
from truestep.step.compute.runner import Accumulated
from truestep.types import Rollout, StepPlan


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for file in files.list_files(run / "rollouts") for row in files.read_rows(file)]


def some_row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "id": f"d{step}", "completion": "text", **values}


@pytest.fixture
def sampled(tmp_path: Path) -> Callable[..., Config]:
    model = word_model(tmp_path / "model")
    prompts = write_lines(tmp_path / "p.jsonl", sort_prompts(7))
    return lambda name="run", **sections: sampled_config(model, prompts, tmp_path / name, **sections)


def test_what_is_said_of_each_document(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """By plain loops over the records and the scores that the runner gives."""
    model = tokenised_model(tmp_path / "model", "llama")
    records = {record["id"]: record for record in write_rollouts(tmp_path / "r.jsonl", 17)}
    trainer = quiet_trainer(file_config(model, tmp_path / "r.jsonl", tmp_path / "run"))
    seen: dict[str, tuple[StepPlan, Any]] = {}

    def note(plan: StepPlan, accumulated: Accumulated, norm: float) -> None:
        seen.update({score.id: (plan, score) for score in accumulated.scores})

    tell(trainer, gradient=note)
    trainer.run()
    rows = rows_of(tmp_path / "run")
    assert [row["id"] for row in rows] == list(records)
    assert [row["step"] for row in rows] == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 2
    with_tokens = 0
    for row in rows:
        record, (plan, score) = records[row["id"]], seen[row["id"]]
        (document,) = (document for document in plan.documents if document.id == row["id"])
        places = label_positions(record)
        assert (row["length"], row["tokens"]) == (len(places), len(record["input_ids"]))
        assert row["reward"] == record.get("reward") and row["rejected"] is None
        start = places[0] if places else len(record["input_ids"])
        assert len(row["prompt"].split()) == start
        assert document.advantages is not None and document.logprobs is not None
        if not places:
            assert row["log_ratio"] is None and row["token_texts"] is None
            continue
        ratios = [float(score.logprobs[at]) - float(document.logprobs[place]) for at, place in enumerate(places)]
        assert row["log_ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-12)
        assert row["largest_log_ratio"] == pytest.approx(max(map(abs, ratios)), abs=1e-12)
        advantages = [float(document.advantages[place]) for place in places]
        assert row["advantage"] == pytest.approx(sum(advantages) / len(advantages), abs=1e-7)
        assert row["entropy"] == pytest.approx(sum(map(float, score.entropy)) / len(places), abs=1e-7)
        if document.model_version is not None:
            assert row["model_version"] == document.model_version[places[0]]
            assert row["staleness"] == plan.documents_seen - row["model_version"]
        if row["token_texts"] is not None:
            with_tokens += 1
            assert len(row["token_texts"]) == len(places)
            assert row["token_log_ratios"] == pytest.approx(ratios, abs=1e-6)
            assert row["token_logprobs"] == pytest.approx(score.logprobs.tolist())
    assert 8 < with_tokens <= 16


def test_rejected_completions_have_their_text(sampled: Callable[..., Config], tmp_path: Path) -> None:
    said(sampled(sampler={"reward": "unsteady_reward:reward"}, schedule={"steps": 6}))
    rejected = [row for row in rows_of(tmp_path / "run") if row["rejected"]]
    assert rejected and all(row["prompt"].startswith("sort") and row["completion"] is not None for row in rejected)
    assert {row["id"] for row in rejected} <= {line["id"] for line in read_lines(tmp_path / "run/rejected.jsonl")}
    assert len({row["id"] for row in rejected}) == len(rejected), "each is kept once, with its step"


def test_the_option_bounds_what_is_kept(sampled: Callable[..., Config], tmp_path: Path) -> None:
    options = {"documents": 4, "with_tokens": 1, "longest_text": 5}
    said(sampled(logging={"rollouts": options}))
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(len(row["prompt"]) == 5 and row["prompt"].endswith("…") for row in rows)
    assert sum(row["token_texts"] is not None for row in rows) == 3
    said(sampled("off", logging={"rollouts": None}))
    assert not (tmp_path / "off" / "rollouts").exists()


def test_whole_groups_from_all_over_the_step() -> None:
    documents = [
        Rollout(f"{group}-{member}", np.zeros(2, np.int64), np.ones(2, bool), group_id=str(group))
        for group in range(8)
        for member in range(4)
    ]
    assert choose(documents, 8) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert choose(documents, 3) == [0, 1, 2] and choose(documents, 100) == list(range(32))
    assert choose([], 5) == []
    alone = [Rollout(str(number), np.zeros(2, np.int64), np.ones(2, bool)) for number in range(10)]
    assert choose(alone, 3) == [0, 4, 8]


def test_pieces_of_tokens_join_to_the_text() -> None:
    """Of a tokenizer of bytes, where a character may take several tokens, and of one that joins words by spaces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    reader = Reader(lambda ids, plain: tokenizer.decode(list(ids)), 1000)
    text = "a ü 漢字 🙂 <b>"
    ids = np.array(tokenizer.encode(text).ids)
    pieces = reader.pieces(ids)
    assert len(pieces) == len(ids) == len(text.encode()) and "".join(pieces) == text
    assert pieces[2:4] == ["ü", ""]
    assert len(reader.pieces(ids[:-8])) == len(ids) - 8, "bytes of half a character at the end"
    words = Reader(lambda ids, plain: " ".join(f"w{number}" for number in ids), 8)
    assert words.pieces(np.array([1, 2, 3, 4, 5])) == [" w1", " w2", " w3"]


def test_a_restart_removes_later_steps(sampled: Callable[..., Config], tmp_path: Path) -> None:
    config = sampled(checkpoint={"every": 2}, schedule={"steps": 5})
    said(config)
    folder, rows = tmp_path / "run/rollouts", rows_of(tmp_path / "run")
    assert [file.name for file in files.list_files(folder)] == [
        f"steps-{first:08}-{last:08}.parquet" for first, last in ((1, 2), (3, 4), (5, 5))
    ]
    for newest in ("00000005", "00000004"):
        for file in sorted((tmp_path / "run/checkpoints" / f"step-{newest}").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (tmp_path / "run/checkpoints" / f"step-{newest}").rmdir()
    trainer = quiet_trainer(config)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1] * 8 + [2] * 8
    trainer.run()
    assert rows_of(tmp_path / "run") == rows


def test_a_file_that_a_checkpoint_stands_in_is_cut(tmp_path: Path) -> None:
    files.write_rows(tmp_path, [some_row(step) for step in (3, 4, 5)])
    files.write_rows(tmp_path, [some_row(step) for step in (6, 7)])
    (tmp_path / ".steps-00000008-00000008.parquet.1.partial").write_bytes(b"half")
    assert not files.roll_back(tmp_path, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["steps-00000003-00000004.parquet"]
    (file,) = files.list_files(tmp_path)
    file.write_bytes(b"PAR1 damaged")
    (fault,) = files.roll_back(tmp_path, 3)
    assert "cannot be cut off after step 3" in fault and not files.list_files(tmp_path)


def test_many_files_are_thinned(tmp_path: Path) -> None:
    for step in range(1, 18):
        files.write_rows(tmp_path, [some_row(step)])
    size = files.list_files(tmp_path)[0].stat().st_size
    files.thin(tmp_path, 6.5 * size)
    steps = [(files.steps_of(file) or (0, 0))[0] for file in files.list_files(tmp_path)]
    assert len(steps) <= 6 and steps[0] == 1 and steps[-1] == 17


def test_a_full_disk_is_named_and_the_run_goes_on(
    sampled: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_rows", full)
    text = said(sampled(checkpoint={"every": 1}))
    assert text.count("No space left on device; training goes on") == 1
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 3 and not rows_of(tmp_path / "run")


def test_a_folder_that_cannot_be_made_harms_nothing(sampled: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rollouts").write_text("a file")
    assert "are not kept" in said(sampled())
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 3


def test_hostile_text_is_kept_as_it_is(tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>\x00\x1b[31m\ud800"
    reader = Reader(lambda ids, plain: hostile, 1000)
    text = reader.text(np.array([1]), True)
    assert text == hostile.replace("\ud800", "?")
    (row,) = files.read_rows(files.write_rows(tmp_path, [some_row(1, completion=text, reward=math.nan)]))
    assert row["completion"] == text
