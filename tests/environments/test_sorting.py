"""The task that the demo learns: prompts that are new each time, and a reward that only the right answer gets."""

from __future__ import annotations

import itertools

import pytest

from truestep.environments.sorting import DIGITS, WORDS, prompts, reward


def test_prompts_are_seeded_and_never_repeat() -> None:
    first = list(itertools.islice(prompts(0), 3000))
    assert first == list(itertools.islice(prompts(0), 3000))
    assert len({prompt["prompt"] for prompt in first}) == 3000
    assert first[:50] != list(itertools.islice(prompts(1), 50))


@pytest.mark.parametrize("length", [2, 4, 7])
def test_an_answer_is_the_prompts_digits_in_order(length: int) -> None:
    for prompt in itertools.islice(prompts(3, length), 40):
        start, *digits, end = prompt["prompt"].split()
        assert (start, end, len(digits)) == ("sort", "=", length)
        assert prompt["answer"].split() == sorted(digits)
        assert digits != sorted(digits), "copying the prompt must be wrong"
        assert set(digits) <= set(DIGITS)
        assert {start, end, *digits} <= set(WORDS)


@pytest.mark.parametrize("length", [1, 2])
def test_the_stream_ends_where_there_is_no_other_prompt(length: int) -> None:
    everything = list(itertools.islice(prompts(0, length), 200))
    assert len(everything) == {1: 0, 2: 45}[length]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("1 2 2 9", 1), (" 1  2 2 9 ", 1), ("1 2 9", 0), ("1 2 2 9 9", 0), ("2 1 2 9", 0), ("", 0), ("1229", 0)],
)
def test_only_the_right_digits_in_the_right_order_are_rewarded(completion: str, expected: float) -> None:
    given = reward("sort 9 2 1 2 =", completion, answer="1 2 2 9", level="other fields are welcome")
    assert type(given) is float
    assert given == expected
