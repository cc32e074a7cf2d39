"""The conversion of chat messages to tokens and labels by the model's chat template.

Labels are the tokens of the assistant's turns: the content and the token that ends the turn. If the template marks them
({% generation %}), those marks are used. Otherwise the conversation is rendered up to each turn and through the turn,
and each rendering must be a prefix of the next; other records are refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from truestep.rollouts.rendering import within_bounds
from truestep.rollouts.values import BadRecord, describe, plain
from truestep.text import printable

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a model's tokenizer. The tokenizer is loaded when the first record needs it."""

    def __init__(self, load: Callable[[], Any], without: str | None = None):
        """`without` is the error message if there is no tokenizer or no template."""
        self._load, self._tokenizer = load, None
        self._without = without or "messages need a tokenizer with a chat template, and the model's directory has none"

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return `input_ids` and `loss_mask` of a record's `messages`. Raises only `BadRecord`."""
        messages = _messages(plain(record.get("messages"), "messages"))
        tools = plain(record.get("tools"), "tools")
        tokenizer = self._of_model()
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise BadRecord("messages has no turn of the assistant: there is nothing to learn")
        template = tokenizer.get_chat_template(None, tools) if tokenizer.chat_template else ""
        render = _Render(tokenizer, tools)
        if _MARKS.search(template):
            ids, mask = render.marked(messages)
        else:
            ids, mask = _found(render, messages, turns)
        if not any(mask):
            raise BadRecord("messages: the chat template gives no token of the assistant")
        return {"input_ids": ids, "loss_mask": mask}

    def _of_model(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise BadRecord(self._without)
        return self._tokenizer


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRecord(f"messages is {describe(messages) if messages else 'empty'}: expected a list of objects")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRecord(f"messages[{index}] is {describe(message)}: expected an object with a role and a content")
        # Parquet rows repeat every key of every message, with null values.
        given = {key: value for key, value in message.items() if value is not None}
        content = given.get("content")
        if not isinstance(content, str | list) and not given.get("tool_calls"):
            raise BadRecord(f"messages[{index}].content is {describe(content)}: expected text")
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRecord(f"messages[{index}] is not text: {printable(error)}") from None
        checked.append(given)
    return checked


class _Render:
    def __init__(self, tokenizer: Any, tools: Any):
        self.tokenizer, self._tools = tokenizer, tools
        self.special = set(tokenizer.all_special_ids)
        self.special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def _apply(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        try:
            return within_bounds(
                lambda: self.tokenizer.apply_chat_template(
                    list(messages), tools=self._tools, tokenize=True, return_dict=True, **options
                )
            )
        except Exception as error:  # a template is a program from the model's directory: it can raise anything
            raise BadRecord(f"messages: the chat template refuses them: {printable(error)}") from None

    def __call__(self, messages: Sequence[Mapping[str, Any]], answer: bool = False) -> list[int]:
        """Return the tokens of rendered messages; with `answer`, followed by the header of an assistant's turn."""
        return list(self._apply(messages, add_generation_prompt=answer)["input_ids"])

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        """Return the tokens and the labels that the template marks.

        After a marked token, two more kinds of tokens become labels: an end-of-sequence token, and the other tokens of
        the turn's last character, because transformers marks only the first of these.
        """
        chat = self._apply(messages, return_assistant_tokens_mask=True)
        ids, mask = list(chat["input_ids"]), list(chat["assistant_masks"])
        for index in range(1, len(ids)):
            if mask[index - 1] and not mask[index]:
                before, here = chat.token_to_chars(index - 1), chat.token_to_chars(index)
                shared = before is not None and here is not None and here.start < before.end
                mask[index] = int(shared or ids[index] == self.tokenizer.eos_token_id)
        return ids, mask

    def length_to_end(self, turn: Sequence[int]) -> int:
        """Return the length of a turn through its last special token.

        Whitespace after that token comes from the template, not the model. Without such a token, or with other text
        after it, the whole turn counts.
        """
        last = max((index for index, token in enumerate(turn) if token in self.special), default=None)
        if last is None or self.tokenizer.decode(list(turn[last + 1 :])).strip():
            return len(turn)
        return last + 1


def _found(render: _Render, messages: list[dict[str, Any]], turns: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the conversation's tokens, and the labels found by rendering up to and through each assistant's turn."""
    ids = render(messages)
    mask = [0] * len(ids)
    for index in turns:
        before, through = render(messages[:index], answer=True), render(messages[: index + 1])
        _check_begins(through, before, index, "the turn's own tokens do not go on from those before it")
        _check_begins(ids, through, index, "the template rewrites the turn once the conversation goes on")
        end = len(before) + render.length_to_end(through[len(before) :])
        mask[len(before) : end] = [1] * (end - len(before))
    return ids, mask


def _check_begins(whole: Sequence[int], beginning: Sequence[int], turn: int, meaning: str) -> None:
    """Raise `BadRecord` unless the tokens `whole` start with the tokens `beginning`."""
    for position, token in enumerate(beginning):
        other = whole[position] if position < len(whole) else None
        if token != other:
            raise BadRecord(
                f"messages[{turn}]: {meaning} (token {position} is {token}, and then {other}): end the conversation "
                "with this turn, or give the model a chat template that marks the assistant's turns with generation"
            )
