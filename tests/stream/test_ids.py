"""The ids that a run has seen: each once, kept in a file that fits its checkpoint or says that it does not."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.rollouts.source import SourceError
from truestep.rollouts.stream import ids
from truestep.rollouts.stream.ids import SeenIds, _Digests


def seen(path: Path, names: list[str]) -> tuple[SeenIds, list[dict[str, Any]]]:
    """The ids after these names, and the state after each."""
    known = SeenIds(path)
    states = []
    for name in names:
        known.add(name)
        states.append(known.state())
    return known, states


# Digests of few different bytes: one is found in the middle of two others unless that is looked after.
digests = st.lists(st.lists(st.sampled_from([0, 1]), min_size=16, max_size=16).map(bytes), max_size=60)


@settings(max_examples=60, deadline=None)
@given(digests, digests)
def test_a_set_of_digests_is_a_set(before: list[bytes], after: list[bytes]) -> None:
    known, oracle = _Digests(b"".join(dict.fromkeys(before))), set(before)
    for digest in after:
        assert known.add(digest) is (digest not in oracle)
        oracle.add(digest)
    assert not any(known.add(digest) for digest in oracle)


def test_an_id_is_new_once(tmp_path: Path) -> None:
    known = SeenIds(tmp_path / "ids")
    names = ["a", "b", "a", "", "ä", "a.jsonl\udcff:1", "a.jsonl\udcff:1"]  # a file's name need not be Unicode
    assert [known.add(name) for name in names] == [True, True, False, True, True, True, False]
    assert len(known) == 5


def test_a_restart_knows_what_its_checkpoint_knew_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_BUFFER", 100)  # so that some are written before a checkpoint asks for it
    names = [f"document {number}" for number in range(300)]
    _, states = seen(tmp_path / "ids", names)
    for count in (300, 299, 150, 7, 1):  # an older checkpoint each time
        again = SeenIds(tmp_path / "ids")
        again.restore(states[count - 1])
        assert again.state() == states[count - 1]
        assert not again.add(names[count - 1])
        assert all(again.add(name) for name in names[count:])
        again.close()


def test_a_kill_between_checkpoints_leaves_a_file_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    known, states = seen(path, ["a", "b"])
    for name in ("c", "d"):
        known.add(name)
    known._write()
    whole = path.read_bytes()
    for size in range(len(whole), 2 * 16 - 1, -1):  # a kill or a power cut at any byte behind the checkpoint
        path.write_bytes(whole[:size])
        again = SeenIds(path)
        again.restore(states[1])
        assert [again.add(name) for name in "abcd"] == [False, False, True, True]
        again.close()


def test_a_run_that_begins_anew_forgets_what_was_never_in_a_checkpoint(tmp_path: Path) -> None:
    seen(tmp_path / "ids", ["a", "b", "c"])
    known, states = seen(tmp_path / "ids", ["x"])
    assert (tmp_path / "ids").stat().st_size == 16
    known.restore(states[0])
    assert known.add("a")


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    elif how == "shorter":
        path.write_bytes(content[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "another run's":
        path.unlink()
        seen(path, [f"other {number}" for number in range(20)])
    else:
        place = random.Random(3).randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.parametrize("how", ["missing", "a directory", "shorter", "empty", "another run's", "a bit flipped"])
def test_a_damaged_file_is_named_with_what_to_do(how: str, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    _, states = seen(path, [str(number) for number in range(10)])
    damaged(path, how)
    with pytest.raises(
        SourceError, match=r"ids, the ids of the documents .* does not fit its checkpoint: .*Put the file"
    ):
        SeenIds(path).restore(states[-1])


def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    known = SeenIds(Path("/dev/full"))
    known._open = lambda size: setattr(known, "_file", open("/dev/full", "r+b", buffering=0))  # type: ignore # noqa: SIM115
    known.add("a")
    with pytest.raises(SourceError, match=r"/dev/full, .* cannot be written: .*No space left"):
        known.state()
    known.close()


def test_a_checkpoint_without_ids_needs_no_file(tmp_path: Path) -> None:
    known = SeenIds(tmp_path / "ids")
    state = known.state()
    assert not (tmp_path / "ids").exists()
    again = SeenIds(tmp_path / "ids")
    again.restore(state)
    assert again.add("a")


def test_ids_are_on_the_disk_before_a_checkpoint_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, synced, honest = SeenIds(tmp_path / "ids"), list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), honest(handle)))
    known.add("first")
    known.state()
    known.add("second")
    known.state()
    assert synced[-2:] == [16, 32]
    known.close()
