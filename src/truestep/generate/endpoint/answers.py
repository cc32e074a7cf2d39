"""Completions in the form that OpenAI's clients, or clients of token ids, expect: whole, or as events of a stream."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truestep.generate.endpoint.document import Choice, cut_at_stop
from truestep.generate.endpoint.requests import Asked

_MAY_BEGIN_CALLS = "<[{"  # characters that may begin a tool call or reasoning, in any model's format


@dataclass(frozen=True)
class Form:
    """The form of an answer, one of three."""

    name: str  # chat, text or token_ids
    id: str
    model: str
    tokenizer: Any

    def answer(self, asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the body of an answer."""
        given = [self._choice(asked, number, choice) for number, choice in enumerate(choices)]
        if self.name == "token_ids":
            return {"request_id": self.id, "choices": given, "usage": usage(choices)}
        kind = "chat.completion" if self.name == "chat" else "text_completion"
        return {**self._head(kind), "choices": given, "usage": usage(choices)}

    def event(self, choices: Sequence[Mapping[str, Any]], **others: Any) -> dict[str, Any]:
        """Return an event of a stream."""
        if self.name == "token_ids":
            return {"request_id": self.id, "choices": list(choices), **others}
        kind = "chat.completion.chunk" if self.name == "chat" else "text_completion"
        return {**self._head(kind), "choices": list(choices), **others}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _choice(self, asked: Asked, number: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"index": number, "finish_reason": choice.reason}
        if self.name == "chat":
            found["message"] = choice.shown
        elif self.name == "text":
            found["text"] = choice.shown
        ids, values = choice.completion.token_ids, choice.completion.logprobs
        found["logprobs"] = self.logprobs(asked, ids, values) if asked.logprobs else None
        if asked.returns_ids or self.name == "token_ids":
            found["token_ids"] = list(ids)
        if asked.returns_ids:
            found["prompt_token_ids"] = list(choice.prompt)
        return found

    def logprobs(self, asked: Asked, ids: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        if self.name == "token_ids":
            return {"content": [{"token_id": id, "logprob": value} for id, value in zip(ids, values, strict=True)]}
        names = [f"token_id:{id}" if asked.names_ids else self._name(id) for id in ids]
        if self.name == "text":
            offsets, place = [], 0
            for name in names:
                offsets.append(place)
                place += len(name)
            return {"tokens": names, "token_logprobs": list(values), "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}
            for name, value in zip(names, values, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _name(self, id: int) -> str:
        return str(self.tokenizer.decode([id], skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Streamed:
    """A choice of a stream, and how much of it has been sent."""

    def __init__(self, form: Form, asked: Asked, number: int):
        self._form, self._asked, self._number = form, asked, number
        self._ids: list[int] = []
        self._sent = ""
        self._sent_ids = 0
        self._held_back = max(map(len, asked.stop), default=1) - 1

    def first(self) -> Sequence[Mapping[str, Any]]:
        """Return the parts that begin the choice."""
        if self._form.name != "chat":
            return []
        return [self._part(delta={"role": "assistant", "content": ""})]

    def more(self, ids: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """Return the parts for new tokens. They contain only text that cannot change any more."""
        self._ids += ids
        if self._form.name == "token_ids":
            self._sent_ids += len(ids)
            return [self._part(token_ids=list(ids))]
        whole = self._decoded().rstrip("\ufffd")  # without the bytes of an incomplete character
        text = cut_at_stop(whole, self._asked.stop)
        if text == whole:  # its end may be the beginning of a stop text
            text = text[: len(text) - self._held_back]
        if self._form.name == "chat":
            # Which text is reasoning or a tool call is known only when the turn has ended.
            text = "" if any(mark in text for mark in _MAY_BEGIN_CALLS) else text.strip()
        return self._text_part(text)

    def _decoded(self) -> str:
        special = self._form.name == "chat"  # special tokens begin reasoning and calls
        decode = self._form.tokenizer.decode
        return str(decode(self._ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def _text_part(self, text: str) -> Sequence[Mapping[str, Any]]:
        if len(text) <= len(self._sent) or not text.startswith(self._sent):
            return []
        new, self._sent = text[len(self._sent) :], text
        return [self._part(delta={"content": new}) if self._form.name == "chat" else self._part(text=new)]

    def last(self, choice: Choice) -> Sequence[Mapping[str, Any]]:
        """Return the parts that end the choice."""
        shown = choice.shown
        parts: list[Mapping[str, Any]] = []
        if isinstance(shown, Mapping):
            parts += self._text_part((shown["content"] or "").lstrip())
            rest = {key: shown[key] for key in ("reasoning_content", "tool_calls") if key in shown}
            if "tool_calls" in rest:
                rest["tool_calls"] = [{"index": place, **call} for place, call in enumerate(rest["tool_calls"])]
            if rest:
                parts.append(self._part(delta=rest))
        elif isinstance(shown, str):
            parts += self._text_part(shown)
        end = self._part(finish_reason=choice.reason) | ({"delta": {}} if self._form.name == "chat" else {})
        if self._form.name == "text":
            end.setdefault("text", "")
        ids, values = choice.completion.token_ids, choice.completion.logprobs
        if self._form.name == "token_ids":
            end["token_ids"] = list(ids[self._sent_ids :])
        elif self._asked.returns_ids:
            end |= {"token_ids": list(ids), "prompt_token_ids": list(choice.prompt)}
        if self._asked.logprobs:
            end["logprobs"] = self._form.logprobs(self._asked, ids, values)
        return [*parts, end]

    def _part(self, **known: Any) -> dict[str, Any]:
        return {"index": self._number, "logprobs": None, "finish_reason": None, **known}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt, drawn = len(choices[0].prompt), sum(len(choice.completion.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def as_event(body: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


LAST_EVENT = b"data: [DONE]\n\n"
