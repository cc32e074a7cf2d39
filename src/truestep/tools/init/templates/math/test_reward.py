"""Tests of the reward, in which most errors of RL tasks are. Run them with `python test_reward.py` or pytest."""

import json
from pathlib import Path

from reward import last_number, reward

HERE = Path(__file__).parent


def test_the_last_number_counts() -> None:
    assert reward("", "2 and 3 make \\boxed{5}", answer=5) == 1.0
    assert reward("", "first 5, then 7", answer=5) == 0.1
    assert reward("", "no idea", answer=5) == 0.0


def test_numbers_are_read_as_people_write_them() -> None:
    assert [last_number(text) for text in ("1,234", "-0.5", "3/4", "4 6", "x")] == [1234, -0.5, 0.75, 46, None]
    assert [last_number(text) for text in ("it is $1,234,567.50.", "7-5", "- 1 2", "-3.")] == [1234567.5, 5, -12, -3]


def test_numbers_beside_each_other_stay_apart() -> None:
    texts = ("12 + 15 = 27\n27", "options are 12, 15", "1, 2, 3", "in 2024 12 were sold", "1,23")
    assert [last_number(text) for text in texts] == [27, 15, 3, 12, 23]


def test_a_box_may_have_braces() -> None:
    texts = ("\\boxed{\\frac{3}{4}}", "\\boxed{\\text{about } 5} and 6", "\\boxed{-\\dfrac{1}{2}}", "\\boxed{7")
    assert [last_number(text) for text in texts] == [0.75, 5, -0.5, 7]


def test_an_answer_may_be_a_worked_solution() -> None:
    assert reward("", "72", answer="48/2 = 24\n48 + 24 = <<48+24=72>>72\n#### 72") == 1.0
    assert reward("", "1,000", answer="#### 1,000") == reward("", "so 3", answer="3") == 1.0
    assert reward("", "5", answer="#### 72") == 0.1


def test_every_problem_can_be_answered() -> None:
    for name in ("prompts.jsonl", "easy.jsonl", "hard.jsonl"):
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            assert reward(record["prompt"], str(record["answer"]), answer=record["answer"]) == 1.0


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: passed")
