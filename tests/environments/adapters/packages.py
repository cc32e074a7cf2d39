"""Packages of other people, which `make adapters` installs beside ours: what the tests on them have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest


def on_packages_of(variable: str) -> list[Any]:
    """Return the marks of tests on the packages of the Python that this variable names."""
    why = f"{variable} names no Python; `make adapters` makes and prints it"
    return [pytest.mark.skipif(not os.environ.get(variable), reason=why), pytest.mark.usefixtures("packages")]


def finding(variable: str) -> Any:
    """Return a fixture by which the packages are found behind those of this environment. Processes of runs get the
    same path."""

    @pytest.fixture
    def packages() -> Iterator[None]:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        asked = subprocess.run([os.environ[variable], "-c", code], capture_output=True, text=True, check=True)
        before = list(sys.path)
        sys.path.append(asked.stdout.strip())
        yield
        sys.path[:] = before

    return packages
