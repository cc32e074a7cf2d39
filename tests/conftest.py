"""Shared by all tests: tiny models are made once a session, and every test process computes on one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiny import make_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with a tiny model of a kind, made when it is first asked for."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return model
