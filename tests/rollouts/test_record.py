import math

import numpy as np
import pyarrow as pa
import pytest

from rollouts.rollout_records import GOOD, MISSING, NOTHING, POISON, changed, parse, reason, same
from truestep.rollouts import record, values
from truestep.rollouts.fields import record_names
from truestep.rollouts.record import BadRecord, Needs


def test_a_good_record():
    rollout = parse(GOOD)
    assert rollout.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert rollout.input_ids.dtype == np.int64
    assert rollout.loss_mask.tolist() == [False, False, True, True, False]
    assert rollout.loss_mask.dtype == np.bool_
    assert rollout.logprobs.tolist() == [0, 0, -0.5, -0.25, 0]
    assert rollout.logprobs.dtype == np.float32
    assert rollout.advantages.tolist() == [0, 0, 0.5, 0.5, 0]
    assert rollout.advantages.dtype == np.float32
    assert rollout.model_version.tolist() == [0, 0, 12, 12, 0]
    assert rollout.model_version.dtype == np.int64
    assert (rollout.reward, rollout.group_id, rollout.temperature) == (1.5, "g", 0.7)
    assert (rollout.id, rollout.metadata) == ("a", {"k": [1, None]})


def test_arrays_are_checked_as_they_are(monkeypatch):
    """And not turned into lists: that costs time for each token."""
    arrays = {
        "input_ids": np.array(GOOD["input_ids"], np.int32),
        "loss_mask": np.array(GOOD["loss_mask"], np.bool_),
        "logprobs": np.array([0, 0, -0.5, -0.25, 0], np.float32),
    }
    expected, whole = parse(GOOD), values.plain

    def plain(value, field):
        assert not isinstance(value, np.ndarray) or not value.ndim, field
        return whole(value, field)

    for module in (values, record):
        monkeypatch.setattr(module, "plain", plain)
    assert same(parse(GOOD | arrays), expected)
    assert reason(GOOD | arrays | {"logprobs": np.array([0, 0, np.nan, -1, 0], np.float32)}).startswith("logprobs[2]")
    assert reason(GOOD | arrays | {"logprobs": np.ones(5, np.bool_)}).startswith("logprobs[2]")
    assert reason(GOOD | arrays | {"input_ids": np.array([5, 6, 7, 8, 9], np.float32)}).startswith("input_ids[0]")


@pytest.mark.parametrize("raw", [None, [], "text", 3, 1.5, True, [GOOD], float("nan"), 10**4000])
def test_a_record_is_an_object(raw):
    assert reason(raw).endswith("expected an object with the fields of a rollout")


def test_long_text_is_cut_in_a_message():
    assert reason(changed(reward="x" * 1000)) == f"reward is '{'x' * 40}'...: expected a number"
    assert "\n" not in reason(changed(reward="a\nb\x1b[31m"))


def test_a_bad_record_keeps_its_readable_identity():
    for fields, identity in (
        ({}, ("a", "g")),
        ({"id": 4.5}, (None, "g")),
        ({"id": 4}, ("4", "g")),
        ({"group_id": []}, ("a", None)),
    ):
        with pytest.raises(BadRecord) as caught:
            parse(changed(input_ids=[], **fields))
        assert (caught.value.id, caught.value.group_id) == identity


@pytest.mark.parametrize(
    "field", [name for name in record_names() if name not in ("input_ids", "loss_mask", "prompt_length")]
)
def test_null_is_absent(field):
    needs = NOTHING
    assert same(parse(changed(**{field: None}), needs), parse(changed(**{field: MISSING}), needs))


def test_absent_fields():
    bare = {"input_ids": [1, 2], "prompt_length": 1}
    rollout = parse(bare, NOTHING, default_temperature=0.25)
    assert (rollout.id, rollout.temperature, rollout.metadata) == ("file.jsonl:3", 0.25, {})
    optional = (rollout.logprobs, rollout.advantages, rollout.reward, rollout.group_id, rollout.model_version)
    assert optional == (None,) * 5


def test_unknown_fields_are_ignored():
    assert same(parse(GOOD | {"prompt": object(), "advantages": "?"}), parse(GOOD))


@pytest.mark.parametrize("length", range(1, 6))
def test_prompt_length_is_the_mask_after_it(length):
    record = changed(loss_mask=MISSING, prompt_length=length, logprobs=[-1.0] * (5 - length))
    assert parse(record).loss_mask.tolist() == [position >= length for position in range(5)]
    both = record | {"loss_mask": [int(position >= length) for position in range(5)]}
    assert same(parse(both), parse(record))


@pytest.mark.parametrize("mask", [[False, False, True, True, False], [0, False, True, 1, 0], (0, 0, 1, 1, 0)])
def test_a_mask_of_booleans(mask):
    assert same(parse(changed(loss_mask=mask)), parse(GOOD))


def test_zero_is_a_log_probability():
    assert parse(changed(logprobs=[0.0, -0.0])).logprobs.tolist() == [0.0] * 5
    assert parse(changed(logprobs=[0, -1e-60])).logprobs[3] == 0
    assert np.isfinite(parse(changed(logprobs=[-3.4028234663852886e38, -1])).logprobs).all()


@pytest.mark.parametrize("field", ["logprobs", "advantage", "model_version"])
def test_one_a_token_and_one_a_label_are_the_same(field):
    on_labels = {"logprobs": [-0.5, -0.25], "advantage": [2.5, -1], "model_version": [3, 4]}[field]
    one_a_token = [99, 98, *on_labels, 97]
    assert same(parse(changed(**{field: on_labels})), parse(changed(**{field: one_a_token})))


@pytest.mark.parametrize("poison", POISON, ids=repr)
def test_values_off_the_mask_are_not_looked_at(poison):
    def spoiled(values):
        return [poison, poison, *values, poison]

    clean = changed(logprobs=[-0.5, -0.25], advantage=[2.5, -1], model_version=[3, 4])
    poisoned = clean | {name: spoiled(clean[name]) for name in ("logprobs", "advantage", "model_version")}
    assert same(parse(poisoned), parse(clean))


def test_a_document_without_labels_needs_nothing():
    record = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}
    for fields in ({}, {"logprobs": [], "advantage": []}, {"logprobs": [math.nan] * 3, "advantage": 2.0}):
        rollout = parse(record | fields)
        assert rollout.num_labels == 0
        assert rollout.logprobs.tolist() == rollout.advantages.tolist() == [0, 0, 0]
    one_token = parse({"input_ids": [1], "prompt_length": 1})
    assert one_token.num_tokens == 1
    # Its reward still belongs to its group, so its advantages are yet to come.
    assert parse(record | {"reward": 1, "group_id": "g"}).advantages is None
    assert reason(record | {"logprobs": [-1]}) == "logprobs has 1 values: expected 3 (one a token) or 0 (one a label)"
    assert reason(record | {"advantage": math.nan}) == "advantage is nan: expected a finite number"


def test_what_each_loss_needs():
    rewarded = changed(advantage=MISSING)
    assert parse(rewarded).advantages is None
    own_only = Needs(logprobs=True, advantages=True, advantage_rule="none")
    expected = "advantage is missing: with data.advantages: none each record carries its own"
    assert reason(rewarded, needs=own_only) == expected
    bare = changed(advantage=MISSING, reward=MISSING, group_id=MISSING, logprobs=MISSING)
    assert parse(bare, NOTHING).logprobs is None
    # What a loss does not need is checked all the same.
    assert reason(changed(logprobs=[1, 1]), needs=NOTHING).startswith("logprobs[0] is 1 on a label")
    assert reason(changed(advantage=math.inf), needs=NOTHING).startswith("advantage is inf")


def test_no_vocabulary_and_no_limit():
    rollout = parse(changed(input_ids=[2**63 - 1, 10**9, 7, 8, 9]), vocabulary_size=None, max_tokens=None)
    assert rollout.input_ids[0] == 2**63 - 1
    assert parse(changed(input_ids=[0, 99, 7, 8, 9])).input_ids.tolist() == [0, 99, 7, 8, 9]
    assert parse(changed(input_ids=[1] * 10, loss_mask=[0] * 10, logprobs=[])).num_tokens == 10


def test_numpy_and_pyarrow_values():
    arrays = {
        "input_ids": np.array(GOOD["input_ids"], dtype=np.int32),
        "loss_mask": np.array(GOOD["loss_mask"], dtype=bool),
        "logprobs": np.array(GOOD["logprobs"], dtype=np.float32),
        "advantage": np.float32(0.5),
        "reward": np.float64(1.5),
        "model_version": np.int16(12),
        "group_id": np.str_("g"),
    }
    assert same(parse(GOOD | arrays), parse(GOOD))
    scalars = {
        "input_ids": [np.int64(i) for i in GOOD["input_ids"]],
        "loss_mask": [np.bool_(i) for i in [0, 0, 1, 1, 0]],
    }
    assert same(parse(GOOD | scalars), parse(GOOD))
    arrow = {name: pa.array(GOOD[name]) for name in ("input_ids", "loss_mask", "logprobs")} | {"id": pa.scalar("a")}
    assert same(parse(GOOD | arrow), parse(GOOD))
    assert same(parse(pa.scalar(GOOD)), parse(GOOD))
    assert reason(changed(input_ids=np.arange(5.0))) == "input_ids[0] is 0.0: expected an integer"
    assert reason(changed(input_ids=np.ones((5, 1), int))) == "input_ids[0] is a list: expected an integer"
    assert reason(changed(input_ids=np.array([2**64 - 1] * 5, np.uint64))).endswith("beyond 64 bits")
    assert reason(changed(logprobs=np.array([-1, np.nan]))).startswith("logprobs[1] is nan on a label")


def test_the_same_record_gives_arrays_of_its_own():
    ids = np.array(GOOD["input_ids"])
    rollout = parse(changed(input_ids=ids))
    ids[:] = 0
    assert rollout.input_ids.tolist() == [5, 6, 7, 8, 9]
