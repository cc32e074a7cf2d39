"""Whole runs of models whose layers keep states: what the engine draws is what training scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from generate.engine.recurrent_models import FAMILIES, made
from selection import long_except
from small_runs import WORDS, quiet_trainer, read_lines, sampled_config, write_lines
from tiny import VOCABULARY
from truestep.tools.demo.model import make_tokenizer


@pytest.mark.parametrize("family", long_except(FAMILIES, "qwen3_5_text"))
def test_every_ratio_of_a_run_is_one(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = made(tmp_path)(family)
    assert make_tokenizer(model, WORDS) == VOCABULARY
    prompts = [{"prompt": " ".join(WORDS[at : at + length])} for at, length in enumerate((3, 17, 1, 40))]
    config = sampled_config(
        model,
        write_lines(tmp_path / "prompts.jsonl", prompts),
        tmp_path / "run",
        model={"head": {"fp32_lm_head": True}},
        loss={"type": "grpo", "metrics": "full"},
        sampler={"temperature": 0.9, "reward": "plain_rewards:letter_reward", "max_new_tokens": 9},
    )
    quiet_trainer(config).run()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 3 and all(line["grad_norm"] > 0 for line in lines)
    for line in lines:
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
        assert line["kl_new_old"] == pytest.approx(0, abs=1e-9)
        assert line["clipped_ratio_fraction"] == 0
    assert "without the engine" not in caplog.text
