"""Metrics of a step's episodes: turns, why they ended, tool calls, and the time of turns and tools.

They cover the documents that have turns. Without such documents there are no metrics. Every rank has all documents of
the step.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from truestep.metrics.types import Max, Mean, Metric
from truestep.rollouts.episodes import ENDS, MOST_TOOLS, OTHER_TOOL, EpisodeFacts, ToolUse, TurnFacts, facts_of
from truestep.types import Rollout


def measure_episodes(documents: Sequence[Rollout]) -> dict[str, Metric]:
    with_turns = [document for document in documents if document.turns]
    if not with_turns:
        return {}
    counts = [float(policy_turns(document)) for document in with_turns]
    facts = [facts_of(document.metadata) for document in with_turns]
    ends = Counter(one.ended_by for one in facts if one.ended_by is not None)
    metrics: dict[str, Metric] = {
        "policy_turns": Mean(sum(counts), float(len(counts))),
        "max_policy_turns": Max(max(counts)),
    }
    if ends:
        metrics |= {f"ended_by/{end}": Mean(float(ends[end]), float(ends.total())) for end in ENDS}
    return metrics | _of_turns([one for one in facts if one.turns])


def policy_turns(document: Rollout) -> int:
    """Count the turns that have labels."""
    return sum(bool(document.loss_mask[turn.start : turn.end].any()) for turn in document.turns)


def _of_turns(episodes: Sequence[EpisodeFacts]) -> dict[str, Metric]:
    """Compute metrics of tool calls and times. Each episode has facts about its turns."""
    if not episodes:
        return {}
    turns = [turn for episode in episodes for turn in episode.turns]
    calls, count = float(sum(turn.calls for turn in turns)), float(len(episodes))
    tools = _by_tool(turns, {name for episode in episodes for name in episode.tools})
    metrics: dict[str, Metric] = {
        "turn_time/drawing": _mean([turn.drawing for turn in turns]),
        "turn_time/environment": _mean([turn.environment for turn in turns]),
        "tool_calls": Mean(calls, count),
        "malformed_tool_calls": Mean(float(sum(turn.malformed for turn in turns)), calls),
    }
    metrics |= {
        f"tool_calls/{name}": Mean(float(sum(use.calls for use in uses)), count) for name, uses in tools.items()
    }
    return metrics | {f"tool_time/{name}": _seconds_of_a_call(uses) for name, uses in tools.items()}


def _by_tool(turns: Sequence[TurnFacts], offered: Collection[str]) -> dict[str, list[ToolUse]]:
    """Return the uses of each tool that is offered or called. If there are more than `MOST_TOOLS` names, those with the
    fewest calls are combined."""
    calls = Counter(dict.fromkeys(offered, 0))
    for turn in turns:
        calls.update({name: use.calls for name, use in turn.tools.items()})
    names = sorted(calls, key=lambda name: (-calls[name], name))
    place = {name: name if number < MOST_TOOLS else OTHER_TOOL for number, name in enumerate(names)}
    tools: dict[str, list[ToolUse]] = {place[name]: [] for name in names}
    for turn in turns:
        for name, use in turn.tools.items():
            tools[place[name]].append(use)
    return tools


def _mean(seconds: Sequence[float | None]) -> Mean:
    known = [value for value in seconds if value is not None]
    return Mean(sum(known), float(len(known)))


def _seconds_of_a_call(uses: Sequence[ToolUse]) -> Mean:
    measured = [use for use in uses if use.seconds is not None]
    return Mean(sum(use.seconds or 0.0 for use in measured), float(sum(use.calls for use in measured)))
