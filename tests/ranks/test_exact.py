"""`sampler.exact` over ranks: weights that are sharded, and tokens that ranks share, change no bit of a log-prob."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranks.cases import on_ranks, train_all
from small_runs import sampled_config, sort_prompts, word_model, write_lines


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{"data_shard": 2}, {"context": 2}])
def test_ratios_are_one_over_ranks(parallel: dict[str, Any], tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(4))
    config = sampled_config(
        word_model(tmp_path / "model"),
        prompts,
        tmp_path / "run",
        model={"dtype": "bfloat16", "head": {"fp32_lm_head": True}},
        sampler={"exact": True},
        parallel=parallel,
    )
    on_ranks(2, train_all, [config.model_dump(exclude_unset=True)])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and any(line["grad_norm"] > 0 for line in lines)
    for line in lines:
        assert (line["ratio_new_old"], line["kl_new_old"], line["clipped_ratio_fraction"]) == (1.0, 0.0, 0.0)
