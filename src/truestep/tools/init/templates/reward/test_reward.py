"""Tests of the reward, in which most errors of RL tasks are. Run them with `python test_reward.py` or pytest."""

import json
from pathlib import Path

from reward import reward

HERE = Path(__file__).parent


def test_the_right_sum_is_worth_most() -> None:
    assert reward("12 + 34 =", "46", answer=46) == 1.0
    assert reward("12 + 34 =", " 4 6 ", answer=46) == 1.0
    assert reward("12 + 34 =", "47", answer=46) == 0.2


def test_anything_but_a_number_is_worth_nothing() -> None:
    for completion in ("", "forty-six", "46 or 47", "4+6", "-46"):
        assert reward("12 + 34 =", completion, answer=46) == 0.0


def test_every_prompt_has_what_the_reward_needs() -> None:
    for name in ("prompts.jsonl", "held_out.jsonl"):
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            fields = {key: value for key, value in record.items() if key != "prompt"}
            assert reward(record["prompt"], str(record["answer"]), **fields) == 1.0


def test_no_held_out_prompt_is_trained_on() -> None:
    trained, held_out = (
        {json.dumps(json.loads(line)["prompt"]) for line in (HERE / name).read_text(encoding="utf-8").splitlines()}
        for name in ("prompts.jsonl", "held_out.jsonl")
    )
    assert not trained & held_out


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: passed")
