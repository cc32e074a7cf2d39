"""Metrics of episodes against the oracle's loops, and against a count by hand."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pages import ROOT
from truestep.metrics.types import values
from truestep.rollouts.episodes import ToolUse, TurnFacts, facts_of
from truestep.rollouts.turns import read_turns
from truestep.step.compute.episodes import measure_episodes
from truestep.tools.verify.oracle.episodes import episode_metrics
from truestep.tools.verify.oracle.records import read_document
from truestep.types import Rollout

NUMBERS = st.sampled_from([None, 0, 1, 2, 2.5, -1, True, "3", [], 1e12, float("nan")])
NAMES = st.sampled_from(["add", "look", "(other)", "", "a\nb", "x" * 65])
TOOLS = st.dictionaries(NAMES, st.fixed_dictionaries({}, optional={"calls": NUMBERS, "seconds": NUMBERS}), max_size=3)
TURN = st.fixed_dictionaries(
    {}, optional={"drawing": NUMBERS, "environment": NUMBERS, "malformed": NUMBERS, "tools": TOOLS | NUMBERS}
)
GOOD = st.fixed_dictionaries(
    {
        "drawing": st.sampled_from([0.5, 1]),
        "malformed": st.integers(0, 2),
        "tools": st.dictionaries(
            st.sampled_from(["add", "look"]),
            st.fixed_dictionaries({"calls": st.integers(0, 3), "seconds": st.sampled_from([None, 0.25])}),
        ),
    }
)
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "ended_by": st.sampled_from(["environment", "max_turns", "episode_timeout", "own", None, 3]),
        "tools": st.lists(NAMES, max_size=2) | NUMBERS,
        "by_turn": st.lists(GOOD, max_size=3) | st.lists(TURN | NUMBERS, max_size=3) | NUMBERS,
    },
)
# Whether each token is a label, and the turns' bounds.
SHAPES = st.tuples(st.lists(st.booleans(), min_size=5, max_size=5), st.sampled_from([(), (1, 3), (1, 2, 4), (2, 3, 5)]))


def record(number: int, shape: tuple[list[bool], tuple[int, ...]], metadata: dict[str, Any]) -> dict[str, Any]:
    mask, bounds = [False, *shape[0]], shape[1]
    turns = [{"start": start, "end": end, "role": "assistant"} for start, end in pairwise(bounds)]
    whole = {"id": f"d{number}", "input_ids": [1] * 6, "loss_mask": [int(one) for one in mask]}
    return whole | {"turns": turns, "metadata": metadata}


def rollout(of: dict[str, Any]) -> Rollout:
    ids, mask = np.array(of["input_ids"]), np.array(of["loss_mask"], dtype=bool)
    return Rollout(of["id"], ids, mask, turns=read_turns(of["turns"], 6) or (), metadata=of["metadata"])


def measured(*records: dict[str, Any]) -> dict[str, float]:
    return values(measure_episodes([rollout(one) for one in records]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SHAPES, METADATA), max_size=5))
def test_they_are_the_oracle_s(drawn: list[Any]) -> None:
    records = [record(number, *one) for number, one in enumerate(drawn)]
    with_turns = [read_document(one, 1.0) for one in records if one["turns"]]
    expected = {name: value for name, (value, _) in episode_metrics(with_turns).items()}
    found = {name: value for name, value in measured(*records).items() if "_time/" not in name}
    assert found == pytest.approx(expected, rel=1e-12)


def with_turns(**metadata: Any) -> dict[str, Any]:
    return record(0, ([True, False, True, True, False], (1, 2, 3, 5)), metadata)


def test_a_count_by_hand() -> None:
    one = with_turns(
        ended_by="max_turns",
        tools=["add", "look"],
        by_turn=[
            {"drawing": 1.0, "environment": 0.5, "tools": {"add": {"calls": 2, "seconds": 0.4}}, "malformed": 1},
            {"drawing": 2.0, "environment": None, "tools": {"(other)": {"calls": 1, "seconds": None}}},
        ],
    )
    other = with_turns(ended_by="environment", by_turn=[{"drawing": 6, "environment": 1.5, "tools": {}}])
    unknown, without = with_turns(), one | {"turns": []}
    assert measured(one, other, unknown, without) == pytest.approx(
        {
            "policy_turns": 2, "max_policy_turns": 2,
            "ended_by/environment": 0.5, "ended_by/max_turns": 0.5, "ended_by/max_episode_tokens": 0,
            "ended_by/max_new_tokens": 0, "ended_by/episode_timeout": 0,
            "tool_calls": 4 / 2, "malformed_tool_calls": 1 / 4,
            "tool_calls/add": 2 / 2, "tool_calls/look": 0, "tool_calls/(other)": 1 / 2,
            "turn_time/drawing": 9 / 3, "turn_time/environment": 2 / 2, "tool_time/add": 0.4 / 2,
        }
    )  # fmt: skip


def test_without_turns_nothing_is_measured() -> None:
    facts = {"ended_by": "environment", "by_turn": [{"drawing": 1.0}]}
    assert measured() == {} and measured(with_turns(**facts) | {"turns": []}) == {}
    assert set(measured(with_turns(own="facts"))) == {"policy_turns", "max_policy_turns"}


def test_names_of_tools_are_bounded() -> None:
    """Whoever wrote them: 64 names are told apart, those with the most calls."""
    turns = [
        {"tools": {f"t{number}": {"calls": number, "seconds": 1.0} for number in range(first, first + 50)}}
        for first in (0, 50, 100)
    ]
    found = measured(with_turns(by_turn=turns))
    names = {name for name in found if name.startswith("tool_calls/")}
    assert len(names) == 65 and "tool_calls/t149" in names and "tool_calls/t85" not in names
    assert found["tool_calls/(other)"] == sum(range(86)) and found["tool_calls/t86"] == 86
    assert found["tool_time/(other)"] == pytest.approx(86 / sum(range(86)))
    assert facts_of({"by_turn": [{"tools": {f"t{number}": {"calls": 1} for number in range(66)}}]}).turns == []


def test_what_a_turn_took_survives_json() -> None:
    turn = TurnFacts(0.1234567, 2.0, {"add": ToolUse(2, 1e-7), "(other)": ToolUse(1)}, 3)
    (read,) = facts_of({"by_turn": [turn.line()]}).turns
    assert (read.drawing, read.environment, read.malformed, read.calls) == (0.123457, 2.0, 3, 6)
    assert read.tools == {"add": ToolUse(2, 0.0), "(other)": ToolUse(1, None)}


def test_the_metadata_of_the_page_are_read() -> None:
    """docs/environments.md: what rollouts that somebody else sampled may say of their episodes."""
    (line,) = re.findall(r"```json\n(.*)\n```", (ROOT / "docs" / "environments.md").read_text(encoding="utf-8"))
    facts = facts_of(json.loads(line))
    assert facts.ended_by == "max_turns" and facts.tools == ["calculate"]
    (turn,) = facts.turns
    assert (turn.drawing, turn.environment, turn.malformed, turn.calls) == (0.31, 0.02, 0, 1)
    assert turn.tools["calculate"].seconds == 0.01
