"""TRL beside our step: `step_trl.py` runs it on our documents, in a process that sees the packages of `make peers`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.types import Rollout

WORKER = Path(__file__).with_name("step_trl.py")
GRACE = 120  # seconds that imports, and a row which has begun in time, may take


def as_given(documents: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Make TRL's form of documents: a prompt, a completion whose tokens are all labels, and one advantage."""
    return [
        {
            "ids": torch.tensor(document.input_ids, dtype=torch.int64),
            "old": torch.tensor(document.logprobs),
            "prompt": first_label(document),
            "advantage": float(document.advantages[-1]),
        }
        for document in documents
    ]


def first_label(document: Rollout) -> int:
    first = int(np.argmax(document.loss_mask))
    assert document.loss_mask[first:].all() and len(set(document.advantages[first:])) == 1, document.id
    return first


def run_trl(
    model: Path, documents: Sequence[Rollout], steps: int, seconds: float, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Measure TRL; no row begins after `seconds`. `only`: rows whose names have one of these words. TRUESTEP_PEERS may
    name a folder of TRL's packages."""
    folders = [os.environ[name] for name in ("TRUESTEP_PEERS", "PYTHONPATH") if os.environ.get(name)]
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.pt", Path(folder) / "made.pt"
        asked = {"model": str(model), "steps": steps, "seconds": seconds, "only": list(only or [""])}
        torch.save({**asked, "documents": as_given(documents)}, given)
        try:
            subprocess.run(
                [sys.executable, str(WORKER), str(given), str(made)],
                check=False,
                timeout=seconds + GRACE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            )
        except subprocess.TimeoutExpired:
            print("TRL took too long: rows that it finished count")
        return torch.load(made, weights_only=True) if made.exists() else []


def print_beside(rows: Sequence[dict[str, Any]], tokens_per_second: float, *, compiled: bool) -> None:
    """Print how many times as many tokens a second ours makes as TRL, at its best and, uncompiled, as it comes."""
    ran = [row for row in rows if not row["error"]]
    if not ran:
        print("TRL              no row ran")
        return
    print(f"TRL              {len(ran)} of {len(rows)} rows ran to their end")
    best = max(ran, key=lambda row: row["tokens_per_second"])
    print_ratio("TRL at its best", best, tokens_per_second)
    if not compiled:
        for row in ran:
            if row["name"].startswith("as it comes"):
                print_ratio("TRL", row, tokens_per_second)


def print_ratio(title: str, row: dict[str, Any], tokens_per_second: float) -> None:
    theirs = row["tokens_per_second"]
    print(
        f"{title:16} {theirs:8,.0f} tokens/s   ours are {tokens_per_second / theirs:.3f} times as many   "
        f"{row['gib']:.1f} GiB   {row['name']}"
    )
