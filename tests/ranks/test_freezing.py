"""model.freeze: what is frozen has no gradient, no master and no state, and everything else is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from documents import same_bits
from ranks.cases import on_ranks, score_all, train_all
from scoring import loaded_once
from small_runs import file_config, merged, quiet_trainer, write_rollouts
from tiny import make_model
from truestep.commands.cli import main
from truestep.config.schema import Config
from truestep.head.logits import LogitsGradient
from truestep.model.loading.load import load_policy
from truestep.tools.score import score
from truestep.weights.errors import ModelError

ENDS = ["model.embed_tokens.*", "lm_head.*"]
LAYOUTS: list[dict[str, Any]] = [
    {"data_shard": 2},
    {"data_shard": 1, "data_replicate": 2},
    {"context": 2},
    {"tensor": 2},
    {"pipeline": 2},
]


def config_of(tmp_path: Path, kind: str, freeze: list[str], **sections: Any) -> dict[str, Any]:
    model = tmp_path / kind
    if not model.exists():
        make_model(model, kind)
        write_rollouts(tmp_path / "rollouts.jsonl", 11)
    config = file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **sections).model_dump(
        exclude_unset=True
    )
    return merged(config, {"model": {"freeze": freeze}})


def gradients_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "gradients.safetensors")


@pytest.mark.parametrize(("kind", "freeze"), [("qwen3", [*ENDS, "*layers.0.*"]), ("qwen3_tied", ["lm_head.weight"])])
def test_gradients_are_those_of_the_trained_weights_on_every_layout(
    kind: str, freeze: list[str], tmp_path: Path
) -> None:
    with loaded_once():
        score(Config.model_validate(config_of(tmp_path, kind, [])), tmp_path / "all", gradients=True)
    whole = gradients_of(tmp_path / "all")
    frozen = {name for name in whole if "embed" in name or "head" in name or (".layers.0." in name and len(freeze) > 1)}
    expected = {name: value for name, value in whole.items() if name not in frozen}
    assert frozen and expected
    runs = [
        (config_of(tmp_path, kind, freeze, parallel=layout), str(tmp_path / str(n))) for n, layout in enumerate(LAYOUTS)
    ]
    score(Config.model_validate(config_of(tmp_path, kind, freeze)), tmp_path / "one", gradients=True)
    on_ranks(2, score_all, runs)
    for folder in [tmp_path / "one", *(Path(folder) for _, folder in runs)]:
        found = gradients_of(folder)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), (folder.name, name)


def test_a_frozen_head_runs_no_product_for_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    honest = LogitsGradient.add_of_weight_

    def counted(self: LogitsGradient, *arguments: Any) -> None:
        calls.append("weight")
        honest(self, *arguments)

    monkeypatch.setattr(LogitsGradient, "add_of_weight_", counted)
    for freeze, run in (([], True), (ENDS, False)):
        calls.clear()
        score(Config.model_validate(config_of(tmp_path, "qwen3", freeze)), tmp_path / "out", gradients=True)
        assert bool(calls) == run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_weight_is_kept_once_in_the_compute_type(dtype: str, tmp_path: Path) -> None:
    config = merged(config_of(tmp_path, "qwen3", ENDS), {"model": {"dtype": dtype}, "schedule": {"steps": 2}})
    trainer = quiet_trainer(Config.model_validate(config))
    trainer.run()
    weights = trainer.policy.weights
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(weights.master)
    updated = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert updated == {id(master) for master in weights.master.values()} and len(trainer.optimizer.state) == len(
        updated
    )
    before = load_file(tmp_path / "qwen3/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        frozen, computed = weights.frozen[name], trainer.policy.model.get_parameter(name)
        assert frozen.dtype == getattr(torch, dtype) and computed.grad is None
        assert frozen.data_ptr() == computed.data_ptr()
        assert same_bits(frozen, before[name].to(frozen.dtype))
    assert not torch.equal(weights.master["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.long
def test_a_run_goes_on_at_another_layout(tmp_path: Path) -> None:
    """The whole lower half is frozen: with a pipeline the first rank has nothing to train."""
    freeze = ["model.embed_tokens.*", "model.layers.0.*"]

    def run(name: str, steps: int, **parallel: int) -> dict[str, Any]:
        config = config_of(tmp_path, "qwen3", freeze, parallel=parallel)
        return merged(config, {"schedule": {"steps": steps}, "checkpoint": {"directory": str(tmp_path / name)}})

    on_ranks(2, train_all, [run("moved", 1, pipeline=2), run("moved", 2, data_shard=2), run("two", 2, tensor=2)])
    train_all([run("moved", 3), run("one", 3)])
    for name in ("moved", "one"):
        result = CliRunner().invoke(
            main, ["export", str(tmp_path / name), "--output", str(tmp_path / f"{name}-out"), "--dtype", "float32"]
        )
        assert result.exit_code == 0, result.output
    moved, one = (load_file(tmp_path / f"{name}-out/model.safetensors") for name in ("moved", "one"))
    before = load_file(tmp_path / "qwen3/model.safetensors")
    for name, value in one.items():
        assert (moved[name] - value).norm() <= 2e-5 * value.norm(), name
        frozen = name.startswith(("model.embed_tokens", "model.layers.0"))
        assert same_bits(value, before[name]) == frozen, name


@pytest.mark.parametrize(
    ("freeze", "message"),
    [(["model.layers.9.*"], "'model.layers.9.*' matches no weight"), (["*"], "match every weight")],
)
def test_patterns_that_cannot_be_meant_are_refused(freeze: list[str], message: str, tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    with pytest.raises(ModelError) as caught:
        load_policy(tmp_path, device="cpu", freeze=freeze)
    assert str(caught.value).startswith("model.freeze: ") and message in str(caught.value)
