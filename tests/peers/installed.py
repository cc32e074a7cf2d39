"""Other trainers' own packages, run in processes of their own: `make peers` installs them beside the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = os.environ.get("TRUESTEP_PEERS", "")
needs_peers = pytest.mark.skipif(
    not FOLDER, reason="TRUESTEP_PEERS names no folder of packages; `make peers` installs them and prints it"
)
HERE = Path(__file__).parent


def run_worker(name: str, given: Any, folder: Path, *launcher: str) -> Any:
    """Run a script of this folder on what it is given, and read what it wrote. It sees the peers' packages, which this
    process must not: transformers looks for some of them once, at its import."""
    torch.save(given, folder / "given.pt")
    environment = os.environ | {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(HERE / name), str(folder / "given.pt"), str(folder / "made.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(folder / "made.pt", weights_only=True)
