"""Prompts that an environment makes itself, in a process of its own, and what its processes prepare once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from truestep.environments.episodes import service as service_module
from truestep.environments.episodes.environment import Answer
from truestep.environments.episodes.service import EpisodeError, EpisodeService, LateEpisodeError, check_environment
from truestep.environments.process import WorkerOptions
from truestep.environments.rewards import RewardError


@contextmanager
def serving(kind: str, timeout: float = 60.0, **options: Any) -> Iterator[EpisodeService]:
    service = EpisodeService(WorkerOptions(f"turn_environments:{kind}", timeout, 2**29), 1, options)
    try:
        yield service
    finally:
        service.close_all()


def test_rows_come_whole_and_in_order_however_large_they_are() -> None:
    with serving("Made", rows="many") as service:
        first, again, held_out = (list(service.rows("7", which)) for which in (False, False, True))
        other = list(service.rows("8"))
        begun = service.begin(first[5], "0").result(60)
    random.seed("7")
    expected = [
        {"prompt": f"p{n}", "held_out": False, "drawn": random.random(), "long": "x" * 10_000} for n in range(300)
    ]
    assert first == again == expected
    assert [row["drawn"] for row in held_out] == [row["drawn"] for row in first] and held_out[0]["held_out"]
    assert other[0]["drawn"] != first[0]["drawn"]
    assert begun.said.text == "p5"


@pytest.mark.long
def test_all_rows_may_take_longer_than_one_answer_may() -> None:
    with serving("Made", timeout=6.0, rows="slow") as service:
        assert [row["prompt"] for row in service.rows("0")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("none", r"^the environment makes no prompts for training: its `rows` gives none$"),
        ("empty", r"^the environment makes no prompts for training: its `rows` gives none$"),
        ("raises", r"^the environment's rows raised ValueError: no more of them \(at turn_environments\.py:\d+\)$"),
        ("exits", r"^the environment ended its process in rows \(exit code 3\)$"),
        ("texts", r"row 1 is 'sort 3 1 =', and a row is a mapping with the key `prompt`"),
        ("objects", r"a row holds \{1, 2\}, of type set, which JSON cannot hold"),
    ],
)
def test_rows_that_fail_say_why(rows: str, problem: str) -> None:
    with serving("Made", rows=rows) as service, pytest.raises(EpisodeError, match=problem):
        list(service.rows("0"))


def test_rows_that_hang_are_late() -> None:
    with serving("Made", timeout=0.5, rows="hangs") as service:
        with pytest.raises(LateEpisodeError, match="the environment's rows took longer than sampler.reward_timeout"):
            list(service.rows("0"))
        assert service._hosts[0].load == 0


def test_rows_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MOST_ROWS", 250)
    with serving("Made", rows="many") as service, pytest.raises(EpisodeError, match="makes more than 250 rows"):
        list(service.rows("0"))


def test_the_check_before_a_run_makes_the_first_rows() -> None:
    options = WorkerOptions("turn_environments:Made", 60.0, 2**29)
    assert check_environment(options, {"rows": "many"}, [False, True]) == {}
    with pytest.raises(RewardError, match="makes no prompts for evaluation"):
        check_environment(options, {"rows": "none"}, [True])
    check_environment(options, {"rows": "none"})


def test_an_environment_is_prepared_once_for_all_episodes() -> None:
    with serving("Prepared") as service:
        begun = [service.begin({"prompt": "p"}, "0").result(60) for _ in range(3)]
        rewards = [service.step(one.episode, Answer("x")).result(60).reward for one in begun]  # type: ignore[union-attr]
        assert rewards == [1.0, 1.0, 1.0] and list(service.tools()) == ["tool_1"]
