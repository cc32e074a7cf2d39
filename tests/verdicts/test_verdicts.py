"""The judgement of runs from their numbers: ten that were recorded, and numbers made up for each sentence."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from truestep.report.verdicts import Evidence, Verdict, judge
from truestep.report.verdicts.beside import beside
from truestep.report.verdicts.watching import Lines, Watching, most_common
from verdicts.ill_runs import ALL_RIGHT, RECORDED, RUNS, VERDICTS

STATES = {
    *("rate", "collapse", "hacked", "entropy", "length", "constant reward", "too hard", "too easy", "lost", "worse"),
    *("learned", "unchanged", "overfitted", "early", "unknown"),
}
BAD = ("bad", "warning")


def recorded(name: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The lines of metrics.jsonl and of evaluation.jsonl of a recorded run."""
    found = json.loads((RECORDED / f"{name.replace(' ', '-')}.json").read_text(encoding="utf-8"))
    steps, evaluations = (
        [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        for table in (found["metrics"], found["evaluation"])
    )
    return steps, evaluations


class Told:
    """What a run says while it goes on."""

    def __init__(self, **options: Any):
        self.said: list[str] = []
        self.written: list[dict[str, Any]] = []
        self.watching = Watching(self.said.append, self.written.append, rejected_in="run/rejected.jsonl", **options)

    @property
    def kinds(self) -> list[str]:
        return [line["kind"] for line in self.written]


def played(
    steps: Iterable[Mapping[str, float]], evaluations: Iterable[Mapping[str, float]] = (), **options: Any
) -> Told:
    told, waiting = Told(**options), list(evaluations)
    while waiting and waiting[0]["step"] == 0:
        told.watching.evaluation(waiting.pop(0))
    for line in steps:
        told.watching.step(line)
        assert_none_contradict(told.watching.judged())
        while waiting and waiting[0]["step"] == line["step"]:
            told.watching.evaluation(waiting.pop(0))
            assert_none_contradict(told.watching.judged())
    return told


def played_without_a_look(steps: Iterable[Mapping[str, float]]) -> Told:
    told = Told()
    for line in steps:
        told.watching.step(line)
    return told


def assert_none_contradict(verdicts: list[Verdict]) -> None:
    kinds = [verdict.kind for verdict in verdicts]
    assert len(set(kinds)) == len(kinds)
    assert [kind for kind in kinds if kind in STATES] == kinds[:1], "there is one state, and it comes first"


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_told_for_what_it_is(name: str) -> None:
    told = played(*recorded(name))
    verdicts = told.watching.judged()
    found = {verdict.kind: verdict for verdict in verdicts}
    assert VERDICTS[name] in found
    assert len(set(told.kinds)) == len(told.kinds) == len(told.said), "each is said once"
    assert {kind for kind, verdict in found.items() if verdict.level in BAD} <= set(told.kinds)
    for line, said in zip(told.said, told.written, strict=True):
        assert line == f"warning: after step {said['step']}: {said['text']}"
    assert told.watching.sentence.startswith(f"{verdicts[0].title}. ")
    for verdict in verdicts:
        assert verdict.level not in BAD or verdict.advice
        assert any(letter.isdigit() for letter in verdict.evidence)
        assert not [claim for claim in ("solved", "at most", "reward 0 or 1") if claim in verdict.text]
    if name == ALL_RIGHT:
        assert not told.said and verdicts[0].level == "good"
    else:
        assert any(verdict.level in BAD for verdict in verdicts)


def test_one_answer_to_all_prompts_is_no_success() -> None:
    """A policy that writes one completion to every prompt earns the largest reward that was ever seen."""
    steps, evaluations = recorded("collapse")
    verdicts = played(steps, evaluations).watching.judged()
    assert [verdict.kind for verdict in verdicts] == ["collapse"], "and nothing beside it says the same or its contrary"
    assert "its part `correct` is 0 in every document" in verdicts[0].evidence
    # Where the numbers do not tell completions of different prompts apart, no success is claimed either.
    without = [{key: value for key, value in line.items() if key != "most_common_completion"} for line in steps]
    assert all(verdict.level != "good" for verdict in played(without, evaluations).watching.judged())


def test_a_task_with_one_answer_is_no_collapse_where_answers_are_declared_to_pass() -> None:
    steps, evaluations = recorded("collapse")
    passing = [line | {"pass@1": 1.0} for line in evaluations]
    assert "collapse" not in {verdict.kind for verdict in played(steps, passing).watching.judged()}


def line_of(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "num_documents": 128, "reward": 0.5, "min_reward": 0.0, "max_reward": 1.0} | more


def lines_of(count: int, **metrics: Callable[[int], float]) -> list[dict[str, float]]:
    return [line_of(step, **{name: make(step) for name, make in metrics.items()}) for step in range(1, count + 1)]


def noisy(mean: Callable[[int], float], spread: float = 0.02, seed: int = 0) -> Callable[[int], float]:
    generator = random.Random(seed)
    return lambda step: mean(step) + generator.gauss(0, spread)


# What is made up, and the kind of the verdict that must be among those on it.
MADE_UP: dict[str, tuple[str, dict[str, Callable[[int], float]]]] = {
    "a reward is far from the sampler's policy": ("far from the sampler", {"kl_new_old": lambda step: 0.5}),
    "most tokens are clipped": ("far from the sampler", {"clipped_ratio_fraction": lambda step: 0.4}),
    "completions are cut off from the start": ("cut off", {"truncated_fraction": lambda step: 0.7}),
    "limits cut many episodes": (
        "cut off",
        {"ended_by/max_turns": lambda step: 0.2, "ended_by/episode_timeout": lambda step: 0.15},
    ),
    "steps have no gradient": ("no gradient", {"grad_norm": lambda step: 0.0}),
    "groups do not differ": ("groups without a difference", {"zero_advantage_groups": lambda step: 0.85}),
    "prefixes are computed again": (
        "divided trees",
        {"computed_tokens": lambda step: 1000.0, "recomputed_prefix_tokens": lambda step: 600.0},
    ),
    "rewards are waited for": ("slow rewards", {"time/rating": lambda step: 8.0, "step_time": lambda step: 10.0}),
    "tools are waited for": ("slow tools", {"sampling_idle_time": lambda step: 6.0, "step_time": lambda step: 10.0}),
    "entropy falls and nothing is learnt": ("no exploration", {"entropy": lambda step: 1.0 / step**2}),
    "the reward falls": ("worse", {"reward": noisy(lambda step: 0.7 - 0.02 * step)}),
    "the policy loses everything": (
        "lost",
        {
            "reward": lambda step: 0.4 * (step < 10),
            "max_reward": lambda step: float(step < 10),
        },
    ),
    "a wanted part falls": (
        "hacked",
        {"reward": noisy(lambda step: 0.1 + 0.03 * step), "rewards/accuracy": noisy(lambda step: 0.5 - 0.025 * step)},
    ),
    "a few earn something": (
        "too hard",
        {"reward": noisy(lambda step: 0.02, 0.003), "zero_advantage_groups": lambda step: 0.97},
    ),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_what_is_wrong_is_said(name: str) -> None:
    kind, metrics = MADE_UP[name]
    assert kind in played(lines_of(20, **metrics)).kinds
    assert kind not in played(lines_of(20)).kinds, "and not where it is not so"


# Honest runs of which nothing bad must be said.
HONEST: dict[str, dict[str, Callable[[int], float]]] = {
    "noise": {"reward": noisy(lambda step: 0.3, 0.05), "entropy": noisy(lambda step: 0.8, 0.05)},
    "learns, and its entropy falls": {
        "reward": noisy(lambda step: min(0.9, 0.2 + 0.02 * step)),
        "entropy": lambda step: 1.0 / step**2,
        "distinct_completions": lambda step: max(0.125, 1 - 0.03 * step),
        "zero_advantage_groups": lambda step: min(0.9, 0.03 * step),
    },
    "thinks longer": {
        "reward": noisy(lambda step: 0.2 + 0.015 * step),
        "response_length": lambda step: 200.0 * step,
        "truncated_fraction": lambda step: 0.01 * step,
    },
    "a penalty that is never paid": {
        "reward": noisy(lambda step: 0.2 + 0.015 * step, seed=1),
        "rewards/correct": noisy(lambda step: 0.2 + 0.015 * step, seed=1),
        "rewards/length_penalty": lambda step: 0.0,
    },
    "a penalty that grows": {
        "reward": noisy(lambda step: 0.2 + 0.01 * step, seed=1),
        "rewards/correct": noisy(lambda step: 0.2 + 0.02 * step, seed=2),
        "rewards/too_long": noisy(lambda step: -0.01 * step, seed=3),
    },
    "a rare success": {
        "reward": lambda step: 0.002 * (step % 7 == 0),
        "max_reward": lambda step: float(step % 7 == 0),
        "zero_advantage_groups": lambda step: 1.0 - 0.1 * (step % 7 == 0),
    },
    "half of the groups do not differ": {"zero_advantage_groups": lambda step: 0.6},
    "classes of which one is common": {"most_common_completion": noisy(lambda step: 0.7, 0.1)},
    "episodes of which a few are cut": {
        "truncated_fraction": noisy(lambda step: 0.2, 0.01),
        "ended_by/max_turns": noisy(lambda step: 0.1, 0.01),
        "ended_by/max_new_tokens": noisy(lambda step: 0.1, 0.01),
    },
    "episodes that are cut less and less": {
        "ended_by/max_turns": lambda step: 0.29 / step,
        "truncated_fraction": lambda step: 0.29 / step,
    },
    "trees of which a few are divided": {
        "computed_tokens": lambda step: 1000.0,
        "recomputed_prefix_tokens": lambda step: 400.0,
    },
    "steered to an entropy": {
        "entropy": lambda step: 0.2 + 0.1 * step,
        "entropy_bonus_weight": lambda step: 0.01,
    },
}
SELDOM = {"a rare success": {"too hard"}}  # what may be said of it, since next to nothing is earned


@pytest.mark.parametrize("name", HONEST)
def test_no_false_alarm(name: str) -> None:
    for length in (8, 40):
        assert set(played(lines_of(length, **HONEST[name])).kinds) <= SELDOM.get(name, set())


@pytest.mark.parametrize(("with_prefixes", "said"), [(range(1, 21), False), (range(1, 41, 2), True)])
def test_prefixes_are_compared_with_the_tokens_of_the_same_steps(with_prefixes: range, said: bool) -> None:
    """Small steps look for no shared prefixes; large ones before them say nothing of the last steps."""
    large, small = {"computed_tokens": 1000.0, "recomputed_prefix_tokens": 600.0}, {"computed_tokens": 100.0}
    lines = [line_of(step, **(large if step in with_prefixes else small)) for step in range(1, 41)]
    assert ("divided trees" in {verdict.kind for verdict in played(lines).watching.judged()}) is said


def test_noise_alone_is_neither_success_nor_failure() -> None:
    """Two hundred runs that do not change: of few more than chance has it is anything said."""
    told = 0
    for seed in range(200):
        steps = lines_of(30, reward=noisy(lambda step: 0.4, 0.05, seed))
        verdicts = played_without_a_look(steps).watching.judged()
        told += verdicts[0].kind != "unchanged"
    assert told <= 6


def test_a_verdict_that_went_away_is_said_again_when_it_comes_back() -> None:
    rates = [0.5] * 10 + [0.0] * 40 + [0.5] * 10
    told = played(lines_of(60, kl_new_old=lambda step: rates[step - 1]))
    assert told.kinds == ["far from the sampler"] * 2
    flickering = played(lines_of(60, kl_new_old=lambda step: 0.6 * (step % 2)))
    assert flickering.kinds == ["far from the sampler"]


def test_a_run_that_goes_on_does_not_repeat_what_was_said() -> None:
    steps, evaluations = recorded("constant reward")
    first = played(steps[:5], evaluations)
    assert first.kinds == ["constant reward"]
    again = Told(steps=steps[:5], warnings=first.written)
    for line in steps[5:]:
        again.watching.step(line)
    assert again.kinds == [] and again.watching.judged()[0].kind == "constant reward"
    assert "all 1,024 completions" in again.watching.judged()[0].evidence, "it counts those of the first start"


def test_rejected_completions_are_counted_by_reason() -> None:
    told = Told()
    told.watching.rejected(["the reward raised KeyError: 'answer'"] * 30 + ["the reward took longer than 60 s"] * 2)
    told.watching.step(line_of(1))
    (said,) = told.said
    assert "32 (20.0%) were rejected" in said and "KeyError: 'answer'" in said and "run/rejected.jsonl" in said
    told.watching.step(line_of(2))
    assert len(told.said) == 1
    few = Told()
    few.watching.rejected(["the reward took longer than 60 s"])
    few.watching.step(line_of(1, num_documents=256))
    assert not few.said, "one of hundreds is a note of the report"


def test_steps_on_the_same_documents_are_one_observation() -> None:
    """Eight updates on each batch log one reward eight times: three numbers are no trend."""
    steps = lines_of(24, reward=lambda step: (0.5, 0.7, 0.4)[(step - 1) // 8])
    assert played(steps).watching.judged()[0].kind == "worse"
    assert played(steps, updates=8).watching.judged()[0].kind == "early"


@pytest.mark.parametrize(
    ("losses", "kind"),
    [([2.0, 1.5, 1.2, 1.1], "learned"), ([2.0, 1.2, 1.3, 1.6], "overfitted"), ([2.0, 2.0], "unknown")],
)
def test_supervised_runs_are_judged_by_the_held_out_loss(losses: list[float], kind: str) -> None:
    steps = [{"step": step, "num_documents": 64, "loss": 2.0} for step in range(1, 13)]
    evaluations = [{"step": 3 * number, "loss": loss} for number, loss in enumerate(losses)]
    assert played(steps, evaluations).watching.judged()[0].kind == kind


def test_anything_may_be_missing_or_of_any_size() -> None:
    generator = random.Random(0)
    names = sorted(recorded("collapse")[0][0].keys() | {"time/rating", "step_time", "entropy_bonus", "staleness"})
    names += ["ended_by/max_turns", "ended_by/episode_timeout"]
    for _ in range(150):
        present = generator.sample(names, generator.randrange(len(names)))
        count = generator.choice([0, 1, 2, 5, 30])
        values = [0.0, 1.0, -1.0, 1e-300, 1e300, math.nan, math.inf, 0.3]
        lines = [
            {"step": step, **{name: generator.choice(values) for name in present if generator.random() < 0.9}}
            for step in range(count)
        ]
        table, evaluated = (
            Lines(lines),
            Lines([{"step": 0, "greedy_reward": generator.choice(values)} for _ in range(3)]),
        )
        verdicts = judge(Evidence(table.column, evaluated.column, table.names))
        assert_none_contradict(verdicts)
        assert all(verdict.text for verdict in verdicts)


def test_slow_rewards_are_said_after_three_steps_of_any_size() -> None:
    told = played_without_a_look(lines_of(3, num_documents=lambda step: 8, **MADE_UP["rewards are waited for"][1]))
    assert told.kinds == ["slow rewards"] and "80.0% of a step's time, 8.0 s" in told.said[0]


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        ("max_turns", "Raise sampler.max_turns"),
        ("max_episode_tokens", "Raise sampler.max_episode_tokens"),
        ("max_new_tokens", "Raise sampler.max_new_tokens"),
        ("episode_timeout", "sampler.episode_timeout"),
    ],
)
def test_the_limit_that_cuts_most_episodes_is_named(limit: str, advice: str) -> None:
    shares: dict[str, Callable[[int], float]] = {
        f"ended_by/{name}": lambda step, name=name: 0.4 if name == limit else 0.05  # type: ignore[misc]
        for name in ("max_turns", "max_new_tokens", "episode_timeout", "max_episode_tokens")
    }
    told = played(lines_of(5, truncated_fraction=lambda step: 0.55, **shares))
    assert told.kinds == ["cut off"], "once, and not as completions too"
    assert f"limits cut 55.0%: 40.0% by {limit}, 5.00% by" in told.said[0] and advice in told.said[0]


def test_prompts_that_were_easy_from_the_start_are_no_success_though_the_last_mistakes_go() -> None:
    def steps(first: float) -> list[dict[str, float]]:
        rewards = noisy(lambda step: min(0.995, first + 0.02 * step), 0.001)
        return lines_of(20, reward=rewards, zero_advantage_groups=lambda step: 0.95)

    assert [played(steps(first)).watching.judged()[0].kind for first in (0.93, 0.6)] == ["too easy", "learned"]


def test_a_fault_of_the_judgement_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(evidence: Evidence) -> list[Verdict]:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("truestep.report.verdicts.watching.judge", fails)
    told = played_without_a_look(lines_of(5))
    (line,) = told.said
    assert "the run cannot be judged: ZeroDivisionError: a fault" in line and told.watching.sentence == ""


def test_the_most_common_completion_is_quoted_safely() -> None:
    assert most_common(["a", "b\x1b[31m", "b\x1b[31m", None]) == "`b\\x1b[31m`"
    assert most_common([None]) is None
    assert len(most_common(["x" * 500]) or "") < 70


def test_beside_a_state_nothing_says_the_same() -> None:
    state = Verdict("collapse", "bad", "", "1")
    table = Lines(lines_of(20, truncated_fraction=lambda step: 1.0, grad_norm=lambda step: 0.0))
    assert not list(beside(Evidence(table.column, Lines().column, table.names), state))
