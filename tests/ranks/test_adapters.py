"""Adapters: gradients are those of the merged weights by the chain rule, on every layout; a run saves and goes on."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from adapters import chain_rule, write_adapter, write_merged
from checkpoints import read_weights
from documents import same_bits
from oracles.step import OracleResult, oracle_step
from ranks.cases import on_ranks, score_all, train_all
from scoring import loaded_once
from selection import in_tiers
from small_runs import (
    file_config,
    file_hashes,
    merged,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
    write_rollouts,
)
from tiny import make_model
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.head.logits import LogitsGradient
from truestep.model.adapter import AdapterSettings, AdapterSource
from truestep.model.loading.load import load_policy
from truestep.run.assemble import policy as assemble_policy
from truestep.run.assemble.policy import join_ranks
from truestep.run.train import make_trainer
from truestep.run.trainer import Trainer
from truestep.tools.export import ExportError, export
from truestep.tools.score import score
from truestep.weights.errors import ModelError

LAYOUTS: list[dict[str, Any]] = [
    {"data_shard": 2},
    {"data_shard": 1, "data_replicate": 2},
    {"context": 2},
    {"tensor": 2},
    {"pipeline": 2},
]


def config_of(tmp_path: Path, model: Path, **sections: Any) -> dict[str, Any]:
    rollouts = tmp_path / "rollouts.jsonl"
    if not rollouts.exists():
        write_rollouts(rollouts, 11)
    return file_config(model, rollouts, tmp_path / "run", **sections).model_dump(exclude_unset=True)


def oracle_of(model: Path, config: dict[str, Any]) -> OracleResult:
    records = [json.loads(line) for line in Path(config["data"]["path"]).read_text(encoding="utf-8").splitlines()]
    options = Config.model_validate(config).model_dump()
    return oracle_step(model, records, options)


def check_gradients(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "gradients.safetensors")
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name].double() - value).norm() <= 1e-5 * value.norm(), (folder.name, name)


def check_scores(folder: Path, oracle: OracleResult) -> None:
    scored = [json.loads(line) for line in (folder / "scores.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = {document["id"]: document["logprobs"] for document in oracle.documents}
    for line in scored:
        worst = max((abs(a - b) for a, b in zip(line["logprobs"], expected[line["id"]], strict=True)), default=0.0)
        assert worst <= 1e-5


# The first with biases, and one key head for both tensor ranks.
KINDS: list[tuple[str, dict[str, Any]]] = [("qwen2", {"num_key_value_heads": 1}), ("gemma2", {})]


@pytest.mark.parametrize(("kind", "changes"), in_tiers(KINDS, [], KINDS[:1]))
def test_gradients_are_those_of_the_merged_weights_on_every_layout(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / kind, kind, **changes)
    write_adapter(tmp_path / "adapter", model)
    config = config_of(tmp_path, model, adapter={"path": str(tmp_path / "adapter")})
    oracle = oracle_of(write_merged(model, tmp_path / "adapter", tmp_path / "merged"), config)
    expected = chain_rule(oracle.gradients, tmp_path / "adapter")
    runs = [(merged(config, {"parallel": layout}), str(tmp_path / str(n))) for n, layout in enumerate(LAYOUTS)]
    with loaded_once():
        score(Config.model_validate(config), tmp_path / "one", gradients=True)
    on_ranks(2, score_all, runs)
    for folder in [tmp_path / "one", *(Path(folder) for _, folder in runs)]:
        check_gradients(folder, expected)
        check_scores(folder, oracle)


def test_an_adapters_head_runs_no_product_for_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(LogitsGradient, "add_of_weight_", lambda *arguments: calls.append("weight"))
    config = config_of(tmp_path, make_model(tmp_path / "model", "qwen3"))
    for adapter, runs in ((None, True), ({"rank": 2}, False)):
        calls.clear()
        score(Config.model_validate(merged(config, {"adapter": adapter})), tmp_path / "out", gradients=True)
        assert bool(calls) == runs


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_the_adapter_alone_is_trained_and_the_base_is_kept_once(ranks: int, dtype: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    config = config_of(tmp_path, model, adapter={"rank": 4, "targets": ["q_proj", "mlp.*_proj"]})
    own = {"model": {"dtype": dtype}, "schedule": {"steps": 2}}
    on_ranks(ranks, _check_what_is_trained, merged(config, own))


def _check_what_is_trained(config: dict[str, Any]) -> None:
    trainer = make_trainer_of(config)
    weights, model = trainer.policy.weights, trainer.policy.model
    base = {name: value.clone() for name, value in weights.frozen.items()}
    first = {name: value.detach().clone() for name, value in weights.master.items()}
    trainer.run()
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in weights.master}
    assert layers == {"q_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(".lora_" in name for name in weights.master) and not any(".lora_" in name for name in weights.frozen)
    updated = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert updated == {id(master) for master in weights.master.values()}
    for name, value in weights.frozen.items():
        assert value.dtype == weights.dtype and same_bits(value, base[name]), name
    for name, value in weights.master.items():
        assert value.dtype == torch.float32
        assert not value.numel() or not torch.equal(value, first[name]), name
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def run_of(tmp_path: Path, model: Path, name: str, steps: int, **parallel: int) -> dict[str, Any]:
    config = config_of(tmp_path, model, adapter={"rank": 4}, parallel=parallel, data={"epochs": 3})
    own = {"schedule": {"steps": steps}, "checkpoint": {"directory": str(tmp_path / name)}, "deterministic": True}
    return merged(config, own)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_tied")
    on_ranks(2, train_all, [run_of(tmp_path, model, name, steps) for name, steps in (("a", 4), ("b", 2), ("b", 4))])
    files = {path.name for path in newest(tmp_path / "a").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "truestep"}
    assert file_hashes(newest(tmp_path / "a")) == file_hashes(newest(tmp_path / "b"))
    assert all("lora" in name for name in read_weights(newest(tmp_path / "a"))), "the model is not saved"


def test_a_run_moves_between_layouts_and_starts_alike_on_each(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    cut = {"tensor": 2}, {"pipeline": 2}, {"data_shard": 2}
    moved = [run_of(tmp_path, model, "moved", steps, **layout) for steps, layout in enumerate(cut, start=1)]
    on_ranks(2, train_all, moved)
    train_all([run_of(tmp_path, model, "moved", 4), run_of(tmp_path, model, "one", 4)])
    one, found = (load_file(newest(tmp_path / name) / "adapter_model.safetensors") for name in ("one", "moved"))
    assert set(one) == set(found)
    for name, value in one.items():
        assert (found[name] - value).norm() <= 2e-4 * value.norm(), name


def test_a_checkpoint_of_another_adapter_or_base_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    config = run_of(tmp_path, model, "run", 1)
    train_all([config])
    further = merged(config, {"schedule": {"steps": 2}})
    held = []  # as a notebook holds the error of its last cell: a start that fails gives its lock back even so
    for changed, message in (
        ({"adapter": {"rank": 8}}, "does not fit adapter.rank, which asks for 8, and it has 4"),
        ({"adapter": {"alpha": 8.0}}, "does not fit adapter.alpha, which asks for 8.0, and it has 32.0"),
        ({"adapter": {"targets": ["q_proj"]}}, "does not fit adapter.targets, which asks for other layers than it has"),
        ({"adapter": None}, "holds an adapter, and the configuration has no section adapter"),
    ):
        with pytest.raises(TruestepError, match=re.escape(message)) as error:
            make_trainer_of(merged(further, changed))
        assert "remove" not in str(error.value), "the checkpoint is sound, and the option is not"
        held.append(error)
    make_model(tmp_path / "model", "llama", seed=5)
    with pytest.raises(TruestepError, match="the run began with the weights of"):
        make_trainer_of(further)
    make_model(tmp_path / "elsewhere", "llama")  # the same weights as at first
    train_all([merged(further, {"model": {"path": str(tmp_path / "elsewhere")}})])


def test_an_export_is_merged_or_the_adapter_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_tied")
    config = run_of(tmp_path, model, "run", 2)
    train_all([config])
    run = tmp_path / "run"
    export(run, tmp_path / "merged", "float32")
    export(run, tmp_path / "alone", "float32", adapter_alone=True)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "alone" / file).read_bytes() == (newest(run) / file).read_bytes()
    expected = load_file(write_merged(model, newest(run), tmp_path / "by-hand") / "model.safetensors")
    found = load_file(tmp_path / "merged/model.safetensors")
    assert set(found) == set(expected)
    changed = 0
    for name, value in load_file(model / "model.safetensors").items():
        assert (found[name].double() - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
        changed += not torch.equal(found[name], value)
    assert changed == 14  # the linear layers of both layers
    policy = load_policy(tmp_path / "merged", device="cpu")
    assert policy.adapter is None
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="does not exist: give its new path with --model"):
        export(run, tmp_path / "other", "float32")
    export(run, tmp_path / "other", "float32", model=tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="is a whole model"):
        export(tmp_path / "merged", tmp_path / "again", "float32", adapter_alone=True)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "c_attn"], "'c_attn' matches no linear layer of LlamaForCausalLM"),
        (["lm_head"], "'lm_head' is the head, which stays as it is"),
        (["embed_tokens"], "matches model.embed_tokens, a Embedding, which is not a linear layer"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets: list[str], message: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        load_policy(tmp_path, device="cpu", adapter=AdapterSource(AdapterSettings(2, 2.0, targets)))
    assert str(caught.value).startswith("adapter.targets: ")


def make_trainer_of(config: dict[str, Any]) -> Trainer:
    given = Config.model_validate(config)
    ranks = join_ranks(given)
    return make_trainer(given, Console(file=io.StringIO()), ranks=ranks)


def test_the_reference_is_the_model_without_its_adapter_on_every_layout(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    write_adapter(tmp_path / "adapter", model)
    adapter = {"path": str(tmp_path / "adapter")}

    def scored(path: str | None, **parallel: int) -> dict[str, Any]:
        loss = {"type": "grpo", "kl_reference": {"weight": 0.3, "path": path}}
        return config_of(tmp_path, model, adapter=adapter, loss=loss, parallel=parallel)

    score(Config.model_validate(scored(str(model))), tmp_path / "loaded", gradients=True)
    score(Config.model_validate(scored(None)), tmp_path / "free", gradients=True)
    on_ranks(2, score_all, [(scored(None, **layout), str(tmp_path / str(n))) for n, layout in enumerate(LAYOUTS)])
    step = json.loads((tmp_path / "loaded/step.json").read_text())
    assert step["kl_reference"] > 1e-4
    expected = {n: g.double() for n, g in load_file(tmp_path / "loaded/gradients.safetensors").items()}
    for folder in [tmp_path / "free", *(tmp_path / str(number) for number in range(len(LAYOUTS)))]:
        found = json.loads((folder / "step.json").read_text())
        assert found["kl_reference"] == pytest.approx(step["kl_reference"], rel=1e-5), folder
        check_gradients(folder, expected)


def test_the_reference_loads_no_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", "llama")
    config = config_of(tmp_path, model, adapter={"rank": 2}, loss={"type": "grpo", "kl_reference": {"weight": 0.3}})
    loaded: list[Any] = []
    honest = assemble_policy.load_policy
    monkeypatch.setattr(assemble_policy, "load_policy", lambda *a, **o: loaded.append(a) or honest(*a, **o))
    train_all([merged(config, {"schedule": {"steps": 2}})])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(loaded) == 1
    assert lines[0]["kl_reference"] == 0.0 and lines[1]["kl_reference"] > 0.0  # B is zero at first


def test_what_is_sampled_has_the_trainers_own_logprobs(tmp_path: Path) -> None:
    model = word_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", model)
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(4))
    config = sampled_config(model, prompts, tmp_path / "run", adapter={"path": str(tmp_path / "adapter")})
    on_ranks(2, train_all, [config.model_dump(exclude_unset=True)])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and any(line["grad_norm"] > 0 for line in lines)
    for line in lines:
        assert abs(line["ratio_new_old"] - 1) < 1e-5 and abs(line["kl_new_old"]) < 1e-9
