"""Rewards in processes: what hangs, dies or raises costs its completion alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from truestep.environments.prompts import Prompt
from truestep.environments.reward_pool import RewardPool
from truestep.environments.rewards import RewardError

PROMPT = Prompt("a", "sort 2 1 =", {"answer": "1 2"}, (1, 2))


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    made = RewardPool("server.rewards:choosy", workers=2, timeout=2.0)
    yield made
    made.close()


def test_a_reward_is_what_the_function_returns(pool: RewardPool) -> None:
    assert pool.rate(PROMPT, "four") == 4.0


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("hang", r"took longer than sampler.reward_timeout: 2 s"),
        ("die", r"ended its process \(exit code 7\)"),
        ("raise", "the reward raised ValueError: no such answer"),
        ("text", "returned '1.0', which is not a number"),
    ],
)
def test_a_reward_that_fails_says_why_and_the_next_is_rated(completion: str, reason: str, pool: RewardPool) -> None:
    with pytest.raises(RewardError, match=reason):
        pool.rate(PROMPT, completion)
    assert pool.rate(PROMPT, "four") == 4.0


def test_one_that_hangs_keeps_nobody_waiting(pool: RewardPool) -> None:
    pool.rate(PROMPT, "warm")
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(pool.rate, PROMPT, "hang")
        time.sleep(0.1)
        assert threads.submit(pool.rate, PROMPT, "four").result(120) == 4.0
        assert isinstance(slow.exception(120), RewardError)


def test_a_process_is_started_only_when_there_is_work_for_it() -> None:
    pool = RewardPool("server.rewards:process_id", workers=4, timeout=10.0)
    assert len({pool.rate(PROMPT, "any") for _ in range(4)}) == 1
    pool.close()


def test_a_function_that_is_not_there_is_named() -> None:
    pool = RewardPool("server.rewards:nobody", workers=1, timeout=5.0)
    with pytest.raises(RewardError, match="has no function nobody"):
        pool.rate(PROMPT, "any")
    pool.close()
