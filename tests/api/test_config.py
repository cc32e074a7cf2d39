"""`Config(model={...})` is checked as a file is, with the same messages; a user's own code may be given as objects."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import yaml

import truestep
from api import own_code
from doors.toy_losses import Saturating
from doors.toy_metrics import surprise
from truestep import Config, ConfigError, load_config

MODEL = {"model": {"path": "m"}}
SAMPLED: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"group_size": 2},
    "schedule": {"docs_per_step": 4, "steps": 1},
    "sampler": {"prompts": "p", "reward": "a:b"},
}

WRONG: list[dict[str, Any]] = [
    {"loss": {"type": "gspo"}},
    {"model": {"path": "m", "dtyp": "float32"}},
    {"model": "m"},
    {**MODEL, "los": {"type": "gspo"}},
    {**MODEL, "loss": {"type": "gsop"}},
    {**MODEL, "loss": {"type": "gspo", "ratio_cap": 2.0}},
    {**MODEL, "loss": {"beta": 0.04}},
    {**MODEL, "num_generations": 8},
    {**MODEL, "optimizer": {"learning_rate": "fast"}},
    {**MODEL, "optimizer": {"learning_rate": -1.0, "beta1": 2.0}},
    {**MODEL, "schedule": {"steps": 1.5}},
    {**MODEL, "seed": True},
    {**MODEL, "preset": "dapoo"},
    {**MODEL, "preset": ["tis", "icepop"]},
    {**MODEL, "data": {"path": "a", "source": {"type": "files", "directory": "d"}}},
    {**SAMPLED, "schedule": {"docs_per_step": 5, "steps": 1}},
    {**SAMPLED, "data": {"group_size": 2, "path": "a.jsonl"}},
    {**SAMPLED, "sampler": {"type": "servers", "prompts": "p", "reward": "a:b"}},
]


@pytest.mark.parametrize("options", WRONG)
def test_what_is_wrong_is_said_as_of_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(options), encoding="utf-8")
    with pytest.raises(ConfigError) as of_file:
        load_config(file)
    with pytest.raises(ConfigError) as of_python:
        Config(**options)
    said = [line.partition(": ")[2] for line in str(of_python.value).splitlines()]
    expected = [line.partition(": ")[2] for line in str(of_file.value).splitlines()]
    # Where an option stands is known of a file alone.
    assert [line.split(" (set at")[0] for line in said] == [line.split(" (set at")[0] for line in expected]
    assert str(of_python.value).startswith("Config: ")


def test_a_configuration_is_that_of_the_file(tmp_path: Path) -> None:
    options = {**SAMPLED, "preset": "dapo", "optimizer": {"learning_rate": 1e-5}, "checkpoint": {"directory": "run"}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(options), encoding="utf-8")
    assert Config(**options) == load_config(file) == Config.model_validate(options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (MODEL, r"not of type dict: write Config\(\*\*options\)$"),
        (None, "^a configuration is a Config or the path of a YAML file, and not of type NoneType$"),
    ],
)
def test_what_is_no_configuration_is_refused(given: Any, message: str) -> None:
    for call in (truestep.train, truestep.Session):
        with pytest.raises(ConfigError, match=message):
            call(given)


def test_python_has_more_than_yaml() -> None:
    options = {**SAMPLED, "sampler": {"prompts": Path("p"), "reward": own_code.reward, "stop": ("a", "b")}}
    config = Config(**options)
    assert config.sampler is not None and config.sampler.type == "in_process"
    assert (config.sampler.prompts, config.sampler.stop) == ("p", ["a", "b"])
    assert config.sampler.reward == "api.own_code:reward"


def test_options_are_changed_by_their_whole_names_and_checked() -> None:
    config = Config(**SAMPLED)
    changed = config.changed({"optimizer.learning_rate": 1e-5, "evaluation.prompts": "q", "seed": 3})
    assert (changed.optimizer.learning_rate, changed.seed) == (1e-5, 3)
    assert changed.evaluation is not None and changed.evaluation.prompts == "q" and config.evaluation is None
    assert changed.sampler == config.sampler
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rat is unknown: did you mean"):
        config.changed({"optimizer.learning_rat": 1e-5})
    with pytest.raises(ConfigError, match=r"schedule\.docs_per_step: 5 is not a multiple"):
        config.changed({"schedule.docs_per_step": 5})


def test_each_option_that_takes_an_import_path_takes_the_object() -> None:
    config = Config(
        model={"path": "m"},
        loss={"type": "custom", "function": Saturating, "options": {"sharpness": 2.0}},
        data={"advantages": own_code.advantages, "group_size": 2},
        schedule={"docs_per_step": 4, "steps": 1},
        sampler={"prompts": "p", "reward": own_code.reward},
        optimizer={"type": "custom", "function": own_code.sgd},
        logging={"custom_metrics": [surprise], "custom_sinks": [own_code.Sink]},
    )
    assert config.loss.model_dump()["function"] == "doors.toy_losses:Saturating"
    assert config.data.advantages == "api.own_code:advantages"
    assert config.optimizer.model_dump()["function"] == "api.own_code:sgd"
    assert config.logging.custom_metrics == ["doors.toy_metrics:surprise"]
    assert config.logging.custom_sinks == ["api.own_code:Sink"]
    source = {"type": "custom", "function": own_code.records}
    given = Config(model={"path": "m"}, data={"source": source, "advantages": "none"})
    assert given.data.source is not None and given.data.source.model_dump()["function"] == "api.own_code:records"


def test_an_object_elsewhere_is_a_wrong_value() -> None:
    with pytest.raises(ConfigError, match=r"Config: model\.path must be text"):
        Config(model={"path": own_code.reward})


def test_the_package_is_imported_quickly_and_its_names_stay() -> None:
    code = (
        "import sys, truestep; assert 'torch' not in sys.modules and 'yaml' not in sys.modules\n"
        "from truestep import Config, load_config, ConfigError; assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("plan",):  # a module has this name too
        module = import_module(f"truestep.{name}")
        assert isfunction(getattr(truestep, name)) and module is sys.modules[f"truestep.{name}"]


def test_the_stub_names_what_the_package_has() -> None:
    stub = Path(truestep.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    named = {line.split(" as ")[1] for line in stub.splitlines() if " as " in line}
    assert {*named, "__version__"} == set(truestep.__all__)
    for name in truestep.__all__:
        assert getattr(truestep, name).__doc__ if name != "__version__" else truestep.__version__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = truestep.trian  # type: ignore[attr-defined]


def test_the_constructor_names_every_section() -> None:
    source = Path(truestep.__file__).with_name("config") / "schema.py"
    text = source.read_text(encoding="utf-8").partition("def __init__(")[2].partition(") -> None")[0]
    named = {line.strip().partition(":")[0] for line in text.splitlines() if ":" in line}
    assert named == set(Config.model_fields)
