"""A reward that never works ends the run at once; what a reward prints is kept."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from doors.own_server import Process, serve
from selection import long_except
from small_runs import merged, quiet_trainer, sampled_config, sort_prompts, word_model, write_lines
from truestep.environments.printed import _MOST_BYTES, PrintedLog, name_lines
from truestep.environments.process import WorkerOptions, isolation_refused
from truestep.environments.prompts import Prompt
from truestep.environments.rater import _NEVER_WORKED, FailingRewardError, Rater
from truestep.environments.rewards import RewardError

PROMPT = Prompt("p", "p", {}, (1,))


def outcomes(reward: str, completions: list[str], log: PrintedLog | None = None) -> list[Any]:
    rater = Rater(WorkerOptions(f"server.rewards:{reward}", 60.0, 2**29), 1, None, log)
    futures = [rater.submit(PROMPT, completion, "0") for completion in completions]
    got = [future.exception(240) or future.result() for future in futures]
    rater.close()
    return got


def test_a_reward_that_never_works_ends_the_run_at_its_first_completions() -> None:
    got = outcomes("never_works", ["x"] * (_NEVER_WORKED + 4))
    assert all(type(error) is RewardError for error in got[: _NEVER_WORKED - 1])
    assert all(type(error) is RewardError or type(error) is FailingRewardError for error in got)
    assert "for the same reason: the reward returned None, which is not a number" in str(got[_NEVER_WORKED - 1])


def test_a_reward_that_works_at_last_goes_on() -> None:
    got = outcomes("works_late", [str(number) for number in range(20)])
    assert [type(one).__name__ for one in got] == ["RewardError"] * 15 + ["Rating"] * 5


@pytest.mark.parametrize("kind", long_except(("evaluation", "in_process", "server"), "evaluation"))
def test_a_run_ends_before_its_evaluation_does(kind: str, tmp_path: Path) -> None:
    model = word_model(tmp_path / "model")
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(40))
    sections: dict[str, Any] = {"sampler": {"reward": "server.rewards:never_works"}}
    if kind == "evaluation":
        sections["evaluation"] = {"prompts": str(prompts), "every": 1}
    if kind == "server":
        with serve(Process(model, "mine", longest=200)) as url:
            server = {"type": "server", "protocol": "doors.own_server:OwnServer", "model": "mine", "urls": [url]}
            sections = merged(sections, {"sampler": server, "data": {"tokens_per_microbatch": 512}})
            ends(sampled_config(model, prompts, tmp_path / "run", **sections))
    else:
        ends(sampled_config(model, prompts, tmp_path / "run", **sections))
    assert (
        not (tmp_path / "run" / "evaluation.jsonl").exists()
        or (tmp_path / "run" / "evaluation.jsonl").read_text() == ""
    )


def ends(config: Any) -> None:
    with pytest.raises(FailingRewardError, match=f"none of the first {_NEVER_WORKED} completions has a reward"):
        quiet_trainer(config).run()


def test_what_a_reward_prints_is_kept_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = PrintedLog(tmp_path / "rewards.log", said.append)
    assert outcomes("prints", ["hello", "\x1b[31mred"], log) == [1.0, 1.0]
    lines = (tmp_path / "rewards.log").read_text().splitlines()
    other = "rewards-0: to the other stream"
    assert sorted(lines) == sorted(["rewards-0: hello", "rewards-0: \\x1b[31mred", other, other])
    assert said == [f"the reward prints; what it printed last is in {tmp_path / 'rewards.log'}"]


def test_the_file_of_what_rewards_print_stays_small_and_keeps_the_end(tmp_path: Path) -> None:
    log = PrintedLog(tmp_path / "rewards.log")
    for number in range(30_000):
        log.add("rewards-0", f"{number} {'x' * 80}")
    text = (tmp_path / "rewards.log").read_text()
    assert len(text) <= _MOST_BYTES and text.splitlines()[-1].startswith("rewards-0: 29999 ")
    assert all(line.startswith("rewards-0: ") for line in text.splitlines())
    PrintedLog(tmp_path / "missing" / "rewards.log").add("rewards-0", "no reason to end a run")


@pytest.mark.skipif(isolation_refused() is not None, reason="rewards cannot be isolated here")
def test_a_reward_that_may_not_write_is_told_the_option() -> None:
    (error,) = outcomes("writes_here", ["x"])
    assert "Read-only file system" in str(error) and "reward_writable" in str(error)


def test_lines_of_an_episode_have_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    name_lines("3-1: ")
    print("one\ntwo", end="")
    assert written.getvalue() == "3-1: one\n", "a line is written when it ends"
    print("", 3, flush=True)
    sys.stdout.writelines(["a\n", "b\n"])
    sys.stdout.write("x" * 600)
    assert written.getvalue() == f"3-1: one\n3-1: two 3\n3-1: a\n3-1: b\n3-1: {'x' * 600}\n"
    assert sys.stdout.getvalue() == written.getvalue(), "all else is the stream's own"
