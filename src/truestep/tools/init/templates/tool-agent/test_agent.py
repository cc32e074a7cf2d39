"""Tests of the environment. Run them with `python test_agent.py` or pytest."""

import json
from pathlib import Path

from agent import Boxes

from truestep import Answer

HERE = Path(__file__).parent
ROW = {"prompt": [{"role": "user", "content": "what is in box 1"}], "boxes": [4, 7], "answer": 7}


def boxes() -> Boxes:
    made = Boxes()
    made.row = ROW
    made.start(ROW)
    return made


def test_the_tool_opens_boxes_that_are_there() -> None:
    assert boxes().open(1) == "7" and boxes().open(2) == boxes().open(-1) == "nothing"


def test_a_number_that_was_looked_up_is_worth_most() -> None:
    agent = boxes()
    agent.open(1)
    assert agent.finish(Answer("7")) == {"called": 0.2, "answered": 0.2, "right": 0.6}
    assert agent.finish(Answer("4")) == {"called": 0.2, "answered": 0.2, "right": 0.0}
    assert agent.finish(Answer("no")) == agent.cut("max_turns") == {"called": 0.2, "answered": 0.0, "right": 0.0}
    assert not any(boxes().finish(Answer("7")).values())


def test_every_task_has_an_answer() -> None:
    for name in ("prompts.jsonl", "held_out.jsonl"):
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            assert record["answer"] in record["boxes"]


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: passed")
