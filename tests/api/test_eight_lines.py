"""README's way from a dataset on disk and a reward that is a closure to a learning curve, as its lines stand there."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import datasets
import pytest

from pages import ROOT, all_pages
from small_runs import read_lines
from truestep.tools.init.make import init

SMOLLM2 = Path.home() / ".cache" / "truestep" / "smollm2-0.1.2"  # as `make small-model` leaves it
# A tiny model knows no sums: it learns what answers have in common.
ROWS = [{"question": f"{first} + {second}", "answer": 7} for first in range(8) for second in range(8)]


def block() -> str:
    """The lines that somebody types who has only the README."""
    (page,) = (page for page in all_pages() if page.path == Path("README.md"))
    (text,) = (block.text for block in page.blocks if "write_report" in block.text)
    return text


def changed(text: str, changes: dict[str, str]) -> str:
    for there, here in changes.items():
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    return text


def test_it_is_eight_lines() -> None:
    lines = [line for line in block().splitlines() if line.strip()]
    assert len(lines) <= 8 and max(map(len, lines)) <= 120


@pytest.mark.long
def test_eight_lines_lead_to_a_learning_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model in the place of SmolLM2, and a learning rate that fits it."""
    monkeypatch.chdir(tmp_path)
    init(tmp_path / "task", None, template="sft")  # a tiny model that converses
    os.makedirs("models")
    (tmp_path / "task" / "model").rename(tmp_path / "models" / "smollm2")
    datasets.Dataset.from_list(ROWS).save_to_disk("sums")
    text = block()
    changes = {
        '"learning_rate": 2e-5': '"learning_rate": 5e-3',
        '"docs_per_step": 64, "steps": 20': '"docs_per_step": 32, "steps": 10',
    }
    exec(compile(changed(text, changes), str(ROOT / "README.md"), "exec"), {})
    rewards = [line["reward"] for line in read_lines(tmp_path / "runs" / "sums" / "metrics.jsonl")]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    page = (tmp_path / "sums.html").read_text(encoding="utf-8")
    assert 'id="reward"' in page and "Final training reward" in page


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="`make small-model` gets SmolLM2")
def test_eight_lines_teach_smollm2_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines as they stand there. An evaluation of sums that are never trained on is added: what is answered right
    rises by more than three standard errors of both."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("models")
    (tmp_path / "models" / "smollm2").symlink_to(SMOLLM2)
    pairs = [(first, second) for first in range(10, 50) for second in range(10, 50)]
    random.Random(0).shuffle(pairs)
    rows = [{"question": f"{first} + {second}", "answer": first + second} for first, second in pairs]
    datasets.Dataset.from_list(rows[96:]).save_to_disk("sums")
    held_out = [{"prompt": f"12 + 31 = 43\n{row['question']} =", "answer": row["answer"]} for row in rows[:96]]
    Path("held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out), encoding="utf-8")
    added = 'checkpoint=place, evaluation={"prompts": "held_out.jsonl", "every": 20}'
    exec(compile(changed(block(), {"checkpoint=place": added}), str(ROOT / "README.md"), "exec"), {})
    first, last = (line["sampled_reward"] for line in read_lines(tmp_path / "runs" / "sums" / "evaluation.jsonl"))
    noise = math.sqrt((first * (1 - first) + last * (1 - last)) / 96)
    assert last > first + 3 * noise, (first, last)
