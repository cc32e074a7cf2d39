import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.rollout_records import EVERYTHING, GOOD, NOTHING, POISON, parse, same
from truestep.rollouts.fields import record_names
from truestep.rollouts.record import BadRecord, Needs
from truestep.types import Rollout

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 12)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=4)
    | st.sampled_from([10**400, -(10**4000), 2**63, 1e308, -1e308, -0.0, "\ud800"]),
    lambda children: st.lists(children, max_size=6) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None)
@given(
    record=anything | st.dictionaries(st.sampled_from(record_names()), anything),
    replaced=st.dictionaries(st.sampled_from(record_names()), anything, max_size=2),
    needs=st.sampled_from([EVERYTHING, NOTHING]),
    vocabulary_size=st.none() | st.just(9),
)
def test_arbitrary_values_give_a_rollout_or_a_bad_record(record, replaced, needs, vocabulary_size):
    for raw in (record, GOOD | replaced):
        try:
            rollout = parse(raw, needs, vocabulary_size)
        except BadRecord as error:
            assert_readable(error)
        else:
            assert_sound(rollout, needs)


def assert_readable(error: BadRecord) -> None:
    assert error.reason.isprintable()
    error.reason.encode()  # a message that could not be written would end the run after all
    assert error.reason
    assert error.id is None or isinstance(error.id, str)
    assert error.group_id is None or isinstance(error.group_id, str)


def assert_sound(rollout: Rollout, needs: Needs) -> None:
    assert rollout.num_tokens >= 1
    assert not rollout.loss_mask[0]
    assert (rollout.input_ids >= 0).all()
    assert rollout.temperature > 0
    assert np.float32(rollout.temperature) > 0
    for values in (rollout.logprobs, rollout.advantages):
        if values is not None:
            assert values.dtype == np.float32
            assert np.isfinite(values).all()
            assert not values[~rollout.loss_mask].any()
    assert rollout.logprobs is None or (rollout.logprobs <= 0).all()
    assert rollout.logprobs is not None or not needs.logprobs
    from_group = rollout.reward is not None and rollout.group_id is not None
    assert rollout.advantages is not None or from_group or not needs.advantages
    json.dumps(rollout.id)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), length=st.integers(1, 12))
def test_poison_off_the_mask_never_shows(data, length):
    mask = [False, *data.draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
    labels = sum(mask)
    poison = st.sampled_from(POISON)

    def values(elements):
        return data.draw(st.lists(elements, min_size=labels, max_size=labels))

    record = {
        "input_ids": list(range(length)),
        "loss_mask": mask,
        "logprobs": values(st.floats(-1e30, 0)),
        "advantage": values(st.floats(-1e30, 1e30)),
        "model_version": values(st.integers(0, 2**62)),
    }
    poisoned = dict(record)
    for name in ("logprobs", "advantage", "model_version"):
        on_labels = iter(record[name])
        poisoned[name] = [next(on_labels) if is_label else data.draw(poison) for is_label in mask]
    assert same(parse(poisoned, max_tokens=None), parse(record, max_tokens=None))
