"""A reward for tests that takes as long as it is told."""

from __future__ import annotations

import time
from pathlib import Path


def reward(
    prompt: object, completion: str, *, waits_for: str = "", makes: str = "", seconds: float = 0.0, **_: object
) -> float:
    if makes:
        Path(makes).touch()
    while waits_for and not Path(waits_for).exists():
        time.sleep(0.01)
    time.sleep(seconds)
    return 1.0
