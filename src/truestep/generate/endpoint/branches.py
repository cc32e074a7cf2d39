"""The token sequences of a document that a program writes by requests.

A request goes on from a turn of the policy if it begins with all that stood there then, as the program saw it: messages
and tools, text, or tokens. What stands there stays, token for token, and the rest is appended. The first request that
goes on from a turn continues its sequence. Another one branches: it begins a sequence with the same tokens, which are
labels of the first sequence alone. A request that goes on from no turn begins a sequence too.
"""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from truestep.environments.episodes.conversation import Conversation, Drawn, Said, Sequence
from truestep.environments.episodes.environment import Answer, Message
from truestep.generate.endpoint.messages import compared

Shown = Message | str | AnySequence[int]  # a turn of the policy, as the program sees it
_Seen = Any  # text, or a tuple of messages or tokens, as the program saw them


class _Kind(NamedTuple):
    """Requests of another kind, or with other tools, are another conversation."""

    said: str
    tools: str


@dataclass(eq=False)
class _Turn:
    """The document after a turn of the policy."""

    kind: _Kind
    seen: _Seen
    conversation: Conversation
    number: int  # of its sequence
    is_continued: bool = False


@dataclass(eq=False)
class Branch:
    """A conversation whose next turn is the policy's."""

    kind: _Kind
    seen: _Seen
    conversation: Conversation
    after: _Turn | None  # whose sequence it goes on with; None: it begins one

    def again(self) -> "Branch":
        """Return the same branch, for another turn in the same place."""
        return Branch(self.kind, self.seen, self.conversation.branch(), self.after)


class Branches:
    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._turns: list[_Turn] = []
        self.sequences: list[Sequence] = []

    def open(self, said: Said, tools: AnySequence[Any] = ()) -> Branch:
        """Return the branch that a request completes. Raises ConversationError."""
        kind, seen = _seen(said, tools)
        before = [turn for turn in self._turns if turn.kind == kind and _goes_on(seen, turn.seen)]
        after = max(before, key=lambda turn: len(turn.seen), default=None)
        if after is None:
            conversation = Conversation(self._tokenizer, tools)
            conversation.begin(said)
        else:
            conversation = after.conversation.branch()
            conversation.say(said[len(after.seen) :])
            if len(conversation.sequences) > 1:  # the template rewrites what stood there
                after = None
        return Branch(kind, seen, conversation, after)

    def add(self, branch: Branch, completion: Drawn, show: Callable[[Answer], Shown]) -> Shown:
        """Append the policy's turn. Return what `show` makes of it for the program: a request that goes on from this
        turn begins with it."""
        conversation, after = branch.conversation, branch.after
        beginning = len(conversation.prompt)
        shown = show(conversation.drawn(completion))
        sequence = conversation.sequences[-1]
        if after is not None and not after.is_continued:
            after.is_continued, number = True, after.number
            self.sequences[number] = sequence
        else:
            sequence.unlabel(beginning)
            number = len(self.sequences)
            self.sequences.append(sequence)
        seen = branch.seen + _of_turn(shown)
        self._turns.append(_Turn(branch.kind, seen, conversation, number))
        return shown


def _seen(said: Said, tools: AnySequence[Any]) -> tuple[_Kind, _Seen]:
    shown = json.dumps(list(tools), sort_keys=True)
    if isinstance(said, str):
        return _Kind("text", shown), said
    parts: Any = said
    if all(isinstance(one, Mapping) for one in parts):
        return _Kind("messages", shown), tuple(map(compared, parts))
    return _Kind("tokens", shown), tuple(said)


def _of_turn(turn: Shown) -> _Seen:
    if isinstance(turn, str):
        return turn
    return (compared(turn),) if isinstance(turn, Mapping) else tuple(turn)


def _goes_on(seen: _Seen, earlier: _Seen) -> bool:
    return len(seen) > len(earlier) and seen[: len(earlier)] == earlier
