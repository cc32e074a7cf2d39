"""A conversation's tokens: what the policy drew stays as it was drawn, and others' words are appended.

With messages, the words of others are the difference that the chat template renders, as text. In the order of attempts,
with `before` the rendering that the policy completed, and `whole` the rendering with its turn and the answers to it:

1. `whole` begins with `before` and with the text that was drawn: what is beyond is new.
2. The rendering that ends with the policy's turn begins with `before`, and `whole` begins with that rendering: the
   template writes the turn in its own way (trimmed, or with other spaces in JSON) and keeps it. The drawn tokens stay.
   What is beyond the turn's last special token is new; the policy drew such a token too, or else it is new as well.
3. `whole` begins with `before`, and the turn in it reads as the policy's turn does: the same as 2, for templates that
   render the last turn in a special way (Qwen3 gives it an empty thought).

Otherwise the template rewrites the past, and a new sequence begins with `whole`. So it is where reasoning of earlier
turns is left out, where tools move to the last question, and for a last turn of gpt-oss, of which the drawn <|return|>
is an <|end|> in the past. A <|call|> stays what it is, and its turn is continued. Without a special token behind its
turns, a template is followed by the first way alone.
"""

from collections.abc import Mapping
from collections.abc import Sequence as AnySequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from truestep.environments.episodes.environment import Answer, Message
from truestep.environments.episodes.tool_calls import added_tokens, family_of
from truestep.errors import TruestepError
from truestep.rollouts.rendering import within_bounds
from truestep.text import printable
from truestep.types import Turn

Said = str | AnySequence[Message] | AnySequence[int]

# Tokens that end a turn, of which a model may draw another one than its template writes.
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>"),
        *("</s>", "<|return|>", "<|call|>"),
    }
)
_LONGEST_ROLE = 64  # characters
_LOOK_BACK = 8  # tokens of a prompt in which a mark before reasoning is looked for


class ConversationError(TruestepError):
    """Something that was said and cannot become tokens, such as messages that the chat template refuses."""


class Drawn(Protocol):
    """A completion: `truestep.generate.generator.Completion`."""

    @property
    def token_ids(self) -> AnySequence[int]: ...
    @property
    def logprobs(self) -> AnySequence[float]: ...
    @property
    def versions(self) -> AnySequence[int]: ...
    @property
    def routes(self) -> np.ndarray | None: ...


@dataclass
class Sequence:
    """Tokens that the policy saw in one go."""

    input_ids: list[int]
    loss_mask: list[bool] = field(default_factory=list)  # true: the policy drew it
    logprobs: list[float] = field(default_factory=list)  # 0 where it did not
    versions: list[int] = field(default_factory=list)  # of the weights that drew it, 0 elsewhere. Empty: unknown
    turns: tuple[Turn, ...] = ()  # of the policy, and what answered each; the first tokens belong to none
    routes: np.ndarray | None = None  # [first tokens, layers, k] the experts with which each was fed first

    _knows_versions: bool = True

    def __post_init__(self) -> None:
        self._label(len(self.input_ids) - len(self.loss_mask), False)

    def add(self, ids: AnySequence[int], role: str) -> None:
        """Append what others said."""
        self._append(ids, role)
        self._label(len(ids), False)

    def add_drawn(self, completion: Drawn) -> None:
        """Append what the policy drew."""
        count = len(completion.token_ids)
        if len(completion.logprobs) != count or len(completion.versions) not in (0, count):
            raise ValueError(f"a completion of {count} tokens has other numbers of log-probs or versions")
        self._append(completion.token_ids, "assistant")
        if count and not completion.versions:
            self.versions, self._knows_versions = [], False
        self._label(count, True)
        if completion.routes is not None:
            known = 0 if self.routes is None else len(self.routes)
            parts = [] if self.routes is None else [self.routes]
            self.routes = np.concatenate([*parts, completion.routes[known:]])
        if count:
            self.logprobs[-count:] = completion.logprobs
        if count and self._knows_versions:
            self.versions[-count:] = completion.versions

    def copy(self) -> "Sequence":
        return replace(
            self,
            input_ids=list(self.input_ids),
            loss_mask=list(self.loss_mask),
            logprobs=list(self.logprobs),
            versions=list(self.versions),
        )

    def unlabel(self, end: int) -> None:
        """Make the first tokens, up to `end`, no labels: they are labels of another sequence."""
        self.loss_mask[:end], self.logprobs[:end] = [False] * end, [0.0] * end

    def _append(self, ids: AnySequence[int], role: str) -> None:
        start = len(self.input_ids)
        self.input_ids += ids
        if ids:
            self.turns += (Turn(start, len(self.input_ids), role),)

    def _label(self, count: int, drawn: bool) -> None:
        self.loss_mask += [drawn] * count
        self.logprobs += [0.0] * count
        if self._knows_versions:
            self.versions += [0] * count


class Conversation:
    """Example:

    conversation = Conversation(tokenizer, tools)
    conversation.begin([{"role": "user", "content": "What is 2 + 2?"}])
    answer = conversation.drawn(await generate(Request(conversation.prompt, options)))
    conversation.say([{"role": "tool", "content": "4"}])
    """

    def __init__(self, tokenizer: Any, tools: AnySequence[Any] | None = None):
        """`tools` are schemas, as chat templates take them."""
        self._tokenizer, self._tools = tokenizer, list(tools) if tools else None
        self._family = family_of(tokenizer, self._tools)
        self._added = added_tokens(tokenizer)
        self._sequences: list[Sequence] = []
        self._messages: list[Message] | None = None  # None: the conversation is text or tokens
        self._rendered = ""  # the messages and the header of the policy's turn
        self._answer: Answer | None = None  # the turn that nothing has answered
        self._thinking = False  # the prompt ends within reasoning

    @property
    def sequences(self) -> list[Sequence]:
        """The document's sequences. The last one has no labels if it begins anew and nothing was drawn since."""
        return self._sequences

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens to complete next."""
        return tuple(self._current.input_ids)

    @property
    def is_thinking(self) -> bool:
        """True where the next turn begins within reasoning, as the template of some models has it."""
        return self._ends_in_thought(self._current.input_ids)

    def branch(self) -> "Conversation":
        """Return another conversation that goes on from here. It has the current sequence alone."""
        other = copy(self)
        other._sequences = [self._current.copy()]
        return other

    def begin(self, said: Said) -> None:
        """Start with text (tokenised as it is), messages or tokens."""
        if self._sequences:
            raise ConversationError("the conversation has begun already")
        if isinstance(said, str):
            ids = self._encode(said, special=True)
        elif _are_tokens(said):
            ids = self._checked_tokens(said)
        else:
            self._messages = _checked_messages(said)
            self._rendered = self._render(self._messages, header=True)
            ids = self._tokens(self._rendered)
        if not ids:
            raise ConversationError("the conversation begins with no tokens; nothing could predict its first one")
        self._sequences.append(Sequence(ids))

    def drawn(self, completion: Drawn) -> Answer:
        """Append a turn of the policy."""
        if self._answer is not None:
            raise ConversationError("the policy has had its turn and was not answered")
        sequence = self._current
        self._thinking = self.is_thinking
        sequence.add_drawn(completion)
        self._answer = self._family.read(self._decoded(completion.token_ids), self._thinking)
        return self._answer

    def say(self, said: Said) -> None:
        """Append what answers the policy's turn. Within messages, text is a message of the user."""
        answer = self._answer
        if answer is None:
            raise ConversationError("an answer came before the policy's turn")
        if not isinstance(said, str) and _are_tokens(said):
            self._current.add(self._checked_tokens(said), "environment")
            self._messages = None  # a chat template cannot render what was said as tokens
        elif self._messages is not None:
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else _checked_messages(said)
            self._say_messages(self._messages, answer, messages)
        elif isinstance(said, str):
            self._current.add(self._tokens(said, after=self._current.input_ids[-1]), "environment")
        else:
            raise ConversationError(
                "messages came in a conversation of text or tokens, which a chat template cannot continue: "
                "start it with messages"
            )
        self._answer = None

    def _say_messages(self, earlier: list[Message], answer: Answer, said: list[Message]) -> None:
        past, whole = self._with_turn(earlier, answer, said)
        before = self._rendered
        if not whole.startswith(before):
            before = self._render(earlier, header=True)  # with another date, if the template shows it
        new = self._beyond_turn(before, past, whole, answer)
        if new is None:
            self._sequences.append(Sequence(self._tokens(whole)))
        else:
            self._current.add(self._tokens(new, after=self._current.input_ids[-1]), said[-1]["role"])
        self._messages, self._rendered = past + said, whole

    def _with_turn(self, earlier: list[Message], answer: Answer, said: list[Message]) -> tuple[list[Message], str]:
        """Return the messages with the policy's turn, and the rendering of all."""
        past = [*earlier, self._family.message(answer)]
        try:
            return past, self._render(past + said, header=True)
        except ConversationError:
            if not answer.tool_calls:
                raise
            past = [*earlier, self._family.as_written(answer)]
            try:  # Llama's template refuses two calls in a turn: the turn is text there
                return past, self._render(past + said, header=True)
            except ConversationError:
                pass
            raise

    def _beyond_turn(self, before: str, past: list[Message], whole: str, answer: Answer) -> str | None:
        """Return the text that follows the policy's turn. None: the template rewrites what was there."""
        start = len(before)
        if not whole.startswith(before):
            return None
        if whole.startswith(answer.raw, start):
            return whole[start + len(answer.raw) :]
        try:
            through = self._render(past, header=False)
        except ConversationError:
            return None
        end = self._last_special(through)
        if not through.startswith(before) or end is None or len(through.rstrip()) < start + len(end):
            return None
        if whole.startswith(through):
            behind = len(through.rstrip())
            kept = (answer.reasoning or "").strip() in through[start:]
        else:
            behind = whole.find(end, start) + len(end)
            kept = behind >= start + len(end) and self._same(answer, whole[start:behind])
        if not kept:
            return None
        return whole[behind:] if self._has_ended(end) else whole[behind - len(end) :]

    def _last_special(self, text: str) -> str | None:
        """Return the special token that ends a text, apart from whitespace."""
        text = text.rstrip()
        found = (token for token, special in self._added.values() if special and token and text.endswith(token))
        return max(found, key=len, default=None)

    def _has_ended(self, end: str) -> bool:
        """Say whether the last token is one that ends a turn: `end`, as the template writes it, or another one."""
        last = self._current.input_ids[-1]
        token, special = self._added.get(last, ("", False))
        return bool(last == self._tokenizer.eos_token_id or token == end or (special and token in _ENDS))

    def _same(self, answer: Answer, rendered: str) -> bool:
        other = self._family.read(rendered, self._thinking)
        return _meaning(other) == _meaning(answer)

    @property
    def _current(self) -> Sequence:
        if not self._sequences:
            raise ConversationError("the conversation has not begun")
        return self._sequences[-1]

    def _ends_in_thought(self, ids: AnySequence[int]) -> bool:
        thought = self._family.thought
        return thought is not None and self._decoded(ids[-_LOOK_BACK:]).rstrip().endswith(thought[0])

    def _render(self, messages: list[Message], header: bool) -> str:
        """Return messages as text, with the header of the policy's turn if asked for."""
        if not self._tokenizer.chat_template:
            raise ConversationError(
                "the conversation has messages and the tokenizer has no chat template: start with text, or take a "
                "model that was trained on chats"
            )
        try:
            return str(
                within_bounds(
                    lambda: self._tokenizer.apply_chat_template(
                        messages, tools=self._tools, add_generation_prompt=header, tokenize=False
                    )
                )
            )
        except Exception as error:  # a template is a program from the model's directory: it can raise anything
            raise ConversationError(f"the chat template refuses the messages: {printable(error)}") from None

    def _tokens(self, text: str, after: int | None = None) -> list[int]:
        """Return the tokens of rendered text. Those that follow the token `after` may depend on it: it can take
        whitespace into itself, and at the beginning of a text some tokenizers add a space."""
        if not text:
            return []
        anchor = self._added.get(-1 if after is None else after, ("", False))[0]
        if anchor:
            ids = self._encode(anchor + text)
            if ids[0] == after:
                return ids[1:]
        return self._encode(text)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConversationError("the text holds half of a surrogate pair, which is not text") from None
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _decoded(self, ids: AnySequence[int]) -> str:
        decoded = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def _checked_tokens(self, ids: Any) -> list[int]:
        size = len(self._tokenizer)
        if wrong := [number for number in ids if not 0 <= number < size]:
            raise ConversationError(f"the token id {wrong[0]} is not one of the tokenizer's {size}")
        return list(ids)


def _are_tokens(said: Any) -> bool:
    return isinstance(said, list | tuple) and len(said) > 0 and all(type(one) is int for one in said)


def _checked_messages(said: Any) -> list[Message]:
    if not isinstance(said, list | tuple) or not said:
        raise ConversationError("expected text, tokens or a list of messages, and it is " + _described(said))
    for index, message in enumerate(said):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role.isprintable() or not 0 < len(role) <= _LONGEST_ROLE:
            raise ConversationError(
                f"message {index} is {_described(message)}: expected an object with a role, such as "
                '{"role": "user", "content": "…"}'
            )
    return [dict(message) for message in said]


def _described(value: Any) -> str:
    return "empty" if isinstance(value, list | tuple | str) and not value else printable(repr(value), 100)


def _meaning(answer: Answer) -> tuple[Any, ...]:
    calls = [(call.name, dict(call.arguments), getattr(call, "written", "").strip()) for call in answer.tool_calls]
    reasoning = None if answer.reasoning is None else answer.reasoning.strip()
    return answer.text.strip(), calls, reasoning
