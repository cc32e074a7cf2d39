"""Compiled layers meet a new tree of shared prefixes in every step, and are not compiled again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from documents import make_document
from model.test_prefixes import make_model
from selection import in_tiers
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.types import Rollout

KINDS = ("llama", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "nemotron_h")
BUDGET = 96


@pytest.fixture(autouse=True)
def _compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def random_trees(draw: np.random.Generator) -> list[Rollout]:
    """Groups of up to five documents that part anywhere, and now and then only documents that share nothing."""
    made: list[Rollout] = []
    for _ in range(int(draw.integers(1, 4))):
        trunk = draw.integers(0, 61, int(draw.integers(2, 40)))
        for _ in range(int(draw.integers(1, 6))):
            at = int(draw.integers(0, len(trunk) + 1)) if draw.random() < 0.5 else len(trunk)
            ids = np.concatenate([trunk[:at], draw.integers(0, 61, int(draw.integers(2, 40)))])
            one = make_document(f"{len(made)}", len(ids), seed=int(draw.integers(1000)))
            made.append(dataclasses.replace(one, input_ids=ids))
    return made


@pytest.mark.parametrize("kind", in_tiers(KINDS, [], ["llama", "qwen3_5_text"], "long"))
def test_no_tree_compiles_a_layer_again(kind: str, tmp_path: Path) -> None:
    policy = load_policy(make_model(tmp_path / kind, kind), device="cpu", compiled=True)
    runner = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")))
    draw, graphs, shapes = np.random.default_rng(7), [], set()
    for _ in range(100):
        documents = random_trees(draw)
        rule = StepRule(len(documents), False, 1, 1, BUDGET, share="always", alike=policy.token_fields)
        plan = plan_exactly(documents, rule, 0)
        runner.accumulate(plan)
        graphs.append(counters["stats"]["unique_graphs"])
        shapes |= {plan.forests[members] and plan.forests[members].tokens for members in plan.micro_batches}
    assert len(shapes) > 40 and None in shapes, "trees of many sizes, and documents alone"
    assert 0 < graphs[-1] == graphs[4], graphs
