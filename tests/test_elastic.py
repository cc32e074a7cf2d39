"""Ranks that come and go, under agents of torch's elastic launcher: the run is the one that lost nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agents import Agents
from checkpoints import latest, read_states, read_weights
from small_runs import write_rollouts

DOCUMENTS, STEPS = 150, 30


def make_config(folder: Path, model: Path, **options: Any) -> Path:
    write_rollouts(folder / "rollouts.jsonl", DOCUMENTS)
    config = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(folder / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": DOCUMENTS // STEPS, "stall_timeout": 20},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"directory": str(folder / "run"), "every": 3},
        "deterministic": True,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options), encoding="utf-8")
    return folder / "config.yaml"


def agents_of(folder: Path, model: Path, **more: Any) -> Agents:
    folder.mkdir(exist_ok=True)
    return Agents(folder, make_config(folder, model), folder / "run", **more)


def undisturbed(folder: Path, model: Path, ranks: int) -> Path:
    with agents_of(folder, model, nodes=(ranks, ranks)) as agents:
        agents.start(*range(ranks))
        assert agents.wait(*range(ranks)) == [0] * ranks, agents.log()[-6000:]
    return folder / "run"


def compare(run: Path, whole: Path, bitwise: bool = False) -> None:
    """The ledgers are the same, and the weights by the law, or bit for bit."""
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    for read in (read_weights, read_states):
        found, expected = read(latest(run)), read(latest(whole))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if bitwise:
                assert torch.equal(found[name], value), name
            else:
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def nothing_left(agents: Agents) -> None:
    assert agents.alive() == []
    assert not [path.name for path in agents.run.iterdir() if path.name.startswith(".generation")]
    assert not list((agents.run / "checkpoints").glob(".*"))


@pytest.mark.long
def test_a_rank_that_is_killed_comes_back_and_the_run_is_bit_for_bit_the_same(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    with agents_of(tmp_path / "elastic", model, nodes=(2, 3)) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 7)
        agents.signal(1, signal.SIGKILL)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
        first, second = agents.generations
        assert first["ranks"] == second["ranks"] == 3
        nothing_left(agents)
    compare(agents.run, undisturbed(tmp_path / "whole", model, 3), bitwise=True)
