"""Answers that take more than they may: each is refused by name, with little memory, and honest large ones are read."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.test_wire import ASKED, ask, reply
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import DrawOptions, Request
from truestep.generate.servers import http as over_http
from truestep.generate.servers.protocol import most_tokens
from truestep.generate.servers.sglang import Sglang
from truestep.generate.servers.vllm import Vllm

MIB = 2**20
Call = Callable[[Any], Coroutine[Any, Any, Any]]
CALLS: dict[str, Call] = {
    "complete": lambda server: server.complete(ASKED, 1),
    "stream": lambda server: server.stream(ASKED, 1, lambda index, tokens: None),
    "next_token": lambda server: server.next_token((5, 6), 0.7, 8),
    "describe": lambda server: server.describe(),
    "tokenize": lambda server: server.tokenize("text"),
    "pause": lambda server: server.pause("keep"),
    "load": lambda server: server.load(Path("weights")),
    "resume": lambda server: server.resume(),
    "unload": lambda server: server._tell("/v1/unload_lora_adapter", {}, 30.0),
}
BOMB = gzip.compress(b'"' + b" " * 50 * MIB + b'"')
ENDLESS = b"data: " + b"[" * 60 * MIB
KINDS = (Vllm, Sglang)


def peak_of(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def with_headers(body: bytes, *headers: str, status: int = 200) -> bytes:
    head = "".join(f"{header}\r\n" for header in (*headers, f"Content-Length: {len(body)}"))
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("status", [302, 304, 308])
def test_a_redirect_is_a_failure_of_every_call(status: int, name: str, kind: type[Any]) -> None:
    moved = with_headers(b"{}", "Location: http://127.0.0.1:1/elsewhere", status=status)
    with pytest.raises(ServerError, match=f"answered {status} and points to http://127.0.0.1:1/elsewhere"):
        ask(CALLS[name], *[moved] * 4, kind=kind)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("encoding", ["gzip", "zstd", "gzip, gzip"])
def test_a_compressed_answer_is_not_read(encoding: str, name: str) -> None:
    """50 KiB that would be 50 MiB; some 1.4 MiB took 4.6 GiB."""
    bomb = with_headers(BOMB, f"Content-Encoding: {encoding}")

    def refused() -> None:
        with pytest.raises(BadAnswerError, match=r"the answer is compressed \((gzip|deflate|br|zstd).*it is not read"):
            ask(CALLS[name], *[bomb] * 4)

    assert peak_of(refused) < 20 * MIB


def test_no_compressed_answer_is_asked_for() -> None:
    heads: list[bytes] = []
    with pytest.raises(BadAnswerError):
        ask(CALLS["complete"], reply("{}"), heads=heads)
    assert b"accept-encoding: identity\r\n" in heads[0].lower()
    assert heads[0].lower().count(b"accept-encoding") == 1


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_is_longer_than_it_may_be(name: str) -> None:
    """Also one that never ends, since its length is not said."""
    endless = b"HTTP/1.1 200 X\r\n\r\n" + ENDLESS

    def refused() -> None:
        with pytest.raises(BadAnswerError, match="is not read: it has more than 4 MiB, more than it may hold"):
            ask(CALLS[name], *[endless] * 4)

    assert peak_of(refused) < 25 * MIB


@pytest.mark.parametrize("name", CALLS)
def test_an_error_is_read_no_further_than_it_is_shown(name: str) -> None:
    endless = b"HTTP/1.1 500 X\r\n\r\n" + b"no " * 20 * MIB

    def refused() -> None:
        with pytest.raises((UnreachableError, ServerError), match="answered 500: no no"):
            ask(CALLS[name], *[endless] * 8)

    assert peak_of(refused) < 20 * MIB


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[" * 100_000 + "]" * 100_000, "answered what is not JSON"),
        ('{"choices": ' + "9" * 100_000 + "}", "answered what is not JSON"),
        ("[" + "[]," * (MIB + 1) + "[]]", "it has 1,048,579 lists and objects"),
        ("[" + '"",' * (2 * MIB) + '""]', "it has more than 4 MiB"),
    ],
    ids=["deep", "digits", "lists", "texts"],
)
def test_json_that_is_more_than_its_bytes(body: str, said: str) -> None:
    with pytest.raises(BadAnswerError, match=said):
        ask(CALLS["complete"], reply(body))


@pytest.mark.parametrize(
    "event",
    [
        {"index": 0, "token_ids": [7] * 4},
        {"index": 5, "token_ids": [7]},
        {"index": "0", "token_ids": [7]},
    ],
    ids=["more tokens", "another completion", "no number"],
)
def test_a_stream_of_more_than_was_asked_for(event: dict[str, Any]) -> None:
    line = f"data: {json.dumps({'choices': [event]})}\n\n"
    with pytest.raises(BadAnswerError, match="asked for 1 completions of at most 3 tokens"):
        ask(CALLS["stream"], reply(line * 10_000))


def test_a_stream_of_sglang_of_more_than_was_asked_for() -> None:
    meta = {"completion_tokens": 4, "output_token_logprobs": [[-1.0, 7]] * 4}
    with pytest.raises(BadAnswerError, match="asked for 1 completions of at most 3 tokens"):
        ask(CALLS["stream"], reply(f"data: {json.dumps({'meta_info': meta})}\n\n"), kind=Sglang)


def vllm_choice(index: int, tokens: int) -> dict[str, Any]:
    """As vLLM writes one with `return_token_ids` and `logprobs: 0`: the text stands in it four times."""
    text = "\\u00e9\U0001f600 "
    logprobs = {
        "text_offset": list(range(100_000, 100_000 + tokens)),
        "token_logprobs": [-0.12345678901234567] * tokens,
        "tokens": [text] * tokens,
        "top_logprobs": [{text: -0.12345678901234567}] * tokens,
    }
    return {
        "index": index,
        "text": text * tokens,
        "logprobs": logprobs,
        "finish_reason": "length",
        "token_ids": [150_000] * tokens,
        "prompt_token_ids": [150_000] * 1000,
    }


@pytest.mark.parametrize(("n", "tokens"), [(2, 4096), pytest.param(64, 8192, marks=pytest.mark.long)])
def test_an_honest_large_answer_is_read(n: int, tokens: int) -> None:
    request = Request((150_000,) * 1000, DrawOptions(1.0, tokens, frozenset({0})))
    body = json.dumps({"choices": [vllm_choice(index, tokens) for index in range(n)]})
    choices = ask(lambda server: server.complete(request, n), reply(body))
    assert [len(choice.logprobs) for choice in choices] == [tokens] * n
    assert len(body) < (over_http._SMALL + over_http._TOKEN * most_tokens(request, n)) / 2


def test_an_honest_large_stream_is_read() -> None:
    tokens = 20_000
    request = Request((5, 6), DrawOptions(1.0, tokens, frozenset({0})))
    choice = vllm_choice(0, 1) | {"finish_reason": None, "prompt_token_ids": None}
    lines = f"data: {json.dumps({'choices': [choice]})}\r\n\r\n" * (tokens - 1)
    lines += f"data: {json.dumps({'choices': [choice | {'finish_reason': 'length'}]})}\n\ndata: [DONE]\n\n"
    (read,) = ask(lambda server: server.stream(request, 1, lambda index, tokens: None), reply(lines))
    assert read.token_ids == [150_000] * tokens


def endless(name: str) -> bytes:
    """Give an answer of which some part outside the body never ends, or claims what cannot be."""
    head, chunked = b"HTTP/1.1 200 X\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    return {
        "header": head + b"X: " + b"a" * 8 * MIB,
        "headers": head + b"X: a\r\n" * MIB,
        "trailers": head + chunked + b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * MIB,
        "extension of a chunk": head + chunked + b"2;" + b"a" * 8 * MIB,
        "size of a chunk": head + chunked + b"F" * 40 + b"\r\n{}",
        "length": head + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n{}",
        "two lengths": head + b"Content-Length: 2\r\nContent-Length: 7\r\n\r\n{}",
        "another protocol": b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n{}",
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("header", "headers", "trailers", "extension of a chunk", "size of a chunk", "length", "two lengths"),
        "another protocol",
    ],
)
def test_what_stands_around_a_body_is_bounded_too(name: str) -> None:
    answer = endless(name)

    def refused() -> None:
        with pytest.raises(UnreachableError, match="ProtocolError"):
            ask(CALLS["complete"], answer)

    assert peak_of(refused) < 25 * MIB


def test_answers_before_the_answer_never_end() -> None:
    with pytest.raises(UnreachableError, match=r"gave no whole answer within 0\.2 s"):
        ask(CALLS["complete"], b"HTTP/1.1 100 Continue\r\n\r\n" * 500_000, timeout=0.2)


def test_no_cookie_is_kept() -> None:
    """Two answers could set 120, so that every later request had 100 KB of headers, more than other servers read."""
    cookies = [f"Set-Cookie: c{number}={'x' * 900}" for number in range(60)]
    heads: list[bytes] = []

    async def thrice(server: Any) -> None:
        for _ in range(3):
            with contextlib.suppress(BadAnswerError):
                await server.complete(ASKED, 1)

    ask(thrice, *[with_headers(b"{}", *cookies)] * 3, heads=heads)
    assert len(heads) == 3 and not any(b"cookie" in head.lower() for head in heads)


def test_lines_of_a_stream_in_any_pieces() -> None:
    """Also in single bytes, of which one line may have millions."""
    text = b"data: one\r\n\r\ndata: two\n" + b"x" * 300 + b"\nlast line without an end"

    async def lines(pieces: list[bytes], most: int) -> list[bytes]:
        response = httpx.Response(200, content=_given(pieces))
        return [line async for line in over_http._lines("/path", response, most)]

    for size in (1, 2, 7, 1000):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert asyncio.run(lines(pieces, 300)) == [b"data: one", b"", b"data: two", b"x" * 300]
        with pytest.raises(BadAnswerError, match="an event is not read"):
            asyncio.run(lines(pieces, 299))


async def _given(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
