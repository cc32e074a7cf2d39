"""Runs of every kind of source that lose a rank under agents of torch's launcher, and what must hold behind them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import yaml

from agents import Agents, leaves_nothing
from server.runs import server_config
from test_elastic import number_of
from truestep.config.load import dump_config

STEPS, DOCUMENTS = 12, 6  # of a step


def agents_of(folder: Path, config: dict[str, Any], **more: Any) -> Agents:
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return Agents(folder, folder / "config.yaml", folder / "run", **more)


def lose(agents: Agents, whom: str, step: int = 4) -> None:
    """Kill a rank behind a step."""
    agents.until(lambda: agents.steps >= step)
    agents.signal(number_of(agents, 0 if whom == "first" else 1), signal.SIGKILL)


def says_why(agents: Agents, whom: str) -> None:
    """The next generation says why the first one ended, and whose rank was lost."""
    first, second, *_ = agents.generations
    expected = {"first": "the store of rank 0 cannot be reached", "another": "rank 1 is gone: its process has ended"}
    assert second["reason"].startswith(expected[whom]), second["reason"]
    assert second["failed"] == [first["agents"][0 if whom == "first" else 1]]


def each_once(agents: Agents, documents: int = DOCUMENTS) -> None:
    ledger = agents.lines("ledger.jsonl")
    assert [line["step"] for line in ledger] == list(range(1, STEPS + 1))
    assert [line["documents_seen"] for line in ledger] == [documents * step for step in range(1, STEPS + 1)]
    names = [name for line in ledger for name in line["documents"]]
    assert len(set(names)) == len(names) == documents * STEPS
    assert [line["step"] for line in agents.lines("metrics.jsonl")] == list(range(1, STEPS + 1))


def train_on_a_server(folder: Path, url: str, whom: str, staleness: int = 0) -> None:
    """Lose a rank. Weights move so far in a step that completions by those of another step would show."""
    sampler = {"max_staleness": staleness, "check_share": 1.0} if staleness else {}
    sections = {
        "data": {"group_size": 3},
        "sampler": sampler,
        "schedule": {"docs_per_step": DOCUMENTS, "steps": STEPS},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"every": 3},
        "logging": {"console": True},
    }
    config = yaml.safe_load(dump_config(server_config(folder, [url], **sections)))
    with agents_of(folder, config, nodes=(2, 3)) as agents, leaves_nothing(agents):
        agents.start(0, 1, 2)
        lose(agents, whom, step=5)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
    says_why(agents, whom)
    each_once(agents)
    assert not (agents.run / "weights").exists(), "published weights are in the last checkpoint"
    lines = agents.lines("metrics.jsonl")
    assert all(line["max_staleness"] <= staleness for line in lines)
    if not staleness:
        assert all(abs(line["kl_new_old"]) < 1e-6 for line in lines), "all is drawn by the weights of its step"
