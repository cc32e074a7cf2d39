"""Whole runs on a stream: what files give, the files give sent; events; what a restart finds."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from small_runs import (
    file_config,
    file_hashes,
    merged,
    quiet_trainer,
    read_lines,
    tell,
    tokenised_model,
    without_times,
    write_lines,
    write_rollouts,
)
from stream.redis_server import RedisServer, needs_redis
from tiny import make_records
from truestep.config.schema import Config
from truestep.rollouts.source import SourceError
from truestep.run.train import train

Record = dict[str, Any]


def directory_config(model: Path, directory: Path, run: Path, **sections: Any) -> Config:
    return sent_config(model, {"type": "files", "directory": str(directory)}, run, **sections)


def redis_config(model: Path, server: RedisServer, run: Path, **sections: Any) -> Config:
    return sent_config(model, {"type": "stream", "url": server.url, "stream": "rollouts"}, run, **sections)


def sent_config(model: Path, source: dict[str, str], run: Path, **sections: Any) -> Config:
    base = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": source, "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": 5, "stall_timeout": 60},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"directory": str(run)},
        "logging": {"console": False},
    }
    return Config.model_validate(merged(base, sections))


def run(config: Config) -> str:
    return quiet_trainer(config).run()


def trained(run: Path) -> list[str]:
    return [name for line in read_lines(run / "ledger.jsonl") for name in line["documents"]]


def put(directory: Path, name: str, records: list[Record]) -> None:
    directory.mkdir(exist_ok=True)
    write_lines(directory / f".{name}", records).rename(directory / name)


def tiny_records(count: int, **options: Any) -> list[Record]:
    return make_records(5, documents=count, max_length=16, **options)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.mark.parametrize("overshoot", ["carry", "keep"])
@pytest.mark.parametrize("grouped", [False, True])
def test_sent_documents_train_as_those_of_files(overshoot: str, grouped: bool, model: Path, tmp_path: Path) -> None:
    options = {"advantages": "rewards"} if grouped else {}
    data = {"advantages": "group_mean", "group_size": 4} if grouped else {}
    records = write_rollouts(tmp_path / "rollouts.jsonl", 33, **options)
    put(tmp_path / "sent", "a.jsonl", records)
    (tmp_path / "sent" / "END").touch()
    sections = {"data": data, "schedule": {"overshoot": overshoot}}
    run(file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "files", **sections))
    ended = run(directory_config(model, tmp_path / "sent", tmp_path / "stream", **sections))
    assert ended.startswith("the data ended after step")
    ledgers = [read_lines(tmp_path / name / "ledger.jsonl") for name in ("files", "stream")]
    assert ledgers[0] == ledgers[1]
    metrics = [without_times(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("files", "stream")]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("schedule", [{"docs_per_step": 5}, {"docs_per_step": 0, "depth_first_micro_batches": 2}])
def test_a_sampler_that_waits_for_the_weights_of_each_step_is_not_waited_for(
    schedule: dict[str, int], model: Path, tmp_path: Path
) -> None:
    """It sends what one step needs, and no more before the step's weights are out."""
    sent = tmp_path / "sent"
    sent.mkdir()
    need = 5 if schedule["docs_per_step"] else 2
    records = [
        record | {"input_ids": [1] * 30, "loss_mask": [0, *[1] * 29], "id": str(number)}
        for number, record in enumerate(tiny_records(60))
    ]
    for record in records:
        record.pop("prompt_length", None)
        record |= {"logprobs": [-1.0] * 30, "advantage": 0.5, "model_version": 0}

    def sample() -> None:
        for step in range(3):
            while len(weights_ready(sent)) < step:
                time.sleep(0.01)
            first = step * need
            # Where the budget decides, a step's last micro-batch is known to be full when the next document is there.
            more = 0 if schedule["docs_per_step"] else 1
            put(sent, f"{step}.jsonl", records[first + (more if step else 0) : first + need + more])

    sampler = threading.Thread(target=sample)
    sampler.start()
    schedule = schedule | {"steps": 3}
    run(directory_config(model, sent, tmp_path / "run", schedule=schedule, checkpoint={"every": 1}))
    sampler.join()
    assert trained(tmp_path / "run") == [record["id"] for record in records[: 3 * need]]


def weights_ready(directory: Path) -> list[Record]:
    events = directory / "events.jsonl"
    return [event for event in read_lines(events) if event["event"] == "weights_ready"] if events.exists() else []


def test_what_a_last_checkpoint_does_not_hold_is_for_the_next_start(model: Path, tmp_path: Path) -> None:
    """Leftovers that were dropped, and a record that was rejected after it."""
    records = tiny_records(24)
    sections = {"schedule": {"last_step": "drop"}, "checkpoint": {"every": 1}}
    config = directory_config(model, tmp_path / "sent", tmp_path / "run", **sections)
    put(tmp_path / "sent", "a.jsonl", [*records[:12], {"id": "bad"}])
    (tmp_path / "sent" / "END").touch()
    assert "the last 2 documents make no whole step and were dropped" in run(config)
    (tmp_path / "sent" / "END").unlink()
    put(tmp_path / "sent", "b.jsonl", records[12:20])
    (tmp_path / "sent" / "END").touch()
    run(config)
    assert trained(tmp_path / "run") == [record["id"] for record in records[:20]]
    assert [line["id"] for line in read_lines(tmp_path / "run" / "rejected.jsonl")] == ["bad"]


def test_a_run_that_waits_ends_at_the_first_signal(model: Path, tmp_path: Path) -> None:
    """And what it had read by then, a bad record among it, is neither lost nor said twice."""
    records = tiny_records(12)
    schedule = {"stall_timeout": 1e6}  # so that nothing else ends it
    config = directory_config(model, tmp_path / "sent", tmp_path / "run", checkpoint={"every": 1}, schedule=schedule)
    put(tmp_path / "sent", "a.jsonl", [*records[:8], {"id": "bad"}])
    trainer = quiet_trainer(config)
    # Once the only step that can be made is made, and the run waits for the documents of the next.
    stop = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    tell(trainer, updated=lambda *_: stop.start())
    assert "stopped by a signal (SIGTERM) after step 1" in trainer.run()
    assert trainer.stopped_by == signal.SIGTERM
    put(tmp_path / "sent", "b.jsonl", records[8:])
    (tmp_path / "sent" / "END").touch()
    run(config)
    assert trained(tmp_path / "run") == [record["id"] for record in records]
    assert [line["id"] for line in read_lines(tmp_path / "run" / "rejected.jsonl")] == ["bad"]


def put_aside(run: Path) -> list[str]:
    return [one["id"] for line in read_lines(run / "ledger.jsonl") for one in line.get("put_aside", ())]


def with_cut_off(records: list[Record]) -> tuple[list[Record], list[str]]:
    """Every third record ended at a length limit; also give those records' ids."""
    records = [record | {"truncated": number % 3 == 2} for number, record in enumerate(records)]
    return records, [record["id"] for record in records if record["truncated"]]


@pytest.mark.parametrize("first", [3, 9])
@pytest.mark.parametrize("every", [0, 1])
def test_what_was_put_aside_before_a_stop_is_in_the_ledger_once(
    first: int, every: int, model: Path, tmp_path: Path
) -> None:
    """The stop comes in a wait: before the first step, or behind one, whose checkpoint is there or is made then."""
    records, cut_off = with_cut_off(tiny_records(24))
    sections = {"checkpoint": {"every": every}, "data": {"truncated": "drop"}}
    config = directory_config(model, tmp_path / "sent", tmp_path / "run", **sections)
    put(tmp_path / "sent", "a.jsonl", records[:first])
    trainer = quiet_trainer(config)
    add, taken = trainer.source._add, []  # type: ignore[attr-defined]

    def count(arrived: object) -> None:
        add(arrived)
        taken.append(arrived)
        if len(taken) == first:
            trainer.ask_to_stop(signal.SIGTERM)

    trainer.source._add = count  # type: ignore[attr-defined]
    assert "stopped by a signal" in trainer.run()
    put(tmp_path / "sent", "b.jsonl", records[first:])
    (tmp_path / "sent" / "END").touch()
    run(config)
    assert trained(tmp_path / "run") == [record["id"] for record in records if not record["truncated"]]
    assert put_aside(tmp_path / "run") == cut_off


@pytest.mark.parametrize("first", [3, 11])
@pytest.mark.parametrize("every", [0, 1])
def test_what_was_put_aside_at_the_end_of_the_data_is_in_the_ledger_once(
    first: int, every: int, model: Path, tmp_path: Path
) -> None:
    """Also when more is sent after that end: before the first step, or behind the last checkpoint."""
    records, cut_off = with_cut_off(tiny_records(24))
    sections = {"checkpoint": {"every": every}, "data": {"truncated": "drop"}, "schedule": {"last_step": "drop"}}
    config = directory_config(model, tmp_path / "sent", tmp_path / "run", **sections)
    put(tmp_path / "sent", "a.jsonl", records[:first])
    (tmp_path / "sent" / "END").touch()
    run(config)
    assert put_aside(tmp_path / "run") == [name for name in cut_off if name in str(records[:first])]
    (tmp_path / "sent" / "END").unlink()
    put(tmp_path / "sent", "b.jsonl", records[first:])
    (tmp_path / "sent" / "END").touch()
    run(config)
    assert put_aside(tmp_path / "run") == cut_off


def test_rejected_records_stay_over_a_restart(model: Path, tmp_path: Path) -> None:
    records = tiny_records(10)
    put(tmp_path / "sent", "a.jsonl", [{"id": "bad"}, *records, records[3]])
    (tmp_path / "sent" / "END").touch()
    for steps in (1, None):
        run(directory_config(model, tmp_path / "sent", tmp_path / "run", schedule={"steps": steps}))
    reasons = [(line["file"], line["line"]) for line in read_lines(tmp_path / "run" / "rejected.jsonl")]
    assert reasons == [(str(tmp_path / "sent" / "a.jsonl"), line) for line in (1, 12)]


def test_documents_of_updates_that_are_repeated_survive_a_restart(model: Path, tmp_path: Path) -> None:
    put(tmp_path / "sent", "a.jsonl", tiny_records(10))
    (tmp_path / "sent" / "END").touch()
    for name, stops in (("whole", (None,)), ("cut", (1, 3, None))):
        for steps in stops:
            schedule = {"updates_per_batch": 2, "steps": steps}
            run(directory_config(model, tmp_path / "sent", tmp_path / name, schedule=schedule))
    assert (tmp_path / "whole" / "ledger.jsonl").read_bytes() == (tmp_path / "cut" / "ledger.jsonl").read_bytes()
    last = "checkpoints/step-00000004/truestep/part-00000.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "cut" / last).read_bytes()


def test_a_group_that_never_closes_is_given_up(model: Path, tmp_path: Path) -> None:
    records = tiny_records(13, advantages="rewards", group_size=4)
    groups = [record | {"group_id": f"g{number // 4}"} for number, record in enumerate(records)]
    put(tmp_path / "sent", "a.jsonl", [groups[12], *groups[:4]])
    data = {"advantages": "group_mean", "group_size": 4, "group_timeout": 0.5}
    schedule = {"docs_per_step": 8, "stall_timeout": 60}
    config = directory_config(model, tmp_path / "sent", tmp_path / "run", data=data, schedule=schedule)

    def sample() -> None:
        time.sleep(5)  # the first group's time is over, however long the model took to load: the next ones are not late
        put(tmp_path / "sent", "b.jsonl", groups[4:12])
        put(tmp_path / "sent", "c.jsonl", [{"id": "bad"}])
        (tmp_path / "sent" / "END").touch()

    sampler = threading.Thread(target=sample)
    sampler.start()
    run(config)
    sampler.join()
    assert trained(tmp_path / "run") == [record["id"] for record in groups[:12]]
    rejected = {line["id"]: line["reason"] for line in read_lines(tmp_path / "run" / "rejected.jsonl")}
    assert rejected[groups[12]["id"]].endswith("was open for 0.5 s (data.group_timeout) and had 1 of 4 records")


def test_a_run_that_gets_nothing_ends_with_an_error(model: Path, tmp_path: Path) -> None:
    put(tmp_path / "sent", "a.jsonl", [*tiny_records(3), {"id": "bad"}])
    with pytest.raises(SourceError, match=r"no document for 5 s .*; 3 of the 5 documents"):
        run(directory_config(model, tmp_path / "sent", tmp_path / "run", schedule={"stall_timeout": 5}))
    assert [line["id"] for line in read_lines(tmp_path / "run" / "rejected.jsonl")] == ["bad"]


def test_what_is_not_there_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"data\.source\.directory: .* is not a directory"):
        run(directory_config(tmp_path / "no model", tmp_path / "sent", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_files_is_none_of_a_stream(model: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 5)
    run(file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run"))
    (tmp_path / "sent").mkdir()
    with pytest.raises(
        SourceError,
        match="data.source: .* made from rollout files that every rank reads, not from documents that are sent",
    ):
        run(directory_config(model, tmp_path / "sent", tmp_path / "run"))


def test_a_checkpoint_of_a_stream_is_none_of_files(model: Path, tmp_path: Path) -> None:
    put(tmp_path / "sent", "a.jsonl", tiny_records(5))
    run(directory_config(model, tmp_path / "sent", tmp_path / "run", schedule={"steps": 1}))
    write_rollouts(tmp_path / "rollouts.jsonl", 5)
    with pytest.raises(SourceError, match="data.path: .* made from documents that are sent, not from rollout files"):
        run(file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run"))


@needs_redis
def test_events_of_a_run_on_redis(redis_server: RedisServer, tmp_path: Path) -> None:
    records = tiny_records(17)
    redis_server.send("rollouts", records)
    redis_server.end("rollouts")
    model = tokenised_model(tmp_path / "model", "llama")
    config = redis_config(model, redis_server, tmp_path / "run", checkpoint={"every": 2, "keep": 9})
    train(config, Console(file=io.StringIO()))
    assert trained(tmp_path / "run") == [record["id"] for record in records]
    assert redis_server.pending("rollouts") == []
    events = redis_server.events("rollouts:events")
    assert [(event["event"], event.get("step"), event["documents_seen"]) for event in events] == [
        ("weights_ready", "2", "10"),
        ("weights_ready", "4", "17"),
        ("training_finished", None, "17"),
    ]
    for event in events[:-1]:
        assert Path(event["path"]).is_absolute()
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(file_hashes(Path(event["path"])))


@needs_redis
def test_a_restart_announces_its_checkpoint_again(redis_server: RedisServer, model: Path, tmp_path: Path) -> None:
    """Who waits for these weights may never have heard of them."""
    redis_server.send("rollouts", tiny_records(10))
    for steps in (1, 2):
        run(redis_config(model, redis_server, tmp_path / "run", schedule={"steps": steps}))
    events = [(event["event"], event.get("step")) for event in redis_server.events("rollouts:events")]
    ready = "weights_ready"
    assert events == [
        (ready, "1"),
        ("training_finished", None),
        (ready, "1"),
        (ready, "2"),
        ("training_finished", None),
    ]


@needs_redis
def test_redis_gone_in_the_middle_of_a_run(redis_server: RedisServer, model: Path, tmp_path: Path) -> None:
    records = tiny_records(30)
    redis_server.send("rollouts", records[:12])

    def outage() -> None:
        while not (tmp_path / "run" / "ledger.jsonl").exists():
            time.sleep(0.01)
        redis_server.kill()
        time.sleep(0.5)
        redis_server.start()
        redis_server.send("rollouts", records[12:])
        redis_server.end("rollouts")

    other = threading.Thread(target=outage)
    other.start()
    run(redis_config(model, redis_server, tmp_path / "run", checkpoint={"every": 1}))
    other.join()
    assert trained(tmp_path / "run") == [record["id"] for record in records]
    assert redis_server.pending("rollouts") == []
    assert redis_server.events("rollouts:events")[-1]["event"] == "training_finished"
