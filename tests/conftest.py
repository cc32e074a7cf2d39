"""Shared by all tests: tiny models are made once a session, and every test process computes on one thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

# Where there is no GPU, Triton's own functions must be interpreted ones from their first import. The variable is taken
# back at once: only the tests of the kernels ask for kernels.
if not list(Path("/dev").glob("nvidia[0-9]*")) or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    del os.environ["TRITON_INTERPRET"]

import pytest
import torch

from interpreter import environment
from tiny import make_model

# The server that ranks are forked from is a Python of its own, and imports truestep before it is told of pytest's
# import paths: ranks would run another copy that is installed, such as that of another working tree.
os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]

torch.set_num_threads(1)

_LONGEST = ("verify", "ranks", "test_demo.py", "test_kill.py")  # directories and files


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: at the end, processes have little left that only one of them can do."""
    items.sort(key=lambda item: item.path.parent.name not in _LONGEST and item.path.name not in _LONGEST)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with a tiny model of a kind, made when it is first asked for."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return model
