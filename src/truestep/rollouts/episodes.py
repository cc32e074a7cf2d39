"""Facts about an episode besides its tokens: why it ended, and the time and the tool calls of each turn.

A document's metadata contain them, as `ended_by`, `tools` (the environment's) and `by_turn`:

    {"ended_by": "max_turns",
     "tools": ["calculate", "look"],
     "by_turn": [{"drawing": 0.31, "environment": 0.02, "malformed": 1,
                  "tools": {"calculate": {"calls": 2, "seconds": 0.01}}}]}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from truestep.rollouts.values import UnfitError

# Why an episode ended: its environment ended it, or a limit cut it.
ENDS = ("environment", "max_turns", "max_episode_tokens", "max_new_tokens", "episode_timeout")
# The name under which calls of tools that do not exist are counted, because a policy may write any name.
OTHER_TOOL = "(other)"
MOST_TOOLS = 64  # the most tool names that are counted separately
_MOST_TURNS = 65536
_LONGEST_NAME = 64  # characters
_LONGEST = 1e9  # seconds


@dataclass
class ToolUse:
    """The calls of a tool in a turn."""

    calls: int = 0
    seconds: float | None = None  # the total; None: not measured


@dataclass
class TurnFacts:
    """A turn of the policy and the answer to it."""

    drawing: float | None = None  # seconds from the request to its completion
    environment: float | None = None  # seconds until the environment's answer; None: there was none
    tools: dict[str, ToolUse] = field(default_factory=dict)  # well-formed calls, by the tool's name
    malformed: int = 0  # calls

    @property
    def calls(self) -> int:
        return sum(use.calls for use in self.tools.values()) + self.malformed

    def line(self) -> dict[str, Any]:
        """Return the turn as JSON, with microseconds."""
        seconds = {name: _rounded(getattr(self, name)) for name in ("drawing", "environment")}
        tools = {name: {"calls": use.calls, "seconds": _rounded(use.seconds)} for name, use in self.tools.items()}
        return {**seconds, "malformed": self.malformed, "tools": tools}


@dataclass
class EpisodeFacts:
    """The facts about an episode that its document's metadata contain."""

    ended_by: str | None  # one of `ENDS`; None: unknown
    turns: list[TurnFacts] = field(default_factory=list)  # the policy's turns, in order; empty: unknown
    tools: list[str] = field(default_factory=list)  # the names of the environment's tools


def facts_of(metadata: Mapping[str, Any]) -> EpisodeFacts:
    """Read a document's metadata. They may come from any program, so facts in another form count as unknown."""
    ended_by, given = metadata.get("ended_by"), metadata.get("by_turn")
    known = ended_by if isinstance(ended_by, str) and ended_by in ENDS else None
    try:
        tools = [_name(one) for one in _list(metadata.get("tools", []), MOST_TOOLS)]
        return EpisodeFacts(known, [_read_turn(one) for one in _list(given, _MOST_TURNS)], tools)
    except UnfitError:
        return EpisodeFacts(known)


def told_apart(names: Iterable[str]) -> tuple[str, ...]:
    """Return the tool names whose calls are counted separately."""
    return tuple(islice((name for name in dict.fromkeys(names) if _is_name(name)), MOST_TOOLS))


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise UnfitError("not a list")
    return value


def _read_turn(given: Any) -> TurnFacts:
    tools = given.get("tools", {}) if isinstance(given, Mapping) else None
    if not isinstance(tools, Mapping) or len(tools) > MOST_TOOLS + 1:
        raise UnfitError("not a turn")
    drawing, environment = (_seconds(given.get(name)) for name in ("drawing", "environment"))
    uses = {_name(name): _read_use(use) for name, use in tools.items()}
    return TurnFacts(drawing, environment, uses, _count(given.get("malformed", 0)))


def _read_use(given: Any) -> ToolUse:
    if not isinstance(given, Mapping):
        raise UnfitError("not the use of a tool")
    return ToolUse(_count(given.get("calls")), _seconds(given.get("seconds")))


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _is_name(value):
        raise UnfitError("not the name of a tool")
    return value


def _is_name(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= _LONGEST_NAME


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise UnfitError("not a count")
    return value


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= _LONGEST:
        raise UnfitError("not a number of seconds")
    return float(value)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
