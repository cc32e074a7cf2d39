"""The endpoint over HTTP, with OpenAI's own client and with those who mean it no good."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from environments.episodes.test_conversation import MODELS, TOOLS, encoded, tokenizer_of
from generate.endpoint.test_branches import document
from truestep.generate.endpoint.document import Document
from truestep.generate.endpoint.keys import SecretKeys, Served
from truestep.generate.endpoint.server import Endpoint
from truestep.generate.generator import Completion, OnTokens, Request

NAME = "qwen3 without reasoning"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]


class Writes:
    """A generator that writes the texts it is given, token by token."""

    def __init__(self, *texts: str, name: str = NAME):
        self.texts, self.name = list(texts), name
        self.requests: list[Request] = []
        self.cancelled = 0
        self.hangs = False
        self.says_nothing = False  # before it hangs

    async def __call__(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        ids = encoded(tokenizer_of(self.name), text + MODELS[self.name].end)[: request.options.max_new_tokens]
        try:
            for token in [] if self.says_nothing else ids:
                await asyncio.sleep(0)
                if on_tokens is not None:
                    on_tokens([token])
            while self.hangs:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        whole = text + MODELS[self.name].end == tokenizer_of(self.name).decode(ids)
        return Completion(ids, [-0.25 * (place + 1) for place in range(len(ids))], whole, versions=[3] * len(ids))


@dataclass
class House:
    """An endpoint with one document."""

    url: str
    key: str
    document: Document
    keys: SecretKeys
    do: Callable[[Callable[[], Any]], Any]  # in the document's event loop

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=self.key, max_retries=0, timeout=30)

    def post(self, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"} | options.pop("headers", {})
        return httpx.post(self.url + path, headers=headers, timeout=30, **options)


@contextmanager
def served(generate: Writes, **options: Any) -> Iterator[House]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(function: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), loop).result(30)

    keys = SecretKeys()
    written = do(lambda: document(generate.name, generate, **options))
    key = keys.add(do(lambda: Served(written)))
    endpoint = Endpoint(keys, "policy")
    try:
        yield House(endpoint.url, key, written, keys, do)
    finally:
        endpoint.close()
        do(written.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_openais_client_chats_calls_tools_and_goes_on() -> None:
    generate = Writes("Hello, you", CALL, "It is 3.")
    with served(generate) as house:
        client = house.client
        assert [model.id for model in client.models.list()] == ["policy"]
        messages: list[Any] = list(USER)
        tools: Any = TOOLS
        first = client.chat.completions.create(model="policy", messages=messages, tools=tools, logprobs=True)
        choice = first.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello, you", "stop")
        drawn = encoded(tokenizer_of(NAME), "Hello, you<|im_end|>")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [one.logprob for one in choice.logprobs.content] == [-0.25 * (n + 1) for n in range(len(drawn))]
        assert first.usage is not None and first.usage.completion_tokens == len(drawn)
        messages += [choice.message.model_dump(), {"role": "user", "content": "1 + 2?"}]
        second = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0]
        assert second.finish_reason == "tool_calls" and second.message.tool_calls is not None
        (call,) = second.message.tool_calls
        assert call.type == "function" and call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        messages += [second.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        third = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0]
        assert third.message.content == "It is 3."
        assert len(house.document.sequences) == 1, "one conversation"
        assert sum(house.document.sequences[0].loss_mask) == sum(
            len(each.token_ids) for each in house.document.completions
        )


def test_a_malformed_call_is_part_of_the_text() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
    with served(Writes(f"I add. {broken}", "again")) as house:
        client: Any = house.client
        choice = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS).choices[0]
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.content == f"I add. {broken}"
        messages = [*USER, choice.message.model_dump(), {"role": "user", "content": "no"}]
        client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        assert len(house.document.sequences) == 1


@pytest.mark.parametrize("text", ["Hello, you", CALL, f"I add.\n{CALL}", "a < b, or [1]", "naïve ✓ 漢字", " spaced \n"])
def test_a_stream_says_what_a_whole_answer_says(text: str) -> None:
    with served(Writes(text)) as house:
        client: Any = house.client
        whole = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS).choices[0]
        content, calls, reason, usage = "", [], None, None
        stream = client.chat.completions.create(
            model="policy", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                content += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                reason = choice.finish_reason or reason
        assert content.strip() == (whole.message.content or "").strip() and reason == whole.finish_reason
        assert [call.function.arguments for call in calls] == [
            call.function.arguments for call in whole.message.tool_calls or ()
        ]
        assert usage is not None and usage.completion_tokens == len(house.document.completions[0].token_ids)
        said = client.completions.create(model="policy", prompt="once")
        pieces = client.completions.create(model="policy", prompt="once", stream=True)
        assert "".join(event.choices[0].text for event in pieces) == said.choices[0].text


def test_stop_texts_and_lengths_end_completions() -> None:
    generate = Writes("one two three")
    with served(generate) as house:
        client = house.client
        stopped = client.completions.create(model="policy", prompt="count", stop=[" two"])
        assert stopped.choices[0].text == "one" and generate.requests[-1].options.stop == (" two",)
        streamed = client.completions.create(model="policy", prompt="count", stop=[" two"], stream=True)
        assert "".join(event.choices[0].text for event in streamed) == "one"
        short = client.completions.create(model="policy", prompt="count", max_tokens=3)
        assert short.choices[0].finish_reason == "length" and generate.requests[-1].options.max_new_tokens == 3


def test_token_ids_and_log_probs() -> None:
    generate = Writes("abc")
    with served(generate) as house:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "logprobs": 1, "temperature": 1.0}}
        answer = httpx.post(
            house.url.removesuffix("/v1") + "/inference/v1/generate",
            json=body,
            headers={"Authorization": f"Bearer {house.key}"},
        ).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == encoded(tokenizer_of(NAME), "abc<|im_end|>") and choice["finish_reason"] == "stop"
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
        named = {"prompt": [5, 6], "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
        (choice,) = house.post("/completions", json=named).json()["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["prompt_token_ids"] == [5, 6]


def test_the_draw_is_the_runs_own_and_says_so() -> None:
    generate = Writes("a")
    with served(generate) as house:
        house.client.chat.completions.create(model="policy", messages=USER, temperature=0.2, top_p=0.5)  # type: ignore[arg-type]
        assert generate.requests[0].options.temperature == 1.0 and generate.requests[0].options.top_p == 1.0
        assert house.document.differs == "temperature 0.2, top_p 0.5"
    with served(generate, obeys=True) as house:
        house.client.chat.completions.create(model="policy", messages=USER, temperature=0.2, seed=4)  # type: ignore[arg-type]
        assert generate.requests[1].options.temperature == 0.2 and generate.requests[1].seed == (4, 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "at least one message"),
    ({"messages": "hi"}, "expected a list"),
    ({"messages": [{"content": "x"}]}, "with a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text is supported"),
    ({"messages": USER, "logit_bias": {"5": 1}}, "logit_bias"),
    ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "frequency_penalty": 0.5}, "frequency_penalty"),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": USER, "temperatur": 1}, "Unrecognized request argument supplied: temperatur"),
    ({"messages": USER, "temperature": "hot"}, "temperature"),
    ({"messages": USER, "n": 10**9}, "n: expected"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens"),
    ({"messages": USER, "max_tokens": True}, "max_tokens"),
    ({"messages": USER, "stop": [""]}, "stop"),
    ({"messages": USER, "stream": "yes"}, "stream"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
]


@pytest.mark.parametrize(("body", "problem"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], problem: str) -> None:
    with served(Writes("a")) as house:
        answer = house.post("/chat/completions", content=json.dumps(body))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert problem in error["message"] and error["type"] == "invalid_request_error"
        assert not house.document.completions and house.document.cut_by is None
        streamed = house.post("/chat/completions", content=json.dumps({**body, "stream": body.get("stream", True)}))
        assert streamed.status_code == 400, "before a stream begins"


def test_keys_open_their_own_document_alone() -> None:
    generate = Writes("a secret")
    with served(generate) as house:
        other = house.do(lambda: document(NAME, generate))
        key = house.keys.add(house.do(lambda: Served(other)))
        house.client.chat.completions.create(model="policy", messages=USER)  # type: ignore[arg-type]
        for wrong in ("x", "sk-", "sk-" + "A" * 32, house.key[:-1], house.key + "A", "ключ".encode()):
            headers = {"Authorization": b"Bearer " + (wrong if isinstance(wrong, bytes) else wrong.encode())}
            for path in ("/chat/completions", "/completions", f"/documents/{house.key}/reward"):
                answer = house.post(path, json={"messages": USER, "reward": 1.0}, headers=headers)
                assert answer.status_code == 401 and "a secret" not in answer.text and house.key not in answer.text
            assert httpx.get(f"{house.url}/models", headers=headers).status_code == 401
        own = {"Authorization": f"Bearer {house.key}"}
        unknown = httpx.get(f"{house.url}/documents/sk-none", headers=own)
        for answer in (
            house.post(f"/documents/{key}/reward", json={"reward": 9.0}),
            httpx.get(f"{house.url}/documents/{key}", headers=own),
        ):
            assert (answer.status_code, answer.text) == (401, unknown.text), "as one that does not exist"
        assert other.rating is None
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=house.url, api_key="no", max_retries=0).models.list()
        house.keys.remove(house.key)
        with pytest.raises(openai.AuthenticationError):
            house.client.chat.completions.create(model="policy", messages=USER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"reward": "much"}, "much"),
        ({"reward": float("nan")}, "nan"),
        ({"reward": 1e300}, "at most"),
        ({"reward": {}}, "0 parts"),
        ({"reward": 1, "turn_rewards": [1] * 9}, "9 turn_rewards after 1 turns"),
        ({"reward": 1, "more": 2}, "expected"),
        ({}, "expected"),
        ([1], "not an object"),
    ],
)
def test_bad_rewards_are_refused(body: Any, problem: str) -> None:
    with served(Writes("a")) as house:
        house.client.chat.completions.create(model="policy", messages=USER)  # type: ignore[arg-type]
        answer = house.post(f"/documents/{house.key}/reward", content=json.dumps(body))
        assert answer.status_code == 400 and problem in answer.json()["error"]["message"], answer.text
        assert house.document.rating is None
        assert house.post(f"/documents/{house.key}/reward", json={"reward": {"a": 1, "b": 2}}).status_code == 200
        assert house.document.rating == 3.0


def test_bodies_that_are_too_large_or_no_json() -> None:
    with served(Writes("a")) as house:
        large = b'{"messages": "' + b"x" * 2**24 + b'"}'
        assert house.post("/chat/completions", content=large).status_code == 413

        def parts() -> Iterator[bytes]:
            for _ in range(2**9 + 1):
                yield b" " * 2**15

        with contextlib.suppress(httpx.HTTPError):  # the connection may be closed while it still sends
            assert house.post("/chat/completions", content=parts()).status_code == 413
        for content in (b"", b"{", b"[" * 100_000, b"[1]", b"\xff\xfe", b'{"a":' * 50_000, b"1" * 5000):
            answer = house.post("/chat/completions", content=content)
            assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"], content[:20]
        assert house.client.chat.completions.create(model="policy", messages=USER).choices  # type: ignore[arg-type]


def test_a_client_that_goes_cancels_its_request() -> None:
    generate = Writes("Hello")
    with served(generate) as house:
        generate.hangs = True
        for number, (stream, generate.says_nothing) in enumerate(
            ((False, False), (True, False), (True, True)), start=1
        ):
            with pytest.raises(openai.APITimeoutError):
                for _ in house.client.with_options(timeout=0.3).chat.completions.create(
                    model="policy",
                    messages=USER,  # type: ignore[arg-type]
                    stream=stream,
                ):
                    pass
            deadline = time.monotonic() + 20
            while generate.cancelled < number and time.monotonic() < deadline:
                time.sleep(0.01)
            assert generate.cancelled == number
        generate.hangs = generate.says_nothing = False
        assert not house.document.completions
        house.client.chat.completions.create(model="policy", messages=USER)  # type: ignore[arg-type]
        assert len(house.document.sequences) == 1


def test_a_thousand_connections_that_say_nothing_keep_nobody_out() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most[1], 4096), most[1]))
    idle = []
    try:
        with served(Writes("Hello")) as house:
            port = int(house.url.split(":")[2].split("/")[0])
            for number in range(1000):
                idle.append(socket.create_connection(("127.0.0.1", port)))
                idle[-1].sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"[: random.Random(number).randint(0, 50)]
                )
            answer = house.client.chat.completions.create(model="policy", messages=USER)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == "Hello"
            assert house.post("/chat/completions", content=b"{").status_code == 400
    finally:
        for one in idle:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_it_listens_on_loopback_alone() -> None:
    with served(Writes("a")) as house:
        assert house.url.startswith("http://127.0.0.1:")
        port = f":{int(house.url.split(':')[2].split('/')[0]):04X}"
        files = filter(Path.exists, map(Path, ("/proc/net/tcp", "/proc/net/tcp6")))
        tables = [file.read_text().splitlines()[1:] for file in files]
        rows = [row.split() for table in tables for row in table]
        listening = {row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"}
        assert listening == {f"0100007F{port}"}, "127.0.0.1, and no other address"
