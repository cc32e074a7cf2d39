"""A run's step is made again from what the run kept: bit for bit at its layout, by the law at another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_weights
from small_runs import (
    file_config,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
    write_rollouts,
)
from truestep.config.schema import Config
from truestep.rollouts.kept.records import RecordsError, blocks_of
from truestep.run.again import ReplayError
from truestep.tools.replay.compare import compare
from truestep.tools.replay.replay import Replay, replay
from truestep.run.weight_lines import read_weight_lines
from truestep.run.directory import RunDirectory

Model = Callable[[str], Path]
KEEP: dict[str, Any] = {
    "logging": {"rollouts": {"documents": "all"}},
    "checkpoint": {"every": 2, "keep": 9},
    "deterministic": True,
}


def trained(config: Config) -> Path:
    quiet_trainer(config).run()
    assert config.checkpoint.directory is not None
    return Path(config.checkpoint.directory)


@pytest.fixture(autouse=True)
def _no_deterministic_after() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def of_files(tiny_model: Model, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "run", kind: str = "llama", **sections: Any) -> Path:
        write_rollouts(tmp_path / "r.jsonl", 25)
        given: dict[str, Any] = {part: {**KEEP[part]} if isinstance(KEEP[part], dict) else KEEP[part] for part in KEEP}
        for part, options in sections.items():
            given[part] = {**given[part], **options} if isinstance(given.get(part), dict) else options
        return trained(file_config(tiny_model(kind), tmp_path / "r.jsonl", tmp_path / name, **given))

    return make


def exactly(found: Replay) -> None:
    assert found.exact and found.lawful and not found.changed, found.text
    assert "bit for bit" in found.text


def test_a_step_of_files_is_what_it_was_bit_for_bit(of_files: Callable[..., Path], tmp_path: Path) -> None:
    run = of_files()
    for step, begins in ((1, 0), (3, 2), (4, 2)):
        found = replay(run, step, tmp_path / f"again{step}")
        exactly(found)
        assert found.begins == begins
        theirs = next(line for line in read_lines(run / "metrics.jsonl") if line["step"] == step)
        assert found.metrics["grad_norm"] == theirs["grad_norm"] and found.metrics["loss"] == theirs["loss"]
    same = compare(run, tmp_path / "again4")
    assert same.step is None and "2 steps, 3 to 4, are the same" in same.text


def test_the_bits_of_the_weights_are_those_of_the_checkpoint(of_files: Callable[..., Path], tmp_path: Path) -> None:
    """Digests in the run's file are sums over the numbers of its checkpoint, by a loop of its own."""
    run = of_files()
    last = max(line["step"] for line in read_lines(run / "ledger.jsonl"))
    noted = read_weight_lines(RunDirectory(run))[last].measured
    weights = read_weights(latest(run))
    assert set(noted.digests) == set(weights)
    for name, weight in weights.items():
        bits = weight.reshape(-1).view(torch.int32).tolist()
        assert noted.digests[name] == sum((2 * place + 1) * value for place, value in enumerate(bits)) % 2**64
        assert noted.weight_norms[name] == pytest.approx(float(weight.double().norm()), rel=1e-5)
