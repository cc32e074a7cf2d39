"""What becomes of truncated documents from files and streams: kept, masked or dropped, after the baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.rollout_records import NEEDS, load, record, write
from small_runs import file_config, quiet_trainer, read_lines, tokenised_model, write_lines, write_rollouts
from truestep.rollouts.record import Checks
from truestep.rollouts.stream.ids import SeenIds
from truestep.rollouts.stream.intake import Intake
from truestep.rollouts.stream.reading import parse_message
from truestep.rollouts.stream.transport import Message

LINES = [
    record("a", reward=1.0, truncated=True),
    record("b", reward=0.0, truncated=False),
    record("c", reward=0.5),
]


def labels(documents):
    return {rollout.id: rollout.num_labels for rollout in documents}


def baseline(documents):
    return {rollout.id: float(rollout.advantages[1]) for rollout in documents if rollout.num_labels}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("keep", {"a": 2, "b": 2, "c": 2}), ("mask", {"a": 0, "b": 2, "c": 2}), ("drop", {"b": 2, "c": 2})],
)
def test_files(rule, expected, tmp_path):
    documents = load(write(tmp_path / "a.jsonl", *LINES), truncated=rule)
    assert labels(documents.rollouts) == expected
    kept = baseline(documents.rollouts)
    assert (kept["b"], kept["c"]) == (-0.5, 0.0), "its reward has had its part in the baseline"
    dropped = [(item.id, item.reason, item.group_id) for item in documents.put_aside]
    assert dropped == ([("a", "it ended at a length limit (data.truncated: drop)", "g")] if rule == "drop" else [])
    if rule == "mask":
        masked = documents.rollouts[0]
        assert masked.reward == 1.0
        assert not masked.advantages.any() and not masked.logprobs.any()


@pytest.mark.parametrize("rule", ["keep", "mask", "drop"])
def test_a_stream_gives_what_files_give(rule, tmp_path):
    checks = Checks(NEEDS, 100, max_tokens=16, group_size=3, truncated=rule)
    intake = Intake(checks, SeenIds(tmp_path / "ids"))
    for number, line in enumerate(LINES):
        message = Message(f"s:{number}", "s", number, json.dumps(line).encode())
        intake.add(message, parse_message(message, checks))
    from_files = load(write(tmp_path / "a.jsonl", *LINES), truncated=rule, group_size=3)
    assert labels(intake.ready) == labels(from_files.rollouts)
    assert baseline(intake.ready) == baseline(from_files.rollouts)
    assert intake.put_aside == list(from_files.put_aside)


def test_what_is_dropped_is_in_the_ledger_once(tmp_path: Path) -> None:
    model = tokenised_model(tmp_path / "model", "llama")
    records = write_rollouts(tmp_path / "all.jsonl", 12)
    lines = [line | {"truncated": index % 3 == 0} for index, line in enumerate(records)]
    rollouts = write_lines(tmp_path / "rollouts.jsonl", lines)
    options = {"data": {"truncated": "drop"}, "schedule": {"docs_per_step": 4, "steps": 1}}
    trainer = quiet_trainer(file_config(model, rollouts, tmp_path / "run", **options))
    trainer.run()
    options["schedule"]["steps"] = 2
    quiet_trainer(file_config(model, rollouts, tmp_path / "run", **options)).run()
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    dropped = [line["id"] for line in lines if line["truncated"]]
    assert [document["id"] for line in ledger for document in line.get("put_aside", ())] == dropped
    assert [len(line["documents"]) for line in ledger] == [4, 4]
    assert not set(dropped) & {name for line in ledger for name in line["documents"]}
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["num_put_aside"] == 4
