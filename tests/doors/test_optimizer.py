"""Recipe: an optimizer of your own is a function outside `src`, named in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_states, read_weights
from doors.own_optimizer import Momentum
from ranks.cases import on_ranks, train_all
from small_runs import file_config, file_hashes, quiet_trainer, read_lines, tell, write_rollouts
from truestep.config.custom import CustomError
from truestep.config.load import ConfigError, load_config
from truestep.errors import TruestepError
from truestep.run.trainer import Trainer
from truestep.step.update.optimizer import OptimizerError
from truestep.tools.score import score
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

Model = Callable[[str], Path]
OWN: dict[str, Any] = {
    "type": "custom",
    "function": "doors.own_optimizer:make",
    "options": {"momentum": 0.75, "decay": 0.5},
    "learning_rate": 1e-2,
    "gradient_clip": 0.5,
}


def config(model: Path, run: Path, optimizer: dict[str, Any] = OWN, **sections: Any) -> Any:
    rollouts = run.parent / "rollouts.jsonl"
    write_rollouts(rollouts, 20)
    return file_config(model, rollouts, run, **{"optimizer": optimizer, **sections})


def train(given: Any) -> Trainer:
    trainer = quiet_trainer(given)
    trainer.run()
    return trainer


def masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.policy.weights.master.items()}


def test_it_trains_with_its_options_and_the_runs_learning_rate(tiny_model: Model, tmp_path: Path) -> None:
    """By hand: the first update of a weight is its rate times its clipped gradient."""
    given = config(tiny_model("llama"), tmp_path / "run", schedule={"steps": 1}, checkpoint={"every": 0})
    trainer = quiet_trainer(given)
    assert isinstance(trainer.optimizer, Momentum)
    before = masters(trainer)
    clipped: dict[str, torch.Tensor] = {}

    def keep(plan: object, accumulated: object, norm: float) -> None:
        factor = min(1.0, 0.5 / norm)
        clipped.update({name: value * factor for name, value in trainer.policy.weights.gradients.items()})

    tell(trainer, gradient=keep)
    trainer.run()
    rate = 1e-2 * 0.75 * 0.9
    for name, weight in masters(trainer).items():
        decay = 0.5 if weight.ndim >= 2 else 0.0
        wanted = before[name] * (1 - rate * decay) - rate * clipped[name]
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-7)


def test_a_run_that_goes_on_is_bitwise_the_uninterrupted_one(tiny_model: Model, tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Path:
        sections: dict[str, Any] = {"deterministic": True, "checkpoint": {"every": 2}, "schedule": {"steps": steps}}
        train(config(tiny_model("qwen3_tied"), tmp_path / name, **sections))
        return latest(tmp_path / name)

    try:
        run("resumed", 2)
        resumed, uninterrupted = run("resumed", 4), run("uninterrupted", 4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert file_hashes(resumed) == file_hashes(uninterrupted)
    kept = read_states(resumed)
    assert {name.rpartition(".")[2] for name in kept} == {"velocity", "updates:number", "trust"}
    assert kept["model.norm.weight.updates:number"] == 4


def test_over_two_ranks_it_makes_the_same_updates_and_its_state_moves_to_one(tiny_model: Model, tmp_path: Path) -> None:
    """Two steps over two ranks and two more in one process, against all four in one. What other layouts make of states:
    tests/ranks/test_optimizers.py."""
    model = tiny_model("qwen3_tied")
    for name, size, steps in (("moved", 2, 2), ("moved", 1, 4), ("still", 1, 4)):
        sections = {"schedule": {"steps": steps}, "parallel": {"tensor": 2} if size > 1 else {}}
        given = config(model, tmp_path / name, checkpoint={"every": 2}, **sections)
        on_ranks(size, train_all, [given.model_dump()])
    assert read_lines(tmp_path / "moved" / "ledger.jsonl") == read_lines(tmp_path / "still" / "ledger.jsonl")
    for read in (read_weights, read_states):
        moved, still = (read(latest(tmp_path / name)) for name in ("moved", "still"))
        assert moved.keys() == still.keys()
        for name, value in still.items():
            assert (moved[name] - value).double().norm() <= 1e-4 * value.double().norm(), name


def test_score_takes_the_same_configuration(tiny_model: Model, tmp_path: Path) -> None:
    given = config(tiny_model("llama"), tmp_path / "run")
    score(given, tmp_path / "scores", gradients=True)
    assert len(read_lines(tmp_path / "scores" / "scores.jsonl")) == 20


def test_verify_runs_it_in_float64_on_whole_tensors(tiny_model: Model, tmp_path: Path) -> None:
    given = config(tiny_model("llama"), tmp_path / "run")
    names = {"FSDP 2", "tensor 2"}
    verdicts = verify(given, tmp_path / "out", only=lambda layout: layout.name in names)
    assert {verdict.layout.name for verdict in verdicts} == names
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]
    assert all("update" in verdict.worst for verdict in verdicts)


def test_verify_finds_one_that_depends_on_the_layout(tiny_model: Model, tmp_path: Path) -> None:
    """It divides by the norm of the weight's gradient, of which a shard has a part."""
    given = config(tiny_model("llama"), tmp_path / "run", OWN | {"function": "doors.own_optimizer:make_normed"})
    given = given.model_copy(update={"optimizer": given.optimizer.model_copy(update={"options": {}})})
    names = {"one process", "FSDP 2"}
    verdicts = verify(given, tmp_path / "out", only=lambda layout: layout.name in names)
    assert {verdict.layout.name: verdict.passed for verdict in verdicts} == {"one process": True, "FSDP 2": False}
    assert [found.kind for verdict in verdicts for found in verdict.wrong] == ["update"]


def test_options_are_given_in_the_file_and_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = (
        "model: {path: m}\noptimizer: {type: custom, function: doors.own_optimizer:make, options: {momentum: 0.25}}\n"
    )
    file.write_text(text, encoding="utf-8")
    given = load_config(file, ["--optimizer.options.decay", "1e-2", "--optimizer.learning_rate", "1e-3"])
    assert given.optimizer.model_dump() == {
        "type": "custom",
        "function": "doors.own_optimizer:make",
        "options": {"momentum": 0.25, "decay": 0.01},
        "learning_rate": 1e-3,
        "schedule": "constant",
        "warmup_steps": 0,
        "minimum_learning_rate": 0.0,
        "gradient_clip": 1.0,
    }
    with pytest.raises(ConfigError, match=r"optimizer.beta1 is not an option of optimizer.type: custom"):
        load_config(file, ["--optimizer.beta1", "0.5"])


def test_one_without_a_state_needs_none(tiny_model: Model, tmp_path: Path) -> None:
    plain = {"type": "custom", "function": "doors.own_optimizer:make_sgd", "learning_rate": 1e-2}
    for steps in (2, 4):
        train(config(tiny_model("llama"), tmp_path / "run", plain, schedule={"steps": steps}))
    assert read_states(latest(tmp_path / "run")) == {}


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        ("nowhere:make", {}, CustomError, "optimizer.function 'nowhere:make': No module named 'nowhere'"),
        ("doors.own_optimizer:make", {"momentun": 1}, CustomError, "optimizer.options.momentun.*did you mean momentum"),
        ("doors.own_optimizer:make", {"momentum": "much"}, CustomError, "optimizer.options.momentum: .*not 'much'"),
        ("doors.own_optimizer:make_nothing", {}, OptimizerError, "it made None, not a torch.optim.Optimizer"),
        ("doors.own_optimizer:make_forgetful", {}, OptimizerError, "its optimizer does not update model.*norm.weight"),
        ("doors.own_optimizer:make_rows", {}, OptimizerError, r"the state rows of .* is a tensor of \[\d+, 1\]"),
        ("doors.own_optimizer:make_counting", {}, OptimizerError, "changed the option updates of a parameter group"),
    ],
)
def test_what_cannot_train_is_refused_by_name(
    function: str, options: dict[str, Any], error: type[TruestepError], message: str, tiny_model: Model, tmp_path: Path
) -> None:
    wrong = {"type": "custom", "function": function, "options": options}
    with pytest.raises(error, match=message):
        train(config(tiny_model("llama"), tmp_path / "run", wrong))
