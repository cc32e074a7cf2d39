"""Messages into documents, as files would give them: checked, scored in whole groups, never twice."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import same_document
from rollouts.rollout_records import NEEDS, NOTHING, record
from truestep.rollouts.advantages import assign_advantages
from truestep.rollouts.files import DataError
from truestep.rollouts.record import Checks
from truestep.rollouts.stream.ids import SeenIds
from truestep.rollouts.stream.intake import Intake
from truestep.rollouts.stream.reading import parse_message
from truestep.rollouts.stream.transport import Message
from truestep.types import Rejected


class Parsing(Intake):
    """An intake that parses what it is given, as the thread that reads ahead does."""

    checks: Checks

    def put(self, given: Message, clock: float = 0.0) -> None:
        outcome = parse_message(given, self.checks)
        assert outcome is not None
        self.add(given, outcome, clock)


def make_intake(directory: Path | None = None, group_timeout: float | None = None, **options: Any) -> Parsing:
    defaults = {"vocabulary_size": 100, "max_tokens": 16, "needs": NEEDS, "group_size": 2}
    checks = Checks(**(defaults | options))
    directory = directory or Path(tempfile.mkdtemp())
    intake = Parsing(checks, SeenIds(directory / "ids"), group_timeout)
    intake.checks = checks
    return intake


def message(content: Any, number: int = 1) -> Message:
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Message(f"s:{number}", f"s:{number}", 1, payload)


def add(intake: Parsing, *contents: Any, clock: float = 0.0) -> Parsing:
    for number, content in enumerate(contents, start=1):
        intake.put(message(content, number), clock)
    return intake


def ready(intake: Intake) -> dict[str, float]:
    return {rollout.id: float(rollout.advantages[1]) for rollout in intake.ready}


def reasons(intake: Intake) -> list[str]:
    return [rejected.reason for rejected in intake.rejected]


BAD = {"input_ids": []}


def test_a_group_is_complete_before_any_of_its_documents_is_used() -> None:
    intake = add(make_intake(), record("a", 1.0, "g"), record("b", 5.0, "h"))
    assert not intake.ready
    assert intake.in_open_groups == (2, 2)
    assert ready(add(intake, record("c", 2.0, "h"))) == {"b": 1.5, "c": -1.5}
    assert ready(add(intake, record("d", 4.0, "g"))) == {"b": 1.5, "c": -1.5, "a": -1.5, "d": 1.5}


def test_a_rejected_record_counts_towards_its_group() -> None:
    intake = make_intake(group_size=3)
    add(intake, record("a", 1.0), record("b", 2.0) | BAD, record("c", 3.0), record("next", 9.0))
    assert ready(intake) == {"a": -1.0, "c": 1.0}
    assert [(rejected.file, rejected.line, rejected.id) for rejected in intake.rejected] == [("s:2", 1, "b")]
    assert intake.in_open_groups == (1, 1)


def test_a_group_of_rejected_records_alone_gives_nothing_and_waits_for_nobody() -> None:
    intake = add(make_intake(), record("a", 1.0) | BAD)
    assert intake.in_open_groups == (0, 0)
    add(intake, record("b", 1.0) | BAD)
    intake.finish()
    assert not intake.ready


def test_the_end_completes_every_group() -> None:
    intake = add(make_intake(), record("a", 1.0, "g"), record("b", 5.0, "h"))
    intake.finish()
    assert ready(intake) == {"a": 0.0, "b": 0.0}
    intake.finish()
    assert len(intake.ready) == 2


def test_documents_that_need_no_group_wait_for_none() -> None:
    intake = make_intake(needs=NOTHING, group_size=None)
    add(intake, record("a", 1.0), record("b", 1.0))
    assert [rollout.id for rollout in intake.ready] == ["a", "b"]


def test_a_repeated_id_is_rejected_and_fills_no_place() -> None:
    intake = add(make_intake(), record("a", 1.0), record("a", 1.0), record("b", 3.0), record("a", 7.0, "other"))
    assert ready(intake) == {"a": -1.0, "b": 1.0}
    assert reasons(intake) == ["id is 'a': repeated, a document of this id came before"] * 2
    assert intake.in_open_groups == (0, 0)


def test_a_bad_record_does_not_use_up_its_id() -> None:
    intake = add(make_intake(group_size=3), record("a", 1.0) | BAD, record("a", 1.0), record("b", 3.0))
    assert ready(intake) == {"a": -1.0, "b": 1.0}


def test_repeated_across_a_restart_also_where_the_first_was_taken(tmp_path: Path) -> None:
    intake = add(make_intake(tmp_path), record("a", 1.0), record("b", 3.0), record("c", 0.0, "h"))
    intake.ready.popleft()
    again = make_intake(tmp_path)
    again.restore(json.loads(json.dumps(intake.state())))
    add(again, record("a", 1.0), record("b", 3.0), record("c", 0.0, "h"))
    assert len(again.rejected) == 3
    assert [rollout.id for rollout in again.ready] == ["b"]
    assert again.state() == intake.state()


def test_a_record_without_an_id_is_named_after_its_message() -> None:
    assert list(ready(add(make_intake(group_size=1), record(None, 1.0)))) == ["s:1"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid UTF-8"),
        (b"", "not valid JSON"),
        (b'{"id": "a", "id": "b"}', "the key 'id' is given twice"),
        ([1], "the record is a list"),
    ],
)
def test_what_is_no_record(content: Any, reason: str) -> None:
    assert reasons(add(make_intake(), content))[0].startswith(reason)


def test_a_message_with_a_problem_of_its_own() -> None:
    intake = make_intake()
    intake.put(Message("s:1", "s:1", 1, b"", "it was deleted"))
    assert reasons(intake) == ["it was deleted"]


def test_stop_at_a_bad_record() -> None:
    with pytest.raises(DataError, match="data.on_bad_record: stop: s:1: input_ids is empty"):
        add(make_intake(stop_at_rejected=True), record("a", 1.0) | BAD)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30), st.integers(1, 4), st.randoms())
def test_the_advantages_are_those_of_files_and_a_restart_anywhere_changes_nothing(
    members: list[tuple[int, bool]], group_size: int, generator: random.Random
) -> None:
    rewards = [generator.uniform(-1, 1) for _ in members]
    contents = [
        record(f"{number}", reward, f"g{group}") | (BAD if bad else {})
        for number, ((group, bad), reward) in enumerate(zip(members, rewards, strict=True))
    ]
    cut = generator.randint(0, len(contents))
    straight = make_intake(group_size=group_size)
    directory = Path(tempfile.mkdtemp())
    first, second = (make_intake(directory, group_size=group_size) for _ in range(2))
    add(straight, *contents)
    add(first, *contents[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    add(second, *contents[cut:])
    for intake in (straight, second):
        intake.finish()
    assert [rollout.id for rollout in straight.ready] == [rollout.id for rollout in second.ready]
    assert all(same_document(*pair) for pair in zip(straight.ready, second.ready, strict=True))

    plain = make_intake(
        needs=dataclasses.replace(NEEDS, advantages=False)
    )  # no advantage is made, and no group waited for
    parsed = {rollout.id: dataclasses.replace(rollout, advantages=None) for rollout in add(plain, *contents).ready}
    as_files = assign_advantages(
        [parsed.get(content["id"]) or Rejected("f", 1, "bad", None, content["group_id"]) for content in contents],
        rule=NEEDS.advantage_rule,
        group_size=group_size,
    )
    expected = {rollout.id: rollout.advantages for rollout in as_files}
    for rollout in straight.ready:
        np.testing.assert_array_equal(rollout.advantages, expected.pop(rollout.id))
    assert not expected


def test_a_group_that_stays_open_is_given_up() -> None:
    intake = make_intake(group_timeout=10.0, group_size=3)
    add(intake, record("a", 1.0, "g"), record("b", 1.0, "g"), clock=5.0)
    add(intake, record("c", 1.0, "h"), record("bad", 1.0, "h") | BAD, clock=8.0)
    intake.expire(14.9)
    assert intake.in_open_groups == (3, 2)
    intake.expire(15.0)
    assert intake.in_open_groups == (1, 1)
    reason = "its group 'g' was open for 10 s (data.group_timeout) and had 2 of 3 records"
    given_up = [one for one in intake.rejected if "group" in one.reason]
    assert [(one.id, one.file, one.line, one.group_id, one.reason) for one in given_up] == [
        ("a", "s:1", 1, "g", reason),
        ("b", "s:2", 1, "g", reason),
    ]
    assert ready(add(intake, record("d", 3.0, "h"), clock=17.9)) == {"c": -1.0, "d": 1.0}, "the rest is as it was"
    add(intake, record("e", 1.0, "g"), clock=100.0)
    assert intake.in_open_groups == (1, 1), "the name may be used again"
    assert intake.num_rejected == 3


def test_the_message_that_comes_too_late_is_of_a_new_group() -> None:
    intake = make_intake(group_timeout=10.0)
    add(intake, record("a", 1.0, "g"), clock=0.0)
    add(intake, record("b", 2.0, "g"), clock=10.0)
    assert not intake.ready
    assert [one.id for one in intake.rejected] == ["a"]
    assert ready(add(intake, record("c", 4.0, "g"), clock=11.0)) == {"b": -1.0, "c": 1.0}


def test_the_age_of_a_group_goes_on_after_a_restart(tmp_path: Path) -> None:
    intake = make_intake(tmp_path, group_timeout=10.0)
    add(intake, record("a", 1.0, "g"), clock=2.0)
    intake.expire(9.0)  # seven seconds old
    again = make_intake(tmp_path, group_timeout=10.0)
    again.restore(json.loads(json.dumps(intake.state())))
    again.expire(2.9)
    assert again.in_open_groups == (1, 1)
    again.expire(3.1)
    assert again.in_open_groups == (0, 0)
    assert [(one.file, one.id) for one in again.rejected] == [("s:1", "a")]


def test_without_a_timeout_a_group_waits_for_ever() -> None:
    intake = add(make_intake(group_timeout=None), record("a", 1.0, "g"))
    intake.expire(1e12)
    assert intake.in_open_groups == (1, 1)


def test_open_groups_take_so_much_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.rollouts.stream.intake.MOST_OPEN_BYTES", 2**20)
    intake = make_intake(group_size=8)
    for number in range(5000):
        add(intake, record(str(number), 1.0, f"g{number}"))
    documents, groups = intake.in_open_groups
    assert documents == groups
    assert 1000 < groups < 2100
    assert intake.num_rejected == 5000 - groups
    assert intake.rejected[0].id == "0", "the oldest first"
    assert intake.rejected[0].reason.endswith("longest while open groups took more than 1 MiB and had 1 of 8 records")
    intake.finish()
    assert intake._open_bytes == 0


def test_a_group_that_is_given_up_stops_a_run_that_stops_at_bad_records() -> None:
    intake = make_intake(group_timeout=1.0, stop_at_rejected=True)
    add(intake, record("a", 1.0, "g"))
    with pytest.raises(DataError, match="data.on_bad_record: stop: s:1:1: its group 'g' was open"):
        intake.expire(2.0)


def test_an_id_as_long_as_a_book_is_no_id() -> None:
    intake = add(make_intake(), record("a" * 10**6, 1.0, "g"), record("b", 1.0, "h" * 10**6))
    assert reasons(intake) == [
        "id has 1000000 characters: expected at most 4096",
        "group_id has 1000000 characters: expected at most 4096",
    ]
    assert len(json.dumps([dataclasses.asdict(one) for one in intake.rejected])) < 1000
