"""The demo, from a model of random weights to one that sorts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from truestep.demo import run as demo


def test_the_demo_learns_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `make demo` names a relative directory
    outcome = demo.run(Path("runs/demo"), 0, Console(file=io.StringIO()))
    assert outcome.before < 0.5 and outcome.after >= 0.9
    assert "<html" in outcome.page.read_text(encoding="utf-8")
