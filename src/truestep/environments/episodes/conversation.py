"""A conversation's tokens: the policy's tokens stay as they were sampled, and the tokens of others are appended.

The chat template renders messages as text, and only the new part of this text is tokenised. `before` is the rendering
that the policy completed, and `whole` is the rendering with the policy's turn and the answers to it. The new part is
found in one of three ways, which are tried in this order:

1. `whole` begins with `before` and the sampled text. The rest of `whole` is new.
2. The rendering that ends with the policy's turn begins with `before`, and `whole` begins with that rendering. So the
   template writes the turn in its own way (trimmed, or with other spaces in JSON) and keeps it. The sampled tokens
   stay. The text after the turn's last special token is new. If the policy sampled no such token, the token itself is
   new too.
3. `whole` begins with `before`, and parsing the turn in `whole` gives the same text, reasoning and tool calls as the
   policy's turn. The rest is as in 2. Some templates need this because they render the last turn in a special way
   (Qwen3 gives it an empty thought).

Otherwise the template rewrites the past, and a new sequence begins with `whole`. This happens if the template leaves
out the reasoning of earlier turns, or moves the tools to the last question. It also happens after a final turn of
gpt-oss: the sampled <|return|> becomes <|end|> when the turn is in the past. A <|call|> does not change, so its turn
can be continued. For a template that writes no special token after a turn, only the first way is possible.
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

# Tokens that end a turn. A model may sample another one of these than its template writes.
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>"),
        *("</s>", "<|return|>", "<|call|>"),
    }
)
_LONGEST_ROLE = 64  # characters
_LOOK_BACK = 8  # how many tokens at a prompt's end are searched for the marker that begins reasoning


class ConversationError(TruestepError):
    """Some input cannot be converted to tokens, such as messages that the chat template refuses."""


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
    """One sequence of tokens, as the policy saw it."""

    input_ids: list[int]
    loss_mask: list[bool] = field(default_factory=list)  # true: the policy sampled the token
    logprobs: list[float] = field(default_factory=list)  # 0 for tokens of others
    # The version of the weights that sampled each token; 0 for tokens of others. Empty: unknown.
    versions: list[int] = field(default_factory=list)
    turns: tuple[Turn, ...] = ()  # turns of the policy and of others; the prompt's tokens belong to no turn
    # [first tokens, layers, k] each token's experts in the pass that first computed it.
    routes: np.ndarray | None = None

    _knows_versions: bool = True

    def __post_init__(self) -> None:
        self._label(len(self.input_ids) - len(self.loss_mask), False)

    def add(self, ids: AnySequence[int], role: str) -> None:
        """Append tokens of others, such as the environment."""
        self._append(ids, role)
        self._label(len(ids), False)

    def add_drawn(self, completion: Drawn) -> None:
        """Append the tokens that the policy sampled."""
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
        """Remove the labels of the first `end` tokens, because they are labels of another sequence."""
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
        """`tools` are JSON schemas, in the form that chat templates accept."""
        self._tokenizer, self._tools = tokenizer, list(tools) if tools else None
        self._family = family_of(tokenizer, self._tools)
        self._added = added_tokens(tokenizer)
        self._sequences: list[Sequence] = []
        self._messages: list[Message] | None = None  # None: the conversation is text or tokens
        self._rendered = ""  # the rendered messages and the header of the policy's turn
        self._answer: Answer | None = None  # the policy's turn that has no answer yet
        self._thinking = False  # True if the prompt of that turn ends inside reasoning

    @property
    def sequences(self) -> list[Sequence]:
        """The document's sequences. The last one has no labels if it is new and nothing has been sampled since."""
        return self._sequences

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens to complete next."""
        return tuple(self._current.input_ids)

    @property
    def is_thinking(self) -> bool:
        """True if the next turn begins inside reasoning, because the model's template opens it in the prompt."""
        return self._ends_in_thought(self._current.input_ids)

    def branch(self) -> "Conversation":
        """Return a second conversation that continues from here. It has only the current sequence."""
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
        """Append the answer to the policy's turn. In a conversation of messages, text becomes a user message."""
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
            before = self._render(earlier, header=True)  # render again: the template may show another date now
        new = self._beyond_turn(before, past, whole, answer)
        if new is None:
            self._sequences.append(Sequence(self._tokens(whole)))
        else:
            self._current.add(self._tokens(new, after=self._current.input_ids[-1]), said[-1]["role"])
        self._messages, self._rendered = past + said, whole

    def _with_turn(self, earlier: list[Message], answer: Answer, said: list[Message]) -> tuple[list[Message], str]:
        """Return the messages up to the policy's turn, and the rendering of these and of `said`."""
        past = [*earlier, self._family.message(answer)]
        try:
            return past, self._render(past + said, header=True)
        except ConversationError:
            if not answer.tool_calls:
                raise
            past = [*earlier, self._family.as_written(answer)]
            try:  # Llama's template refuses two calls in a turn; then the turn is rendered as text
                return past, self._render(past + said, header=True)
            except ConversationError:
                pass
            raise

    def _beyond_turn(self, before: str, past: list[Message], whole: str, answer: Answer) -> str | None:
        """Return the text that follows the policy's turn; None if the template rewrites earlier text."""
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
        """Return the special token at the end of a text, apart from whitespace."""
        text = text.rstrip()
        found = (token for token, special in self._added.values() if special and token and text.endswith(token))
        return max(found, key=len, default=None)

    def _has_ended(self, end: str) -> bool:
        """Tell whether the last token ends a turn. It may be `end`, which the template writes, or another such
        token."""
        last = self._current.input_ids[-1]
        token, special = self._added.get(last, ("", False))
        return bool(last == self._tokenizer.eos_token_id or token == end or (special and token in _ENDS))

    def _same(self, answer: Answer, rendered: str) -> bool:
        other = self._family.read(rendered, self._thinking)
        return _meaning(other) == _meaning(answer)

    @property
    def _current(self) -> Sequence:
        if not self._sequences:
            raise ConversationError("the conversation has not begun: call begin first")
        return self._sequences[-1]

    def _ends_in_thought(self, ids: AnySequence[int]) -> bool:
        thought = self._family.thought
        return thought is not None and self._decoded(ids[-_LOOK_BACK:]).rstrip().endswith(thought[0])

    def _render(self, messages: list[Message], header: bool) -> str:
        """Render messages as text. `header`: add the header of the policy's turn."""
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
        """Tokenise rendered text that follows the token `after`. The result may depend on that token: it can absorb
        whitespace, and some tokenizers add a space at the beginning of a text."""
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
