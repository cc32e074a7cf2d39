"""Documents of large files that are kept in a file: the same as from memory, read once, and never half or stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.rollout_records import NEEDS, NOTHING, assert_same, record, write
from truestep.config.schema import Config
from truestep.rollouts import stored
from truestep.rollouts.files import DataError, collect, load_documents
from truestep.rollouts.record import Checks
from truestep.rollouts.source import FileSource, SourceError
from truestep.rollouts.stored import StoredDocuments, load_stored, open_documents
from truestep.run.assemble.sources import read_documents

CHECKS = Checks(NEEDS, 100, 1.0, 16)
NUMBER = st.sampled_from([0, -0.0, -0.5, -1e-300, 0.25, 3, None, "x", 1e39, True, 10**30])


def some(count: int, **fields: object) -> list[dict]:
    return [record(f"r{number}", number % 3, f"g{number // 4}", **fields) for number in range(count)]


@st.composite
def records(draw: st.DrawFn) -> object:
    length = draw(st.integers(0, 6))
    good = {
        "input_ids": draw(st.lists(st.sampled_from([0, 7, 99, 100, 2**31, 2**40]), min_size=length, max_size=length)),
        "loss_mask": [0, *draw(st.lists(st.integers(0, 1), min_size=max(length - 1, 0), max_size=max(length - 1, 0)))],
        "logprobs": draw(st.none() | st.lists(st.sampled_from([-0.5, -0.0, 0, -3]), min_size=length, max_size=length)),
        "advantage": draw(st.none() | st.sampled_from([0.5, -0.0, 1e30])),
        "reward": draw(st.none() | st.sampled_from([0, 1, 0.1])),
        "group_id": draw(st.none() | st.sampled_from(["g", "h", 3])),
        "temperature": draw(st.none() | st.sampled_from([0.5, 1.0])),
        "model_version": draw(st.none() | st.sampled_from([0, 7])),
        "id": draw(st.none() | st.sampled_from(["a", "b", "r.jsonl:2", "r.jsonl:3"])),
        "metadata": draw(st.none() | st.just({"k": [1, None, {"x": 0.1}]})),
    }
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=2)):
        good[name] = draw(st.just("gone") | NUMBER | st.lists(NUMBER, max_size=4))
    return {name: value for name, value in good.items() if value != "gone"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(records() | st.sampled_from([b"", b"{", b"\xff", b'{"id": "a", "id": "b"}']), max_size=8),
    st.sampled_from([None, 16, 3]),
    st.sampled_from([None, 100]),
    st.sampled_from([NEEDS, NOTHING]),
    st.sampled_from([None, 2]),
)
def test_both_ways_agree(lines, most, vocabulary, needs, group_size) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "r.jsonl", *lines)
        checks = Checks(needs, vocabulary, 0.75, most, group_size)
        expected = load_documents([path], checks)
        for _ in range(2):  # made, and opened
            assert_same(load_stored([path], checks, Path(folder) / "cache"), expected)


@pytest.mark.parametrize("ending", [b"\n", b"", b"\r\n\n\n"])
def test_lines_are_counted_as_in_memory(tmp_path: Path, ending: bytes) -> None:
    lines = [json.dumps(line).encode() for line in some(12)]
    lines[3:3] = [b"", b"{", b"  "]
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + ending)
    expected = load_documents([path], CHECKS)
    assert len(expected.rollouts) == 12 and [item.line for item in expected.rejected] == [5]
    assert_same(load_stored([path], CHECKS, tmp_path / "cache"), expected)


def test_several_files_are_kept_in_one(tmp_path: Path) -> None:
    lines = [{name: value for name, value in line.items() if name != "id"} for line in some(40)]
    paths = [write(tmp_path / f"r{number}.jsonl", *lines, b"[") for number in range(2)]
    assert_same(load_stored(paths, CHECKS, tmp_path / "cache"), load_documents(paths, CHECKS))
    assert len([item for item in (tmp_path / "cache").iterdir() if item.is_dir()]) == 1


def test_other_checks_read_the_files_again(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "r.jsonl", *some(8)), tmp_path / "cache"
    for checks in (CHECKS, replace(CHECKS, max_tokens=2), CHECKS, replace(CHECKS, group_size=2, vocabulary_size=3)):
        assert_same(load_stored([path], checks, folder), load_documents([path], checks))


def made(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Open the file's documents; count how often it was read for that."""
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(stored, "collect", lambda *given: calls.append(1) or collect(*given))
        assert_same(load_stored([path], CHECKS, folder), load_documents([path], CHECKS))
    return len(calls)


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write(tmp_path / "r.jsonl", *some(4)), tmp_path / "cache"
    assert [made(path, folder, monkeypatch) for _ in range(3)] == [1, 0, 0]
    times = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"-0.25", b"-0.75"))  # of the same size, and with the old time
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [made(path, folder, monkeypatch) for _ in range(2)] == [1, 0]
    path.write_bytes(content + content.replace(b'"r', b'"s'))
    assert [made(path, folder, monkeypatch) for _ in range(2)] == [1, 0]
    assert len([item for item in folder.iterdir() if item.is_dir()]) == 1, "the old one is gone"


@pytest.mark.parametrize("name", ["index", "facts.json", "documents"])
@pytest.mark.parametrize("harm", ["cut", "empty", "gone"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, harm: str) -> None:
    path, folder = write(tmp_path / "r.jsonl", *some(4)), tmp_path / "cache"
    made(path, folder, monkeypatch)
    (victim,) = folder.glob(f"*/{name}")
    content = victim.read_bytes()
    victim.unlink()
    if harm != "gone":
        victim.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    assert made(path, folder, monkeypatch) == 1


def test_a_flipped_value_ends_the_run_and_the_next_one_reads_again(tmp_path, monkeypatch) -> None:
    path, folder = write(tmp_path / "r.jsonl", *some(4, advantage=[0.125, 0.25])), tmp_path / "cache"
    made(path, folder, monkeypatch)
    (victim,) = folder.glob("*/documents")
    content = victim.read_bytes()
    at = content.index(np.array([-0.5, -0.25], np.float32).tobytes())
    victim.write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    with pytest.raises(DataError, match=r"data\.cache_directory: .* is damaged \(document r0\)"):
        load_stored([path], CHECKS, folder).rollouts[0]
    assert made(path, folder, monkeypatch) == 1


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.jsonl", *some(4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stored.Path, "write_bytes", full)
        with pytest.raises(DataError, match=r"data\.cache_directory: the disk of .* is full"):
            load_stored([path], CHECKS, tmp_path / "cache")
    assert not [item for item in (tmp_path / "cache").iterdir() if item.is_dir()], "nothing half is left"
    with pytest.raises(DataError, match=r"data\.cache_directory: .* cannot be used"):
        load_stored([path], CHECKS, path / "cache")


def test_a_file_that_changes_meanwhile_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.jsonl", *some(4))

    def changing(*given: object) -> list:
        with path.open("ab") as file:
            file.write(b"{}\n")
        return collect(*given)

    monkeypatch.setattr(stored, "collect", changing)
    with pytest.raises(DataError, match="changed while it was read"):
        load_stored([path], CHECKS, tmp_path / "cache")


OPENS = """
import sys
from pathlib import Path
from truestep.rollouts.record import Checks, Needs
from truestep.rollouts import stored
from truestep.rollouts.files import collect
from truestep.rollouts.stored import load_stored
calls = []
stored.collect = lambda *given: calls.append(1) or collect(*given)
checks = Checks(Needs(True, True, "group_mean"), 100, 1.0, 16)
documents = load_stored([Path(sys.argv[1])], checks, Path(sys.argv[2]))
print(len(calls), len(documents.rollouts))
"""


def opening(path: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", OPENS, str(path), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_one_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *some(200))
    processes = [opening(path, tmp_path / "cache") for _ in range(2)]
    answers = sorted(process.communicate(timeout=300)[0].split() for process in processes)
    assert answers == [["0", "200"], ["1", "200"]]


def test_a_kill_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write(tmp_path / "r.jsonl", *some(3000)), tmp_path / "cache"
    process = opening(path, folder)
    try:
        while process.poll() is None and not list(folder.glob(".*/documents")):
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    readings = made(path, folder, monkeypatch)
    assert readings == 1 or process.returncode == 0
    assert [item.suffix for item in folder.iterdir() if item.is_file()] == [".lock"]
    tables = [item for item in folder.iterdir() if item.is_dir() and not item.name.startswith(".")]
    assert len(tables) == 1


def test_a_source_goes_on_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *some(20))
    rollouts = load_stored([path], CHECKS, tmp_path / "cache").rollouts
    in_memory = load_documents([path], CHECKS).rollouts
    assert isinstance(rollouts, StoredDocuments)
    expected = FileSource(in_memory, epochs=2, shuffle_seed=3)
    ids = [document.id for document in expected.take(40, 0).documents]
    source = FileSource(rollouts, epochs=2, shuffle_seed=3)
    taken = [document.id for document in source.take(13, 0).documents]
    state = json.loads(json.dumps(source.state()))
    for documents in (rollouts, in_memory):  # a file's documents are the same either way
        resumed = FileSource(documents, epochs=2, shuffle_seed=3)
        resumed.restore(state)
        assert taken + [document.id for document in resumed.take(40, 0).documents] == ids
    other = load_stored([write(tmp_path / "r.jsonl", *some(20, input_ids=[1, 2, 4]))], CHECKS, tmp_path / "cache")
    with pytest.raises(SourceError, match="no longer those in the files"):
        FileSource(other.rollouts, epochs=2, shuffle_seed=3).restore(state)


def test_only_large_files_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.jsonl", *some(4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert isinstance(open_documents([path], CHECKS).rollouts, tuple)
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr("truestep.rollouts.stored.LARGE_BYTES", 1)
    assert isinstance(open_documents([path], CHECKS).rollouts, StoredDocuments)
    assert list((tmp_path / "home" / "truestep" / "data").glob("*/facts.json"))
    with pytest.raises(DataError, match="cannot be read"):
        open_documents([tmp_path / "none.jsonl"], CHECKS)


def test_the_option_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.jsonl", *some(8))
    data = {"path": str(path), "cache_directory": str(tmp_path / "tables"), "tokens_per_microbatch": 16}
    config = Config.model_validate({"model": {"path": "none"}, "data": data})
    expected = read_documents(config, 100)
    assert not (tmp_path / "tables").exists()
    monkeypatch.setattr("truestep.rollouts.stored.LARGE_BYTES", 1)
    assert_same(read_documents(config, 100), expected)
    assert list((tmp_path / "tables").glob("*/facts.json"))
