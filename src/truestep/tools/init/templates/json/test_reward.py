"""Tests of the reward, in which most errors of RL tasks are. Run them with `python test_reward.py` or pytest."""

import json
from pathlib import Path

from reward import reward

HERE = Path(__file__).parent
WANTED = {"name": "Ann", "age": 31}


def total(completion: str) -> float:
    return round(sum(reward("", completion, wanted=WANTED).values()), 6)


def test_the_right_object_is_worth_one() -> None:
    assert total(' {"name": "Ann", "age": 31} ') == 1.0


def test_each_part_counts() -> None:
    assert total('{"name": "Ann", "age": 30}') == 0.7
    assert total('{"name": "Ann"}') == 0.5
    assert total("{name: Ann}") == 0.1
    assert total("[1]") == total("Ann is 31") == 0.0


def test_every_text_can_be_answered() -> None:
    for name in ("prompts.jsonl", "held_out.jsonl"):
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            parts = reward(record["prompt"], json.dumps(record["wanted"]), wanted=record["wanted"])
            assert abs(sum(parts.values()) - 1.0) < 1e-9


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: passed")
