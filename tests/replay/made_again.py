"""Options of a run that can be replayed, and what an exact replay is."""

from __future__ import annotations

from typing import Any

from truestep.tools.replay.replay import Replay

KEEP: dict[str, Any] = {
    "logging": {"rollouts": {"documents": "all"}},
    "checkpoint": {"every": 2, "keep": 9},
    "deterministic": True,
}


def exactly(found: Replay) -> None:
    assert found.exact and found.lawful and not found.changed, found.text
    assert "bit for bit" in found.text
