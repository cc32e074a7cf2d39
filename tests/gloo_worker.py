"""What ranks that a test starts do: commands in the files that the test gave them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from truestep.config.schema import Config
from truestep.run.train import train
from truestep.tools.score import score


def score_all(configs: list[tuple[dict[str, Any], str]]) -> None:
    """One after another, in the same processes."""
    for config, output in configs:
        score(Config.model_validate(config), Path(output), gradients=True)


def train_one(config: dict[str, Any]) -> None:
    train(Config.model_validate(config), Console(file=io.StringIO()))
