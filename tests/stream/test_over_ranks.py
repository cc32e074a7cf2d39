"""Several ranks train on one stream: the first reads it, all see the same, and a restart may have other ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks.cases import on_ranks, train_all
from small_runs import merged, read_lines
from stream.redis_server import RedisServer, needs_redis
from stream.test_train import sent_config, tiny_records, trained


def given(model: Path, server: RedisServer, directory: Path, group: str, **sections: Any) -> dict[str, Any]:
    source = {"type": "stream", "url": server.url, "stream": "rollouts", "group": group, "events": f"{group}:events"}
    return sent_config(model, source, directory, **merged({"checkpoint": {"every": 2}}, sections)).model_dump()


@needs_redis
def test_two_ranks_train_what_one_does_and_one_goes_on_from_two(
    redis_server: RedisServer, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, records = tiny_model("llama"), tiny_records(33)
    redis_server.send("rollouts", [{"id": "bad"}, *records])
    redis_server.end("rollouts")
    train_all([given(model, redis_server, tmp_path / "one", "one")])
    on_ranks(2, train_all, [given(model, redis_server, tmp_path / "moved", "moved", schedule={"steps": 3})])
    train_all([given(model, redis_server, tmp_path / "moved", "moved")])
    ledger = read_lines(tmp_path / "one" / "ledger.jsonl")
    assert read_lines(tmp_path / "moved" / "ledger.jsonl") == ledger
    assert trained(tmp_path / "moved") == [record["id"] for record in records]
    assert [line["id"] for line in read_lines(tmp_path / "moved" / "rejected.jsonl")] == ["bad"]
    assert redis_server.pending("rollouts", "moved") == []
    ready = [event["step"] for event in redis_server.events("moved:events") if event["event"] == "weights_ready"]
    assert ready == ["2", "3", "3", "4", "6", "7"]
