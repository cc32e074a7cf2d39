"""Numbers that are not finite: no checkpoint, export, publication or evaluation has one, and the message says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_states, read_weights
from selection import long_except
from small_runs import (
    file_config,
    file_hashes,
    merged,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    tell,
    word_model,
    write_lines,
    write_rollouts,
)
from test_trainer import DoAt
from truestep.config.schema import Config
from truestep.run.checkpoint.saves import SaveError
from truestep.run.checkpoint.staging import Staged
from truestep.run.trainer import TrainingError
from truestep.tools.export import ExportError, export
from truestep.tools.score import score
from truestep.weights.errors import ModelError
from truestep.weights.finite import UpdateCheck
from truestep.weights.whole import WholeWeights

Model = Callable[[str], Path]

# Ways in which weights are kept and updated.
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw in bfloat16": {"model": {"dtype": "bfloat16"}},
    "adamw_8bit": {"optimizer": {"type": "adamw_8bit"}},
    "muon": {"optimizer": {"type": "muon"}},
    "custom": {"optimizer": {"type": "custom", "function": "doors.own_optimizer:make", "options": {"momentum": 0.25}}},
    "states on the host": {"model": {"dtype": "bfloat16"}, "optimizer": {"offload": "states"}},
    "all on the host": {"model": {"dtype": "bfloat16"}, "optimizer": {"offload": "all"}},
    "adapter": {"adapter": {"type": "lora", "rank": 2, "alpha": 4}},
}
RUINED = r"^step 3: its update left weights that are not finite, or close to it: .*learning rate 1e\+30: lower"


@pytest.fixture
def config(tiny_model: Model, tmp_path: Path) -> Callable[..., Config]:
    def make(**sections: Any) -> Config:
        base = {"checkpoint": {"every": 1, "keep": 1}, "loss": {"type": "reinforce"}}
        given = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run").model_dump(exclude_unset=True)
        return Config.model_validate(merged(given, merged(base, sections)))

    return make


@pytest.mark.parametrize("way", long_except(WAYS, "adamw", "adamw_8bit", "all on the host"))
def test_ruined_weights_never_replace_a_good_checkpoint(
    way: str, config: Callable[..., Config], tmp_path: Path
) -> None:
    """Two good steps, and one at a learning rate that no weight survives."""
    write_rollouts(tmp_path / "r.jsonl", 20)
    quiet_trainer(config(**merged(WAYS[way], {"schedule": {"steps": 2}}))).run()
    good = latest(tmp_path / "run")
    before = file_hashes(good)
    with pytest.raises(TrainingError, match=RUINED) as caught:
        quiet_trainer(config(**merged(WAYS[way], {"optimizer": {"learning_rate": 1e30}}))).run()
    assert str(caught.value).endswith(f"the last checkpoint is {good}")
    assert latest(tmp_path / "run") == good and file_hashes(good) == before
    quiet_trainer(config(**WAYS[way])).run()
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("way", long_except(WAYS, "adamw", "adamw_8bit", "muon"))
def test_a_gradient_whose_square_float32_cannot_hold_is_refused_before_it_changes_anything(
    way: str, config: Callable[..., Config], tmp_path: Path
) -> None:
    lines = write_rollouts(tmp_path / "r.jsonl", 20)
    lines[7]["advantage"] = 1e23
    write_lines(tmp_path / "r.jsonl", lines)
    trainer = quiet_trainer(config(**merged(WAYS[way], {"optimizer": {"gradient_clip": None}})))
    kept: dict[str, torch.Tensor] = {}

    def keep() -> None:
        kept.update({name: weight.detach().clone() for name, weight in trainer.policy.weights.master.items()})

    trainer.sinks.append(DoAt(1, keep))
    refused = (
        r"^step 2: the gradient's norm is .*e\+.*gradient_clip: null.* each of these documents alone .*: "
        rf"{lines[7]['id']}\."
    )
    with pytest.raises(TrainingError, match=refused):
        trainer.run()
    assert kept and all(torch.equal(kept[name], weight) for name, weight in trainer.policy.weights.master.items())
    assert latest(tmp_path / "run").name == "step-00000001"


def test_a_large_gradient_is_clipped_and_trained_on(config: Callable[..., Config], tmp_path: Path) -> None:
    lines = write_rollouts(tmp_path / "r.jsonl", 20)
    lines[7]["advantage"] = 1e30
    write_lines(tmp_path / "r.jsonl", lines)
    assert quiet_trainer(config(optimizer={"gradient_clip": 1.0})).run() == "the data ended after step 4"
    assert read_lines(tmp_path / "run/metrics.jsonl")[1]["grad_norm"] > 1e25
    states = read_states(latest(tmp_path / "run"))
    assert all(state.isfinite().all() for state in states.values())


@pytest.mark.parametrize("value", [math.nan, 1e18])
def test_documents_are_not_blamed_for_ruined_weights(
    value: float, config: Callable[..., Config], tmp_path: Path
) -> None:
    """Ruined by what no update did, or large enough to make no finite gradient and small enough to pass."""
    write_rollouts(tmp_path / "r.jsonl", 20)
    trainer = quiet_trainer(config(checkpoint={"every": 0}))
    name = "model.layers.0.mlp.up_proj.weight"

    def ruin() -> None:
        assert not trainer.learner.update_check.ruined(), "the update itself was right"
        with torch.no_grad():
            trainer.policy.weights.master[name].fill_(value)
            trainer.policy.weights.master["model.layers.0.mlp.gate_proj.weight"].fill_(value)

    trainer.sinks.append(DoAt(1, ruin))
    blamed = (
        r"^step 2: the gradient's norm is nan.*; the documents are not the cause: .* the largest number among them is "
    )
    with pytest.raises(TrainingError, match=blamed) as caught:
        trainer.run()
    assert "alone causes it" not in str(caught.value)
    assert "mlp." in str(caught.value)


def test_nothing_is_evaluated_or_published_from_ruined_weights(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(6))
    sections = {
        "evaluation": {"prompts": str(prompts), "every": 1, "max_prompts": 2},
        "optimizer": {"learning_rate": 1e30},
    }
    words = word_model(tmp_path / "model")
    trainer = quiet_trainer(sampled_config(words, prompts, tmp_path / "run", **sections))
    told: list[int] = []
    tell(trainer, updated=lambda step, _: told.append(step))
    with pytest.raises(TrainingError, match="^step 1: its update left weights"):
        trainer.run()
    assert [line["step"] for line in read_lines(tmp_path / "run/evaluation.jsonl")] == [0]
    assert not told
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def test_a_state_that_is_not_finite_is_not_saved(config: Callable[..., Config], tmp_path: Path) -> None:
    """Weights alone do not show it: they stand still where a second moment is infinite."""
    write_rollouts(tmp_path / "r.jsonl", 20)
    trainer = quiet_trainer(config())
    name = "model.layers.1.mlp.up_proj.weight"

    def ruin() -> None:
        state = trainer.optimizer.state[trainer.policy.weights.master[name]]
        state["exp_avg_sq"][3] = math.inf

    trainer.sinks.append(DoAt(2, ruin))
    with pytest.raises(
        SaveError, match=rf"^step 2 is not saved: .*optimizer/{name}.exp_avg_sq with values .* not finite"
    ):
        trainer.run()
    assert latest(tmp_path / "run").name == "step-00000001"


def make_ruined(monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]) -> None:
    """Do as versions did that looked at no number: their checkpoints are there."""
    with monkeypatch.context() as patch:
        patch.setattr(UpdateCheck, "ruined", lambda self: [])
        patch.setattr(Staged, "not_finite", property(lambda self: [], lambda self, value: None), raising=False)
        make()


def test_a_ruined_checkpoint_of_an_older_version_is_named_for_what_it_is(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 20)
    trainer = quiet_trainer(config(checkpoint={"keep": 2}, schedule={"steps": 2}))

    def ruin() -> None:
        with torch.no_grad():
            for master in trainer.policy.weights.master.values():
                master.fill_(math.nan)

    trainer.sinks.append(DoAt(2, ruin))
    make_ruined(monkeypatch, trainer.run)
    ruined = latest(tmp_path / "run")
    assert ruined.name == "step-00000002" and read_weights(ruined)["model.norm.weight"].isnan().all()
    named = rf"{ruined} has model.embed_tokens.weight and \d+ more tensors with values that are not finite"
    with pytest.raises(TrainingError, match=rf"{named}\. Without it the run goes on from .*step-00000001\."):
        quiet_trainer(config())
    with pytest.raises(ModelError, match=named):
        score(config(model={"path": str(ruined)}), tmp_path / "scored", gradients=False)
    with pytest.raises(ExportError, match=r"^nothing is exported: .* not finite, in bfloat16"):
        export(tmp_path / "run", tmp_path / "out", "bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_ruined_state_of_an_older_version_is_named(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 20)
    trainer = quiet_trainer(config(schedule={"steps": 1}))
    name = "model.norm.weight"

    def ruin() -> None:
        trainer.optimizer.state[trainer.policy.weights.master[name]]["exp_avg_sq"].fill_(math.inf)

    trainer.sinks.append(DoAt(1, ruin))
    make_ruined(monkeypatch, trainer.run)
    found = rf"the optimizer's state has {name}.exp_avg_sq with values that are not finite\. Without it"
    with pytest.raises(TrainingError, match=found):
        quiet_trainer(config())


def test_float16_cannot_hold_every_weight(config: Callable[..., Config], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 5)
    trainer = quiet_trainer(config())

    def grow() -> None:
        with torch.no_grad():
            trainer.policy.weights.master["model.norm.weight"][0] = 1e5

    trainer.sinks.append(DoAt(1, grow))
    trainer.run()
    export(tmp_path / "run", tmp_path / "half", "bfloat16")
    with pytest.raises(ExportError, match=r"model.norm.weight would have values that are not finite, in float16"):
        export(tmp_path / "run", tmp_path / "out", "float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e20, 1e18])
def test_the_check_sees_a_single_number(dtype: torch.dtype, value: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(80, 60), torch.nn.Linear(60, 4))
    weights = WholeWeights(model, dtype)
    check = UpdateCheck(weights)
    assert not check.ruined(), "it was not asked"
    check.ask(0.5)
    assert not check.ruined()
    weights.master["1.weight"].detach()[2, 30] = value
    weights.publish()
    check.ask(0.5)
    assert check.ruined() == ([] if value == 1e18 else ["1.weight"])
