"""What samplers send in tests: groups that are interleaved, bad records, records sent twice, cut-off ones; and what a
run must make of them."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from small_runs import read_lines
from stream.redis_server import RedisServer
from tiny import make_records

GROUP = 4
Record = dict[str, Any]


def batches(seed: int, truncated: bool = False, several: bool = False) -> Iterator[list[Record]]:
    """Eight records at a time, of three groups that begin and end in different batches, and one that is sent again.
    With `several`, every other document has two sequences, which come apart and in any order."""
    generator = random.Random(seed)
    waiting: list[Record] = []
    for number in range(10_000):
        group = make_records(number, documents=GROUP + 1, advantages="rewards", group_size=GROUP, max_length=10)
        for record in group[:GROUP]:
            waiting.append(record | {"group_id": f"group-{number}", "id": f"{number}:{record['id']}"})
        if number % 5 == 3:  # one member is bad; the group is complete all the same
            waiting[-1] |= {"logprobs": "none", "bad": True}
        for record in waiting[-GROUP:] if truncated else ():
            record |= {"truncated": generator.random() < 0.3}
        if several:
            waiting = [part for record in waiting for part in _in_two(record)]
        if len(waiting) < 16:
            continue
        generator.shuffle(waiting)
        batch, waiting = waiting[:8], waiting[8:]
        batch.append(generator.choice([record for record in batch if "bad" not in record]) | {"again": True})
        yield batch
    raise AssertionError("the run never ended")


def _in_two(record: Record) -> list[Record]:
    """Make some records a document of two sequences, of which only the second one may be bad."""
    if "document_id" in record or "whole" in record or int(record["id"].rpartition("-")[2]) % 2:
        return [record | {"whole": True}] if "document_id" not in record else [record]
    joined = {"document_id": record["id"], "sequences": 2}
    first = {name: value for name, value in record.items() if name != "bad"}
    first |= {"logprobs": [-0.5] * len(record["input_ids"])} if "bad" in record else {}
    return [first | joined | {"id": f"{record['id']}/1"}, record | joined | {"id": f"{record['id']}/2"}]


def closed(sent: Sequence[Record]) -> list[Record]:
    """The good documents in the order in which their groups were complete; at the end, of groups that never were.
    One of several sequences stands for them all, under the document's name."""
    order: list[Record] = []
    groups: dict[str, list[Record]] = {}
    parts: dict[str, list[Record]] = {}
    for record in sent:
        if "again" in record:
            continue
        if "document_id" in record:
            come = parts.setdefault(record["document_id"], [])
            come.append(record)
            if len(come) < record["sequences"]:
                continue
            record = come[0] | {name: True for one in come for name in ("bad",) if name in one}
            record |= {"id": record["document_id"]}
        members = groups.setdefault(record["group_id"], [])
        members.append(record)
        if len(members) == GROUP:
            order += groups.pop(record["group_id"])
    for come in parts.values():  # the end of the data rejects what is not complete, which counts in its group
        good = [record for record in come if "bad" not in record]
        if len(come) < come[0]["sequences"] and good:
            members = groups.setdefault(good[0]["group_id"], [])
            members.append({"bad": True})
            if len(members) == GROUP:
                order += groups.pop(good[0]["group_id"])
    order += [member for members in groups.values() for member in members]
    return [record for record in order if "bad" not in record]


def ids(records: Sequence[Record]) -> list[str]:
    return [record["id"] for record in records]


def check_run(
    run: Path,
    sent: Sequence[Record],
    step_size: int | None = 5,
    drops: bool = False,
    updates: int = 1,
    ordered: bool = True,
) -> None:
    """Compare what a run wrote with what it was sent: each document once (an update), and nothing else."""
    ledger = read_lines(run / "ledger.jsonl")
    steps = [line for line in ledger if line["documents"]]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for again in range(updates):
        assert [line["documents"] for line in steps[again::updates]] == [line["documents"] for line in steps[::updates]]
    steps = steps[::updates]
    trained = [name for line in steps for name in line["documents"]]
    expected = [record for record in closed(sent) if not (drops and record.get("truncated"))]
    assert sorted(trained) == sorted(ids(expected)), "each document once"
    assert not ordered or trained == ids(expected), "in the order in which they became usable"
    if step_size is not None:
        assert {line["num_documents"] for line in steps[:-1]} <= {step_size}
    put_aside = [document["id"] for line in ledger for document in line.get("put_aside", ())]
    assert put_aside == [record["id"] for record in closed(sent) if drops and record.get("truncated")]
    refused = [line["id"] for line in read_lines(run / "rejected.jsonl")]
    expected_refused = [record["id"] for record in sent if "bad" in record or "again" in record]
    beside = _refused_beside(sent)
    assert Counter(refused) == Counter(expected_refused + beside)
    assert not ordered or beside or refused == expected_refused


def _refused_beside(sent: Sequence[Record]) -> list[str]:
    """Good records of documents that have a bad one, or that never were complete."""
    parts: dict[str, list[Record]] = {}
    for record in sent:
        if "document_id" in record and "again" not in record:
            parts.setdefault(record["document_id"], []).append(record)
    wrong = [come for come in parts.values() if len(come) < 2 or any("bad" in one for one in come)]
    return [record["id"] for come in wrong for record in come if "bad" not in record]


class ToStream:
    """Sends to a Redis stream."""

    def __init__(self, server: RedisServer, stream: str = "rollouts"):
        self._server, self._stream = server, stream

    def send(self, records: Sequence[Record]) -> None:
        self._server.send(self._stream, records)

    def end(self) -> None:
        self._server.end(self._stream)


class ToDirectory:
    """Sends a file a batch, each renamed when it is whole."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._number = 0

    def send(self, records: Sequence[Record]) -> None:
        self._number += 1
        beside = self._directory / f".{self._number:05}.partial"
        with beside.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")
                file.flush()
        beside.rename(self._directory / f"{self._number:05}.jsonl")

    def end(self) -> None:
        (self._directory / "END").touch()


class ToUsedNames(ToDirectory):
    """Uses `NAMES` names. Then it waits for the run to call a file finished, and gives its name to another file, in
    turn in each way of `WAYS`."""

    NAMES = 16  # more than the run reads ahead of its checkpoints
    WAYS = ("same size", "longer, with a line's end at the old size", "longer", "shorter")
    _ROOM = 6000  # bytes that every file has at least, more than the records of a batch

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.used_again = Counter(dict.fromkeys(self.WAYS, 0))
        self._read = 0  # lines of the events
        self._free: list[str] = []

    def _free_name(self) -> str | None:
        path = self._directory / "events.jsonl"
        events = read_lines(path) if path.is_file() else []
        for event in events[self._read :]:
            self._free += [name for name in event.get("files", ()) if name not in self._free]
        self._read = len(events)
        return self._free.pop(0) if self._free else None

    def send(self, records: Sequence[Record]) -> None:
        lines = [json.dumps(record) for record in records]
        assert sum(map(len, lines)) + len(lines) < self._ROOM
        if self._number < self.NAMES:
            self._number += 1
            self._write(f"{self._number:05}.jsonl", _padded(lines, self._ROOM + 500 * (self._number % 4)))
            return
        name, until = self._free_name(), time.monotonic() + 200
        while name is None:
            assert time.monotonic() < until, "no file is called finished: the run has lost documents"
            time.sleep(0.01)
            name = self._free_name()
        way, size = self.WAYS[self.used_again.total() % len(self.WAYS)], (self._directory / name).stat().st_size
        text = {
            "same size": lambda: _padded(lines, size),
            "longer, with a line's end at the old size": lambda: _padded(lines[:-2], size) + _padded(lines[-2:], 0),
            "longer": lambda: _padded(lines, size + 17),
            "shorter": lambda: _padded(lines, size - 40),
        }[way]()
        self._write(name, text)
        self.used_again[way] += 1

    def _write(self, name: str, text: str) -> None:
        beside = self._directory / f".{name}.partial"
        beside.write_text(text, encoding="utf-8")
        beside.rename(self._directory / name)


def _padded(lines: Sequence[str], size: int) -> str:
    """Join lines, with spaces behind the last one, to `size` characters at least."""
    return "\n".join(lines) + " " * (size - sum(map(len, lines)) - len(lines)) + "\n"
