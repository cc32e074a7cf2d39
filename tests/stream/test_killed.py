"""SIGKILL at random instants, while a sampler goes on sending: every document is trained on once, and none is lost.

The sampler sends whole groups, interleaved, with records that are bad and records that are sent twice. It ends when all
kills are done, so none of them comes too late.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from kill_driver import Driver
from small_runs import read_lines
from stream.redis_server import RedisServer, needs_redis
from stream.senders import GROUP, Record, ToDirectory, ToStream, ToUsedNames, batches, check_run, closed
from truestep.files.whole import read_json_lines

_AHEAD = 60  # documents that the sampler sends before it waits for the trainer


class Sender(Protocol):
    def send(self, records: list[Record]) -> None: ...

    def end(self) -> None: ...


def _train(
    config: dict[str, Any],
    file: Path,
    kills: list[tuple[str, float]],
    sender: Sender,
    several: bool = False,
    enough: Callable[[], bool] = lambda: True,
) -> list[Record]:
    """Return all that was sent: until all kills are done, and it was `enough`. The run is in the directory that has the
    file's name."""
    checkpoint = {"directory": str(file.with_suffix("")), "every": 3, "keep": 2}
    schedule = {"docs_per_step": 5, "stall_timeout": 60}
    base = {
        "loss": {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.1},
        "schedule": schedule,
        "checkpoint": checkpoint,
    }
    file.write_text(yaml.safe_dump(config | base), encoding="utf-8")
    sent: list[Record] = []
    good = 0
    with Driver(file, kills) as driver:
        for batch in batches(len(kills), several=several):
            sender.send(batch)
            sent += batch
            good += sum("bad" not in record and "again" not in record for record in batch)
            while (
                not (over := len(driver.said()) >= len(kills) or not driver.process.is_alive())
                and good - _trained(file) > _AHEAD
            ):
                time.sleep(0.01)
            if over and (enough() or not driver.process.is_alive()):
                break
        sender.end()
        outcome = driver.wait()
    log = driver.log.read_text(encoding="utf-8")[-2000:]
    assert outcome == {"killed": [True] * len(kills), "final": 0}, log
    return sent


def _trained(file: Path) -> int:
    return sum(line["num_documents"] for line in read_json_lines(file.with_suffix("") / "ledger.jsonl"))


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
        "data": {"source": {"type": "stream", "url": redis_server.url, "stream": "rollouts"}, "group_size": GROUP},
    }
    kills = _kills(random.Random(20), seconds=6, command=6, answer=5, event=3)
    sent = _train(config, tmp_path / "run.yaml", kills, ToStream(redis_server))
    check_run(tmp_path / "run", sent)
    assert redis_server.pending("rollouts") == [], "all is acknowledged"
    events = redis_server.events("rollouts:events")
    assert events[-1] == {"event": "training_finished", "documents_seen": str(len(closed(sent)))}


@pytest.mark.long
def test_kills_on_a_watched_directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    config = {
        "model": {"path": str(tiny_model("qwen3_tied")), "dtype": "float32"},
        "data": {"source": {"type": "files", "directory": str(tmp_path / "sent")}, "group_size": GROUP},
    }
    kills = _kills(random.Random(7), seconds=5, event=3)
    sent = _train(config, tmp_path / "run.yaml", kills, ToDirectory(tmp_path / "sent"))
    check_run(tmp_path / "run", sent)
    events = read_lines(tmp_path / "sent" / "events.jsonl")
    assert events[-1] == {"event": "training_finished", "documents_seen": len(closed(sent))}


@pytest.mark.long
def test_twenty_kills_while_documents_of_several_sequences_come_apart(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "sent").mkdir()
    config = {
        "model": {"path": str(tiny_model("qwen3_tied")), "dtype": "float32"},
        "data": {"source": {"type": "files", "directory": str(tmp_path / "sent")}, "group_size": GROUP},
    }
    kills = _kills(random.Random(13), seconds=12, event=8)
    sent = _train(config, tmp_path / "run.yaml", kills, ToDirectory(tmp_path / "sent"), several=True)
    check_run(tmp_path / "run", sent)
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    joined = [names for line in ledger for names in line.get("records", {}).values()]
    assert len(joined) > 20
    assert all(sorted(name.rpartition("/")[2] for name in names) == ["1", "2"] for names in joined)


@pytest.mark.release
def test_twenty_kills_where_names_are_used_again(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Sixteen names are used again and again, each as soon as the run calls its file finished: by files of the same
    size, by longer ones, also with a line's end where the old file ended, and by shorter ones."""
    (tmp_path / "sent").mkdir()
    config = {
        "model": {"path": str(tiny_model("qwen3_tied")), "dtype": "float32"},
        "data": {"source": {"type": "files", "directory": str(tmp_path / "sent")}, "group_size": GROUP},
    }
    sender = ToUsedNames(tmp_path / "sent")
    kills = _kills(random.Random(11), seconds=10, event=10)

    def enough() -> bool:
        return min(sender.used_again.values()) >= 3

    sent = _train(config, tmp_path / "run.yaml", kills, sender, enough=enough)
    check_run(tmp_path / "run", sent, ordered=False)
    assert enough()
