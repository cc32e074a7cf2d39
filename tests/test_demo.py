"""The demo, from a model of random weights to one that sorts."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from truestep.config.schema import Config
from truestep.files.whole import read_json_lines
from truestep.run.train import train
from truestep.tools.demo import run as demo


@pytest.mark.long
def test_the_demo_learns_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `make demo` names a relative directory
    outcome = demo.run(Path("runs/demo"), 0, Console(file=io.StringIO()))
    assert outcome.before < 0.5 and outcome.after >= 0.9
    assert "<html" in outcome.page.read_text(encoding="utf-8")


def test_a_stop_in_the_warm_up_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def stopped(config: Config, console: Console, title: str) -> SimpleNamespace:
        begun.append(title)
        return SimpleNamespace(stopped_by=signal.SIGINT)

    monkeypatch.setattr(demo, "train", stopped)
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        demo.run(tmp_path / "demo", 0, Console(file=said))
    assert begun == ["warm-up"] and ended.value.code == 130
    again = f"truestep train {tmp_path / 'demo' / 'warm-up.yaml'} goes on with this part"
    assert "begins it anew" in said.getvalue() and again in said.getvalue()


@pytest.mark.release
def test_the_demo_learns_to_sort_by_an_adapter(tmp_path: Path) -> None:
    """The same task and the same model after its warm-up; rank 16 changes a tenth as many weights."""
    quiet = Console(file=io.StringIO())
    first, second = demo.PHASES
    base = demo.make_model(tmp_path / "model", demo.sorting.WORDS, 0)
    demo._write_task(tmp_path, base, 0)
    policy = demo._train(first, base, tmp_path, 0, quiet).checkpoints.latest()
    assert policy is not None
    changes = {"adapter": {"rank": 16, "alpha": 32.0}, "optimizer.learning_rate": 3e-3}
    trainer = train(demo.phase_config(second, policy, tmp_path, 0).changed(changes), quiet)
    evaluations = read_json_lines(trainer.directory.path / "evaluation.jsonl")
    assert evaluations[0]["sampled_reward"] < 0.5 and evaluations[-1]["sampled_reward"] >= 0.9
