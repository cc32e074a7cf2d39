"""Evaluation on held-out prompts: what a line says, and that training draws the same with and without it."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from completing import Asked, How, decode
from plain_rewards import digit_reward, failing_reward
from raters import DirectRater, NumberedRater
from small_runs import sort_prompts, word_model, write_lines
from truestep.environments.prompts import load_prompts
from truestep.environments.rater import Rates
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.evaluate import Evaluator, EvaluatorOfSets, pass_chances
from truestep.generate.play import SingleTurn
from truestep.generate.read import reader, stop_ids
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(word_model(tmp_path_factory.mktemp("evaluate") / "model"))


def how(policy: Policy) -> How:
    return How(1.0, 1.0, 6, 3, stop_ids(policy))


def make_evaluator(
    policy: Policy, directory: Path, count: int = 5, rater: Rates | None = None, **changes: Any
) -> Evaluator:
    usual: dict[str, Any] = {
        "prompts": load_prompts(write_lines(directory / "held_out.jsonl", sort_prompts(count)), policy.tokenizer),
        "plays": SingleTurn(rater or DirectRater(digit_reward), reader(policy)),
        "options": how(policy).draw,
        "samples_per_prompt": 3,
        "seed": 0,
    }
    return Evaluator(generator=EngineGenerator(policy, how(policy).settings), **(usual | changes))


def test_a_line_is_the_mean_reward_of_greedy_and_of_sampled_answers(policy: Policy, tmp_path: Path) -> None:
    given: list[float] = []

    def reward(prompt: Any, completion: str, **fields: Any) -> float:
        given.append(digit_reward(prompt, completion))
        return given[-1]

    evaluator = make_evaluator(policy, tmp_path, rater=DirectRater(reward))
    line = evaluator.run(step=4, documents_seen=32)
    assert len(given) == 5 + 15
    assert line["greedy_reward"] == pytest.approx(sum(given[:5]) / 5)
    assert line["sampled_reward"] == pytest.approx(sum(given[5:]) / 15)
    assert line["sampled_reward_std"] == pytest.approx(statistics.stdev(given[5:]))
    assert line["greedy_reward_std"] == pytest.approx(statistics.stdev(given[:5]))
    assert (line["step"], line["documents_seen"], line["num_prompts"]) == (4, 32, 5)
    assert json.loads(json.dumps(line)) == line


def test_rewards_of_several_sources_are_in_the_line_by_name(policy: Policy, tmp_path: Path) -> None:
    prompts = load_prompts(write_lines(tmp_path / "prompts.jsonl", sort_prompts(5)), policy.tokenizer)
    named = [replace(prompt, source="ab"[number % 2]) for number, prompt in enumerate(prompts)]
    given: dict[str, list[float]] = {"a": [], "b": []}

    def reward(prompt: Any, completion: str, **fields: Any) -> float:
        source = next(each.source for each in named if each.prompt == prompt)
        given[source].append(digit_reward(prompt, completion))
        return given[source][-1]

    line = make_evaluator(policy, tmp_path, rater=DirectRater(reward), prompts=named).run(step=4, documents_seen=32)
    for source, size in (("a", 3), ("b", 2)):
        rewards = given[source]
        assert len(rewards) == size + 3 * size
        assert line[f"greedy_reward/{source}"] == pytest.approx(sum(rewards[:size]) / size)
        assert line[f"sampled_reward/{source}"] == pytest.approx(sum(rewards[size:]) / (3 * size))
    assert line["sampled_reward/a"] != line["sampled_reward/b"]


def test_an_interval_is_made_of_questions_and_not_of_answers(policy: Policy, tmp_path: Path) -> None:
    """By hand: t with 4 degrees of freedom is 2.7764, and five questions have the means of their three answers."""
    given: list[float] = []

    def reward(prompt: Any, completion: str, **fields: Any) -> float:
        given.append(digit_reward(prompt, completion))
        return given[-1]

    line = make_evaluator(policy, tmp_path, rater=DirectRater(reward), pass_reward=2.0).run(step=4, documents_seen=32)
    questions = [statistics.fmean(given[5 + 3 * number : 8 + 3 * number]) for number in range(5)]
    assert len(set(questions)) > 1
    assert line["sampled_reward_ci"] == pytest.approx(2.7764 * statistics.stdev(questions) / 5**0.5, rel=2e-3)
    assert len(set(given[:5])) == 1 and line["greedy_reward_ci"] is None
    passed = [statistics.fmean(value >= 2 for value in given[5 + 3 * number : 8 + 3 * number]) for number in range(5)]
    assert line["pass@1_ci"] == pytest.approx(2.7764 * statistics.stdev(passed) / 5**0.5, rel=2e-3)
    few = make_evaluator(policy, tmp_path, count=1, rater=DirectRater(reward)).run(step=4, documents_seen=32)
    assert few["sampled_reward_ci"] is None and few["greedy_reward_ci"] is None


def test_sets_have_their_own_rewards_and_metrics_by_name(policy: Policy, tmp_path: Path) -> None:
    def half(prompt: Any, completion: str, **fields: Any) -> float:
        return digit_reward(prompt, completion) / 2

    (tmp_path / "b").mkdir()
    first = make_evaluator(policy, tmp_path, pass_reward=2.0)
    second = make_evaluator(policy, tmp_path / "b", count=3, rater=DirectRater(half), samples_per_prompt=2)
    lines = {"a": first.run(4, 32), "b": second.run(4, 32)}
    line = EvaluatorOfSets({"a": first, "b": second}).run(4, 32)
    assert (line["step"], line["documents_seen"], line["num_prompts"], line["num_unrated"]) == (4, 32, 8, 0)
    for name, alone in lines.items():
        for key in ("greedy_reward", "sampled_reward", "sampled_reward_ci", "response_length", "num_prompts"):
            assert line[f"{name}/{key}"] == alone[key]
    assert line["a/pass@1"] == lines["a"]["pass@1"] and "b/pass@1" not in line
    assert line["sampled_reward"] == pytest.approx(sum(one["sampled_reward"] for one in lines.values()) / 2)
    widths = [one["sampled_reward_ci"] for one in lines.values()]
    assert line["sampled_reward_ci"] == pytest.approx((widths[0] ** 2 + widths[1] ** 2) ** 0.5 / 2)
    errors = [one["sampled_reward_std"] ** 2 / one["num_prompts"] for one in lines.values()]
    assert line["sampled_reward_std"] ** 2 / 8 == pytest.approx(sum(errors) / 4)
    assert [example["set"] for example in line["examples"]] == ["a"] * 4 + ["b"] * 3
    assert json.loads(json.dumps(line)) == line


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers(k: int) -> None:
    """By listing every choice of k answers of each prompt; prompts with fewer answers are in no mean."""
    counts = [(4, 0), (5, 1), (6, 3), (4, 4), (3, 2), (0, 0)]
    shares = []
    for answers, passed in counts:
        chosen = list(combinations([True] * passed + [False] * (answers - passed), k))
        if chosen:
            shares.append(sum(map(any, chosen)) / len(chosen))
    assert len(shares) == (5 if k < 4 else 4)
    assert pass_chances(k, counts) == pytest.approx(shares, abs=1e-15)
    assert pass_chances(7, counts) == []


def test_a_line_has_pass_at_k_and_lengths(policy: Policy, tmp_path: Path) -> None:
    given: list[float] = []

    def reward(prompt: Any, completion: str, **fields: Any) -> float:
        given.append(digit_reward(prompt, completion))
        return given[-1]

    evaluator = make_evaluator(policy, tmp_path, rater=DirectRater(reward), samples_per_prompt=5, pass_reward=2.0)
    line = evaluator.run(0, 0)
    passed = [sum(value >= 2.0 for value in given[5 + 5 * prompt : 10 + 5 * prompt]) for prompt in range(5)]
    assert 0 < sum(passed) < 25
    names = [name for name in line if name.startswith("pass@") and not name.endswith("_ci")]
    assert names == ["pass@1", "pass@2", "pass@4"]
    assert line["pass@1"] == pytest.approx(sum(passed) / 25)
    assert line["pass@2"] == pytest.approx(sum(1 - (5 - c) * (4 - c) / 20 for c in passed) / 5)
    assert 0 < line["response_length"] <= 6 and 0 <= line["truncated_fraction"] <= 1


def test_examples_are_the_greedy_answers(policy: Policy, tmp_path: Path) -> None:
    evaluator = make_evaluator(policy, tmp_path, count=10)
    line = evaluator.run(0, 0)
    greedy = decode(
        policy,
        [Asked(prompt.input_ids, (0,)) for prompt in evaluator.prompts],
        How(0.0, 1.0, 6, 64, stop_ids(policy)),
    )
    texts = [reader(policy)(completion.token_ids) for completion in greedy]
    assert [example["completion"] for example in line["examples"]] == texts[:8]
    assert [example["prompt"] for example in line["examples"]] == [prompt.prompt for prompt in evaluator.prompts[:8]]
    assert [example["reward"] for example in line["examples"]] == [digit_reward("", text) for text in texts[:8]]


def test_samples_are_seeded_by_the_step(policy: Policy, tmp_path: Path) -> None:
    def sampled(step: int, **changes: Any) -> list[str]:
        texts: list[str] = []

        def reward(prompt: Any, completion: str, **fields: Any) -> float:
            texts.append(completion)
            return 0.0

        make_evaluator(policy, tmp_path, rater=DirectRater(reward), **changes).run(step, 0)
        return texts[5:]

    first = sampled(2)
    assert first == sampled(2)
    assert first != sampled(3)
    assert first != sampled(2, seed=1)
    assert len(set(first[:3])) > 1, "the samples of one prompt differ"


def test_what_cannot_be_rated_is_counted_and_no_part_of_a_mean(policy: Policy, tmp_path: Path) -> None:
    seen: dict[int, int] = {}

    def reward(step: int, number: int) -> float:
        seen[number] = seen.get(number, -1) + 1
        return float("nan") if (number, seen[number]) in ((1, 0), (2, 1), (9, 0)) else 2.0

    line = make_evaluator(policy, tmp_path, rater=NumberedRater(reward)).run(0, 0)
    assert (line["greedy_reward"], line["sampled_reward"], line["num_unrated"]) == (2.0, 2.0, 3)
    assert [example["reward"] for example in line["examples"]] == [2.0, None, 2.0, 2.0, 2.0]


def test_an_evaluation_that_nothing_can_be_rated_in_ends_no_run(policy: Policy, tmp_path: Path) -> None:
    line = make_evaluator(policy, tmp_path, rater=DirectRater(failing_reward)).run(0, 0)
    assert (line["greedy_reward"], line["sampled_reward"], line["num_unrated"]) == (None, None, 20)
