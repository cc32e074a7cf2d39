"""What a Python that a test starts must be given, so that it finds what the test itself imports."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with its import paths: pytest adds to them for itself alone."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more
