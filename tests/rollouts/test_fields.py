"""The table of fields: a line of it, or a user's declaration, acts in everything that a document goes through."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.rollout_records import EVERYTHING, GOOD, MISSING, NOTHING, changed, parse
from rollouts.test_record_properties import anything, assert_readable
from truestep.commands.cli import main
from truestep.files import bounded
from truestep.model.mixers.context_parallel import Context
from truestep.rollouts import fields, values
from truestep.rollouts.check import check_files
from truestep.rollouts.documents import document_line, read_document
from truestep.rollouts.fields import Field, FieldError, declare, optional
from truestep.rollouts.files import Documents, load_documents
from truestep.rollouts.packing import pack
from truestep.rollouts.record import Checks, Needs, parse_record
from truestep.rollouts.rows import encode
from truestep.rollouts.selection import choose_truncated
from truestep.rollouts.stored import load_stored
from truestep.rollouts.stream.reading import parse_message
from truestep.rollouts.stream.transport import Message
from truestep.rollouts.values import BadRecord
from truestep.tools.verify.oracle import records as oracle_records
from truestep.tools.verify.reduced import record_of, reduce_record
from truestep.types import Rollout

DECLARED = {
    "my_weight": {"level": "label"},
    "bonus": {"level": "label", "dtype": "int64", "default": 7},
    "liked": {"level": "label", "dtype": "bool", "default": False},
    "difficulty": {"level": "document"},
    "source_number": {"level": "document", "dtype": "int64", "default": -1},
}
OWN = {"my_weight": [0.5, 0.25, 2.0, 3.0, 9.0], "difficulty": 2.5}


def checks_of(declared: Any = None, needs: Needs = NOTHING) -> Checks:
    return Checks(needs, 100, max_tokens=10, fields=declare(declared))


def read(record: Any, declared: Any = DECLARED) -> Rollout:
    return parse_record(record, "file.jsonl:3", checks_of(declared))


def reason(record: Any, declared: Any = DECLARED) -> str:
    with pytest.raises(BadRecord) as caught:
        read(record, declared)
    assert_readable(caught.value)
    return caught.value.reason


def fields_in(rollout: Rollout) -> dict[str, Any]:
    held = (rollout.fields, rollout.token_fields, rollout.document_fields)
    return {name: (values.dtype.name, values.tolist()) for part in held for name, values in part.items()}


# ---- one line of the table


@pytest.fixture
def wider_table(monkeypatch: pytest.MonkeyPatch) -> list[Field]:
    """What the diff of a new field is: its line."""
    new = [
        Field("surprise", "label", np.float32, values.logprob, written="list of float", one_for_all=False),
        Field("place", "token", np.int64, values.version, missing=-1, has=False),
        Field("length_wanted", "document", np.int64, values.version),
    ]
    monkeypatch.setattr(fields, "TABLE", (*fields.TABLE, *new))
    return new


NEW = {"surprise": [-1.0, -2.0], "place": [4, 3, 2], "length_wanted": 17}


def test_a_new_line_of_the_table_acts_everywhere(wider_table: list[Field], tmp_path: Path) -> None:
    records = [GOOD | NEW, GOOD | {"id": "b", "truncated": False}]
    expected = {
        "surprise": ("float32", [0, 0, -1, -2, 0]),
        "place": ("int64", [4, 3, 2]),
        "length_wanted": ("int64", 17),
    }
    checks = checks_of()

    # JSON, Parquet, large files, streams
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(records), rows)
    message = parse_message(Message("here", "here", 1, json.dumps(records[0]).encode()), checks)
    found = [
        load_documents([lines], checks).rollouts[0],
        load_documents([rows], checks).rollouts[0],
        load_stored([lines], checks, tmp_path / "cache").rollouts[0],
        load_stored([rows], checks, tmp_path / "cache").rollouts[0],
        message,
    ]
    assert [fields_in(document) for document in found] == [expected] * 5
    assert not fields_in(load_stored([lines], checks, tmp_path / "cache").rollouts[1])

    # checks, and their messages
    for name, value, said in (
        ("surprise", [0.5, 0], "surprise[0] is 0.5 on a label: a log-probability is at most 0"),
        ("surprise", -1.0, "surprise is -1.0: expected a list"),
        ("place", [1, -1], "place[1] is -1: expected at least 0"),
        ("length_wanted", [1], "length_wanted is a list: expected an integer"),
    ):
        assert reason(GOOD | {name: value}, None) == said

    # checkpoints of documents
    document = found[0]
    again = read_document(json.loads(json.dumps(document_line(document))))
    assert fields_in(again) == expected

    # packing, `has`, slicing, moving
    bare = load_documents([lines], checks).rollouts[1]
    batch = pack([document, bare], 4, of_tokens=["place"]).to(torch.device("cpu"))
    assert batch.labels.fields["surprise"].tolist() == [-1, -2, 0, 0]
    assert batch.labels[1:3].fields["surprise"].tolist() == [-2, 0]
    assert batch.labels[1:3].document_fields["length_wanted"].tolist() == [17, 0]
    assert batch.labels.has["surprise"].tolist() == [True, False]
    assert batch.labels.has["length_wanted"].tolist() == [True, False]
    assert batch.tokens.fields["place"].tolist() == [4, 3, 2, -1, -1, *[-1] * 5, -1, -1]
    assert not pack([document], 4).tokens.fields, "tokens have only what is asked for"

    # masking
    (masked,), _ = choose_truncated([document], "mask")
    assert masked.fields["surprise"].tolist() == [0] * 5
    assert masked.token_fields["place"].tolist() == [4, 3, 2], "the model reads the tokens all the same"

    # data check, and the records that verify writes
    assert dict(check_files([str(lines)]).fields) == {"surprise": 1, "place": 1}
    short = reduce_record(record_of(document), 4)
    assert (short["surprise"], short["place"], short["length_wanted"]) == ([0, -1, -2, 0], [3, 2], 17)
    check_oracle_of_masked_records()


def test_the_table_and_the_page_name_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", page, re.MULTILINE)
    on_page = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    for field in fields.TABLE:
        if field.source == "record":
            assert on_page[field.in_record] == field.written, field.name


def test_every_attribute_of_a_rollout_is_in_the_table() -> None:
    beside = {"id", "difference", *("fields", "token_fields", "document_fields")}
    beside |= {"starts", "record_ids", "one_advantage", "membership"}  # of a document's sequences
    assert {item.name for item in fields_of(Rollout)} - beside <= {field.name for field in fields.TABLE}


def check_oracle_of_masked_records() -> None:
    """A record with a value per label in every field that has labels has none left once it is masked, for the oracle
    either: of the fields that it reads."""
    own = {field.in_record: [0.0, 0.0] for field in fields.of_labels() if field.source == "record"}
    record = {"id": "a", "input_ids": [1, 2, 3, 4], "prompt_length": 2, "reward": 1.0, "truncated": True} | own
    (document,) = oracle_records.read_documents([record], {"truncated": "mask", "advantages": "none"})
    assert (document.positions, document.old_logprobs, document.versions) == ([], None, None)
    (document,) = oracle_records.read_documents([record], {"truncated": "keep", "advantages": "none"})
    assert document.positions == [2, 3] and document.old_logprobs == document.versions == [0.0, 0.0]


def test_the_oracle_masks_every_field_of_labels_that_it_reads() -> None:
    check_oracle_of_masked_records()


# ---- a user's own


def test_a_users_fields_are_read() -> None:
    found = fields_in(read(GOOD | OWN | {"bonus": 3, "liked": [True, False, True, False, 1], "source_number": 4}))
    assert found == {
        "my_weight": ("float32", [0, 0, 2, 3, 0]),
        "bonus": ("int64", [0, 0, 3, 3, 0]),
        "liked": ("bool", [False, False, True, False, False]),
        "difficulty": ("float32", 2.5),
        "source_number": ("int64", 4),
    }
    defaults = fields_in(read(GOOD | OWN))
    assert defaults["bonus"] == ("int64", [0, 0, 7, 7, 0])
    assert defaults["source_number"] == ("int64", -1)
    assert not fields_in(parse(GOOD | OWN)), "what is not declared is ignored"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"my_weight": None}, "my_weight is missing: data.fields has no default for it"),
        ({"difficulty": None}, "difficulty is missing: data.fields has no default for it"),
        ({"my_weight": "x"}, "my_weight is 'x': expected a number"),
        ({"my_weight": [1, 2, 3]}, "my_weight has 3 values: expected 5 (one a token) or 2 (one a label)"),
        ({"my_weight": [1, float("nan")]}, "my_weight[1] is nan on a label: expected a finite number"),
        ({"my_weight": [1, None]}, "my_weight[1] is null on a label: expected a number"),
        ({"bonus": 1.5}, "bonus is 1.5: expected an integer"),
        ({"liked": [2, 0]}, "liked[0] is 2 on a label: expected 0 or 1"),
        ({"difficulty": [1.0]}, "difficulty is a list: expected a number"),
        ({"source_number": True}, "source_number is true: expected an integer"),
    ],
)
def test_a_users_field_that_is_wrong_rejects_its_record(own: dict[str, Any], said: str) -> None:
    assert reason(GOOD | OWN | own) == said


def test_a_document_without_labels_needs_no_values_of_labels() -> None:
    record = GOOD | {"loss_mask": [0] * 5, "difficulty": 1.0, "logprobs": MISSING}
    del record["logprobs"], record["advantage"], record["model_version"]
    assert fields_in(read(record))["my_weight"] == ("float32", [0] * 5)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"logprobs": {"level": "label"}}, "data.fields.logprobs: truestep has a field of this name already"),
        ({"advantage": {"level": "label"}}, "data.fields.advantage: truestep has a field of this name already"),
        ({"old_logprobs": {"level": "label"}}, "data.fields.old_logprobs: truestep has a field"),
        ({"input_ids": {"level": "document"}}, "data.fields.input_ids: truestep has a field"),
        ({"routed_experts": {"level": "document"}}, "data.fields.routed_experts: truestep has a field"),
        (
            {"n": {"level": "label", "dtype": "int64", "default": 0.5}},
            "data.fields.n.default is 0.5: expected an integer",
        ),
        ({"n": {"level": "label", "default": float("inf")}}, "data.fields.n.default is inf: expected a finite number"),
    ],
)
def test_what_cannot_be_declared(declared: dict[str, Any], said: str) -> None:
    with pytest.raises(FieldError, match=re.escape(said)):
        declare(declared)


def own_records() -> list[dict[str, Any]]:
    lacking = GOOD | {"id": "c"}
    masked = {"id": "d", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 0], "difficulty": 1}
    return [
        GOOD | OWN | {"bonus": [1, 2], "liked": True},
        GOOD | OWN | {"id": "b", "my_weight": [8, 9]},
        lacking,
        GOOD | OWN | {"id": "e", "difficulty": None},
        masked,
        GOOD | OWN | {"id": "f", "bonus": [1, "x"]},
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tables_give_what_memory_gives(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    records = own_records()
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        for record in records:  # a column has one type
            if "bonus" in record:
                record["bonus"] = [1, 2] if record["id"] != "f" else [1, None]
            if "liked" in record:
                record["liked"] = [record["liked"]] * 2
        pq.write_table(pa.Table.from_pylist(records), path)
    checks = checks_of(DECLARED)
    in_memory, of_table = load_documents([path], checks), load_stored([path], checks, tmp_path / "cache")
    assert [item.id for item in in_memory.rollouts] == ["a", "b", "d"]
    assert in_memory.rejected == of_table.rejected
    for first, second in zip(in_memory.rollouts, of_table.rollouts, strict=True):
        assert fields_in(first) == fields_in(second)
    # The same files without the declaration, and with another one, have tables of their own.
    assert all(not fields_in(item) for item in load_stored([path], checks_of(), tmp_path / "cache").rollouts)
    fewer = load_stored([path], checks_of({"difficulty": {"level": "document"}}), tmp_path / "cache")
    assert [item.id for item in fewer.rollouts] == [
        item["id"] for item in records if item.get("difficulty") is not None
    ]


def test_a_table_rejects_records_without_the_references_log_probs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [GOOD, GOOD | {"id": "b", "reference_logprobs": [-1.0, -2.0]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    checks = checks_of(needs=replace(NOTHING, reference_logprobs=True))
    made: list[Documents] = [load_documents([path], checks), load_stored([path], checks, tmp_path / "cache")]
    assert made[0].rejected == made[1].rejected
    assert [item.id for item in made[1].rollouts] == ["b"]


def test_packing_refuses_a_document_that_lacks_what_is_declared() -> None:
    with pytest.raises(FieldError, match="document a has no my_weight, which data.fields declares without a default"):
        pack([parse(GOOD)], declared=declare(DECLARED))
    empty = pack([], 4, declare(DECLARED))
    assert {name: values.dtype for name, values in empty.labels.fields.items()} == {
        "my_weight": torch.float32,
        "bonus": torch.int64,
        "liked": torch.bool,
    }, "a loss finds its fields in a micro-batch without documents too"
    assert empty.labels.document_fields["difficulty"].shape == (0,)


def test_data_check_counts_what_lacks_a_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in own_records()))
    summary = check_files([str(path)], fields=DECLARED)
    assert dict(summary.fields) == {"my_weight": 1, "bonus": 3, "liked": 3, "difficulty": 2}
    assert summary.rejected == 1


def test_data_check_takes_declarations_and_names_what_is_wrong_in_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in own_records()[:3]))
    runner = CliRunner()
    shown = runner.invoke(main, ["data", "check", str(path), "--fields", "{my_weight: {level: label}}"])
    assert re.search(r"my_weight\s+missing in 1 of 3 documents with labels", shown.output)
    for text, said in (
        ("{my_weight: {level: token}}", "--fields: my_weight.level: "),
        ("{my_weight: [", "--fields is not YAML"),
        ("{logprobs: {level: label}}", "data.fields.logprobs: truestep has a field of this name already"),
    ):
        wrong = runner.invoke(main, ["data", "check", str(path), "--fields", text])
        assert wrong.exit_code
        assert said in wrong.output + wrong.stderr


def test_documents_of_older_checkpoints_have_none() -> None:
    line = document_line(parse(GOOD))
    older = {name: value for name, value in line.items() if name not in ("fields", "token_fields", "document_fields")}
    assert not fields_in(read_document(older))


# ---- routed_experts: tokens, layers, k

EXPERTS = np.arange(5 * 3 * 2).reshape(5, 3, 2)


def written(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (encode(array) | changes).items() if value is not MISSING}


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
@pytest.mark.parametrize("rows", [5, 4, 1])
def test_experts_are_read_however_they_are_written(kind: str, rows: int, tmp_path: Path) -> None:
    experts = (EXPERTS + (300 if kind == "uint16" else 0))[:rows]
    forms: list[Any] = [written(experts.astype(kind)), experts.tolist(), experts, experts.astype(np.uint64)]
    found = [parse(GOOD | {"routed_experts": form}).token_fields["routed_experts"] for form in forms]
    for number, form in enumerate(forms[:2]):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist([GOOD | {"routed_experts": form}]), path)
        (document,) = load_documents([path], checks_of()).rollouts
        found.append(document.token_fields["routed_experts"])
        (document,) = load_stored([path], checks_of(), tmp_path / "cache").rollouts
        found.append(document.token_fields["routed_experts"])
    for experts_read in found:
        assert experts_read.dtype == kind
        np.testing.assert_array_equal(experts_read, experts)
    document = parse(GOOD | {"routed_experts": forms[0]})
    again = read_document(json.loads(json.dumps(document_line(document)))).token_fields["routed_experts"]
    assert again.dtype == kind
    np.testing.assert_array_equal(again, experts)


def test_a_record_whose_every_row_is_missing_has_no_experts() -> None:
    for nothing in ([], None, written(np.zeros((0, 3, 2), np.uint8))):
        assert not parse(GOOD | {"routed_experts": nothing}).token_fields


DATA = encode(EXPERTS.astype(np.uint8))["data"]


@pytest.mark.parametrize(
    ("given_experts", "said"),
    [
        (5, "routed_experts is 5: expected a list"),
        ("x", "routed_experts is 'x': expected a list"),
        ([1, 2], "routed_experts[0] is 1: expected a list"),
        ([[[1], [2]], [[1]]], "routed_experts[1] has 1 values: expected 2, as in the first list"),
        ([[[1], [2]], [[1], [2, 3]]], "routed_experts[1][1] has 2 values: expected 1, as in the first list"),
        ([[[1], 2]], "routed_experts[0][1] is 2: expected a list"),
        ([[]], "routed_experts has 0 layers: expected 1 to 65,536"),
        ([[[]]], "routed_experts has 0 k: expected 1 to 65,536"),
        ([[[1, True]]], "routed_experts[0][0][1] is true: expected an integer"),
        ([[[1, 2.0]]], "routed_experts[0][0][1] is 2.0: expected an integer"),
        ([[[1, None]]], "routed_experts[0][0][1] is null: expected an integer"),
        ([[[1, -1]]], "routed_experts[0][0][1] is -1: an expert's number is 0 to 65,535"),
        ([[[0]], [[65536]]], "routed_experts[1][0][0] is 65536: an expert's number is 0 to 65,535"),
        ([[[2**70]]], "routed_experts[0][0][0] is an integer of 71 bits: beyond 64 bits"),
        ([[[1]]] * 6, "routed_experts has 6 rows: expected at most 5, one for each token"),
        (np.zeros((2, 3)), "routed_experts has 2 dimensions: expected 3"),
        (np.zeros((2, 3, 2)), "routed_experts is of float64: expected integers"),
        (np.full((2, 3, 2), 2**63, np.uint64), "routed_experts[0][0][0] is 9223372036854775808: beyond 64 bits"),
        ({}, "routed_experts.data is missing: expected data, dtype and shape"),
        ({"data": DATA, "shape": [5, 3, 2]}, "routed_experts.dtype is missing: expected data, dtype and shape"),
        ({"data": DATA, "dtype": "uint8"}, "routed_experts.shape is missing: expected data, dtype and shape"),
        (written(EXPERTS.astype(np.int8)), "routed_experts.dtype is 'int8': expected uint8 or uint16"),
        (
            written(EXPERTS.astype(np.uint8), dtype=["uint8"]),
            "routed_experts.dtype is a list: expected uint8 or uint16",
        ),
        (
            written(EXPERTS.astype(np.uint8), shape=[5, 6]),
            "routed_experts.shape has 2 numbers: expected [tokens, layers, k]",
        ),
        (written(EXPERTS.astype(np.uint8), shape=30), "routed_experts.shape is 30: expected [tokens, layers, k]"),
        (written(EXPERTS.astype(np.uint8), shape=[5, 3, 2.0]), "routed_experts.shape[2] is 2.0: expected an integer"),
        (written(EXPERTS.astype(np.uint8), shape=[-5, 3, -2]), "routed_experts.shape[0] is -5: expected at least 0"),
        (written(EXPERTS.astype(np.uint8), shape=[5, -3, -2]), "routed_experts has -3 layers: expected 1 to 65,536"),
        (
            written(EXPERTS.astype(np.uint8), shape=[5, 3, 3]),
            "routed_experts.data has 30 bytes: expected 45 for its shape and dtype",
        ),
        (
            written(EXPERTS.astype(np.uint8), dtype="uint16"),
            "routed_experts.data has 30 bytes: expected 60 for its shape and dtype",
        ),
        (written(EXPERTS.astype(np.uint8), data=[1]), "routed_experts.data is a list: expected text of base64"),
        (
            written(EXPERTS.astype(np.uint8), data=DATA + "é"),
            "routed_experts.data is not base64: 'string argument should contain only ASCI'...",
        ),
        (
            written(EXPERTS.astype(np.uint8), data=DATA[:-1] + "!"),
            "routed_experts.data is not base64: 'Only base64 data is allowed'",
        ),
        (
            written(EXPERTS.astype(np.uint8), shape=[2**40, 2**10, 2**10]),
            "routed_experts is not read: it has more than 96 MiB",
        ),
    ],
)
def test_experts_that_are_wrong_reject_their_record(given_experts: Any, said: str) -> None:
    with pytest.raises(BadRecord) as caught:
        parse(GOOD | {"routed_experts": given_experts})
    assert_readable(caught.value)
    assert caught.value.reason == said
    assert (caught.value.id, caught.value.group_id) == ("a", "g")


def test_experts_have_a_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "TOKEN_FIELD", 29)
    for form in (EXPERTS.tolist(), EXPERTS, written(EXPERTS.astype(np.uint8))):
        with pytest.raises(BadRecord, match="routed_experts is not read: it has more than 29 bytes"):
            parse(GOOD | {"routed_experts": form})
    monkeypatch.setattr(bounded, "TOKEN_FIELD", 30)
    parse(GOOD | {"routed_experts": EXPERTS.tolist()})


@settings(max_examples=150, deadline=None)
@given(
    value=anything
    | st.fixed_dictionaries({}, optional=dict.fromkeys(("data", "dtype", "shape"), anything))
    | st.builds(
        lambda content, dtype, shape: {"data": base64.b64encode(content).decode(), "dtype": dtype, "shape": shape},
        st.binary(max_size=24),
        st.sampled_from(["uint8", "uint16", "<u2"]),
        st.lists(st.integers(-1, 4), max_size=4),
    )
    | st.lists(st.lists(st.lists(st.integers(-1, 70000), max_size=3), max_size=3), max_size=6)
)
def test_arbitrary_experts_give_a_rollout_or_a_bad_record(value: Any) -> None:
    try:
        rollout = parse(GOOD | {"routed_experts": value}, EVERYTHING)
    except BadRecord as error:
        assert_readable(error)
        return
    if (experts := rollout.token_fields.get("routed_experts")) is not None:
        assert experts.dtype in (np.uint8, np.uint16)
        assert experts.ndim == 3
        assert 1 <= len(experts) <= rollout.num_tokens


@settings(max_examples=120, deadline=None)
@given(own=st.fixed_dictionaries({}, optional=dict.fromkeys(DECLARED, anything)))
def test_arbitrary_values_of_a_user_give_a_rollout_or_a_bad_record(own: dict[str, Any]) -> None:
    try:
        rollout = read(GOOD | OWN | own)
    except BadRecord as error:
        assert_readable(error)
        return
    assert rollout.fields.keys() | rollout.document_fields.keys() == set(DECLARED)
    assert all(not values[~rollout.loss_mask].any() for values in rollout.fields.values())
    assert np.isfinite(rollout.fields["my_weight"]).all()
    pack([rollout], declared=declare(DECLARED))


def test_experts_are_packed_where_they_are_asked_for_and_cut_with_the_tokens() -> None:
    documents = [
        parse(GOOD | {"routed_experts": EXPERTS[:4]}),
        parse(changed(id="b")),
        parse(GOOD | {"id": "c", "routed_experts": EXPERTS + 9}),
    ]
    batch = pack(documents, 8, of_tokens=["routed_experts"]).to(torch.device("cpu"))
    experts = batch.tokens.fields["routed_experts"]
    expected = np.full((16, 3, 2), -1)
    expected[:4], expected[10:15] = EXPERTS[:4], EXPERTS + 9
    assert experts.dtype == torch.int32
    np.testing.assert_array_equal(experts.numpy(), expected)
    for size in (2, 4):
        runs = [Context(None, rank, size).run(len(batch.tokens)) for rank in range(size)]  # type: ignore[arg-type]
        cut = [batch.tokens.fields_of(run)["routed_experts"] for run in runs]
        assert torch.equal(torch.cat(cut), experts)
        assert all(len(part) == len(batch.tokens.input_ids[run]) for part, run in zip(cut, runs, strict=True))
    assert not pack(documents, 8).tokens.fields
    assert not pack(documents[1:2], 8, of_tokens=["routed_experts"]).tokens.fields, "no document has any"


def test_documents_of_other_dimensions_are_not_packed_together() -> None:
    documents = [parse(GOOD | {"routed_experts": EXPERTS}), parse(GOOD | {"id": "b", "routed_experts": EXPERTS[:, :2]})]
    with pytest.raises(ValueError, match=re.escape("routed_experts is [3, 2] for each token of a and [2, 2] for each")):
        pack(documents, of_tokens=["routed_experts"])


def test_a_field_may_be_asked_for_without_a_default_of_the_run() -> None:
    assert all(not field.required and field.default is None for field in optional(declare(DECLARED)))
