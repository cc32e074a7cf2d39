"""The demo, from a model of random weights to one that sorts."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from truestep.demo import run as demo


def test_the_demo_learns_to_sort(tmp_path: Path) -> None:
    outcome = demo.run(tmp_path / "demo", 0, Console(file=io.StringIO()))
    assert outcome.before < 0.5 and outcome.after >= 0.9
    assert "<html" in outcome.page.read_text(encoding="utf-8")
