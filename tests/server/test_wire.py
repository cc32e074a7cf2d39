"""vLLM's client against canned replies: every way that a reply can fail is one of the three that the fleet knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from truestep.generate.errors import BadAnswerError, ForgottenError, ServerError, UnreachableError
from truestep.generate.generator import DrawOptions, Request
from truestep.generate.servers.http import HttpServer
from truestep.generate.servers.vllm import Vllm

ASKED = Request((5, 6), DrawOptions(1.0, 3, frozenset({0})))
TOKEN = 'data: {"choices": [{"index": 0, "token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}}]}\n\n'
LAST = TOKEN.replace("[7]", "[0]").replace('"index": 0', '"index": 0, "finish_reason": "stop"')


def reply(body: str, status: int = 200, missing: int = 0) -> bytes:
    """`missing`: so many bytes fewer than the reply says that it has."""
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) + missing}\r\n\r\n{body}".encode()


def ask(
    call: Callable[[Any], Coroutine[Any, Any, Any]],
    *replies: bytes | None,
    timeout: float = 30.0,
    kind: type[HttpServer] = Vllm,
    heads: list[bytes] | None = None,
) -> Any:
    """`replies` to one request after another, whose heads are noted. None: never."""

    async def main() -> Any:
        left, stop = list(replies), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if heads is not None:
                heads.append(head)
            sent = left.pop(0)
            if sent is None:
                await stop.wait()
            else:
                with contextlib.suppress(ConnectionError):  # the client has read enough
                    for start in range(0, len(sent), 2**16):
                        writer.write(sent[start : start + 2**16])
                        await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        asked = kind(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/", "m", "key", timeout)
        try:
            return await call(asked)
        finally:
            stop.set()
            await asked.close()
            server.close()

    return asyncio.run(main())


def complete(vllm: Vllm) -> Any:
    return vllm.complete(ASKED, 1)


def stream(vllm: Vllm) -> Any:
    return vllm.stream(ASKED, 1, lambda index, tokens: None)


@pytest.mark.parametrize("call", [complete, stream])
@pytest.mark.parametrize(
    ("sent", "error", "said"),
    [
        (reply("try again", 503), UnreachableError, "answered 503: try again"),
        (reply("later", 429), UnreachableError, "answered 429"),
        (reply("who?", 401), ServerError, "set sampler.api_key_env to the variable"),
        (reply("no", 404), ServerError, "started with VLLM_SERVER_DEV_MODE=1"),
        (reply(TOKEN, missing=10), UnreachableError, "/v1/completions: RemoteProtocolError"),
        (b"", UnreachableError, "/v1/completions: RemoteProtocolError"),
    ],
)
def test_a_reply_that_fails(call: Any, sent: bytes, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ask(call, sent)


@pytest.mark.parametrize("call", [complete, stream])
def test_a_reply_that_never_comes(call: Any) -> None:
    with pytest.raises(UnreachableError, match="/v1/completions gave no whole answer within 0.2 s"):
        ask(call, None, timeout=0.2)


def test_a_stream_is_read_to_the_event_that_says_it_is_the_last() -> None:
    (choice,) = ask(stream, reply(TOKEN + LAST + "data: [DONE]\n\n"))
    assert (choice.token_ids, choice.logprobs, choice.stopped) == ([7, 0], [-1.0, -1.0], True)
    with pytest.raises(UnreachableError, match="the stream ended early"):
        ask(stream, reply(TOKEN + LAST))
    with pytest.raises(BadAnswerError, match="an event of the stream is not JSON"):
        ask(stream, reply("data: <html>\n\n"))
    with pytest.raises(BadAnswerError, match="is not in a vLLM server's format"):
        ask(stream, reply('data: {"choices": [null]}\n\n'))
    with pytest.raises(BadAnswerError, match="the stream says"):
        ask(stream, reply('data: {"error": "engine died"}\n\n'))


def test_a_page_is_no_answer() -> None:
    with pytest.raises(BadAnswerError, match="/v1/completions answered what is not JSON"):
        ask(complete, reply("<html>welcome to the proxy</html>"))
    with pytest.raises(BadAnswerError, match="without the log-probs of its next token"):
        ask(lambda vllm: vllm.next_token((1,), 1.0, 3), reply('{"choices": []}'))


def test_weights_that_cannot_be_loaded_and_a_server_that_went_away_meanwhile() -> None:
    def load(vllm: Vllm) -> Any:
        return vllm.load(Path("weights"))

    with pytest.raises(ServerError, match="could not load the weights in weights: .*500: no such file"):
        ask(load, reply("no such file", 500), reply(""))
    with pytest.raises(UnreachableError, match="answered 500"):
        ask(load, reply("dying", 500), reply("gone", 503))
    with pytest.raises(UnreachableError, match="answered 503"):
        ask(load, reply("busy", 503), reply(""))
    with pytest.raises(UnreachableError, match="requests still use the KV cache"):
        ask(load, reply(""), reply('{"success": false}'))


def test_a_connection_that_a_server_closes_with_an_error_is_not_used_again() -> None:
    """As vLLM's does a moment after it has answered: the next request would be lost on it."""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed it
                while not (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                    writer.write(reply('{"data": [{"id": "m"}]}'))
                writer.write(reply("{}", 500))
                await asyncio.sleep(0.05)  # the answer is there, and the end of the connection is not
            writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        vllm = Vllm(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", None, 10)
        try:
            with pytest.raises(UnreachableError, match="answered 500"):
                await vllm.pause("abort")
            assert (await vllm.describe()).names == ("m",)
        finally:
            await vllm.close()
            server.close()

    asyncio.run(main())


def test_an_adapter_gets_a_name_of_its_own_and_one_that_is_forgotten_is_known(tmp_path: Path) -> None:
    adapters = [tmp_path / "first", tmp_path / "second"]
    for adapter in adapters:
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")

    async def one_after_another(vllm: Vllm) -> list[str]:
        names = []
        for adapter in adapters:
            await vllm.load(adapter)
            names.append(vllm._body(ASKED, 1)["model"])
        with pytest.raises(ForgottenError, match="no longer knows the adapter second"):
            await vllm.complete(ASKED, 1)
        return names

    # What is loaded is answered in words; the one before is taken away, whether the server still knows it or not.
    replies = reply("Success"), reply("Success"), reply("unknown", 404), reply("no such model", 404)
    assert ask(one_after_another, *replies) == ["first", "second"]
    with pytest.raises(ServerError, match="404.*start the server with --enable-lora, --max-lora-rank"):
        ask(lambda vllm: vllm.load(adapters[0]), reply("Not Found", 404))
    with pytest.raises(ServerError, match="500: rank.*--max-lora-rank"):
        ask(lambda vllm: vllm.load(adapters[0]), reply("rank", 500), reply(""))


@pytest.mark.parametrize("models", ["null", "[]", '{"data": null}', '{"data": 3}', '{"data": [null]}'])
def test_a_list_of_models_of_the_wrong_form_names_none(models: str) -> None:
    described = ask(lambda vllm: vllm.describe(), reply(""), reply(models))
    assert described.names == () and described.longest_text is None
