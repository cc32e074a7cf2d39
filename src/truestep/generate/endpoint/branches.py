"""The token sequences of a document that a program makes by requests.

A request continues a turn of the policy if it begins with the whole conversation up to that turn, as the program saw
it: messages and tools, text, or tokens. The tokens of that conversation are kept, and the rest of the request is
appended. The first request that continues a turn extends the turn's sequence. Any further one begins a new sequence
with the same tokens, which are labels only in the first sequence. A request that continues no turn begins a new
sequence too.
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
    """The kind of a conversation. Requests of another kind, or with other tools, belong to another conversation."""

    said: str
    tools: str


@dataclass(eq=False)
class _Turn:
    """A conversation after a turn of the policy."""

    kind: _Kind
    seen: _Seen
    conversation: Conversation
    number: int  # the number of its sequence
    is_continued: bool = False


@dataclass(eq=False)
class Branch:
    """A conversation whose next turn is the policy's."""

    kind: _Kind
    seen: _Seen
    conversation: Conversation
    after: _Turn | None  # the turn whose sequence it extends; None: it begins a sequence

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
            if len(conversation.sequences) > 1:  # the template rewrites earlier text
                after = None
        return Branch(kind, seen, conversation, after)

    def add(self, branch: Branch, completion: Drawn, show: Callable[[Answer], Shown]) -> Shown:
        """Append the policy's turn. `show` converts it to the form that the program sees, which is returned. A request
        that continues this turn has to contain that form."""
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
