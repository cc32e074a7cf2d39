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
