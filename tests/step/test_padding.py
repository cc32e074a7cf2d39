"""Padding belongs to no document: no value in it, whatever it is, reaches a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scoring import write_records
from step.test_score_oracle import config_for, records_for
from truestep.config.schema import Config
from truestep.metrics.types import values
from truestep.ranks.group import ALONE
from truestep.run.assemble.policy import make_policy
from truestep.run.assemble.sources import read_documents
from truestep.run.assemble.step import make_rule, make_runner
from truestep.step.compute import runner as step_runner
from truestep.step.plan.plan import plan_exactly
from truestep.types import PackedBatch


@pytest.mark.parametrize(("kind", "loss"), [("gemma2", "gspo"), ("qwen3", "grpo")])
def test_poisoned_padding_changes_no_bit(
    kind: str, loss: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind)
    file = write_records(tmp_path / "rollouts.jsonl", records_for(model, loss))
    options = config_for(model, file, {"type": loss}, tokens_per_microbatch=80, pad_to_multiple=80)
    config = Config.model_validate(options)
    policy = make_policy(config, ALONE)
    documents = read_documents(config, policy.vocabulary_size).rollouts
    plan = plan_exactly(documents, make_rule(config, policy), documents_seen=0)
    runner = make_runner(config, policy)
    padded_tokens = 0
    honest = step_runner.pack

    def step(poison: int | None) -> tuple[dict[str, float], list[torch.Tensor]]:
        def pack(*arguments: Any, **named: Any) -> PackedBatch:
            nonlocal padded_tokens
            batch = honest(*arguments, **named)
            tokens = batch.tokens
            end = int(tokens.segments[tokens.num_segments])
            padded_tokens += len(tokens) - end
            if poison is None:
                return batch
            input_ids, position_ids = tokens.input_ids.clone(), tokens.position_ids.clone()
            input_ids[end:], position_ids[end:] = poison, poison
            poisoned = dataclasses.replace(tokens, input_ids=input_ids, position_ids=position_ids)
            return dataclasses.replace(batch, tokens=poisoned)

        monkeypatch.setattr(step_runner, "pack", pack)
        accumulated = runner.accumulate(plan)
        return values(accumulated.metrics), [gradient.clone() for gradient in policy.weights.gradients.values()]

    clean = step(None)
    assert padded_tokens > 0
    for poison in (1, 60, -100, 10**9, -(2**63), 2**63 - 1):
        metrics, gradients = step(poison)
        assert metrics == clean[0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, clean[1], strict=True))
