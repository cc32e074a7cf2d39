"""The fields of a record beside tokens and log-probs: truncated, reference_logprobs, rewards, a per-token advantage."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from losses.label_cases import labels_of, make_objective
from rollouts.rollout_records import GOOD as PLAIN
from rollouts.rollout_records import MISSING, load, parse, reason, same, write
from truestep.losses.measure import StepFacts, measure_labels
from truestep.metrics.types import merge, values
from truestep.rollouts.packing import pack
from truestep.tools.verify.oracle.losses import complete_loss_config
from truestep.tools.verify.oracle.metrics import step_metrics
from truestep.tools.verify.oracle.records import read_document
from truestep.types import StepTotals

GOOD = PLAIN | {"reference_logprobs": [9, -1, -0.75, -0.125, -9]}


def changed(**fields):
    return {name: value for name, value in (GOOD | fields).items() if value is not MISSING}


def test_they_are_read():
    rollout = parse(GOOD)
    assert rollout.truncated is True
    assert rollout.reference_logprobs.tolist() == [0, 0, -0.75, -0.125, 0]
    assert rollout.rewards == {"format": 0.5, "answer": 1.0}
    bare = parse(changed(truncated=MISSING, reference_logprobs=MISSING, rewards=MISSING))
    assert (bare.truncated, bare.reference_logprobs, bare.rewards) == (None, None, {})


def test_reference_logprobs_may_be_one_a_token():
    for values_of in ([math.nan, None, -0.75, -0.125, math.inf], [-0.75, -0.125]):
        assert same(parse(changed(reference_logprobs=values_of)), parse(GOOD))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncated": 1}, "truncated is 1: expected true or false"),
        ({"truncated": "yes"}, "truncated is 'yes': expected true or false"),
        ({"reference_logprobs": -1.0}, "reference_logprobs is -1.0: expected a list"),
        (
            {"reference_logprobs": [-1.0]},
            "reference_logprobs has 1 values: expected 5 (one a token) or 2 (one a label)",
        ),
        (
            {"reference_logprobs": [-1.0, 0.5]},
            "reference_logprobs[1] is 0.5 on a label: a log-probability is at most 0",
        ),
        (
            {"reference_logprobs": [-1.0, -math.inf]},
            "reference_logprobs[1] is -inf on a label: expected a finite number",
        ),
        ({"rewards": [1.0]}, "rewards is a list: expected an object of numbers by name"),
        ({"rewards": {"a": "1"}}, "rewards['a'] is '1': expected a number"),
        ({"rewards": {"a": math.nan}}, "rewards['a'] is nan: expected a finite number"),
        ({"rewards": {"a": 1e39}}, "rewards['a'] is 1e+39: not finite in float32"),
        ({"rewards": {"": 1.0}}, "rewards has a part '': its name is not printable text"),
        ({"rewards": {"a\n\x1b[31m": 1.0}}, "rewards has a part 'a\\n\\x1b[31m': its name is not printable text"),
        ({"rewards": {str(number): 1.0 for number in range(257)}}, "rewards has more than 256 parts"),
        ({"advantage": [1.0, 2.0, 3.0]}, "advantage has 3 values: expected 5 (one a token) or 2 (one a label)"),
    ],
)
def test_bad_values_are_rejected(fields, expected):
    assert reason(changed(**fields)) == expected


def test_so_many_parts_may_a_reward_have():
    """Null is no part: a row of a Parquet file has the names of all rows."""
    parts = {str(number): 1.0 for number in range(256)}
    assert parse(changed(rewards=parts | {f"null {number}": None for number in range(500)})).rewards == parts


def test_an_advantage_of_each_token_follows_the_two_lengths_of_logprobs():
    assert parse(changed(advantage=[0.25, -2])).advantages.tolist() == [0, 0, 0.25, -2, 0]
    assert same(parse(changed(advantage=[9, 9, 0.25, -2, math.nan])), parse(changed(advantage=[0.25, -2])))


def test_jsonl_and_parquet_give_the_same(tmp_path):
    lines = [
        GOOD | {"id": "a", "rewards": {"format": 0.5, "answer": 1.0}},
        GOOD | {"id": "b", "rewards": {"format": 0.25, "answer": None}, "truncated": False},
        GOOD | {"id": "c", "rewards": None, "truncated": None, "reference_logprobs": None},
    ]
    kept = [{name: line[name] for name in line if name != "metadata"} for line in lines]
    pq.write_table(pa.Table.from_pylist(kept), tmp_path / "a.parquet")
    first = load(write(tmp_path / "a.jsonl", *kept)).rollouts
    second = load(tmp_path / "a.parquet").rollouts
    assert [same(*pair) for pair in zip(first, second, strict=True)] == [True] * 3
    assert second[1].rewards == {"format": 0.25} and second[2].rewards == {}


RECORDS = [
    {"input_ids": [1, 2, 3], "prompt_length": 1, "truncated": True, "rewards": {"format": 0.1, "unit": -2.0}},
    {"input_ids": [1, 2], "prompt_length": 1, "truncated": False, "rewards": {"format": 0.7}},
    {"input_ids": [4], "prompt_length": 1, "rewards": {"format": 1.5}},
    {"input_ids": [1, 2], "prompt_length": 1},
]


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_parts_of_rewards_are_means_over_the_documents_that_have_them(cut):
    """Against the plain loop of the oracle, over any micro-batches."""
    full = [record | {"logprobs": [-0.5] * (len(record["input_ids"]) - 1), "advantage": 0.0} for record in RECORDS]
    documents = [parse(record | {"id": str(at)}) for at, record in enumerate(full)]
    metrics = {}
    for start in range(0, len(documents), cut):
        packed = pack(documents[start : start + cut]).labels
        statistics = {name: torch.zeros(len(packed)) for name in ("logprobs", "entropy", "logsumexp", "weight")}
        labels = labels_of(**(vars(packed) | statistics))
        facts = StepFacts(make_objective({"type": "grpo"}), 0, StepTotals(len(RECORDS), 1, 1))
        metrics = merge(metrics, measure_labels(labels, facts, "basic", {}))
    found = values(metrics)
    wanted = step_metrics(
        [read_document(r, 1.0) for r in RECORDS], [[]] * 4, [], complete_loss_config({"type": "grpo"}), 0
    )
    for name in ("rewards/format", "rewards/unit", "truncated_fraction"):
        assert found[name] == pytest.approx(wanted[name][0], rel=1e-6), name
    assert found["truncated_fraction"] == 0.5
    assert found["rewards/unit"] == -2.0


def test_a_name_in_the_rewards_may_hold_anything_printable():
    assert parse(changed(rewards={"é/1 b": 1})).rewards == {"é/1 b": 1.0}
    json.dumps(parse(changed(rewards={"é": 1})).rewards)
