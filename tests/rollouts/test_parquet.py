import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.rollout_records import SCHEMA, load, reasons, record, same, write
from truestep.rollouts.files import DataError, expand_paths, read_records


def parquet(path: Path, rows, schema=SCHEMA, **options) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


def test_parquet_with_nulls_and_nan(tmp_path):
    rows = [
        record("a", 0, logprobs=[None, -0.5, -0.25], metadata={"k": 3, "text": None}),
        record("b", 1, logprobs=[math.nan, -0.5, -0.25], model_version=[None, 4, 5]),
        record("c", 1, logprobs=[0, None, -0.25]),
        record("d", math.nan),
        record("e", 1, logprobs=None),
        record("f", 1, input_ids=None),
    ]
    documents = load(parquet(tmp_path / "r.parquet", rows))
    assert [rollout.logprobs.tolist() for rollout in documents.rollouts] == [[0, -0.5, -0.25]] * 2
    assert documents.rollouts[0].metadata == {"k": 3, "text": None}
    assert documents.rollouts[1].metadata == {}
    assert documents.rollouts[1].model_version.tolist() == [0, 4, 5]
    assert reasons(documents) == [
        (3, "logprobs[1] is null on a label: expected a number"),
        (4, "reward is nan: expected a finite number"),
        (5, "logprobs is missing: this run's loss needs the sampler's log-probabilities"),
        (6, "input_ids is missing"),
    ]
    assert [item.id for item in documents.rejected] == list("cdef")


def test_parquet_rows_are_numbered_over_batches_and_row_groups(tmp_path):
    rows = [record(None if index % 2 else f"r{index}", index, str(index)) for index in range(300)]
    file = parquet(tmp_path / "r.parquet", rows, row_group_size=77)
    rollouts = load(file).rollouts
    assert [rollout.reward for rollout in rollouts] == list(range(300))
    assert rollouts[299].id == "r.parquet:300"
    assert [line for _, line, _ in read_records([file])] == list(range(1, 301))


@pytest.mark.parametrize(
    "schema",
    [
        {"input_ids": pa.large_list(pa.uint16()), "loss_mask": pa.list_(pa.int8()), "logprobs": pa.list_(pa.float32())},
        {"input_ids": pa.list_(pa.int64(), 3), "loss_mask": pa.list_(pa.uint64()), "logprobs": pa.list_(pa.float16())},
    ],
    ids=["large", "fixed"],
)
def test_parquet_of_other_types(tmp_path, schema):
    rows = [record("a", 0, loss_mask=[0, 1, 1]), record("b", 1, loss_mask=[0, 1, 1])]
    fields = {name: SCHEMA.field(name).type for name in SCHEMA.names} | schema
    fields["group_id"] = pa.dictionary(pa.int32(), pa.string())
    found = load(parquet(tmp_path / "r.parquet", rows, pa.schema(fields))).rollouts
    expected = load(write(tmp_path / "r.jsonl", *rows)).rollouts
    assert [same(*pair) for pair in zip(found, expected, strict=True)] == [True, True]


def test_parquet_metadata_may_be_a_map(tmp_path):
    schema = SCHEMA.set(SCHEMA.get_field_index("metadata"), pa.field("metadata", pa.map_(pa.string(), pa.int64())))
    rows = [record("a", 0, metadata=[("k", 1), ("l", 2)]), record("b", 0, metadata=[("k", 1), ("k", 2)])]
    documents = load(parquet(tmp_path / "r.parquet", rows, schema))
    assert documents.rollouts[0].metadata == {"k": 1, "l": 2}
    assert len(documents.rejected) == 1
    assert documents.rejected[0].reason.startswith("metadata cannot be read: ")
    assert (documents.rejected[0].id, documents.rejected[0].group_id) == ("b", "g")


def test_parquet_without_a_usable_column(tmp_path):
    unrelated = pa.table({"text": ["x", "y"]})
    pq.write_table(unrelated, tmp_path / "a.parquet")
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["id", "id"])
    pq.write_table(twice, tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([], schema=SCHEMA), tmp_path / "c.parquet")
    documents = load(*expand_paths(str(tmp_path / "*.parquet")))
    assert reasons(documents) == [
        (1, "input_ids is missing"),
        (2, "input_ids is missing"),
        (1, "the column 'id' is given twice"),
    ]


def test_parquet_text_that_is_no_unicode(tmp_path):
    table = pa.Table.from_pylist([record("a", 0), record("b", 1)], schema=SCHEMA)
    broken = pa.array([b"\xff", b"b"]).cast(pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.schema.get_field_index("id"), "id", broken), tmp_path / "r.parquet")
    documents = load(tmp_path / "r.parquet")
    assert [rollout.id for rollout in documents.rollouts] == ["b"]
    assert documents.rejected[0].reason.startswith("id cannot be read: ")


def test_a_file_that_is_no_parquet(tmp_path):
    file = tmp_path / "r.parquet"
    file.write_bytes(b"not this")
    with pytest.raises(DataError, match=r"r\.parquet cannot be read"):
        load(file)


@st.composite
def valid_records(draw):
    length = draw(st.integers(1, 8))
    mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
    full = draw(st.booleans())
    size = length if full else sum(mask)

    def values(elements):
        return draw(st.lists(elements, min_size=size, max_size=size))

    optional = {
        "advantage": draw(st.none() | st.floats(-1e30, 1e30)),
        "temperature": draw(st.none() | st.floats(1e-3, 10)),
        "model_version": draw(st.none() | st.just(values(st.integers(0, 2**62)))),
        "metadata": draw(st.none() | st.fixed_dictionaries({"k": st.integers(0, 9), "text": st.text(max_size=3)})),
    }
    required = {
        "input_ids": draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)),
        "loss_mask": mask,
        "logprobs": values(st.floats(-1e30, 0)),
        "reward": draw(st.floats(-1e30, 1e30)),
        "group_id": draw(st.sampled_from(["g", "h", "é\u2028"])),
    }
    return required | optional


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(valid_records(), max_size=6))
def test_jsonl_and_parquet_give_the_same_rollouts(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("same")
    rows = [row | {"id": f"id {index}"} for index, row in enumerate(rows)]
    from_json = load(write(folder / "r.jsonl", *rows, b""), group_size=2)
    from_parquet = load(parquet(folder / "r.parquet", rows), group_size=2)
    assert from_json.rejected == from_parquet.rejected == ()
    assert len(from_json.rollouts) == len(rows)
    for left, right, row in zip(from_json.rollouts, from_parquet.rollouts, rows, strict=True):
        assert same(left, right)
        assert left.input_ids.tolist() == row["input_ids"]
        assert left.loss_mask.tolist() == row["loss_mask"]
        assert left.reward == row["reward"]
        on_labels = row["logprobs"]
        if len(on_labels) == len(row["loss_mask"]):
            on_labels = [value for value, is_label in zip(on_labels, row["loss_mask"], strict=True) if is_label]
        assert left.logprobs[left.loss_mask].tolist() == np.array(on_labels, np.float32).tolist()


def test_metadata_that_json_cannot_hold_is_a_rejected_record(tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    from truestep.rollouts.check import check_files

    rows = {"input_ids": [[1, 2]], "prompt_length": [1], "metadata": [{"at": datetime.datetime(2026, 1, 1)}]}
    pq.write_table(pa.table(rows), tmp_path / "r.parquet")
    summary = check_files([str(tmp_path / "r.parquet")])
    assert "metadata holds what JSON cannot" in str(summary)
