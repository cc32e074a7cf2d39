"""SIGKILL at random instants, while a sampler goes on sending: every document is trained on once, and none is lost.

The sampler sends whole groups, interleaved, with records that are bad and records that are sent twice. It ends when all
kills are done, so none of them comes too late.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from kill_driver import Driver
from small_runs import read_lines
from stream.redis_server import RedisServer, needs_redis
from tiny import make_records
from truestep.files import read_json_lines

_GROUP = 4
_AHEAD = 60  # documents that the sampler sends before it waits for the trainer
Record = dict[str, Any]


class Sender(Protocol):
    def send(self, records: list[Record]) -> None: ...

    def end(self) -> None: ...


def _batches(seed: int) -> Iterator[list[Record]]:
    """Eight records at a time, of three groups that begin and end in different batches."""
    generator = random.Random(seed)
    waiting: list[Record] = []
    for number in range(10_000):
        group = make_records(number, documents=_GROUP + 1, advantages="rewards", group_size=_GROUP, max_length=10)
        for record in group[:_GROUP]:
            waiting.append(record | {"group_id": f"group-{number}", "id": f"{number}:{record['id']}"})
        if number % 5 == 3:  # one member is bad; the group is complete all the same
            waiting[-1] |= {"logprobs": "none", "bad": True}
        if len(waiting) < 16:
            continue
        generator.shuffle(waiting)
        batch, waiting = waiting[:8], waiting[8:]
        batch.append(generator.choice([record for record in batch if "bad" not in record]) | {"again": True})
        yield batch
    raise AssertionError("the run never ended")


def _expected(sent: list[Record]) -> list[str]:
    """Ids in the order in which their groups were complete; at the end, the groups that never were."""
    order: list[str] = []
    groups: dict[str, list[Record]] = {}
    for record in sent:
        if "again" in record:
            continue
        members = groups.setdefault(record["group_id"], [])
        members.append(record)
        if len(members) == _GROUP:
            order += [member["id"] for member in groups.pop(record["group_id"]) if "bad" not in member]
    return order + [member["id"] for members in groups.values() for member in members if "bad" not in member]


def _train(config: dict[str, Any], file: Path, kills: list[tuple[str, float]], sender: Sender) -> list[Record]:
    """All that was sent. The run is in the directory that has the file's name."""
    checkpoint = {"directory": str(file.with_suffix("")), "every": 3, "keep": 2}
    schedule = {"docs_per_step": 5, "stall_timeout": 15}
    base = {
        "loss": {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.1},
        "schedule": schedule,
        "checkpoint": checkpoint,
    }
    file.write_text(yaml.safe_dump(config | base), encoding="utf-8")
    sent: list[Record] = []
    good = 0
    with Driver(file, kills) as driver:
        for batch in _batches(len(kills)):
            sender.send(batch)
            sent += batch
            good += sum("bad" not in record and "again" not in record for record in batch)
            while (
                not (over := len(driver.said()) >= len(kills) or not driver.process.is_alive())
                and good - _trained(file) > _AHEAD
            ):
                time.sleep(0.01)
            if over:
                break
        sender.end()
        outcome = driver.wait()
    log = driver.log.read_text(encoding="utf-8")[-2000:]
    assert outcome == {"killed": [True] * len(kills), "final": 0}, log
    return sent


def _trained(file: Path) -> int:
    return sum(line["num_documents"] for line in read_json_lines(file.with_suffix("") / "ledger.jsonl"))


def _check(run: Path, sent: list[Record]) -> None:
    trained = [name for line in read_lines(run / "ledger.jsonl") for name in line["documents"]]
    expected = _expected(sent)
    assert sorted(trained) == sorted(expected), "each document once"
    assert trained == expected, "in the order in which they became usable"
    sizes = [line["num_documents"] for line in read_lines(run / "ledger.jsonl")]
    assert set(sizes[:-1]) == {5}
    refused = [line["id"] for line in read_lines(run / "rejected.jsonl")]
    assert refused == [record["id"] for record in sent if "bad" in record or "again" in record]


class _ToStream:
    def __init__(self, server: RedisServer):
        self._server = server

    def send(self, records: list[Record]) -> None:
        self._server.send("rollouts", records)

    def end(self) -> None:
        self._server.end("rollouts")


def _kills(generator: random.Random, **counts: int) -> list[tuple[str, float]]:
    """At random times, and at random ones of the places where a kill is most likely to hurt."""
    instants: dict[str, Callable[[], float]] = {
        "seconds": lambda: generator.uniform(0.1, 0.9),
        "command": lambda: generator.randint(1, 40),
        "answer": lambda: generator.randint(1, 40),
        "event": lambda: generator.randint(5, 80),
    }
    kills = [(kind, instants[kind]()) for kind, count in counts.items() for _ in range(count)]
    generator.shuffle(kills)
    return kills


@pytest.mark.long
@needs_redis
def test_twenty_kills_on_redis(redis_server: RedisServer, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config = {
        "model": {"path": str(tiny_model("qwen3_tied")), "dtype": "float32"},
        "data": {"source": {"type": "stream", "url": redis_server.url, "stream": "rollouts"}, "group_size": _GROUP},
    }
    kills = _kills(random.Random(20), seconds=6, command=6, answer=5, event=3)
    sent = _train(config, tmp_path / "run.yaml", kills, _ToStream(redis_server))
    _check(tmp_path / "run", sent)
    assert redis_server.pending("rollouts") == [], "all is acknowledged"
    events = redis_server.events("rollouts:events")
    assert events[-1] == {"event": "training_finished", "documents_seen": str(len(_expected(sent)))}


class _ToDirectory:
    """A file a batch, some of them in two parts, each renamed when it is whole."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._number = 0

    def send(self, records: list[Record]) -> None:
        self._number += 1
        beside = self._directory / f".{self._number:05}.partial"
        with beside.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")
                file.flush()
        beside.rename(self._directory / f"{self._number:05}.jsonl")

    def end(self) -> None:
        (self._directory / "END").touch()


@pytest.mark.long
def test_kills_on_a_watched_directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    config = {
        "model": {"path": str(tiny_model("qwen3_tied")), "dtype": "float32"},
        "data": {"source": {"type": "files", "directory": str(tmp_path / "sent")}, "group_size": _GROUP},
    }
    kills = _kills(random.Random(7), seconds=5, event=3)
    sent = _train(config, tmp_path / "run.yaml", kills, _ToDirectory(tmp_path / "sent"))
    _check(tmp_path / "run", sent)
    events = read_lines(tmp_path / "sent" / "events.jsonl")
    assert events[-1] == {"event": "training_finished", "documents_seen": len(_expected(sent))}
