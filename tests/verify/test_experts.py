"""`verify` on mixtures of experts: no layout changes a step, its routers' terms or the biases of choices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families.tiny_families import tiny_family
from selection import in_tiers
from small_runs import file_config, write_rollouts
from tiny import expert_model
from truestep.config.schema import Config
from truestep.model.experts import over_ranks
from truestep.model.experts.routing import OwnTokens, Routing
from truestep.model.loading import load
from truestep.model.policy import Policy
from truestep.step.compute.runner import StepRunner
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints
from truestep.types import StepPlan

LAYOUTS = {
    "one process",
    "smallest micro-batches",
    "shared prefixes",
    "FSDP 2",
    "replicas 2",
    "context 2",
    "pipeline 2",
    "expert 2",
    "context 2, expert 2",
    "tensor 2, expert 2",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"balance": "loss", "strength": 0.3, "z_loss": 0.02},
    "glm4_moe": {"balance": "bias", "strength": 0.01},
    "gpt_oss": {"z_loss": 0.02},
    "mixtral": {"balance": "loss", "strength": 0.3},
}
OF_FOUR = {
    "qwen3_moe": {"expert 4", "data 2 x expert 2, reduced each time", "data 2 x tensor 2, expert 4"},
    "glm4_moe": {"expert 2 x pipeline 2", "data 2 x context 2, expert 4"},
    "gpt_oss": {"expert 4", "expert 2 x pipeline 2"},
    "mixtral": {"replicas 2 x expert 2", "data 2 x tensor 2, expert 4"},
}


def config_of(family: str, folder: Path, **experts: Any) -> Config:
    """A configuration whose routers have the family's terms, unless options of `experts` are given."""
    model = expert_model(folder / "model") if family == "qwen3_moe" else tiny_family(folder / "model", family)
    write_rollouts(folder / "rollouts.jsonl", 10)
    config = file_config(model, folder / "rollouts.jsonl", folder / "run")
    return config.changed({f"model.experts.{name}": value for name, value in (experts or OPTIONS[family]).items()})


@pytest.mark.long
@pytest.mark.parametrize("family", OF_FOUR)
def test_no_layout_of_four_ranks_changes_a_step(family: str, tmp_path: Path) -> None:
    wanted = {"one process", *OF_FOUR[family]}
    verdicts = verify(
        config_of(family, tmp_path), tmp_path / "out", most_ranks=4, only=lambda layout: layout.name in wanted
    )
    assert {verdict.layout.name for verdict in verdicts} == wanted
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_no_layout_changes_a_step(family: str, tmp_path: Path) -> None:
    config = config_of(family, tmp_path)
    verdicts = verify(config, tmp_path / "out", most_ranks=2, only=lambda layout: layout.name in LAYOUTS)
    assert {verdict.layout.name for verdict in verdicts} == LAYOUTS
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


FROZEN = {"one process", "shared prefixes", "FSDP 2", "expert 2", "tensor 2", "pipeline 2"}


def routers_that_are_trained() -> None:
    """What should freeze routers freezes nothing."""
    load.freeze_routers = lambda model: None


@pytest.mark.parametrize("family", in_tiers(OPTIONS, ["mixtral"], []))
def test_frozen_routers_pass_and_trained_ones_are_found(family: str, tmp_path: Path) -> None:
    config = config_of(family, tmp_path, router="frozen")
    wanted = {"one process"} if family == "mixtral" else FROZEN
    verdicts = verify(config, tmp_path / "out", most_ranks=2, only=lambda one: one.name in wanted)
    assert verdicts and all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]
    plant = routers_that_are_trained
    (found,) = verify(config, tmp_path / "out", only=lambda one: one.name == "one process", plant=plant)
    assert any("gate" in line or "router" in line for line in complaints(found)), complaints(found)
    assert any("the reference has none" in line for line in complaints(found)), complaints(found)


def shares_of_a_micro_batch() -> None:
    """The balance term takes the shares of the first micro-batch."""
    honest = StepRunner._choices

    def of_one(self: StepRunner, plan: StepPlan, micro_batches: Any, every: Any) -> Any:
        return honest(self, plan, micro_batches[:1], every[:1])

    StepRunner._choices = of_one  # type: ignore[method-assign]


def bias_of_a_rank() -> None:
    """A bias moves by half of the choices."""
    honest = Routing.move_biases

    def of_half(self: Routing, counts: Any) -> None:
        honest(self, {name: own * (own.argsort() % 2) for name, own in counts.items()})

    Routing.move_biases = of_half  # type: ignore[method-assign]


def tokens_counted_once() -> None:
    """A token that several sequences have counts once in the loads."""
    honest = Policy.own_tokens

    def once(self: Policy, tokens: Any) -> OwnTokens:
        return replace(honest(self, tokens), sequences=None)

    Policy.own_tokens = once  # type: ignore[method-assign]


def gradient_of_one_rank() -> None:
    """An expert has the gradient of the tokens of one rank alone."""
    honest = over_ranks.of_rows

    def of_one(copies: Any, rows: Any, index: Any, scales: Any, first: Any, last: Any, activation: Any) -> Any:
        still = [replace(weight, values=weight.values.detach()) for weight in (first, last)]
        y = honest(copies, rows, index, scales, *still, activation)
        own = honest(copies.detach(), rows, index, scales.detach(), first, last, activation)
        counts = torch.arange(len(copies)) < len(copies) // 2  # copies come in the order of their ranks
        return y + (own - own.detach()) * counts[:, None]

    over_ranks.of_rows = of_one


def token_summed_twice() -> None:
    """What one rank gives back for a token is added twice, where gradients are computed: the probe sees nothing."""
    kept = over_ranks._Summed

    class Summed:
        @staticmethod
        def apply(parts: Any, token: Any, *runs: Any) -> Any:
            y = kept.apply(parts, token, *runs)
            return y.index_add(0, token[:1], parts[:1]) if torch.is_grad_enabled() and len(token) else y

    over_ranks._Summed = Summed  # type: ignore[misc, assignment]


def routes_of_the_next_token() -> None:
    """A token has the experts that its record names for the token before."""
    honest = Policy.own_tokens

    def shifted(self: Policy, tokens: Any) -> OwnTokens:
        own = honest(self, tokens)
        return own if own.routes is None else replace(own, routes=own.routes.roll(1, 0))

    Policy.own_tokens = shifted  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "plant", "layout", "found"),
    [
        ("qwen3_moe", shares_of_a_micro_batch, "smallest micro-batches", "expert_balance"),
        ("qwen3_moe", tokens_counted_once, "shared prefixes", "expert_balance"),
        ("qwen3_moe", gradient_of_one_rank, "expert 2", "mlp.experts.gate_up_proj"),
        ("qwen3_moe", token_summed_twice, "expert 2", "logprobs of document"),
        ("qwen3_moe", routes_of_the_next_token, "one process", "routing route_disagreement"),
        (
            "glm4_moe",
            bias_of_a_rank,
            "smallest micro-batches",
            "the bias of choices did not move as the step's choices say",
        ),
    ],
)
def test_a_planted_fault_is_found_by_name(family: str, plant: Any, layout: str, found: str, tmp_path: Path) -> None:
    config = config_of(family, tmp_path)
    (verdict,) = verify(
        config,
        tmp_path / "out",
        most_ranks=2,
        only=lambda one: one.name == layout,
        plant=plant,
    )
    assert found in " ".join(complaints(verdict))
