"""README's way from a dataset on disk and a reward that is a closure to a learning curve, as its lines stand there."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest

from pages import ROOT, all_pages
from small_runs import read_lines
from truestep.tools.init.make import init

# A tiny model knows no sums: it learns what answers have in common.
ROWS = [{"question": f"{first} + {second} =", "answer": 7} for first in range(8) for second in range(8)]


def block() -> str:
    """The lines that somebody types who has only the README."""
    (page,) = (page for page in all_pages() if page.path == Path("README.md"))
    (text,) = (block.text for block in page.blocks if "write_report" in block.text)
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
        '"learning_rate": 1e-5': '"learning_rate": 5e-3',
        '"steps": 20': '"steps": 10',
        '"max_new_tokens": 16': ('"max_new_tokens": 4'),
    }
    for there, here in changes.items():
        assert there in text
        text = text.replace(there, here)
    exec(compile(text, str(ROOT / "README.md"), "exec"), {})
    rewards = [line["reward"] for line in read_lines(tmp_path / "runs" / "sums" / "metrics.jsonl")]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    page = (tmp_path / "sums.html").read_text(encoding="utf-8")
    assert 'id="reward"' in page and "Final training reward" in page
