"""The reward of JSON that was read out of a text, in parts: its form, its keys, and each value.

A policy that cannot write JSON yet gets a little for its first and last character, so that it has something to learn
from.
"""

import json
from typing import Any


def reward(prompt: object, completion: str, *, wanted: dict[str, Any], **_: object) -> dict[str, float]:
    text = completion.strip()
    found = _object(text)
    edges = 0.05 * text.startswith("{") + 0.05 * text.endswith("}")
    if found is None:
        return {"form": edges, "keys": 0.0, "values": 0.0}
    right = sum(found.get(key) == value for key, value in wanted.items())
    return {"form": edges + 0.1, "keys": 0.2 * (set(found) == set(wanted)), "values": 0.6 * right / len(wanted)}


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
