"""Runs on the real packages reasoning-gym, math-verify and openenv, which `make adapters` installs beside ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.adapters.packages import finding, on_packages_of
from small_runs import kept_rows, quiet_trainer, read_lines, said, sampled_config, without_times, write_lines
from truestep.environments.episodes.environment import Answer, End, ToolCall
from truestep.environments.episodes.service import EpisodeService, Said, check_environment
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater
from truestep.environments.rewards import RewardError
from truestep.rollouts.source import SourceError
from truestep.tools.demo.model import make_model

pytestmark = [pytest.mark.nightly, *on_packages_of("TRUESTEP_ADAPTERS")]
packages = finding("TRUESTEP_ADAPTERS")
HERE = Path(__file__).parent
TASKS = {
    "leg_counting": {"weight": 2, "config": {"min_animals": 1, "max_animals": 2, "max_instances": 3}},
    "chain_sum": {"config": {"max_terms": 3, "max_digits": 2}},
    "spell_backward": {"level": 0},
}
OPTIONS = {"tasks": TASKS, "size": 24, "held_out": 6, "seed": 3, "system": None, "chat": False}
GYM = "truestep.environments.adapters.reasoning_gym:ReasoningGym"
# Words of the tiny model: it answers at times, and at times rightly.
WORDS = ["<answer>", "</answer>", *map(str, range(10)), *map(str, range(10, 40, 2)), "sort", "="]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("adapters") / "model", WORDS, seed=0)


def gym_config(model: Path, run: Path, options: dict[str, Any] | None = None, **sections: Any) -> Any:
    sampler = {
        "prompts": None,
        "reward": None,
        "environment": {"type": "reasoning_gym", "options": OPTIONS | (options or {})},
        "max_new_tokens": 16,
        "max_episode_tokens": 128,
        "stop": ["</answer>"],
    }
    base: dict[str, Any] = {"sampler": sampler, "data": {"tokens_per_microbatch": 256}, "deterministic": True}
    base["logging"] = {"rollouts": {"documents": 1000}}
    return sampled_config(model, Path(), run, **base, **sections)


def package_items(size: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """By the names of prompts: the package's own dataset and its item, made with nothing of ours."""
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec

    level = {"min_word_len": 3, "max_word_len": 3}
    configs = [dict(TASKS["leg_counting"]["config"]), dict(TASKS["chain_sum"]["config"]), level]  # type: ignore[arg-type]
    specs = [DatasetSpec(name, 2.0 if number == 0 else 1.0, configs[number]) for number, name in enumerate(TASKS)]
    made = CompositeDataset(CompositeConfig(size=size, seed=3, datasets=specs))
    items = [made[number] for number in range(size)]
    return {f"{item['metadata']['source_dataset']}-{number}": (made, item) for number, item in enumerate(items)}


def _place(group: int, count: int) -> int:
    """The index of a group's prompt: each pass has its own order, by the run's seed 0."""
    return int(np.random.default_rng([0, 0, group // count]).permutation(count)[group % count])


def test_three_tasks_are_trained_on_with_the_packages_own_scores(model: Path, tmp_path: Path) -> None:
    from reasoning_gym.utils import extract_answer

    evaluation = {"every": 2, "stop": ["</answer>"]}
    said(gym_config(model, tmp_path / "run", evaluation=evaluation, schedule={"steps": 3, "docs_per_step": 48}))
    assert [line["num_documents"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [48] * 3
    asked, rows = package_items(30), kept_rows(tmp_path / "run")
    assert len(rows) == 3 * 48
    names = list(asked)[:24]
    asked_of = {row["group_id"]: names[_place(int(row["group_id"]), len(names))] for row in rows}
    for row in rows:
        made, item = asked[asked_of[row["group_id"]]]  # type: ignore[index]
        given = extract_answer(row["completion"])
        expected = 0.0 if row["truncated"] else made.score_answer(given, item)
        assert row["reward"] == pytest.approx(expected), row
    assert any(row["reward"] > 0 for row in rows)
    assert {str(name).rpartition("-")[0] for name in asked_of.values()} == set(TASKS)
    questions = [item["question"] for _, item in asked.values()]
    held_out = [question for question in questions[24:] if question not in questions[:24]]
    for line in read_lines(tmp_path / "run" / "evaluation.jsonl"):
        assert line["num_unrated"] == 0 and line["num_prompts"] == len(held_out)


def test_a_run_that_goes_on_is_the_run_that_did_not_stop(model: Path, tmp_path: Path) -> None:
    quiet_trainer(gym_config(model, tmp_path / "whole", schedule={"steps": 2})).run()
    quiet_trainer(gym_config(model, tmp_path / "parts", schedule={"steps": 1})).run()
    quiet_trainer(gym_config(model, tmp_path / "parts", schedule={"steps": 2})).run()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        whole, parts = (without_times(read_lines(tmp_path / run / name)) for run in ("whole", "parts"))
        assert whole == parts
    with pytest.raises(SourceError, match="the environment now makes other prompts"):
        quiet_trainer(gym_config(model, tmp_path / "parts", {"seed": 4}, schedule={"steps": 3}))


def test_answers_of_the_package_have_its_full_score() -> None:
    service = EpisodeService(WorkerOptions(GYM, 60.0, 2**30), 1, OPTIONS)
    try:
        rows = list(service.rows("0"))
        assert rows == list(service.rows("1")), "they depend on the option `seed` alone"
        asked = package_items(30)
        assert [row["id"] for row in rows] == list(asked)[:24]
        assert [row["prompt"] for row in rows] == [item["question"] for _, item in asked.values()][:24]
        for row in rows[:8]:
            right = f"I think <answer> 1 </answer> no: <answer>{asked[row['id']][1]['answer']}</answer>"
            for text, score, answered in ((right, 1.0, 1.0), ("I do not know", 0.0, 0.0)):
                begun = service.begin(row, "0").result(60)
                end = service.step(begun.episode, Answer(text)).result(60)
                assert isinstance(end, End)
                assert float(end.reward) == score  # type: ignore[arg-type]
                assert end.reward.parts == {row["task"]: score, "answered": answered, "score_failed": 0.0}  # type: ignore[union-attr]
    finally:
        service.close_all()


def test_prompts_are_the_packages_and_chats_where_they_can_be() -> None:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    from truestep.environments.adapters.reasoning_gym import ReasoningGym

    rows = list(ReasoningGym.rows({"tasks": ["list_functions", "countdown"], "size": 20}, held_out=False))
    again = list(ReasoningGym.rows({"tasks": ["list_functions", "countdown"], "size": 20}, held_out=False))
    assert rows == again, "also of tasks that draw from Python's global generator"
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[0]["prompt"][0]["content"] == SYSTEM_PROMPTS["default"]
    (own,) = ReasoningGym.rows(
        {"tasks": ["countdown"], "size": 1, "system": "Be short.", "chat": False}, held_out=False
    )
    assert own["prompt"].startswith("Be short.\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tasks": ["leg_countin"]}, r"^sampler\.environment\.options\.tasks: reasoning-gym has no task 'leg_countin'"),
        ({"tasks": {"chain_sum": {"wait": 2}}}, r"tasks\.chain_sum: 'wait' is none of weight, config, level"),
        ({"tasks": {"chain_sum": {"config": {"legs": 2}}}}, r"options: reasoning-gym refuses them: .*'legs'"),
        (
            {"tasks": {"leg_counting": {"config": {"max_animals": 0}}}},
            r"refuses them: max_animals must be >= min_animals",
        ),
        (
            {"tasks": {"chain_sum": {"level": {"legs": 1}}}},
            r"chain_sum\.level: 'legs' is none of num_terms, num_digits",
        ),
        ({"tasks": []}, r"refuses them: Must specify at least one dataset"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        check_environment(WorkerOptions(GYM, 60.0, 2**30), options, [False])


def test_mathematics_is_compared_as_mathematics(model: Path, tmp_path: Path) -> None:
    cases: Sequence[tuple[Any, str, float]] = [
        ("1/2", r"First 3. So it is $\boxed{\frac{1}{2}}$", 1.0),
        (r"\frac{1}{2}", "The answer is 0.5", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}} or rather \boxed{\frac{1}{3}}", 0.0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        (7, "<answer>6</answer> no, <answer> 7 </answer> said 8", 1.0),
        (7, "<answer>8</answer> 7", 0.0),
        ("7", "I do not know", 0.0),
        ("7", "", 0.0),
        ("7", r"\boxed{9^{9^{9^{9}}}}", 0.0),
    ]
    rater = Rater(WorkerOptions("truestep.environments.adapters.math_verify:reward", 60.0, 2**30), 2)
    try:
        rated = [
            rater.submit(Prompt("p", "p", {"answer": answer, "kind": "x"}, (1,)), completion, str(number))
            for number, (answer, completion, _) in enumerate(cases)
        ]
        assert [float(one.result(120)) for one in rated] == [expected for _, _, expected in cases]
    finally:
        rater.close()
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": f"sort {n} =", "answer": n} for n in range(8)])
    reward = "truestep.environments.adapters.math_verify:reward"
    quiet_trainer(
        sampled_config(model, prompts, tmp_path / "run", sampler={"reward": reward}, schedule={"steps": 1})
    ).run()
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["num_documents"] == 8


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real server of the package, in its own Python."""
    command = [os.environ["TRUESTEP_ADAPTERS"], str(HERE / "openenv_server.py")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        yield f"http://127.0.0.1:{int(started.stdout.readline())}"
    finally:
        started.kill()
        started.wait()


def openenv(url: str, **options: Any) -> EpisodeService:
    kind = WorkerOptions("truestep.environments.adapters.openenv:OpenEnv", 60.0, 2**29)
    return EpisodeService(kind, 1, {"url": url, **options})


def test_a_run_trains_and_evaluates_on_a_real_server(server: str, model: Path, tmp_path: Path) -> None:
    """The server's reward is counted here from the texts alone."""
    environment = {"type": "openenv", "options": {"url": f"{server}/digits", "size": 6, "held_out": 2, "chat": False}}
    sampler = {"prompts": None, "reward": None, "environment": environment, "stop": ["="], "max_episode_tokens": 64}
    sections: dict[str, Any] = {"evaluation": {"every": 2, "stop": ["="]}, "logging": {"rollouts": {"documents": 100}}}
    runs = [tmp_path / name for name in ("one", "other")]
    for run in runs:
        quiet_trainer(
            sampled_config(model, Path(), run, sampler=sampler, schedule={"steps": 2}, deterministic=True, **sections)
        ).run()
    first, other = (without_times(read_lines(run / "metrics.jsonl")) for run in runs)
    assert first == other and [line["num_documents"] for line in first] == [8, 8]
    rows = kept_rows(runs[0])
    assert len(rows) == 16 and any(row["reward"] for row in rows)
    for row in rows:
        words = row["completion"].replace("sort 2 =", "").split()
        digits = sum(word.isdigit() for word in words)
        if not row["truncated"]:
            assert row["reward"] == pytest.approx(digits / 10), row
    assert all(line["num_unrated"] == 0 for line in read_lines(runs[0] / "evaluation.jsonl"))


def test_the_tools_of_a_real_mcp_environment_are_called(server: str) -> None:
    service = openenv(f"{server}/tools")
    try:
        tools = service.tools(120)
        assert set(tools) == {"add", "fail"} and tools["add"]["function"]["description"] == "Add two numbers."
        assert set(tools["add"]["function"]["parameters"]["properties"]) == {"a", "b"}
        begun = service.begin({"prompt": "p", "seed": 4}, "0").result(60)
        calls = (ToolCall("add", {"a": 1, "b": 41}, "first"), ToolCall("fail", {}), ToolCall("add", {"a": "x"}))
        told = service.step(begun.episode, Answer("", calls)).result(60)
        assert isinstance(told, Said) and told.messages is not None
        assert told.messages[0] == {"role": "tool", "name": "add", "tool_call_id": "first", "content": "42"}
        assert "it cannot be done" in told.messages[1]["content"] and "b" in told.messages[2]["content"]
        end = service.step(begun.episode, Answer("42")).result(60)
        assert isinstance(end, End) and float(end.reward) == 1.5 and list(end.turn_rewards) == [1.5, None]  # type: ignore[arg-type]
    finally:
        service.close_all()


def test_a_typed_action_of_a_real_server_is_a_tool(server: str) -> None:
    service = openenv(f"{server}/board", reward="last")
    try:
        assert service.tools(120)["act"]["function"]["description"] == "A place on the board."
        begun = service.begin({"prompt": "p", "seed": 4}, "0").result(60)
        assert begun.said.messages == [{"role": "user", "content": "sort 4 1 ="}]
        calls = (ToolCall("act", {"x": "one", "y": 1}), ToolCall("act", {"x": 3, "y": 1}))
        told = service.step(begun.episode, Answer("", calls)).result(60)
        assert isinstance(told, Said) and told.messages is not None
        assert told.messages[0]["content"].startswith("error: x: Input should be a valid integer")
        assert told.messages[1]["content"] == "3,1"
        end = service.step(begun.episode, Answer("", (ToolCall("act", {"x": 2, "y": 2}),))).result(60)
        assert isinstance(end, End) and float(end.reward) == 2.0  # type: ignore[arg-type]
    finally:
        service.close_all()
