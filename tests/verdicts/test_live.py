"""Short real runs that say what is wrong with them while they go on, and a plan that does not fit."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from small_runs import (
    file_config,
    read_lines,
    said,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
    write_rollouts,
)
from tiny import make_model
from truestep.commands.cli import main
from truestep.config.load import dump_config
from truestep.config.schema import Config
from truestep.plan import room
from truestep.report import write_report
from truestep.run.directory import RunDirectory
from truestep.run.train import train


def small(tmp_path: Path, reward: str, steps: int) -> Config:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(16))
    changes = {"schedule": {"docs_per_step": 64, "steps": steps}, "sampler": {"reward": reward, "max_new_tokens": 3}}
    return sampled_config(word_model(tmp_path / "model"), prompts, tmp_path / "run", **changes)


def test_a_constant_reward_is_said_once_in_the_run_at_its_end_and_in_its_report(tmp_path: Path) -> None:
    config = small(tmp_path, "plain_rewards:one_reward", 4)
    lines = said(config).splitlines()
    title = "Nothing is learnt: the reward is constant"
    (place,) = [number for number, line in enumerate(lines) if line.startswith("warning:") and title in line]
    assert lines[place].startswith(
        f"warning: after step 3: {title}. All 192 completions so far have the reward 1, so no"
    )
    assert [line.split()[1] for line in lines[:place] if line.startswith("step ")] == ["1/4", "2/4", "3/4"]
    ending = f"all 4 steps are done; the run is in {tmp_path / 'run'}. {title}. All 256 completions so far"
    assert lines[-1].startswith(ending)
    kept = read_lines(tmp_path / "run" / "warnings.jsonl")
    (written,) = [line for line in kept if line["kind"] == "constant reward"]
    assert f"warning: after step {written['step']}: {written['text']}" == lines[place]
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.search(f'<li class="bad">[^\n]*<p class="title">{title}</p>', page)
    assert "The run said so after step 3." in page and 'class="notes card well"' not in page
    # It goes on, and does not say it again.
    longer = config.model_copy(update={"schedule": config.schedule.model_copy(update={"steps": 5})})
    again = said(longer)
    assert "warning: after step" not in again and "All 320 completions so far" in again
    assert read_lines(tmp_path / "run" / "warnings.jsonl") == kept


def test_rejected_completions_are_said_with_reason_and_file(tmp_path: Path) -> None:
    text = said(small(tmp_path, "plain_rewards:failing_for_some", 2))
    (line,) = [line for line in text.splitlines() if line.startswith("warning: after")]
    assert re.match(
        r"warning: after step 1: Rejected completions are not trained on\. \d+ \(\d\d\.\d%\) were rejected", line
    )
    assert "KeyError" in line and str(tmp_path / "run" / "rejected.jsonl") in line


def test_a_restart_takes_back_what_was_said_of_steps_that_it_makes_anew(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (2, 3, 3, 5):
        directory.record_warning({"step": step, "kind": f"k{step}"})
    directory.roll_back(3, 0)
    assert [line["step"] for line in read_lines(tmp_path / "warnings.jsonl")] == [2, 3, 3]


def test_a_plan_that_does_not_fit_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 8)
    config = file_config(make_model(tmp_path / "m", "llama"), tmp_path / "r.jsonl", tmp_path / "run")
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    assert "does not fit" not in said(config)
    monkeypatch.setattr(room, "machine_memory", lambda: 2**10)
    lines = said(config).splitlines()
    assert re.match(
        r"warning: a step is planned to need \d+\.\d GiB, and this machine has 0\.0 GiB: it does not fit\. ", lines[0]
    )
    assert "These need less, each alone: --" in lines[0]
    broken = config.model_copy(
        update={"data": config.data.model_copy(update={"path": str(tmp_path / "nowhere.jsonl")})}
    )
    console = io.StringIO()
    shown = broken.model_copy(update={"logging": broken.logging.model_copy(update={"console": True})})
    with pytest.raises(Exception, match="nowhere"):
        train(shown, Console(file=console, width=200))
    assert "does not fit" in console.getvalue()
    (tmp_path / "c.yaml").write_text(dump_config(config), encoding="utf-8")
    outcome = CliRunner().invoke(main, ["plan", str(tmp_path / "c.yaml")])
    assert outcome.exit_code == 0 and "it does not fit. These need less" in outcome.output, outcome.output
    outcome = CliRunner().invoke(main, ["plan", str(tmp_path / "c.yaml"), "--memory", "1000"])
    assert "it does not fit" not in outcome.output
