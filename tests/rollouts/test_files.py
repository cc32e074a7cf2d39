import json
import math
from pathlib import Path

import pytest

from rollouts.rollout_records import RULE, advantages, load, reasons, record, write
from truestep.rollouts.files import DataError, expand_paths, read_records, short_names
from truestep.rollouts.record import BadRecord, Needs
from truestep.types import Rejected

# ---- paths


def test_patterns_are_sorted_and_files_come_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "deep/c.parquet", "z[1].jsonl"):
        write(tmp_path / name)
    assert expand_paths("*.jsonl") == [Path("a.jsonl"), Path("b.jsonl"), Path("z[1].jsonl")]
    assert expand_paths(["b.jsonl", "./*.jsonl"])[:2] == [Path("b.jsonl"), Path("a.jsonl")]
    assert expand_paths(["b.jsonl", str(tmp_path / "b.jsonl"), "./b.jsonl"]) == [Path("b.jsonl")]
    assert expand_paths("**/*.parquet") == [Path("deep/c.parquet")]
    assert expand_paths("z[1].jsonl") == [Path("z[1].jsonl")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none-*.jsonl", "no file matches 'none-*.jsonl'"),
        ("none.jsonl", "no file matches 'none.jsonl'"),
        ([], "no data files: data.path is an empty list"),
        ("notes.txt", "notes.txt has an unknown suffix: expected .jsonl or .parquet"),
        (["a.jsonl", "*"], "deep is a directory: name its files, as in 'deep/*.jsonl'"),
        ("deep", "deep is a directory: name its files, as in 'deep/*.jsonl'"),
    ],
)
def test_paths_that_name_nothing_usable(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "notes.txt", "deep/c.jsonl"):
        write(tmp_path / name)
    with pytest.raises(DataError) as caught:
        expand_paths(path)
    assert str(caught.value) == message


def test_names_tell_files_apart_and_stay_when_files_are_added():
    paths = [Path("run/step1/r.jsonl"), Path("run/step2/r.jsonl"), Path("other/step2/r.jsonl"), Path("r.jsonl")]
    names = list(short_names(paths).values())
    assert names == ["r.jsonl", "step2/r.jsonl", "other/step2/r.jsonl", f"{Path.cwd().name}/r.jsonl"]
    assert list(short_names(paths[:2]).values()) == names[:2]


def test_files_of_one_name_do_not_repeat_ids(tmp_path):
    files = [write(tmp_path / folder / "r.jsonl", record(reward=1), record(reward=2)) for folder in ("one", "two")]
    documents = load(*files)
    assert [rollout.id for rollout in documents.rollouts] == [
        "r.jsonl:1",
        "r.jsonl:2",
        "two/r.jsonl:1",
        "two/r.jsonl:2",
    ]
    assert documents.rejected == ()


# ---- JSONL


def test_lines_that_are_no_records(tmp_path):
    file = write(
        tmp_path / "r.jsonl",
        b"\xef\xbb\xbf" + json.dumps(record("first", 1)).encode(),
        b"",
        b"   \t\r",
        b'{"input_ids": ',
        b'{"id": "\xff\xfe"}',
        b"[1, 2]",
        b'{"id": "x", "id": "y", "group_id": "g"}',
        b'{"id": "twice", "reward": 1, "metadata": {"k": 1, "k": 2}}',
        b'{"input_ids": [' + b"9" * 5000 + b"]}",
        b"[" * 100_000,
        json.dumps(record("last", 3)).encode() + b"\r",
    )
    documents = load(file)
    assert [rollout.id for rollout in documents.rollouts] == ["first", "last"]
    found = {item.line: item for item in documents.rejected}
    assert sorted(found) == [4, 5, 6, 7, 8, 9, 10]
    assert found[4].reason == "not valid JSON: Expecting value (column 15)"
    assert found[5].reason == "not valid UTF-8: byte 9 of the line"
    assert found[6].reason == "the record is a list: expected an object with the fields of a rollout"
    assert found[7] == Rejected(str(file), 7, "the key 'id' is given twice", None, "g")
    assert found[8] == Rejected(str(file), 8, "the key 'k' is given twice", "twice", None)
    assert found[9].reason.startswith("not readable JSON: 'Exceeds the limit")
    assert found[10].reason.startswith("not readable JSON: 'maximum recursion depth")


def test_a_last_line_without_its_end_and_an_empty_file(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_bytes(json.dumps(record("a", 1)).encode())
    empty = write(tmp_path / "empty.jsonl", b"")
    assert [rollout.id for rollout in load(empty, file).rollouts] == ["a"]
    assert load(empty).rollouts == ()


def test_python_writes_nan_and_reads_it_back(tmp_path):
    spoiled = record("a", 1, logprobs=[math.nan, -0.5, -0.25])
    also = record("b", 2, logprobs=[-math.inf, -0.5, -0.25])
    bad = record("c", 2, logprobs=[0, math.nan, -0.25])
    huge = b'{"input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [-1], "group_id": "g", "reward": 1e400}'
    documents = load(write(tmp_path / "r.jsonl", spoiled, also, bad, huge))
    assert [rollout.id for rollout in documents.rollouts] == ["a", "b"]
    assert documents.rollouts[0].logprobs.tolist() == [0, -0.5, -0.25]
    assert reasons(documents) == [
        (3, "logprobs[1] is nan on a label: expected a finite number"),
        (4, "reward is inf: expected a finite number"),
    ]


def test_reading_is_lazy(tmp_path):
    file = write(tmp_path / "r.jsonl", record("a"), record("b"))
    records = read_records([file, tmp_path / "missing.jsonl"])
    assert next(records)[:2] == (file, 1)
    assert next(records)[2]["id"] == "b"
    with pytest.raises(DataError, match=r"missing\.jsonl cannot be read"):
        next(records)


# ---- groups over files


def test_groups_across_files_in_file_order(tmp_path):
    first = write(tmp_path / "1.jsonl", record("a", 0, "x"), record("b", 10, "y"), record("c", 1, "x"))
    second = write(tmp_path / "2.jsonl", record("d", 30, "y"))
    documents = load(first, second)
    assert list(advantages(documents).items()) == [("a", -0.5), ("b", -10), ("c", 0.5), ("d", 10)]
    assert list(advantages(load(second, first))) == ["d", "a", "b", "c"]


def test_a_rejected_member_counts_towards_its_group(tmp_path):
    file = write(
        tmp_path / "r.jsonl",
        record("a", 0),
        record("bad", 5, logprobs=[1, 1]),
        record("b", 1),
        record("c", 10),
        record("d", 20),
    )
    documents = load(file, group_size=3)
    assert advantages(documents) == {"a": -0.5, "b": 0.5, "c": -5, "d": 5}
    assert [(item.id, item.group_id) for item in documents.rejected] == [("bad", "g")]


def test_repeated_ids_across_files(tmp_path):
    first = write(tmp_path / "1.jsonl", record("a", 0), record("b", 5, input_ids=[]), record("a", 7))
    second = write(tmp_path / "2.jsonl", record("b", 1), record("a", 9))
    documents = load(first, second)
    assert [(rollout.id, rollout.reward) for rollout in documents.rollouts] == [("a", 0), ("b", 1)]
    assert [(Path(item.file).name, item.line, item.id) for item in documents.rejected] == [
        ("1.jsonl", 2, "b"),
        ("1.jsonl", 3, "a"),
        ("2.jsonl", 2, "a"),
    ]
    assert documents.rejected[2].reason == f"id is 'a': repeated, first at {first}:1"
    assert advantages(documents) == {"a": -0.5, "b": 0.5}


def test_an_id_that_is_another_records_default(tmp_path):
    file = write(tmp_path / "r.jsonl", record("r.jsonl:2", 1), record(None, 2))
    assert reasons(load(file)) == [(2, f"id is 'r.jsonl:2': repeated, first at {file}:1")]


@pytest.mark.parametrize("bad", [b"{", record("b", math.nan), record("a", 1)])
def test_stop_names_the_place_and_the_reason(tmp_path, bad):
    file = write(tmp_path / "r.jsonl", record("a", 0), b"", bad, record("c", 1))
    with pytest.raises(DataError) as caught:
        load(file, stop_at_rejected=True)
    assert str(caught.value) == f"{file}:3: {reasons(load(file))[0][1]}"
    assert load(write(file, record("a", 0)), stop_at_rejected=True).rejected == ()


def test_supervised_data_needs_no_rewards_and_gets_no_advantages(tmp_path):
    needs = Needs(logprobs=False, advantages=False, advantage_rule=RULE)
    bare = {"input_ids": [1, 2], "prompt_length": 1}
    file = write(tmp_path / "r.jsonl", bare, record("b", 1), record("c", 2), bare | {"advantage": 2})
    rollouts = load(file, needs=needs).rollouts
    assert [rollout.advantages is None for rollout in rollouts] == [True, True, True, False]
    assert [rollout.reward for rollout in rollouts] == [None, 1, 2, None]


def test_read_records_gives_bad_lines_as_values(tmp_path):
    file = write(tmp_path / "r.jsonl", b"{", record("a"))
    found = list(read_records([file]))
    assert isinstance(found[0][2], BadRecord)
    assert found[1][1:] == (2, record("a"))
