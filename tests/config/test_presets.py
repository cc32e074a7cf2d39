"""Presets are names for options: what a user gives wins, what a run shows is plain, what contradicts is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from config.loading import load, message
from truestep.commands.cli import main
from truestep.config.describe import options, section_models
from truestep.config.explain import explain
from truestep.config.load import dump_config
from truestep.config.losses import GrpoLoss
from truestep.config.presets import PRESETS, fill, overridden
from truestep.config.schema import Config

MODEL = "model: {path: m}\n"
SAMPLED = """\
data: {group_size: 4}
schedule: {docs_per_step: 8, steps: 3}
sampler: {prompts: p.jsonl, reward: "a:b"}
"""
GIVEN = {"dr_grpo": "loss: {max_labels: 512}\n", "on_policy_distillation": "loss: {kl_reference: {path: teacher}}\n"}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def value_of(config: Config, dotted: str) -> Any:
    value: Any = config.model_dump()
    for part in dotted.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_preset_is_its_options_and_nothing_else(name: str, sampled: bool) -> None:
    given = GIVEN.get(name, "") + (SAMPLED if sampled else "")
    config = load(f"preset: {name}\n{MODEL}{given}")
    expected = dict(PRESETS[name].options) | (dict(PRESETS[name].sampled) if sampled else {})
    assert {option: value_of(config, option) for option in expected} == expected
    flags = [part for option, value in expected.items() for part in (f"--{option}", str(value))]
    assert load(MODEL + given, *flags).model_copy(update={"preset": name}) == config
    assert overridden(config.model_dump(), name) == {}


def test_options_of_the_file_and_of_the_command_line_win() -> None:
    text = f"preset: dapo\n{MODEL}loss: {{epsilon_high: 0.25}}\n"
    config = load(text, "--data.advantages", "group_mean")
    assert (value_of(config, "loss.epsilon_high"), config.data.advantages) == (0.25, "group_mean")
    assert value_of(config, "loss.epsilon_low") == 0.2
    assert overridden(config.model_dump(), "dapo") == {
        "loss.epsilon_high": (0.25, 0.28),
        "data.advantages": ("group_mean", "group_normalized"),
    }


def test_a_section_that_is_switched_off_stays_off() -> None:
    config = load(f"preset: tis\n{MODEL}loss: {{correction: null}}\n")
    assert value_of(config, "loss.correction") is None
    assert value_of(config, "loss.old_logprobs") == "recompute"
    assert value_of(load(f"preset: tis\n{MODEL}loss:\n"), "loss.correction.high") == 2.0


def test_presets_add_up() -> None:
    config = load(f"preset: [dapo, icepop]\n{MODEL}")
    assert value_of(config, "loss.epsilon_high") == 0.28
    assert value_of(config, "loss.correction.type") == "mask"


@pytest.mark.parametrize("text", [f"preset: [dapo, tis]\n{MODEL}", f"preset: dapo\n{MODEL}loss: {{epsilon_high: 0.3}}"])
def test_the_run_s_own_file_loads_back_to_the_same_run(text: str) -> None:
    config = load(text)
    shown = dump_config(config)
    assert "epsilon_high" in shown and "preset:" in shown
    assert load(shown) == config


def test_a_configuration_that_is_no_file_is_filled_in_too() -> None:
    plain = {"preset": "dapo", "model": {"path": "m"}}
    assert value_of(Config.model_validate(plain), "loss.epsilon_high") == 0.28
    assert plain == {"preset": "dapo", "model": {"path": "m"}}  # what is given is not changed
    made = Config.model_validate(plain | {"loss": GrpoLoss(epsilon_low=0.1)})
    assert (value_of(made, "loss.epsilon_low"), value_of(made, "loss.epsilon_high")) == (0.1, 0.28)
    twice: dict[str, Any] = {"preset": "tis"}
    assert fill(twice) and not fill(twice)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("preset: dapa", (), "run.yaml:2: preset must be dapo"),
        ("preset: [dapo, dapa]", (), "run.yaml:2: preset: 'dapa' is unknown: did you mean dapo?"),
        (
            "preset: dapo\nloss: {type: gspo}",
            (),
            "run.yaml:2, run.yaml:3: preset: dapo is a recipe for loss.type: grpo, and loss.type is gspo",
        ),
        ("preset: dapo", ("--loss.type", "gspo"), "run.yaml:2, command line: preset: dapo is a recipe"),
        (
            "preset: [dapo, luspo]",
            (),
            "run.yaml:2: preset: luspo has loss.type: gspo, and dapo has loss.type: grpo: take one of the two",
        ),
        (
            "preset: [tis, icepop]",
            (),
            "preset: icepop has loss.correction.type: mask, and tis has loss.correction.type: truncate: give "
            "loss.correction.type yourself, or take one of the two",
        ),
        ("preset: dr_grpo", (), "run.yaml:2: preset: dr_grpo needs loss.max_labels: the longest completion"),
        ("preset: on_policy_distillation", (), "needs loss.kl_reference.path: the teacher's directory"),
        (
            "preset: tis\nloss: {type: cross_entropy}",
            (),
            "preset tis (run.yaml:2): loss.correction is not an option of loss.type: cross_entropy (set at run.yaml:3)",
        ),
        (
            f"preset: dapo\n{SAMPLED}",
            ("--data.group_size", "1"),
            "preset dapo (run.yaml:2), command line: data.zero_advantage: replace would replace every group",
        ),
    ],
)
def test_a_contradiction_names_the_preset_and_its_place(text: str, overrides: tuple[str, ...], expected: str) -> None:
    assert expected in message(f"{MODEL}{text}\n", *overrides)


def test_the_docs_have_every_preset_with_its_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        for option, value in {**preset.options, **preset.sampled}.items():
            assert f"`{option}: {value}`" in row, (name, option)
        assert all(f"`{option}`" in row for option in preset.needs), name


# --explain


def test_the_explanation_shows_presets_and_what_is_given_in_their_place() -> None:
    said = explain(load(f"preset: [dapo, tis]\n{MODEL}{SAMPLED}loss: {{epsilon_high: 0.25}}\n"))
    assert "but loss.epsilon_high: 0.25, in place of 0.28" in said
    assert "l = -min(ρ · A, clip(ρ, 0.8, 1.25) · A)" in said
    assert "w = min(c, 2)" in said and "c = exp(logπ_old - logπ_sampler)" in said
    assert "sampled anew" in said


# Of each option that the objective has, two values whose explanations have to differ.
CHANGES = {
    "normalize_by": ("labels", "documents"),
    "max_labels": (8, 9),
    "gradient_divisor": ("none", "deepspeed"),
    "entropy_bonus": (0.0, 0.1),
    "entropy_normalize_by": ("documents", "document_means"),
    "z_loss": (0.0, 0.1),
    "old_logprobs": ("sampler", "recompute"),
    "kl_reference": (None, {"weight": 0.1}),
    "correction": (None, {"type": "truncate", "high": 2.0, "level": "document_mean"}),
    "off_policy_mask": (None, 0.5),
    "entropy_target": (None, {"entropy": 0.5}),
    "clip_cov": (None, {"share": 0.01}),
    "kl_cov": (None, {"share": 0.01}),
    "epsilon_low": (0.1, 0.15),
    "epsilon_high": (0.1, 0.15),
    "dual_clip": (None, 3.0),
    "ratio_cap": (None, 3.0),
    "tau_positive": (1.0, 2.0),
    "tau_negative": (1.0, 2.0),
    "divergence": ("tv", "kl"),
    "threshold": (0.1, 0.2),
    "function": ("doors.toy_losses:Saturating", "doors.toy_losses:WrongSlope"),
    "options": ({"sharpness": 1.0}, {"sharpness": 2.0}),
}
LOSSES = section_models(Config.model_fields["loss"])


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, name) for kind, model in LOSSES.items() for name in model.model_fields if name not in ("type", "metrics")],
)
def test_every_option_of_every_loss_is_in_its_explanation(kind: str, option: str) -> None:
    base: dict[str, Any] = {"type": kind}
    if kind == "custom":
        base |= {"function": "doors.toy_losses:Saturating", "options": {"sharpness": 1.0}}
    if kind == "custom" and option == "clip_cov":  # it needs a loss of single labels
        base |= {"function": "truestep.losses.label_losses:Sapo", "options": {"tau_positive": 1.0, "tau_negative": 1.0}}
    if option == "max_labels":
        base["normalize_by"] = "constant"
    if option == "entropy_normalize_by":
        base["entropy_bonus"] = 0.1
    texts = {
        explain(Config.model_validate({"model": {"path": "m"}, "loss": base | {option: value}}))
        for value in CHANGES[option]
    }
    assert len(texts) == 2, option


def test_an_own_loss_is_named_with_its_options() -> None:
    loss = {"type": "custom", "function": "doors.toy_losses:Saturating", "options": {"sharpness": 2.0}}
    said = explain(Config.model_validate({"model": {"path": "m"}, "loss": loss}))
    assert "l = doors.toy_losses:Saturating  -- a loss of your own, with sharpness: 2.0" in said


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("loss.correction.type", ("truncate", "mask", "reject")),
        ("loss.correction.level", ("label", "document", "document_mean")),
        ("loss.correction.high", ("2.0", "3.0")),
        ("loss.correction.low", ("0.0", "0.5")),
        ("loss.kl_reference.weight", ("0.1", "0.2")),
        ("loss.kl_reference.estimator", ("k1", "k2", "k3", "unbiased")),
        ("loss.kl_reference.in", ("loss", "reward")),
        ("loss.kl_reference.path", ("null", "records", "teacher")),
        ("data.advantages", ("group_mean", "leave_one_out", "length_weighted", "group_normalized", "none", "a:b")),
        ("data.advantage_scale", ("none", "group", "step")),
        ("data.advantage_std_floor", ("1e-4", "1e-3")),
        ("data.overlong_penalty.to", ("20", "30")),
        ("data.zero_advantage", ("keep", "skip")),
        ("data.truncated", ("keep", "mask", "drop")),
        ("data.group_size", ("null", "4")),
        ("schedule.docs_per_step", ("8", "16")),
        ("schedule.updates_per_batch", ("1", "2")),
        ("optimizer.gradient_clip", ("null", "0.3")),
    ],
)
def test_every_option_around_the_loss_is_in_the_explanation(option: str, values: tuple[str, ...]) -> None:
    base = {
        "loss.correction": "loss: {correction: {type: truncate, high: 2.5}}\n",
        "loss.kl_reference": "loss: {kl_reference: {weight: 0.5}}\n",
        "data.overlong_penalty": "data: {overlong_penalty: {from: 10, to: 25}}\n",
        "data.advantage_std_floor": "data: {advantage_scale: group, advantages: group_mean}\n",
        "data.advantage_scale": "data: {advantages: group_mean}\n",
        "data.zero_advantage": "schedule: {docs_per_step: 8}\n",
    }
    given = next((text for start, text in base.items() if option.startswith(start)), "")
    assert len({explain(load(MODEL + given, f"--{option}", value)) for value in values}) == len(values)


def test_the_command_explains_and_does_nothing_else() -> None:
    Path("run.yaml").write_text(f"preset: dr_grpo\n{MODEL}loss: {{max_labels: 512}}\n", encoding="utf-8")
    result = CliRunner().invoke(main, ["train", "run.yaml", "--explain", "--loss.epsilon_low", "0.1"])
    assert result.exit_code == 0, result.output
    assert "/ (D · 512)" in result.output and "clip(ρ, 0.9, 1.2)" in result.output
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["run.yaml"]


def test_the_losses_that_it_knows_are_those_of_the_schema() -> None:
    assert set(LOSSES) == set(options()["loss.type"].choices)
