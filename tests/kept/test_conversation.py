"""Documents of several turns as kept blocks, against plain loops over their tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truestep.rollouts.kept import files
from truestep.rollouts.kept.conversation import MOST_BLOCKS, blocks_of
from truestep.rollouts.kept.reader import CUT, Reader
from truestep.rollouts.kept.rows import row_of
from truestep.rollouts.turns import read_turns
from truestep.types import Rollout


def reader(longest: int = 1000) -> Reader:
    return Reader(lambda ids, plain: "".join(f"w{number} " for number in ids), longest)


def document(generator: random.Random, by_turn: bool = True) -> Rollout:
    size, sequences = generator.randint(4, 30), generator.randint(1, 3)
    starts = sorted({0, *(generator.randrange(1, size) for _ in range(sequences - 1))})
    mask = np.array([place not in starts and generator.random() < 0.5 for place in range(size)])
    turns, place = [], 0
    while place < size:
        end = min(size, place + generator.randint(1, 6), *(start for start in starts if start > place), size)
        if generator.random() < 0.8:
            reward = generator.choice([None, 0.5, 0.0])
            turns.append({"start": place, "end": end, "role": generator.choice(["user", "tool"]), "reward": reward})
        place = end
    own = [turn for turn in turns if mask[turn["start"] : turn["end"]].any()]
    facts = [{"drawing": float(number), "tools": {"add": {"calls": number}}} for number in range(len(own))]
    several = {"starts": tuple(starts), "record_ids": tuple(map(str, starts))} if len(starts) > 1 else {}
    metadata = {"ended_by": "max_turns", "by_turn": facts if by_turn else [*facts, {}]}
    ids = np.arange(size) + 100
    return Rollout("d", ids, mask, turns=read_turns(turns, size) or (), metadata=metadata, **several)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_are_the_document(seed: int) -> None:
    made = document(random.Random(seed))
    blocks, place, drawn = blocks_of(made, reader()), 0, 0
    starts, known = made.starts or (0,), set()
    for block in blocks:
        tokens = range(place, place + block["tokens"])
        assert block["text"] == "".join(f"w{number + 100} " for number in tokens)
        for token in tokens:
            assert made.loss_mask[token] == block["label"]
            assert block["sequence"] == sum(start <= token for start in starts) - 1
            inside = [number for number, turn in enumerate(made.turns) if turn.start <= token < turn.end]
            assert [block["turn"]] == (inside or [None])
        turn = None if block["turn"] is None else made.turns[block["turn"]]
        if turn is None or block["turn"] in known:
            assert not {"role", "reward", "tools"} & block.keys()
        else:
            known.add(block["turn"])
            assert (block["role"], block["reward"]) == (turn.role, turn.reward)
            if made.loss_mask[turn.start : turn.end].any():
                assert block["drawing_seconds"] == drawn
                assert block["tools"] == [{"name": "add", "calls": drawn, "seconds": None}]
                drawn += 1
            else:
                assert "tools" not in block
        place += block["tokens"]
    assert place == made.num_tokens and len(known) == len(made.turns)


def test_facts_that_are_of_other_turns_are_left_out() -> None:
    made = document(random.Random(3), by_turn=False)
    assert made.turns and not any("tools" in block for block in blocks_of(made, reader()))


def test_texts_and_blocks_are_bounded() -> None:
    size = 4 * MOST_BLOCKS
    mask = np.arange(size) % 2 == 1
    turns = read_turns([{"start": 0, "end": size, "role": "assistant"}], size) or ()
    made = Rollout("d", np.arange(size), mask, turns=turns)
    blocks = blocks_of(made, reader(20))
    assert len(blocks) == MOST_BLOCKS and sum(len(block["text"]) for block in blocks if block["text"] != CUT) <= 40
    long = Rollout("d", np.arange(size), np.arange(size) == size - 1, turns=turns)
    first, last = blocks_of(long, reader(20))
    assert len(first["text"]) == 20 and first["text"].endswith(CUT) and last["text"] == f"w{size - 1} "


def test_of_a_past_that_is_said_again_the_end_is_kept() -> None:
    mask = np.arange(200) % 100 == 99
    turns = read_turns([{"start": place, "end": place + 1, "role": "assistant"} for place in (99, 199)], 200) or ()
    made = Rollout("d", np.arange(200), mask, turns=turns, starts=(0, 100), record_ids=("a", "b"))
    blocks = blocks_of(made, reader(80))
    assert [block["sequence"] for block in blocks] == [0, 0, 1, 1]
    assert blocks[0]["text"].startswith("w0 w1 ") and len(blocks[0]["text"]) == 80
    assert blocks[2]["text"] == f"{CUT}197 w198 " and blocks[3]["text"] == "w199 "


def test_a_row_with_turns_is_read_back_as_it_was(tmp_path: Path) -> None:
    made = document(random.Random(1))
    row = row_of(made, None, reader(), 1, 0, False)
    (read,) = files.read_rows(files.write_rows(tmp_path, [row]))
    assert read["ended_by"] == row["ended_by"] == "max_turns"
    assert [{name: block[name] for name in block if block[name] is not None} for block in read["turns"]] == [
        {name: value for name, value in block.items() if value is not None} for block in row["turns"]
    ]
    plain: dict[str, Any] = row_of(Rollout("d", made.input_ids, made.loss_mask), None, reader(), 1, 0, False)
    assert "turns" not in plain and "ended_by" not in plain
