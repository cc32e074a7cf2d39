"""How far the members of a group differ, against the oracle's loops, and what a run logs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from small_runs import file_config, quiet_trainer, read_lines, write_lines
from tiny import make_records
from truestep.metrics.types import values
from truestep.step.compute.groups import measure_answers, measure_groups
from truestep.tools.verify.oracle.metrics import answer_metrics, group_metrics
from truestep.tools.verify.oracle.records import read_document
from truestep.types import Rollout

NAMES = {"zero_advantage_groups", "distinct_completions", "group_reward_spread", "most_common_completion"}
MEMBERS = st.tuples(
    st.sampled_from([None, "a", "b", "c"]),  # its group
    st.lists(st.integers(1, 2), min_size=1, max_size=2),  # its completion
    st.sampled_from([None, 0.0, 0.5, -1.0]),  # its advantage
    st.sampled_from([None, 0.0, 1.0, 0.25]),  # its reward
)


def record(number: int, group: str | None, completion: list[int], advantage: float | None, reward: float | None) -> Any:
    prompt = 6 if group == "c" else 5
    whole = {"id": f"d{number}", "input_ids": [prompt, *completion], "loss_mask": [0] + [1] * len(completion)}
    optional = {"group_id": group, "advantage": advantage, "reward": reward}
    return whole | {name: value for name, value in optional.items() if value is not None}


def rollout(of: dict[str, Any]) -> Rollout:
    mask = np.array(of["loss_mask"], dtype=bool)
    advantage = of.get("advantage")
    return Rollout(
        id=of["id"],
        input_ids=np.array(of["input_ids"], dtype=np.int64),
        loss_mask=mask,
        advantages=None if advantage is None else np.where(mask, np.float32(advantage), np.float32(0)),
        reward=of.get("reward"),
        group_id=of.get("group_id"),
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(MEMBERS, max_size=9))
def test_it_is_the_oracle_s(members: list[tuple[str | None, list[int], float | None, float | None]]) -> None:
    records = [record(number, *member) for number, member in enumerate(members)]
    expected = {name: value for name, (value, _) in group_metrics([read_document(r, 1.0) for r in records]).items()}
    found = values(measure_groups([rollout(one) for one in records]))
    assert found == pytest.approx(expected, rel=1e-12)
    documents = [read_document(r, 1.0) for r in records]
    answers = {name: value for name, (value, _) in answer_metrics(documents).items()}
    assert values(measure_answers([rollout(one) for one in records])) == pytest.approx(answers, rel=1e-12, abs=1e-15)


def test_what_it_says_of_two_groups() -> None:
    same = [record(number, "same", [1], 0.0, 1.0) for number in range(4)]
    other = [record(4, "other", [1], 1.0, 1.0), record(5, "other", [2], -1.0, 0.0)]
    alone = [record(6, "alone", [1], 0.0, 0.0)]
    found = values(measure_groups([rollout(one) for one in (*same, *other, *alone)]))
    assert found == {
        "zero_advantage_groups": 0.5,
        "distinct_completions": (0.25 + 1.0) / 2,
        "group_reward_spread": pytest.approx(0.5**0.5 / 2),
    }


def test_one_completion_of_all_prompts_is_told_from_one_prompt_s() -> None:
    groups = [record(number, "ab"[number // 4], [1] if number < 6 else [2], 0.0, 1.0) for number in range(8)]
    assert "most_common_completion" not in values(measure_groups([rollout(one) for one in groups]))
    for one in groups[4:]:
        one["input_ids"][0] = 6  # another prompt
    assert values(measure_groups([rollout(one) for one in groups]))["most_common_completion"] == 6 / 8


def test_what_it_says_of_answers() -> None:
    rewards = [(3, 1.0), (1, 0.0), (2, 0.0), (4, 0.5), (6, None)]
    found = values(
        measure_answers([rollout(record(n, None, [1] * size, None, r)) for n, (size, r) in enumerate(rewards)])
    )
    assert found == {
        "response_length": 16 / 5, "max_response_length": 6, "min_response_length": 1,
        "reward_std": pytest.approx((0.6875 / 3) ** 0.5),  # around a mean of 3/8
        "response_length_rewarded": 3.5, "response_length_unrewarded": 1.5,
    }  # fmt: skip
    alike = [rollout(record(number, None, [1], None, 0.1)) for number in range(3)]
    assert "response_length_rewarded" not in values(measure_answers(alike)), "none is above a mean that they all have"
    assert values(measure_answers([])) == {}


def test_a_run_logs_them_with_groups_and_not_without(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    records = make_records(5, documents=8, max_length=12)
    for number, one in enumerate(records):
        one.pop("advantage", None)
        one |= {"group_id": f"g{number // 4}", "reward": float(number % 2) if number < 4 else 1.0}
    write_lines(tmp_path / "groups.jsonl", records)
    lines = {}
    for level in ("none", "basic"):
        run = tmp_path / level
        grouped = {"data": {"advantages": "group_mean", "group_size": 4}, "schedule": {"docs_per_step": 8}}
        config = file_config(tiny_model("llama"), tmp_path / "groups.jsonl", run, loss={"metrics": level}, **grouped)
        quiet_trainer(config).run()
        (lines[level],) = read_lines(run / "metrics.jsonl")
    assert not NAMES & set(lines["none"])
    assert lines["basic"]["zero_advantage_groups"] == 0.5
    assert lines["basic"]["zero_advantage_fraction"] == pytest.approx(0.5, abs=0.2)
    assert lines["basic"]["distinct_completions"] == 1.0
    assert lines["basic"]["group_reward_spread"] == pytest.approx((1 / 3) ** 0.5 / 2)
