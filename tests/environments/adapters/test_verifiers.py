"""Runs on environments of the real package verifiers, which `make adapters` installs beside ours."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from environments.adapters.packages import finding, on_packages_of
from pages import ROOT
from small_runs import kept_rows, read_lines, said, sampled_config
from tool_models import CALL, STOPS, tool_model
from truestep.config.custom import CustomError
from truestep.environments.adapters import ADAPTERS
from truestep.environments.episodes.service import EpisodeService
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError
from truestep.generate.command import CommandPlay
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import DrawOptions
from truestep.generate.play import Episode, EpisodeLimits, Played
from truestep.model.loading.load import load_policy

pytestmark = [pytest.mark.nightly, *on_packages_of("TRUESTEP_VERIFIERS")]
packages = finding("TRUESTEP_VERIFIERS")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.mktemp("verifiers") / "model")


def config(model: Path, run: Path, env: Any, *, size: int = 8, steps: int = 1, **sections: Any) -> Any:
    sampler = {
        "prompts": None,
        "reward": None,
        "environment": {"type": "verifiers", "options": {"env": env, "size": size, "held_out": 4}},
        "max_new_tokens": 8,
        "max_episode_tokens": 256,
        "stop": list(STOPS),
    }
    base: dict[str, Any] = {
        "sampler": sampler,
        "data": {"tokens_per_microbatch": 256},
        "logging": {"rollouts": {"documents": 1000}},
        "schedule": {"docs_per_step": 8, "steps": steps},
        "seed": 5,
    }
    for name, given in sections.items():
        base[name] = base.get(name, {}) | given if isinstance(given, dict) else given
    return sampled_config(model, Path(), run, **base)


def turns_of(row: dict[str, Any]) -> list[str]:
    """What the policy wrote in each turn, tool calls included."""
    return [turn["text"] for turn in row["turns"] if turn["label"]]


def test_a_taskset_of_one_turn_is_trained_with_its_own_rewards(model: Path, tmp_path: Path) -> None:
    evaluation = {"every": 2, "stop": list(STOPS)}
    said(config(model, tmp_path / "run", "sums_taskset", steps=2, evaluation=evaluation))
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["num_documents"] == 8
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
    rows = kept_rows(tmp_path / "run")
    assert len(rows) == 16
    for row in rows:
        assert row["reward"] == pytest.approx(0.05 * turns_of(row)[-1].split().count("3")), row
        assert dict(row["rewards"])["turns"] == len(turns_of(row))
    assert any(row["reward"] for row in rows)
    evaluated = read_lines(tmp_path / "run" / "evaluation.jsonl")
    assert evaluated and all(line["num_unrated"] == 0 and line["num_prompts"] == 4 for line in evaluated)


def test_a_taskset_with_tools_is_trained_over_several_turns(model: Path, tmp_path: Path) -> None:
    env = {"taskset": {"id": "sums_taskset", "task": {"has_tools": True}}}
    said(config(model, tmp_path / "run", env, steps=2))
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["num_documents"] == line["num_sequences"] == 8
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
    rows = kept_rows(tmp_path / "run")
    assert len(rows) == 16
    for row in rows:
        turns = turns_of(row)
        calls = sum(turn.split()[-1] == CALL for turn in turns[:-1])  # each is answered with the sum of 1+2
        assert row["reward"] == pytest.approx(0.05 * turns[-1].split().count("3") + calls), row
        assert dict(row["rewards"])["called"] == calls
    assert any(row["reward"] >= 1 for row in rows), "a tool was called"


def test_an_environment_that_talks_is_trained_on_the_whole_talk(model: Path, tmp_path: Path) -> None:
    from talk_taskset import SAID

    said(config(model, tmp_path / "run", "talk_taskset", steps=2))
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["num_documents"] == line["num_sequences"] == 8
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
    for row in kept_rows(tmp_path / "run"):
        shown = " ".join(turn["text"] for turn in row["turns"] if not turn["label"])
        assert all(each in shown for each in SAID)
        words = " ".join(turns_of(row)).split()
        assert row["reward"] == pytest.approx(words.count("3") / 10), row


def test_the_taskset_of_the_page_is_trained_as_it_stands_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# three\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "three.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    off = {"reward_isolation": "off"}  # isolated processes do not see /tmp
    said(config(model, tmp_path / "run", {"taskset": {"id": "three"}}, sampler=off))
    rows = kept_rows(tmp_path / "run")
    assert len(rows) == 8
    for row in rows:
        assert row["reward"] == float("3" in turns_of(row)[-1].split()), row


def played(model: Path, env: Any, *, count: int, turns: int) -> list[Played]:
    """Play an episode of each of the first tasks, without a run."""
    options = WorkerOptions(ADAPTERS["verifiers"], 10.0, 2**30)
    service = EpisodeService(options, 1, {"env": env, "size": count})
    policy = load_policy(model)
    limits = EpisodeLimits(turns, 1024)
    play = CommandPlay(service, policy.tokenizer, limits, stops_by_text=True, say=lambda _: None, longest_step=5.0)
    draw = DrawOptions(1.0, 8, frozenset(), stop=STOPS)
    try:
        prompts = [Prompt(row["id"], row["prompt"], row, ()) for row in service.rows("0")]
        episodes = [Episode(prompt, draw, (3, number), f"e{number}") for number, prompt in enumerate(prompts)]
        return EngineGenerator(policy).map(episodes, play.play)
    finally:
        play.close()


def test_what_fails_costs_its_document_by_name(model: Path) -> None:
    """Each task fails in another way."""
    env = {"taskset": {"id": "sums_taskset", "task": {"fails": ["", "setup", "reward", "hang"]}}}
    fine, setup, reward, hang = played(model, env, count=4, turns=40)
    assert not isinstance(fine.rating, RewardError) and fine.rating.parts["turns"] == len(fine.completions)
    for failed, reason in (
        (setup, "TaskError: task setup: ValueError: this task cannot be set up"),
        (reward, "ZeroDivisionError: nothing to divide by"),
        (hang, "the environment's step took longer than sampler.reward_timeout: 10 s"),
    ):
        assert isinstance(failed.rating, RewardError) and reason in str(failed.rating), failed.rating


def test_at_a_limit_the_environment_scores_what_is_there(model: Path) -> None:
    for each in played(model, "talk_taskset", count=3, turns=2):
        assert each.truncated and each.metadata["ended_by"] == "max_turns" and each.metadata["num_turns"] == 2
        threes = drawn_words(model, each).count("3")
        assert not isinstance(each.rating, RewardError)
        assert float(each.rating) == pytest.approx(threes / 10) and set(each.rating.parts) == {"threes"}


def drawn_words(model: Path, played: Played) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [str(tokenizer.decode([token])).strip() for one in played.completions for token in one.token_ids]


def test_several_rewards_and_turns_of_others_are_refused_by_name() -> None:
    """Nobody listens at the address: an agent's run is looked at before its first turn."""
    from truestep.environments.adapters.verifiers import Verifiers

    url = "http://127.0.0.1:9/v1"
    for name, problem in (
        ("best-of-n", r"scores several runs of the policy in one episode \(agent, agent\)"),
        ("user-sim", r"agent 'user' is not to be trained.*options\.env\.user: model and client"),
    ):
        made = Verifiers(env={"id": name, "taskset": {"id": "sums_taskset"}}, size=2)
        with pytest.raises(RuntimeError, match=problem):
            asyncio.run(made._play({"number": 0, "key": made.loaded.tasks[0].key}, url))


@contextmanager
def speaker(*replies: str) -> Iterator[tuple[str, list[str | None]]]:
    """Serve a model that says these, one after another; and note the keys that it is asked with."""
    left, keys = iter(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            keys.append(self.headers["Authorization"])
            message = {"role": "assistant", "content": next(left)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            known = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
            body = json.dumps({**known, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", keys
    finally:
        server.shutdown()
        server.server_close()


def test_a_simulated_user_may_be_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.environments.adapters.verifiers import Verifiers

    monkeypatch.setenv("USERS_KEY", "the user's key")
    monkeypatch.setenv("TRUESTEP_DOCUMENT", "the document's key")
    with speaker("what is 1+2", "###DONE###") as (users, of_user), speaker("it is 3 or 3") as (policy, of_policy):
        user = {"model": "a user", "client": {"type": "eval", "base_url": users, "api_key_var": "USERS_KEY"}}
        made = Verifiers(env={"id": "user-sim", "taskset": {"id": "sums_taskset"}, "user": user}, size=2)
        rated = asyncio.run(made._play({"number": 0, "key": made.loaded.tasks[0].key}, policy))
    assert of_user == ["Bearer the user's key"] * 2 and of_policy == ["Bearer the document's key"]
    assert rated == pytest.approx({"turns": 1, "user_turns": 2, "right": 0.1, "called": 0, "reward": 0.1})


def test_options_that_do_not_fit_are_named() -> None:
    from truestep.environments.adapters.verifiers import Verifiers

    for env, problem in (
        (
            "no_such_taskset",
            r"^sampler\.environment\.options\.env: verifiers refuses it: .*'no_such_taskset'",
        ),
        ({"taskset": {"id": "sums_taskset", "counts": 3}}, r"counts"),
    ):
        with pytest.raises(CustomError, match=problem):
            Verifiers.prepare({"env": env})
    with pytest.raises(ValueError, match="the taskset has 12 tasks, and options.size: 12 leaves none for evaluation"):
        Verifiers.rows({"env": "sums_taskset", "size": 12}, held_out=True)
