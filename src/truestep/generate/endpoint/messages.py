"""Converts chat messages between the forms of OpenAI's clients and of chat templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from truestep.environments.episodes.environment import Answer, Message
from truestep.generate.endpoint.errors import RequestError
from truestep.text import printable

_MOST_MESSAGES = 10_000  # messages of one request
# Fields of a message that the policy would not see. They must be empty.
_UNSEEN = frozenset({"refusal", "annotations", "audio", "function_call"})


def from_client(messages: Any) -> list[Message]:
    """Convert the messages of a request to the form of chat templates. Raises RequestError."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: expected a list of at least one message", param="messages")
    if len(messages) > _MOST_MESSAGES:
        raise RequestError(f"messages: {len(messages)} of them; at most {_MOST_MESSAGES}", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: expected an object with a role", param=where)
    found: Message = {
        key: value for key, value in message.items() if value is not None and not (key in _UNSEEN and not value)
    }
    if unseen := sorted(_UNSEEN & found.keys()):
        raise RequestError(f"{where}.{unseen[0]} is not supported", param=f"{where}.{unseen[0]}")
    found["content"] = _text(message.get("content"), f"{where}.content")
    if "tool_calls" in found:
        calls = found["tool_calls"]
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls: expected a list", param=f"{where}.tool_calls")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
        if not calls:
            del found["tool_calls"]
    return found


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected text", param=where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}: only text is supported, not {printable(repr(kind), 40)}", param=where)
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object with a function and its name", param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(text: str) -> Any:
    """Parse the arguments of a call as a JSON object, which chat templates render. Text that is not a JSON object stays
    text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def compared(message: Mapping[str, Any]) -> str:
    """Return the part of a message by which two messages are compared. Clients send a turn of the policy back without
    its reasoning, with other fields that have no meaning here, and without surrounding whitespace."""
    content = message.get("content") or ""
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in (_call(call, "tool_calls") for call in message.get("tool_calls") or ())
    ]
    said = content.strip() if message["role"] == "assistant" and isinstance(content, str) else content
    others = {key: message.get(key) for key in ("name", "tool_call_id")}
    return json.dumps([message["role"], said, calls, others], sort_keys=True)


def to_client(answer: Answer, number: int, text: str, written: str) -> Message:
    """Convert a turn of the policy, whose text is `text`, to a message for a client. `number` is the turn's number in
    the document; the ids of calls contain it. If a call is malformed, the content is `written`, the whole turn as text,
    because no client could read the call."""
    message: Message = {"role": "assistant", "content": text, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if any(call.problem is not None for call in answer.tool_calls):
        message["content"] = written
    elif answer.tool_calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{number}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for index, call in enumerate(answer.tool_calls)
        ]
    return message


def tools_of(given: Any) -> Sequence[dict[str, Any]]:
    """Return the tools of a request. Raises RequestError."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise RequestError("tools: expected a list", param="tools")
    for index, one in enumerate(given):
        function = one.get("function") if isinstance(one, Mapping) and one.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{index}]: expected a function with a name", param=f"tools[{index}]")
    return given
