"""Shared by all tests: tiny models are made once a session, and every test process computes on one thread."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Where there is no GPU, Triton's own functions must be interpreted ones from their first import. The variable is taken
# back at once: only the tests of the kernels ask for kernels.
if not list(Path("/dev").glob("nvidia[0-9]*")) or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ["TRITON_INTERPRET"] = "1"
    from interpreted import patch_the_language_once

    with contextlib.suppress(ImportError):
        patch_the_language_once()
    del os.environ["TRITON_INTERPRET"]

import pytest
import torch

from guard import Guard
from ranks import pool
from tiny import make_model
from truestep.tools.verify import judge

# A Python that a test starts, and the server that ranks are forked from, must find what the test itself imports: pytest
# adds `src` and `tests` to the import paths of its own process alone.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

torch.set_num_threads(1)

_LONGEST = ("verify", "ranks", "test_demo.py", "test_kill.py")  # directories and files


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("usepdb"):
        config.pluginmanager.register(Guard())


@pytest.hookimpl(trylast=True)  # behind the choice by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: at the end, processes have little left that only one of them can do.

    Each process of xdist begins with a run of the list of its own, so each run gets its share of the long ones.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    others.sort(key=lambda item: item.path.parent.name not in _LONGEST and item.path.name not in _LONGEST)
    size = -(-len(others) // count)
    items[:] = [item for n in range(count) for item in (*long[n::count], *others[n * size : (n + 1) * size])]


@pytest.fixture(scope="session", autouse=True)
def _verify_on_the_ranks_of_the_session() -> Iterator[None]:
    """`verify` starts ranks for each group of layouts; within a test they are the session's, and those of a user's
    command are new ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "run_ranks", pool.run_ranks)
        yield


@pytest.fixture(autouse=True)
def _import_path() -> Iterator[None]:
    """Put the import path back: a command that runs within a test takes the working directory off it."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with a tiny model of a kind, made when it is first asked for."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return model
