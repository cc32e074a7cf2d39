"""Runs with `sampler.exact`: the ratio of every update on fresh documents is exactly 1, and nothing is clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import long_except
from small_runs import quiet_trainer, read_lines, sampled_config, sort_prompts, tokenised_model, word_model, write_lines
from truestep.config.load import ConfigError


def run(directory: Path, weights: Path, **sections: Any) -> list[dict[str, Any]]:
    prompts = write_lines(directory / "prompts.jsonl", sort_prompts(6))
    usual = {"exact": True, "temperature": 0.9, "reward": "plain_rewards:letter_reward"}
    sampler = {**usual, **sections.pop("sampler", {})}
    config = sampled_config(weights, prompts, directory / "run", sampler=sampler, **sections)
    quiet_trainer(config).run()
    return read_lines(directory / "run" / "metrics.jsonl")


def is_exact(line: dict[str, Any]) -> bool:
    return line["ratio_new_old"] == 1.0 and line["clipped_ratio_fraction"] == 0.0 and line["kl_new_old"] == 0.0


@pytest.mark.parametrize("kind", long_except(["qwen3_tied", "gemma2"], "qwen3_tied"))
def test_every_fresh_update_has_ratio_one(kind: str, tmp_path: Path) -> None:
    model = tokenised_model(tmp_path / "model", kind)
    lines = run(
        tmp_path,
        model,
        model={"dtype": "bfloat16", "head": {"fp32_lm_head": True}},
        loss={"type": "grpo", "epsilon_low": 1e-6, "epsilon_high": 1e-6, "metrics": "full"},
    )
    assert len(lines) == 3 and all(line["grad_norm"] > 0 for line in lines)
    assert all(map(is_exact, lines)), lines
    assert all(line["time/exact"] > 0 for line in lines)


def test_without_it_bfloat16_is_off(tmp_path: Path) -> None:
    """The assertions above can fail, with the same bounds."""
    lines = run(
        tmp_path,
        tokenised_model(tmp_path / "model", "qwen3_tied"),
        model={"dtype": "bfloat16", "head": {"fp32_lm_head": True}},
        loss={"type": "grpo", "epsilon_low": 1e-6, "epsilon_high": 1e-6},
        sampler={"exact": False},
    )
    assert not any(map(is_exact, lines))
    assert all(line["clipped_ratio_fraction"] > 0 for line in lines)


@pytest.mark.parametrize(
    "loss", long_except([{"type": "gspo"}, {"type": "grpo", "old_logprobs": "recompute"}], {"type": "gspo"})
)
def test_later_updates_on_the_same_documents_move_away(loss: dict[str, Any], tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        word_model(tmp_path / "model"),
        model={"dtype": "bfloat16", "head": {"fp32_lm_head": True}},
        loss=loss,
        schedule={"updates_per_batch": 2, "steps": 4},
    )
    first, second = lines[::2], lines[1::2]
    assert all(map(is_exact, first))
    assert not any(map(is_exact, second))


def test_an_adapter_and_recomputed_activations(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        word_model(tmp_path / "model"),
        model={"dtype": "bfloat16", "activation_checkpointing": True},
        adapter={"rank": 4},
    )
    assert all(map(is_exact, lines))


def test_it_trains_as_without_it(tmp_path: Path) -> None:
    """In float32 both find the same gradient, within rounding."""
    model = word_model(tmp_path / "model")
    lines = [run(tmp_path / str(exact), model, sampler={"exact": exact}) for exact in (True, False)]
    for mine, theirs in zip(*lines, strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        ({"engine": False}, "leave out sampler.engine: false"),
        ({"type": "server", "urls": ["http://localhost"], "model": "m"}, "exact"),
    ],
)
def test_what_cannot_be_exact_is_refused_before_anything_is_loaded(
    sampler: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ValueError), match=named):
        sampled_config(tmp_path, tmp_path / "p.jsonl", tmp_path / "run", sampler={"exact": True, **sampler})


@pytest.mark.parametrize("dimension", ["tensor", "pipeline"])
def test_ranks_that_share_a_model_are_refused(dimension: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=f"parallel.{dimension}"):
        sampled_config(
            tmp_path, tmp_path / "p.jsonl", tmp_path / "run", sampler={"exact": True}, parallel={dimension: 2}
        )
