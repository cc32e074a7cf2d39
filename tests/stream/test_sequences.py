"""Documents of several sequences on a stream: out of order, apart, never complete, across restarts."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from documents import same_document
from rollouts.rollout_records import record
from stream.test_intake import BAD, Parsing, add, make_intake, ready, reasons
from truestep.rollouts.fields import declare
from truestep.rollouts.stream import intake as module


def part(id: str, document: str = "d", of: int = 2, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    return record(id, reward, document_id=document, sequences=of, **fields)


def again(intake: Parsing, directory: Path, **options: Any) -> Parsing:
    """The intake of a process that goes on from the first one's checkpoint."""
    second = make_intake(directory, **options)
    second.restore(json.loads(json.dumps(intake.state())))
    return second


def test_a_document_waits_for_its_sequences_and_then_counts_once(tmp_path: Path) -> None:
    intake = add(make_intake(tmp_path), part("a"), record("x", 3.0))
    assert intake.in_open_documents == (1, 1)
    assert intake.in_open_groups == (1, 1)
    intake = again(intake, tmp_path)
    assert intake.in_open_documents == (1, 1)
    assert ready(add(intake, part("b"))) == {"x": 1.0, "d": -1.0}
    assert intake.ready[1].record_ids == ("a", "b")
    assert intake.in_open_documents == (0, 0)
    assert intake._open_bytes == 0


def test_a_bad_record_rejects_its_document_when_all_have_come() -> None:
    intake = add(make_intake(group_size=3), part("a"), record("x", 3.0), part("b") | BAD)
    assert [rejected.id for rejected in intake.rejected] == ["b", "a"]
    assert "one of its sequences, 'b', was rejected" in reasons(intake)[1]
    assert intake.in_open_groups == (1, 1)
    assert ready(add(intake, record("y", 5.0))) == {"x": -1.0, "y": 1.0}, "the rejected document was the third"


def test_a_document_that_stays_open_is_given_up(tmp_path: Path) -> None:
    intake = add(make_intake(tmp_path, group_timeout=10.0), part("a", of=3), part("b", of=3), clock=5.0)
    intake.expire(9.0)  # four seconds old
    intake = again(intake, tmp_path, group_timeout=10.0)  # the clock begins at 0 again, and the age stays
    intake.expire(5.9)
    assert intake.in_open_documents == (2, 1)
    intake.expire(6.0)
    reason = "document_id 'd': its document had 2 of 3 sequences after 10 s (data.group_timeout)"
    assert reasons(intake) == [reason, reason]
    assert intake._open_bytes == module._PLACE_BYTES
    assert ready(add(intake, record("x", 3.0))) == {"x": 0.0}, "it counts in its group"


def test_a_name_that_a_document_had_before_a_restart(tmp_path: Path) -> None:
    intake = again(add(make_intake(tmp_path), part("a", of=1)), tmp_path)
    repeated = "document_id is 'd': repeated, a document of this name came before"
    assert reasons(add(intake, part("b", of=1))) == [repeated]
    assert intake.in_open_groups == (1, 1), "it fills no place"
    assert reasons(add(intake, record("d", 1.0)))[1:] == ["id is 'd': the document_id of others"]
    assert reasons(add(intake, record("x", 1.0, "h"), part("y", "x", of=1)))[2:] == [repeated.replace("'d'", "'x'")]


def test_records_that_come_too_late_or_again_begin_no_document_anew(tmp_path: Path) -> None:
    intake = add(make_intake(tmp_path, group_timeout=10.0, group_size=3), part("a"), clock=0.0)
    intake.expire(10.0)
    add(intake, part("b"), part("bad") | BAD, clock=11.0)
    assert intake.in_open_documents == (0, 0)
    assert len(intake._groups["g"].members) == 1, "the document, once"
    # Records that do not agree on how many there are, and a bad one that is sent again.
    add(intake, part("c", "e", of=2), part("d", "e", of=3), part("f", "e", of=3), clock=12.0)
    assert [rejected.id for rejected in intake.rejected][-3:] == ["c", "d", "f"]
    assert len(intake._groups["g"].members) == 2
    bad = part("h", "i", of=3, group_id=None) | BAD
    add(intake, bad, bad, part("j", "i", of=3), clock=13.0)
    assert intake.in_open_documents == (2, 1), "one more is to come"
    add(intake, part("k", "i", of=3), clock=13.0)
    assert not intake._groups, "a document counts in the group of its first record that has one"


def test_a_field_that_is_declared_or_not_after_a_restart(tmp_path: Path) -> None:
    own = declare({"w": {"level": "label", "default": 1.0}})
    first = add(make_intake(tmp_path, fields=own), part("a", w=3.0))
    without = add(again(first, tmp_path), part("b"), record("x", 1.0))
    assert sorted(ready(without)) == ["d", "x"]
    plain = add(make_intake(tmp_path / "second"), part("a"))
    with_field = add(again(plain, tmp_path / "second", fields=own), part("b", w=3.0), record("x", 1.0))
    assert {one.id: one.fields["w"].tolist() for one in with_field.ready}["d"] == [0, 1, 1, 0, 3, 3]


def test_documents_that_never_come_together_take_bounded_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_OPEN_BYTES", 8000)
    intake = add(make_intake(group_size=2), record("x", 1.0, "healthy"))
    add(intake, *(part(str(number), f"document {number}") for number in range(40)))
    assert intake._open_bytes <= 8000 + 2000
    assert 1 < intake.in_open_documents[1] < 10
    assert "documents that were not complete took more than" in reasons(intake)[0]
    assert len(intake._groups["healthy"].members) == 1, "groups are given up after them"
    add(intake, *(part(str(number), f"document {number}") | BAD for number in range(100, 140)))
    assert intake.in_open_documents[1] < 15, "bad records take memory too"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 3),
    st.randoms(),
)
def test_any_order_of_arrival_and_a_restart_anywhere(
    documents: list[tuple[int, int, bool]], group_size: int, generator: random.Random
) -> None:
    """Against a plain loop: documents are complete in the order of their last records, a document with a bad record is
    rejected and counts, and nothing is lost or comes twice."""
    records = []
    for number, (group, size, bad) in enumerate(documents):
        broken = generator.randrange(size) if bad else -1
        for place in range(size):
            one = part(f"{number}/{place}", f"d{number}", size, float(number), group_id=f"g{group}")
            records.append(one | (BAD if place == broken else {}))
    generator.shuffle(records)
    cut = generator.randint(0, len(records))
    directory = Path(tempfile.mkdtemp())
    straight, first = make_intake(group_size=group_size), make_intake(directory, group_size=group_size)
    add(straight, *records)
    second = again(add(first, *records[:cut]), directory, group_size=group_size)
    add(second, *records[cut:])
    for intake in (straight, second):
        intake.finish()
    assert [one.id for one in straight.ready] == [one.id for one in second.ready]
    assert all(same_document(*pair) for pair in zip(straight.ready, second.ready, strict=True))

    come: Counter[str] = Counter()
    groups: dict[str, list[str | None]] = {}
    closed: list[list[str | None]] = []
    for one in records:
        name = one["document_id"]
        come[name] += 1
        if come[name] == one["sequences"]:
            good = all(other["input_ids"] for other in records if other["document_id"] == name)
            members = groups.setdefault(one["group_id"], [])
            members.append(name if good else None)
            if len(members) == group_size:
                closed.append(groups.pop(one["group_id"]))
    expected = [name for members in [*closed, *groups.values()] for name in members if name is not None]
    assert [one.id for one in straight.ready] == expected
    for one in straight.ready:
        order = [other["id"] for other in records if other["document_id"] == one.id]
        assert one.record_ids == tuple(order)
    used = {name for one in straight.ready for name in one.record_ids}
    rejected = [one.id for one in straight.rejected]
    assert len(rejected) == len(set(rejected))
    assert used.isdisjoint(rejected)
    assert used | set(rejected) == {one["id"] for one in records}
