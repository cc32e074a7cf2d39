"""Loads configurations of tests from a file in the directory that the test runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from truestep.config.load import load_config
from truestep.config.schema import Config
from truestep.config.yaml_tree import ConfigError


def load(text: str, *overrides: str) -> Config:
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load_config(Path("run.yaml"), overrides)


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)
