"""SIGTERM at any instant of a run on two ranks, which is then started again: each document is trained on once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ranks.cases import on_ranks, train_all
from ranks.test_train_over_ranks import config
from small_runs import merged, read_lines, write_lines
from stream.redis_server import RedisServer, needs_redis
from stream.senders import GROUP, Record, ToDirectory, ToStream, batches, check_run
from stream.stop_cases import Instant, stop_all

_BEFORE, _LATER = 5, 3  # batches that are sent before the first start, and before the second
_MESSAGES = 9 * _BEFORE
_DROPS = {"data": {"truncated": "drop"}}
_TWICE = {"schedule": {"updates_per_batch": 2}}
_PACKED = {"schedule": {"overshoot": "keep"}}
_EACH = {"checkpoint": {"every": 1}}
_GRACE = {"checkpoint": {"grace": 100}}
Case = tuple[Instant, dict[str, Any]]

# `make test` has the first four: a step, waits, and reading ahead.
CASES: dict[str, Case] = {
    "in a step": (Instant("computing step 3"), _DROPS),
    "waiting for documents": (Instant("taken", _MESSAGES), _DROPS),
    "waiting for documents, and one rank is asked": (Instant("taken", _MESSAGES, ranks=(0,)), _GRACE),
    "reading ahead": (Instant("arrived", 20), _PACKED),
    "in a step, on the other rank": (Instant("computing step 3", ranks=(1,)), {}),
    "between two updates": (Instant("ending step 3"), _TWICE),
    "before a wait": (Instant("waiting for the documents of step 3"), _PACKED),
    "in a wait": (Instant("taken", 27), _TWICE | _DROPS),
    "waiting behind a checkpoint": (Instant("taken", _MESSAGES), _EACH | _DROPS),
    "before the first step": (Instant("agreeing whether to make step 1"), {}),
    "in the first wait": (Instant("taken", 9), _DROPS),
    "reading the first message": (Instant("arrived", 1), {}),
    "before a save": (Instant("saving after step 2"), _PACKED),
    **{f"in a save, change {number}": (Instant("changed", number), _EACH) for number in (1, 3, 6, 9, 14, 25, 40)},
}
_SHORT = list(CASES)[:4]


def given(model: Path, source: dict[str, str], run: Path, sections: dict[str, Any]) -> dict[str, Any]:
    data = {"source": source, "group_size": GROUP, "advantages": "group_mean", "path": None}
    base = config(model, "unused", run, schedule={"docs_per_step": 5, "stall_timeout": 60})
    base["data"].pop("path")
    return merged(merged(base, {"data": {name: value for name, value in data.items() if value is not None}}), sections)


def stop_and_go_on(
    names: Sequence[str],
    configs: Sequence[dict[str, Any]],
    senders: Sequence[ToStream | ToDirectory],
    folder: Path,
    stopped: Callable[[int], None] = lambda number: None,
) -> None:
    """Start each run, stop it, send the rest, and start it again; `stopped` checks what a stop leaves."""
    sent: list[list[Record]] = []
    samplers = [batches(number, truncated=True) for number in range(len(names))]
    for sender, sampler in zip(senders, samplers, strict=True):
        sent.append([])
        for batch in itertools.islice(sampler, _BEFORE):
            sender.send(batch)
            sent[-1] += batch
    folder.mkdir()
    runs = [(given, CASES[name][0]) for given, name in zip(configs, names, strict=True)]
    on_ranks(2, stop_all, runs, str(folder))
    for number in range(len(names)):
        stopped(number)
    for number, (sender, sampler) in enumerate(zip(senders, samplers, strict=True)):
        for batch in itertools.islice(sampler, _LATER):
            sender.send(batch)
            sent[number] += batch
        sender.end()
    on_ranks(2, train_all, list(configs))
    for one, documents in zip(configs, sent, strict=True):
        schedule, exact = one["schedule"], one["schedule"].get("overshoot") != "keep"
        check_run(
            Path(one["checkpoint"]["directory"]),
            documents,
            step_size=schedule["docs_per_step"] if exact else None,
            drops=one["data"].get("truncated") == "drop",
            updates=schedule.get("updates_per_batch", 1),
        )


PART_CASES: dict[str, Case] = {
    "in a step": (Instant("computing step 3"), {}),
    "while the next documents are looked at": (Instant("peeked", 4), _PACKED),
    "in a step, on the other rank": (Instant("computing step 3", ranks=(1,)), {}),
    "between two updates": (Instant("ending step 3"), _TWICE),
    "in a save": (Instant("changed", 6), _EACH),
    "before the first step": (Instant("agreeing whether to make step 1"), _DROPS),
    "before a save": (Instant("saving after step 2"), _DROPS | _PACKED),
}


def parts_config(model: Path, rollouts: Path, run: Path, sections: dict[str, Any]) -> dict[str, Any]:
    data = {"advantages": "group_mean", "group_size": GROUP}
    base = config(model, rollouts, run, schedule={"docs_per_step": 5, "stall_timeout": 60}, data=data)
    return merged(base, sections)


@pytest.mark.parametrize(
    "names",
    [list(PART_CASES)[:3], pytest.param(list(PART_CASES)[3:], marks=pytest.mark.release)],
    ids=["some", "others"],
)
@pytest.mark.long
def test_stopped_with_parts_of_their_own(names: list[str], tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Files of which each rank reads a part: a stopped run and the one behind it write what an unbroken one does."""
    for rank, number in enumerate((3, 5)):
        # Groups that a part leaves open are closed at its end.
        sent = [record for batch in itertools.islice(batches(rank, truncated=True), number) for record in batch]
        write_lines(tmp_path / f"part-{rank}.jsonl", [record | {"id": f"{rank}:{record['id']}"} for record in sent])
    model, parts = tiny_model("llama"), tmp_path / "part-{rank}.jsonl"
    runs, whole = [], []
    for number, name in enumerate(names):
        instant, sections = PART_CASES[name]
        runs.append((parts_config(model, parts, tmp_path / f"run-{number}", sections), instant))
        whole.append(parts_config(model, parts, tmp_path / f"whole-{number}", sections))
    (tmp_path / "processes").mkdir()
    on_ranks(2, stop_all, runs, str(tmp_path / "processes"))
    on_ranks(2, train_all, [*[config for config, _ in runs], *whole])
    for number, name in enumerate(names):
        sections = PART_CASES[name][1]
        for file in ("ledger.jsonl", "rejected.jsonl"):
            found, expected = (read_lines(tmp_path / f"{kind}-{number}" / file) for kind in ("run", "whole"))
            assert found == expected, (name, file)
        ledger = read_lines(tmp_path / f"run-{number}" / "ledger.jsonl")
        updates = sections.get("schedule", {}).get("updates_per_batch", 1)
        times = Counter(document for line in ledger for document in line["documents"])
        assert set(times.values()) == {updates}, name


@pytest.mark.parametrize("names", [_SHORT, pytest.param(list(CASES)[4:], marks=pytest.mark.release)])
@needs_redis
def test_stopped_on_redis(
    names: list[str], redis_server: RedisServer, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, configs, senders = tiny_model("llama"), [], []
    for number, name in enumerate(names):
        source = {"type": "stream", "url": redis_server.url, "stream": f"s{number}"}
        configs.append(given(model, source, tmp_path / f"run-{number}", CASES[name][1]))
        senders.append(ToStream(redis_server, f"s{number}"))

    def stopped(number: int) -> None:
        assert redis_server.pending(f"s{number}") == [], f"{names[number]}: what was read ahead is given back"

    stop_and_go_on(names, configs, senders, tmp_path / "processes", stopped)
    for number, name in enumerate(names):
        assert redis_server.pending(f"s{number}") == [], name
        assert redis_server.events(f"s{number}:events")[-1]["event"] == "training_finished"


@pytest.mark.release
@pytest.mark.parametrize("names", [_SHORT, list(CASES)[4:]])
def test_stopped_on_a_watched_directory(names: list[str], tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, configs, senders = tiny_model("llama"), [], []
    for number, name in enumerate(names):
        (tmp_path / f"sent-{number}").mkdir()
        source = {"type": "files", "directory": str(tmp_path / f"sent-{number}")}
        configs.append(given(model, source, tmp_path / f"run-{number}", CASES[name][1]))
        senders.append(ToDirectory(tmp_path / f"sent-{number}"))
    stop_and_go_on(names, configs, senders, tmp_path / "processes")
    for number, name in enumerate(names):
        events = read_lines(tmp_path / f"sent-{number}" / "events.jsonl")
        acknowledged = {file for event in events if event["event"] == "acknowledged" for file in event["files"]}
        assert acknowledged == {f"{file + 1:05}.jsonl" for file in range(_BEFORE + _LATER)}, name
        assert events[-1]["event"] == "training_finished"
