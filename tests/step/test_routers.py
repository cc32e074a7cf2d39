"""Terms of routers, loads of experts and biases of choices: whole steps against the float64 oracle of the contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from families.tiny_families import tiny_family
from scoring import check_against_oracle, differences, run_score, write_records
from small_runs import said
from tiny import expert_model, make_model, make_records
from truestep.config.load import ConfigError
from truestep.config.schema import Config
from truestep.model.experts import routers
from truestep.model.experts.routing import ExpertSettings, OwnTokens, Routing
from truestep.model.loading.load import load_policy
from truestep.step.compute.runner import StepRunner
from truestep.tools.verify.oracle.step import OracleResult, oracle_step
from truestep.tools.verify.reference import Reference
from truestep.types import StepPlan
from truestep.weights.errors import ModelError

BOTH = {"balance": "loss", "strength": 0.3, "z_loss": 0.02}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expert_model(tmp_path_factory.mktemp("mixture"))


def config_of(model: Path, folder: Path, experts: dict[str, Any], **data: Any) -> dict[str, Any]:
    records = make_records(3, documents=8, max_length=14)
    path = write_records(folder / "rollouts.jsonl", records)
    return {
        "model": {"path": str(model), "dtype": "float32", "experts": experts},
        "loss": {"type": "reinforce", "metrics": "full"},
        "data": {"path": str(path), "advantages": "none", "tokens_per_microbatch": 30, **data},
    }


def oracle_of(model: Path, config: dict[str, Any]) -> OracleResult:
    records = [json.loads(line) for line in Path(config["data"]["path"]).read_text(encoding="utf-8").splitlines()]
    return oracle_step(Reference(model), records, config)


@pytest.mark.parametrize("tokens", [30, 200])
def test_terms_and_loads_are_those_of_the_whole_step(tokens: int, mixture: Path, tmp_path: Path) -> None:
    config = config_of(mixture, tmp_path, BOTH, tokens_per_microbatch=tokens)
    oracle = oracle_of(mixture, config)
    assert {"expert_balance", "router_z_loss", "policy_loss", "dead_experts/1"} <= oracle.metrics.keys()
    scored = run_score(config, tmp_path / "out")
    assert (scored.step["num_micro_batches"] > 1) == (tokens == 30)
    check_against_oracle(scored, oracle)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "lfm2_moe"])
def test_terms_of_other_kinds_of_routers(family: str, tmp_path: Path) -> None:
    """Sigmoids with groups and a bias; a softmax over the chosen ones; sigmoids with a bias of the block."""
    model = tiny_family(tmp_path / "model", family)
    config = config_of(model, tmp_path, BOTH)
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_of(model, config))


@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_that_are_computed_again_count_once(how: str, mixture: Path, tmp_path: Path) -> None:
    config = config_of(mixture, tmp_path, BOTH)
    config["model"]["activation_checkpointing"] = how
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_of(mixture, config))


def test_a_divisor_of_the_gradient_divides_that_of_the_terms(mixture: Path, tmp_path: Path) -> None:
    config = config_of(mixture, tmp_path, BOTH)
    config["loss"]["gradient_divisor"] = "deepspeed"
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_of(mixture, config))


def test_loads_without_terms(mixture: Path, tmp_path: Path) -> None:
    config = config_of(mixture, tmp_path, {})
    scored = run_score(config, tmp_path / "out")
    check_against_oracle(scored, oracle_of(mixture, config))
    assert scored.step["largest_expert_share"] == max(scored.step[f"largest_expert_share/{layer}"] for layer in (0, 1))


def _wrong(config: dict[str, Any], model: Path, folder: Path) -> set[str]:
    found = differences(run_score(config, folder / "out"), oracle_of(model, config))
    return {name for name, value in found if not value <= 1e-5}


def test_frequencies_of_a_micro_batch_are_found(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of other trainers: the balance term takes the shares of some of the step's tokens."""

    def of_one(self: StepRunner, plan: StepPlan, own: Any, every: Any) -> Any:
        return honest(self, plan, own, every[:1])

    honest = StepRunner._choices
    monkeypatch.setattr(StepRunner, "_choices", of_one)
    config = config_of(mixture, tmp_path, BOTH)
    wrong = _wrong(config, mixture, tmp_path)
    assert {"expert_balance", "gradient of model.layers.0.mlp.gate.weight"} <= wrong
    assert "router_z_loss" not in wrong and "largest_expert_share" not in wrong


def test_a_token_that_is_counted_twice_is_found(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is computed again in the backward pass counts again."""
    honest = Routing.passing
    monkeypatch.setattr(Routing, "passing", lambda self, tokens, counts: honest(self, tokens, True))
    config = config_of(mixture, tmp_path, BOTH)
    config["model"]["activation_checkpointing"] = "full"
    assert "router_z_loss" in _wrong(config, mixture, tmp_path)


def test_padding_that_is_counted_is_found(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.model.policy.Policy.own_tokens", lambda self, tokens: OwnTokens(len(tokens)))
    config = config_of(mixture, tmp_path, BOTH, tokens_per_microbatch=32, pad_to_multiple=16)
    assert {"router_z_loss", "expert_load_entropy"} <= _wrong(config, mixture, tmp_path)


@pytest.mark.parametrize("tokens", [30, 200])
def test_a_bias_moves_by_the_choices_of_the_whole_step(tokens: int, tmp_path: Path) -> None:
    model = tiny_family(tmp_path / "model", "deepseek_v3")
    sections = config_of(model, tmp_path, {"balance": "bias", "strength": 0.01}, tokens_per_microbatch=tokens)
    rest = {"schedule": {"docs_per_step": 8, "steps": 1}, "checkpoint": {"directory": str(tmp_path / "run")}}
    config = Config(**sections, **rest, optimizer={"learning_rate": 1e-3}, logging={"console": False})
    expected = oracle_of(model, sections)
    said(config)
    after = load_policy(next((tmp_path / "run" / "checkpoints").glob("*")), device="cpu").model
    before = load_policy(model, device="cpu").model
    layers = {routes.name: routes.counts for routes in expected.routes}
    assert layers
    for name, counts in layers.items():
        moved = after.get_submodule(name).e_score_correction_bias - before.get_submodule(name).e_score_correction_bias
        mean = sum(counts) / len(counts)
        signs = [(mean > count) - (mean < count) for count in counts]
        torch.testing.assert_close(moved, 0.01 * torch.tensor(signs, dtype=torch.float32))
        assert any(signs)


def test_a_frozen_router_has_no_gradient(mixture: Path, tmp_path: Path) -> None:
    scored = run_score(config_of(mixture, tmp_path, {"router": "frozen"}), tmp_path / "out")
    plain = run_score(config_of(mixture, tmp_path, {}), tmp_path / "plain")
    missing = plain.gradients.keys() - scored.gradients.keys()
    assert missing == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}
    for name, gradient in scored.gradients.items():
        assert torch.equal(gradient, plain.gradients[name])


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"balance": "loss"}, "model.experts.balance: loss: LlamaForCausalLM has no router"),
        ({"z_loss": 0.1}, "model.experts.z_loss: 0.1: LlamaForCausalLM has no router"),
        ({"router": "frozen"}, "model.experts.router: frozen: LlamaForCausalLM has no router"),
    ],
)
def test_a_model_without_routers_is_refused(experts: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match=message):
        load_policy(model, device="cpu", experts=ExpertSettings(**experts))


def test_a_router_without_a_bias_is_refused(mixture: Path) -> None:
    with pytest.raises(ModelError, match="balance: bias: the routers of Qwen3MoeForCausalLM have no bias"):
        load_policy(mixture, device="cpu", experts=ExpertSettings(balance="bias"))


def test_scores_of_neither_kind_are_refused(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_kind_of", lambda routed: "")
    with pytest.raises(ModelError, match="neither of a softmax nor of sigmoids"):
        load_policy(mixture, device="cpu", experts=ExpertSettings(balance="loss"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"experts": {"router": "frozen", "balance": "loss"}}}, "router: frozen keeps them"),
        ({"model": {"experts": {"strength": 0.1}}}, "strength needs model.experts.balance"),
        ({"model": {"experts": {"balance": "bias"}}, "adapter": {"rank": 2}}, "only the adapter is trained"),
        ({"model": {"experts": {"z_loss": 0.1}}, "data": {"zero_advantage": "skip"}}, "model.experts.z_loss may have"),
    ],
)
def test_options_that_contradict_each_other_are_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        Config(**{**sections, "model": {"path": str(tmp_path), **sections["model"]}})
