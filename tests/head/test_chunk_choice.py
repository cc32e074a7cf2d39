"""The size that `logits_chunk_size: auto` chooses, and what a run's results may know of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import latest
from small_runs import file_config, quiet_trainer, write_rollouts
from tiny import VOCABULARY
from truestep.head import logits
from truestep.head.logits import HeadSettings

LITTLE, MUCH = 3 * 4 * VOCABULARY, 2**30  # bytes that are free: room for three rows of logits, or for all of them


def chosen(settings: HeadSettings, rows: int = 100) -> int:
    return settings.rows_per_chunk(rows, VOCABULARY, 4, torch.device("cpu"))


def test_a_deterministic_choice_does_not_know_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for free in (LITTLE, MUCH):
        monkeypatch.setattr(logits, "_free_bytes", lambda device, free=free: free)
        sizes.append((chosen(HeadSettings(deterministic=True)), chosen(HeadSettings())))
    assert sizes[0][0] == sizes[1][0], "of the shape alone"
    assert sizes[0][1] < sizes[1][1], "without it, memory decides"


def test_a_deterministic_choice_follows_the_vocabulary() -> None:
    settings = HeadSettings(deterministic=True)
    on = torch.device("cuda")
    assert settings.rows_per_chunk(10**5, 151_936, 2, on) == settings.rows_per_chunk(10**5, 151_936, 4, on)
    assert 1024 < settings.rows_per_chunk(10**5, 151_936, 4, on) < settings.rows_per_chunk(10**5, 32_000, 4, on) <= 8192


def test_a_deterministic_run_is_bitwise_the_same_whatever_is_free(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 20)
    saved = []
    try:
        for name, free in (("little", LITTLE), ("much", MUCH)):
            monkeypatch.setattr(logits, "_free_bytes", lambda device, free=free: free)
            config = file_config(
                tiny_model("qwen3"),
                tmp_path / "rollouts.jsonl",
                tmp_path / name,
                deterministic=True,
                schedule={"steps": 3},
            )
            quiet_trainer(config).run()
            saved.append((latest(tmp_path / name) / "truestep" / "part-00000.safetensors").read_bytes())
    finally:
        torch.use_deterministic_algorithms(False)
    assert saved[0] == saved[1]
