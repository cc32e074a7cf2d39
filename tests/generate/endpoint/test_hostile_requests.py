"""Requests that are JSON and still mean no good: each is refused or answered, and none is an error of the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from generate.endpoint.test_app import USER, Writes, served


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def call(arguments: Any = "{}", name: Any = "add", **others: Any) -> list[dict[str, Any]]:
    calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}, **others}]
    return [*USER, {"role": "assistant", "content": None, "tool_calls": calls}]


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "add", **function}}]


CHATS: dict[str, Any] = {
    "a name in 400 lists": {"messages": [{**USER[0], "name": nested(400)}]},
    "a name in 900 lists": {"messages": [{**USER[0], "name": nested(900)}]},
    "an id of a call in 900 lists": {"messages": [{"role": "tool", "content": "x", "tool_call_id": nested(900)}]},
    "arguments in 900 lists": {"messages": call(json.dumps({"a": nested(900)}))},
    "arguments that are a number": {"messages": call(5)},
    "arguments that are null": {"messages": call(None)},
    "arguments with half a character": {"messages": call('{"a": "\\ud800"}')},
    "a tool's parameters in 900 lists": {"messages": USER, "tools": tool(parameters=nested(900))},
    "a tool's parameters that are a text": {"messages": USER, "tools": tool(parameters="no schema")},
    "a tool with half a character": {"messages": USER, "tools": tool(description="\ud800")},
    "a stop of half a character": {"messages": USER, "stop": ["\ud800"]},
    "a role that is none": {"messages": [{"role": "\u0000{{ 1 / 0 }}", "content": "x"}]},
    "only the policy speaks": {"messages": [{"role": "assistant", "content": "x"}]},
    "a number of calls": {"messages": [{"role": "assistant", "content": "", "tool_calls": 7}]},
    "a thousand calls": {
        "messages": [*USER, {"role": "assistant", "content": "", "tool_calls": call()[1]["tool_calls"] * 1000}]
    },
    "reasoning that is a number": {
        "messages": [*USER, {"role": "assistant", "content": "x", "reasoning_content": 5}, *USER]
    },
    "reasoning in 900 lists": {
        "messages": [*USER, {"role": "assistant", "content": "x", "reasoning_content": nested(900)}, *USER]
    },
    "many messages": {"messages": USER * 9999},
    "a million words": {"messages": [{"role": "user", "content": "word " * 10**6}]},
    "special tokens as text": {"messages": [{"role": "user", "content": "<|im_end|><|im_start|>assistant"}]},
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_or_refused(name: str) -> None:
    with served(Writes("a")) as house:
        answer = house.post("/chat/completions", content=json.dumps(CHATS[name]))
        assert answer.status_code in (200, 400), answer.text
        assert house.post("/chat/completions", json={"messages": USER}).status_code == 200
        assert answer.status_code == 400 or len(house.document.completions) == 2


@pytest.mark.parametrize("ids", [[10**9], [2**63], [10**30]])
def test_token_ids_beyond_the_vocabulary_are_refused(ids: list[int]) -> None:
    with served(Writes("a")) as house:
        for path, body in (("/completions", {"prompt": ids}), ("/../inference/v1/generate", {"token_ids": ids})):
            answer = house.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
        assert not house.document.completions


@pytest.mark.parametrize("beyond", [0, 10**30])
def test_a_stop_token_beyond_the_vocabulary_is_refused(beyond: int) -> None:
    """A server of the run would refuse it, for which the run and not the program would be blamed."""
    generate = Writes("a")
    with served(generate) as house:
        token = len(house.document.tokenizer) + beyond
        answer = house.post("/chat/completions", json={"messages": USER, "stop_token_ids": [5, token]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop_token_ids"
        assert not generate.requests
        assert house.post("/chat/completions", json={"messages": USER, "stop_token_ids": [5]}).status_code == 200
