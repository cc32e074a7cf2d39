"""A whole run, sampler and all, is the same run whether prefixes are shared or not: documents, metrics and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_weights
from ranks.cases import on_ranks, train_all
from selection import in_tiers
from small_runs import (
    file_config,
    merged,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
)
from truestep.metrics.spent import of_the_machine
from truestep.run.assemble.step import least_saved

OF_THE_LAYOUT = {"num_micro_batches", "computed_tokens", "recomputed_prefix_tokens", "sampler_cache_use"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "in process": (1, {}),
    "divided trees": (1, {"data": {"tokens_per_microbatch": 24}}),
    "adapter": (1, {"adapter": {"rank": 3}}),
    "reference": (1, {"loss": {"kl_reference": {"weight": 0.1}}}),
    "recompute": (1, {"loss": {"old_logprobs": "recompute"}, "schedule": {"updates_per_batch": 2}}),
    "8-bit states": (1, {"optimizer": {"type": "adamw_8bit"}}),
    "context 2": (2, {"parallel": {"context": 2}}),
    "FSDP 2": (2, {}),
}
SHORT = ("in process", "adapter")
STEPS = 20
# The last digit of a gradient may decide between two levels of a moment, which are 5% apart (docs/optimizers.md).
ONE_LEVEL = 2e-3


def run(folder: Path, share: str, ranks: int, sections: dict[str, Any]) -> Path:
    base = {
        "loss": {"type": "grpo"},
        "data": {"share_prefixes": share},
        "schedule": {"steps": STEPS},
        "optimizer": {"learning_rate": 1e-3},
    }
    made = sampled_config(folder / "model", folder / "prompts.jsonl", folder / share, **merged(base, sections))
    on_ranks(ranks, train_all, [made.model_dump(exclude_unset=True)])
    return folder / share


@pytest.mark.parametrize("name", in_tiers(CASES, SHORT, [name for name in CASES if name not in SHORT]))
def test_a_run_is_the_same_with_shared_prefixes(name: str, tmp_path: Path) -> None:
    word_model(tmp_path / "model")
    write_lines(tmp_path / "prompts.jsonl", sort_prompts(16))
    off, on = (run(tmp_path, share, *CASES[name]) for share in ("off", "always"))
    assert read_lines(on / "ledger.jsonl") == read_lines(off / "ledger.jsonl")
    lines = read_lines(on / "metrics.jsonl"), read_lines(off / "metrics.jsonl")
    assert len(lines[0]) >= STEPS
    for mine, theirs in zip(*lines, strict=True):
        for key in theirs.keys() - OF_THE_LAYOUT:
            if not of_the_machine(key):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (theirs["step"], key)
        assert mine["computed_tokens"] < theirs["computed_tokens"] == theirs["num_tokens"] == mine["num_tokens"]
    again = any(line["recomputed_prefix_tokens"] > 0 for line in lines[0])
    assert again == (name in ("divided trees", "FSDP 2")), "by a small budget, or between two data ranks"
    mine, theirs = (read_weights(latest(folder)) for folder in (on, off))
    for key, weight in theirs.items():
        assert (mine[key] - weight).norm() / weight.norm() < (ONE_LEVEL if name == "8-bit states" else 1e-5), key


@pytest.mark.parametrize(("prompt", "shared"), [(2, False), (3, True), (9, True)])
def test_a_cpu_shares_a_prompt_that_saves_sixteen_tokens(
    prompt: int, shared: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Eight completions of a prompt compute it seven times less. A GPU shares it only if that saves 64 tokens."""
    records = [
        {"id": str(number), "input_ids": [*range(1, prompt + 1), 20 + number, 30 + number], "prompt_length": prompt,
         "logprobs": [-1.0] * 2, "advantage": 1.0}
        for number in range(8)
    ]  # fmt: skip
    write_lines(tmp_path / "r.jsonl", records)
    sections: dict[str, Any] = {"data": {"tokens_per_microbatch": 256}, "schedule": {"docs_per_step": 8}}
    trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", **sections))
    trainer.run()
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["num_tokens"] == 8 * (prompt + 2)
    assert line["computed_tokens"] == line["num_tokens"] - (7 * prompt if shared else 0)
    assert least_saved(torch.device("cpu")) == 16 and least_saved(torch.device("cuda")) == 64
