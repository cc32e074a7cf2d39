"""The metrics of a step's episodes, from the documents that have turns: docs/contract.md, section 9."""

from typing import Any

from truestep.tools.verify.oracle.losses import Metric
from truestep.tools.verify.oracle.records import Document

_REASONS = ("environment", "max_turns", "max_episode_tokens", "max_new_tokens", "episode_timeout")


def episode_metrics(documents: list[Document]) -> dict[str, Metric]:
    """Compute why episodes ended, and their tool calls, from metadata. Times are measurements, so they are not
    compared."""
    reasons = [document.metadata.get("ended_by") for document in documents]
    known = [reason for reason in reasons if isinstance(reason, str) and reason in _REASONS]
    metrics = _drawn_turns(documents)
    for reason in _REASONS:
        metrics |= _mean(f"ended_by/{reason}", [float(one == reason) for one in known])
    found = [(document, _readable_turns(document.metadata)) for document in documents]
    episodes = [turns for _, turns in found if turns]
    called, broken = [], 0
    by_name = {name: 0 for document, turns in found if turns for name in document.metadata.get("tools", [])}
    for turns in episodes:
        count = 0
        for turn in turns:
            count += turn.get("malformed", 0)
            broken += turn.get("malformed", 0)
            for name, use in turn.get("tools", {}).items():
                count += use["calls"]
                by_name[name] = by_name.get(name, 0) + use["calls"]
        called.append(float(count))
    metrics |= _mean("tool_calls", called)
    total = sum(called)
    if total:
        metrics["malformed_tool_calls"] = (broken / total, broken / total)
    names = sorted(by_name, key=lambda name: (-by_name[name], name))
    if rest := names[64:]:
        by_name["(other)"] = sum(by_name[name] for name in {*rest, "(other)"} if name in by_name)
    for name in {*names[:64], *(["(other)"] if rest else [])}:
        mean = by_name[name] / len(episodes)
        metrics[f"tool_calls/{name}"] = (mean, mean)
    return metrics


def _drawn_turns(documents: list[Document]) -> dict[str, Metric]:
    """Count the turns that have labels."""
    counts = []
    for document in documents:
        labels = set(document.positions)
        counts.append(float(sum(bool(labels & set(range(turn["start"], turn["end"]))) for turn in document.turns)))
    largest = {"max_policy_turns": (max(counts), max(counts))} if counts else {}
    return _mean("policy_turns", counts) | largest


def _mean(name: str, values: list[float]) -> dict[str, Metric]:
    mean = sum(values) / len(values) if values else 0.0
    return {name: (mean, mean)} if values else {}


def _readable_turns(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the turns in a document's metadata; an empty list if the metadata has another form."""
    given, offered = metadata.get("by_turn"), metadata.get("tools", [])
    if not isinstance(offered, list) or len(offered) > 64 or not all(_is_name(name) for name in offered):
        return []
    if not isinstance(given, list) or not 0 < len(given) <= 65536:
        return []
    for turn in given:
        tools = turn.get("tools", {}) if isinstance(turn, dict) else None
        if not isinstance(tools, dict) or len(tools) > 65 or not _is_count(turn.get("malformed", 0)):
            return []
        if not all(_is_time(turn.get(name)) for name in ("drawing", "environment")):
            return []
        for name, use in tools.items():
            if not _is_name(name) or not isinstance(use, dict):
                return []
            if not _is_count(use.get("calls")) or not _is_time(use.get("seconds")):
                return []
    return given


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_time(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= 1e9)
