"""Records that make a document together: what joins, what they must agree in, and what rejects a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from documents import same_document
from rollouts.rollout_records import NEEDS, NOTHING, record, write
from truestep.rollouts.check import check_files
from truestep.rollouts.documents import document_line, read_document
from truestep.rollouts.files import Documents, load_documents
from truestep.rollouts.kept.reader import Reader
from truestep.rollouts.kept.rows import row_of
from truestep.rollouts.packing import pack
from truestep.rollouts.record import Checks
from truestep.rollouts.stored import load_stored
from truestep.types import Membership, Turn


def part(id: str, document: str = "d", of: int = 2, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    return record(id, reward, document_id=document, sequences=of, **fields)


def load(tmp_path: Path, *records: Any, **options: Any) -> Documents:
    return load_documents([write(tmp_path / "r.jsonl", *records)], Checks(**({"needs": NEEDS} | options)))


def reasons(documents: Documents) -> dict[str | None, str]:
    return {rejected.id: rejected.reason for rejected in documents.rejected}


def test_records_become_one_document_where_the_last_of_them_stands(tmp_path: Path) -> None:
    long = {"input_ids": [4, 5, 6, 7], "loss_mask": [0, 0, 0, 1], "logprobs": [-1.0]}
    turn = {"start": 3, "end": 4, "role": "assistant", "reward": 0.5}
    found = load(
        tmp_path,
        part("a", turns=[{"start": 0, "end": 1, "role": "user"}]),
        record("x", 3.0),
        part("b", **long, turns=[turn], metadata={"k": 1}),
        record("y", 3.0),
    )
    assert [document.id for document in found.rollouts] == ["x", "d", "y"]
    document = found.rollouts[1]
    assert document.starts == (0, 3)
    assert document.record_ids == ("a", "b")
    assert document.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert document.logprobs is not None
    assert document.logprobs.tolist() == [0, -0.5, -0.25, 0, 0, 0, -1]
    assert document.turns == (Turn(0, 1, "user"), Turn(6, 7, "assistant", 0.5))
    assert document.metadata == {"k": 1}
    # Three members of the group, and not four.
    assert document.advantages is not None
    third = np.float32(1 - 7 / 3)
    assert document.advantages.tolist() == [0, third, third, 0, 0, 0, third]
    first, second = document.sequences
    assert (first.id, second.id) == ("a", "b")
    assert second.input_ids.tolist() == [4, 5, 6, 7]
    assert second.turns == (Turn(3, 4, "assistant", 0.5),)
    assert first.membership == Membership(3, counts=True, others_have_advantage=True)
    assert second.membership == Membership(3, counts=False, others_have_advantage=True)
    assert found.rollouts[0].sequences == (found.rollouts[0],)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    lines = page.split("### Documents of several sequences")[1].split("```json\n")[1].split("```")[0].splitlines()
    (document,) = load(tmp_path, *map(json.loads, lines)).rollouts
    assert (document.id, document.record_ids) == ("e7", ("e7/1", "e7/2"))


def test_any_number_of_documents_may_be_open_and_come_in_any_order(tmp_path: Path) -> None:
    found = load(tmp_path, part("1", "d", 3), part("2", "e"), part("3", "d", 3), part("4", "e"), part("5", "d", 3))
    assert [(document.id, document.record_ids) for document in found.rollouts] == [
        ("e", ("2", "4")),
        ("d", ("1", "3", "5")),
    ]


def test_a_document_of_one_sequence_has_its_own_name(tmp_path: Path) -> None:
    (document,) = load(tmp_path, part("a", of=1)).rollouts
    assert (document.id, [one.id for one in document.sequences]) == ("d", ["a"])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"reward": 2.0}, "reward is 1.0 and 2.0 in two of its sequences: all must have the same"),
        ({"group_id": "h"}, "group_id is 'g' and 'h' in two of its sequences: all must have the same"),
        ({"temperature": 0.5}, "temperature is 1.0 and 0.5 in two of its sequences: all must have the same"),
        ({"truncated": True}, "truncated is null and true in two of its sequences: all must have the same"),
        ({"rewards": {"a": 1.0}}, "rewards is an object and an object in two of its sequences: all must have the same"),
        ({"sequences": 3}, "sequences is 2 and 3 in two of its sequences: all must have the same"),
        ({"advantage": 1.0}, "advantage is there for some of its sequences and not for others"),
        ({"model_version": 3}, "model_version is there for some of its sequences and not for others"),
    ],
)
def test_what_sequences_must_agree_in(tmp_path: Path, other: dict[str, Any], reason: str) -> None:
    found = load(tmp_path, part("a"), part("b") | other)
    assert not found.rollouts
    assert reasons(found) == dict.fromkeys(("a", "b"), f"document_id 'd': {reason}")


def test_advantages_differ_where_they_are_lists_and_not_where_they_are_one_number(tmp_path: Path) -> None:
    lists = load(tmp_path, part("a", advantage=[1.0, 2.0]), part("b", advantage=[3.0, 3.0]))
    assert lists.rollouts[0].advantages is not None
    assert lists.rollouts[0].advantages.tolist() == [0, 1, 2, 0, 3, 3]
    numbers = load(tmp_path, part("a", advantage=1.0), part("b", advantage=-1.0))
    assert "advantage is 1.0 and -1.0" in reasons(numbers)["a"]
    mixed = load(tmp_path, part("a", advantage=1.0), part("b", advantage=[1.0, 1.0]))
    assert "advantage is 1.0 and a list" in reasons(mixed)["a"]
    nothing = {"loss_mask": [0, 0, 0], "logprobs": [0.0, 0.0, 0.0]}
    assert not load(tmp_path, part("a", advantage=1.0), part("b", **nothing)).rejected, "it has no label"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"document_id": "d"}, "sequences is missing: it says how many records have this document_id"),
        ({"sequences": 2}, "document_id is missing: sequences says how many records of one document_id there are"),
        ({"document_id": "d", "sequences": 0}, "sequences is 0: expected at least 1"),
        ({"document_id": "d", "sequences": 5000}, "sequences is 5000: expected at most 4096"),
        ({"document_id": "", "sequences": 1}, "document_id is empty text"),
        ({"turns": {}}, "turns is an object: expected a list"),
        ({"turns": [3]}, "turns[0] is 3: expected an object with start, end and role"),
        ({"turns": [{"start": 0, "end": 4, "role": "user"}]},
         "turns[0] is 0 to 4: expected a span that begins at 0 or later and ends by 3"),
        ({"turns": [{"start": 0, "end": 2, "role": "user"}, {"start": 1, "end": 3, "role": "tool"}]},
         "turns[1] is 1 to 3: expected a span that begins at 2 or later and ends by 3"),
        ({"turns": [{"start": 0, "end": 2, "role": ""}]}, "turns[0].role is '': expected a short text"),
        ({"turns": [{"start": 0, "end": 2, "role": "x", "reward": "1"}]},
         "turns[0].reward is '1': expected a number"),
        ({"turns": [{"start": "0", "end": 2, "role": "x"}]}, "turns[0].start is '0': expected an integer"),
    ],
)  # fmt: skip
def test_bad_fields(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    assert reasons(load(tmp_path, record("a", 1.0) | fields)) == {"a": reason}


def test_one_bad_record_rejects_its_document_which_counts_once_in_its_group(tmp_path: Path) -> None:
    bad = part("b", of=3) | {"input_ids": []}
    found = load(tmp_path, part("a", of=3), bad, record("x", 1.0), part("c", of=3), record("next", 5.0), group_size=2)
    assert reasons(found) == {
        "b": "input_ids is empty: a document has at least one token",
        **dict.fromkeys(
            ("a", "c"),
            "document_id 'd': one of its sequences, 'b', was rejected: input_ids is empty: a document has at least one "
            "token",
        ),
    }
    # The group was x and the document, which leaves x alone.
    assert {one.id: float(one.advantages.max()) for one in found.rollouts if one.advantages is not None} == {
        "x": 0.0,
        "next": 0.0,
    }
    assert [rejected.group_id for rejected in found.rejected if rejected.group_id is not None] == ["g"]


def test_a_document_of_bad_records_alone_counts_in_its_group(tmp_path: Path) -> None:
    bad = [part(name) | {"input_ids": []} for name in "ab"]
    found = load(tmp_path, record("x", 1.0), *bad, record("y", 3.0), record("z", 5.0), group_size=2)
    advantages = {one.id: float(one.advantages.sum()) for one in found.rollouts if one.advantages is not None}
    assert advantages == {"x": 0.0, "y": -2.0, "z": 2.0}


def test_what_is_not_complete_at_the_end_of_the_data_is_rejected(tmp_path: Path) -> None:
    found = load(tmp_path, part("a", of=3), part("b", of=3), record("x", 1.0))
    reason = "document_id 'd': its document had 2 of 3 sequences at the end of the data"
    assert reasons(found) == {"a": reason, "b": reason}
    assert [one.id for one in found.rollouts] == ["x"]


def test_a_record_that_comes_twice_is_no_further_sequence(tmp_path: Path) -> None:
    found = load(tmp_path, part("a"), part("a"), part("b"))
    assert found.rollouts[0].record_ids == ("a", "b")
    assert "repeated" in reasons(found)["a"]


def test_a_name_that_a_document_has_already(tmp_path: Path) -> None:
    again = {"a": "document_id is 'd': repeated, a document of this name came before"}
    assert reasons(load(tmp_path, record("d", 1.0), part("a", of=1))) == again
    assert reasons(load(tmp_path, part("x", of=1), part("a", of=1))) == again
    assert reasons(load(tmp_path, part("a", of=1), record("d", 1.0))) == {"d": "id is 'd': the document_id of others"}
    found = load(tmp_path, part("d"), part("b"))
    assert found.rollouts[0].record_ids == ("d", "b"), "a record may have its document's name"


def test_sequences_that_lack_rows_of_a_field_of_tokens(tmp_path: Path) -> None:
    rows = {"data": "AAECAw==", "dtype": "uint8", "shape": [2, 1, 2]}  # of two of the three tokens
    found = load(tmp_path, part("a", routed_experts=rows), part("b"))
    packed = pack(found.rollouts[0].sequences, 8, of_tokens=["routed_experts"]).tokens.fields["routed_experts"]
    assert packed.tolist() == [[[0, 1]], [[2, 3]], *[[[-1, -1]]] * 6]
    full = {"data": "AAECAwQF", "dtype": "uint8", "shape": [3, 1, 2]}
    found = load(tmp_path, part("a", routed_experts=full), part("b", routed_experts=full))
    assert found.rollouts[0].token_fields["routed_experts"].dtype == np.uint8, "as narrow as its records"


def test_a_document_is_the_same_behind_a_checkpoint_and_by_way_of_tables(tmp_path: Path) -> None:
    records = [part("a", turns=[{"start": 0, "end": 2, "role": "user"}]), record("x", 2.0), part("b")]
    found = load(tmp_path, *records)
    for document in found.rollouts:
        again = read_document(json.loads(json.dumps(document_line(document))))
        assert same_document(document, again)
        assert (again.starts, again.record_ids, again.turns) == (document.starts, document.record_ids, document.turns)
    tables = load_stored([tmp_path / "r.jsonl"], Checks(NEEDS), tmp_path / "cache")
    assert [document.record_ids for document in tables.rollouts] == [(), ("a", "b")]


def test_data_check_counts_documents_and_records(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", part("a"), part("b"), record("x", 2.0), part("c", "e"))
    summary = check_files(str(file))
    assert (summary.records, summary.documents, summary.sequences, summary.rejected) == (4, 2, 3, 1)
    assert summary.group_sizes == ((3, 1),)


def test_a_kept_rollout_shows_each_sequence(tmp_path: Path) -> None:
    (document,) = load(tmp_path, part("a"), part("b", input_ids=[7, 8, 9]), needs=NOTHING).rollouts
    reader = Reader(lambda ids, plain: " ".join(map(str, ids)), 1000)
    row = row_of(document, None, reader, 1, 0, True)
    assert row["prompt"] == "1"
    assert row["completion"] == "2 3\n\n--- sequence 2 of 2 ---\n7\n8 9"
