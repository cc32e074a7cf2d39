"""Presets are names for options: what a user gives wins, what a run shows is plain, what contradicts is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config.loading import load, message
from truestep.config.load import dump_config
from truestep.config.losses import GrpoLoss
from truestep.config.presets import PRESETS, fill
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


def test_options_of_the_file_and_of_the_command_line_win() -> None:
    text = f"preset: dapo\n{MODEL}loss: {{epsilon_high: 0.25}}\n"
    config = load(text, "--data.advantages", "group_mean")
    assert (value_of(config, "loss.epsilon_high"), config.data.advantages) == (0.25, "group_mean")
    assert value_of(config, "loss.epsilon_low") == 0.2


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
