"""A policy learns a task of three turns with a tool: from below one half to nine in ten, on prompts it has not seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asking import PROMPT, demonstrations
from small_runs import read_lines, said, word_model, write_lines
from truestep.config.load import config_of

PROGRAM = Path(__file__).parent / "endpoint" / "asks.py"


def warmed_up(tmp_path: Path) -> Path:
    """A policy that has imitated demonstrations of which three turns in four are good."""
    model = word_model(tmp_path / "model")
    corpus = write_lines(
        tmp_path / "corpus.jsonl", list(demonstrations(AutoTokenizer.from_pretrained(model), 240 * 128, 1))
    )
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "loss": {"type": "cross_entropy"},
        "data": {"path": str(corpus), "tokens_per_microbatch": 4096},
        "schedule": {"docs_per_step": 128, "steps": 240},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20, "schedule": "linear"},
        "checkpoint": {"directory": str(tmp_path / "warm-up")},
    }
    said(config_of(config))
    return sorted((tmp_path / "warm-up" / "checkpoints").iterdir())[-1]


def trained(tmp_path: Path, environment: dict[str, Any], *, docs: int, steps: int, seed: int) -> list[float]:
    """The share of held-out episodes that are right, at each evaluation."""
    policy = warmed_up(tmp_path)
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"id": f"p{n}", "prompt": PROMPT} for n in range(2000)])
    held_out = write_lines(tmp_path / "held_out.jsonl", [{"id": f"h{n}", "prompt": PROMPT} for n in range(100)])
    config = {
        "model": {"path": str(policy), "dtype": "float32", "head": {"fp32_lm_head": True}},
        "loss": {"type": "grpo"},
        "data": {"group_size": 8, "tokens_per_microbatch": 4096},
        "sampler": {
            "prompts": str(prompts),
            "environment": environment,
            "max_new_tokens": 6,
            "max_episode_tokens": 64,
            "stop": ["="],
            "reward_memory": 4.0,
        },
        "evaluation": {"prompts": str(held_out), "every": steps, "pass_reward": 1.0, "stop": ["="]},
        "schedule": {"docs_per_step": docs, "steps": steps},
        "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
        "checkpoint": {"directory": str(tmp_path / "run")},
        "seed": seed,
    }
    said(config_of(config))
    return [line["pass@1"] for line in read_lines(tmp_path / "run" / "evaluation.jsonl")]


@pytest.mark.release
def test_an_environment_is_learnt(tmp_path: Path) -> None:
    before, after = trained(tmp_path, {"class": "asking:Asking"}, docs=64, steps=100, seed=1)
    assert before < 0.5 and after >= 0.9, (before, after)


@pytest.mark.release
def test_a_program_is_learnt(tmp_path: Path) -> None:
    run = {"type": "command", "run": [sys.executable, str(PROGRAM)]}
    before, after = trained(tmp_path, run, docs=64, steps=100, seed=1)
    assert before < 0.5 and after >= 0.9, (before, after)
