"""Runs whose weights go to a real vLLM: over a directory in memory, and by vLLM's own backend `nccl`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ranks.cases import on_ranks, train_all
from server.conftest import Servers
from server.linked_server import BY_LINK
from server.runs import recorded, server_config
from server.vllm_server import VllmServer
from small_runs import read_lines, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start


@dataclass(frozen=True)
class Way:
    sampler: dict[str, Any]
    server: VllmServer


@pytest.fixture(params=["directory", "nccl"])
def way(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Way]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        ways = {
            "directory": Way({"weights_directory": directory}, servers.second),
            "nccl": Way(BY_LINK, servers.linked),
        }
        yield ways[request.param]


def test_training_is_on_policy(way: Way, tmp_path: Path) -> None:
    run = recorded(server_config(tmp_path, [way.server.url], sampler={**way.sampler, "max_staleness": 16}))
    run.trainer.run()
    assert run.worst_gap() < 1e-4
    assert not (tmp_path / "run" / "weights").exists()
    staleness = [line["max_staleness"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert staleness[0] == 0 and max(staleness) == 16, "sampling went on beside training"


@pytest.mark.parametrize(
    ("way", "parallel"),
    [("directory", {"pipeline": 2}), ("nccl", {}), ("nccl", {"tensor": 2})],
    indirect=["way"],
)
def test_ranks_train(way: Way, parallel: dict[str, int], tmp_path: Path) -> None:
    config = server_config(
        tmp_path, [way.server.url], parallel=parallel, sampler=way.sampler, logging={"console": False}
    )
    on_ranks(2, train_all, [config.model_dump(mode="json", exclude_unset=True)])
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 4 and all(abs(line["ratio_new_old"] - 1) < 1e-4 for line in metrics)


def test_a_server_that_is_started_anew_is_given_weights_anew(way: Way, tmp_path: Path) -> None:
    schedule = {"steps": 4, "stall_timeout": 280}
    run = recorded(server_config(tmp_path, [way.server.url], sampler=way.sampler, schedule=schedule))

    def kill_once(step: int, seen: int) -> None:
        if seen == 32:
            way.server.kill()
            way.server.start()

    tell(run.trainer, updated=kill_once)
    assert run.trainer.run() == "all 4 steps are done"
    assert run.worst_gap() < 1e-4
