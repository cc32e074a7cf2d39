"""Keeps compiled bytecode where Python would compile torch's and transformers' sources at each start.

That takes nine seconds. It happens where an installer left no bytecode beside the sources (uv does not), and Python may
not write any there: PYTHONDONTWRITEBYTECODE is set, as in many images of containers, or the directory is read-only.
"""

import importlib.util
import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory of the user's cache that holds what truestep computes once for a machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "truestep"


def keep_bytecode() -> None:
    """Let this process and those that it starts keep bytecode in the user's cache, if torch's is not kept otherwise."""
    if sys.pycache_prefix is not None or _is_kept("torch"):
        return
    try:
        directory = cache_directory() / "bytecode"
    except RuntimeError:  # the user has no home
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(directory), False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_kept(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return True
    if os.path.exists(importlib.util.cache_from_source(spec.origin)):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)
