"""An OpenAI-compatible address, against a real server on this machine: what it is sent, and how it may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, read_page
from server.address import Address, as_json, listening, stream
from server.fake import asked
from server.fake_vllm import FakeVllm
from server.models import make_model
from server.sglang_server import serving
from server.test_bounds import BOMB, peak_of, with_headers
from truestep.generate import openai
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.generate.openai import OpenAiUrl

MIB = 2**20
KEY = "sk-not-a-real-key-0123456789"


def choice(**changes: Any) -> dict[str, Any]:
    made = {"index": 0, "text": "a b", "finish_reason": "stop", "token_ids": [7, 0]}
    return made | {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0]}} | changes


def answer(**changes: Any) -> bytes:
    return as_json({"choices": [choice(**changes)]})


def piece(*tokens: int, **changes: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5] * len(tokens)}
    made = {"index": 0, "text": "a" * len(tokens), "token_ids": list(tokens), "logprobs": logprobs}
    return {"choices": [made | {"finish_reason": None} | changes]}


def said(text: Any) -> bytes:
    return as_json({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]})


OPEN_STREAM = b"HTTP/1.1 200 X\r\n\r\n" + stream(piece(5), last="").partition(b"\r\n\r\n")[2] + b"..."

Call = Callable[[OpenAiUrl], Coroutine[Any, Any, Any]]


def call(do: Call, *answers: bytes | None, timeout: float = 20.0, **options: Any) -> tuple[Any, Address]:
    """Return what a call gives, and the server that it was made to."""

    async def main() -> tuple[Any, Address]:
        async with listening(*answers) as address:
            url = OpenAiUrl(f"{address.url}/v1", "judge", timeout=timeout, **options)
            try:
                return await do(url), address
            finally:
                await url.close()

    return asyncio.run(main())


def generate(url: OpenAiUrl) -> Coroutine[Any, Any, Completion]:
    return url.generate(asked())


def hear_nothing(url: OpenAiUrl) -> Coroutine[Any, Any, Completion]:
    return url.generate(asked(), lambda tokens: None)


def chat(url: OpenAiUrl) -> Coroutine[Any, Any, str]:
    return url.chat([{"role": "user", "content": "good?"}])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_FIRST_DELAY", 0.02)


# ---- what it gives


def test_a_completion_and_what_was_asked() -> None:
    completion, address = call(generate, answer(), api_key=KEY)
    assert completion == Completion([7, 0], [-0.5, -1.0], stopped=True, server=address.url)
    ((path, headers, body),) = address.asked
    assert path == "/v1/completions" and headers["authorization"] == f"bearer {KEY}"
    assert headers["accept-encoding"] == "identity"
    assert (body["prompt"], body["model"], body["max_tokens"], body["temperature"]) == ([3, 4], "judge", 6, 1.0)
    assert body["stop_token_ids"] == [0] and body["return_token_ids"] and body["return_tokens_as_token_ids"]
    assert not {"stop", "top_k", "min_p", "stream"} & set(body)


def test_every_option_is_sent() -> None:
    options = DrawOptions(0.5, 6, frozenset(), top_p=0.9, top_k=5, min_p=0.1, stop=("end",))
    _, address = call(lambda url: url.generate(Request((3,), options)), answer())
    body = address.asked[0][2]
    assert (body["top_p"], body["top_k"], body["min_p"], body["stop"]) == (0.9, 5, 0.1, ["end"])
    assert "stop_token_ids" not in body


def test_ids_that_are_the_names_of_tokens() -> None:
    logprobs = {"tokens": ["token_id:7", "token_id:12"], "token_logprobs": [-0.5, -1.0]}
    completion, _ = call(generate, answer(token_ids=None, logprobs=logprobs, finish_reason="length"))
    assert completion.token_ids == [7, 12] and not completion.stopped


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_gives_its_tokens_in_their_order(named: bool) -> None:
    events = [piece(5), piece(6, 7), piece(0, finish_reason="stop"), {"choices": [], "usage": {}}]
    if named:
        for event in events[:3]:
            (one,) = event["choices"]
            one["logprobs"]["tokens"] = [f"token_id:{token}" for token in one.pop("token_ids")]
    heard: list[list[int]] = []
    completion, address = call(lambda url: url.generate(asked(), lambda ids: heard.append(list(ids))), stream(*events))
    assert heard == [[5], [6, 7], [0]] and completion.token_ids == [5, 6, 7, 0] and completion.stopped
    assert len(completion.logprobs) == 4 and address.asked[0][2]["stream"] is True


def test_a_real_model_behind_the_paths_of_vllm(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=3)
    server = FakeVllm(model, "judge")
    request = Request((3, 4, 5), DrawOptions(0.8, 8, frozenset({0})))

    async def main(url: str) -> Completion:
        teacher = OpenAiUrl(url, "judge", timeout=60.0)
        try:
            return await teacher.generate(request)
        finally:
            await teacher.close()

    with serving(server) as url:
        completion = asyncio.run(main(url))
    ids = list(request.token_ids)
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        assert abs(float(server._scores(ids, 0.8)[token]) - logprob) < 1e-5
        ids.append(token)


def test_a_judges_reply_and_what_was_asked() -> None:
    def ask(url: OpenAiUrl) -> Coroutine[Any, Any, str]:
        return url.chat([{"role": "user", "content": "good?"}], max_tokens=5, seed=3)

    reply, address = call(ask, said("yes"))
    path, _, body = address.asked[0]
    assert reply == "yes" and path == "/v1/chat/completions"
    assert body == {
        "model": "judge",
        "messages": [{"role": "user", "content": "good?"}],
        "temperature": 0.0,
        "max_tokens": 5,
        "seed": 3,
    }


# ---- overload


@pytest.mark.parametrize("do", [generate, hear_nothing, chat])
@pytest.mark.parametrize("busy", [408, 425, 429, 500, 503])
def test_an_overloaded_server_is_asked_again(busy: int, do: Call) -> None:
    good = {generate: answer(), hear_nothing: stream(piece(5, 0, finish_reason="stop")), chat: said("yes")}[do]
    result, address = call(do, *[as_json({}, status=busy)] * 3, b"", good)
    assert result and len(address.asked) == 5, "once more behind a connection that was closed unanswered"


def test_delays_grow_and_the_servers_own_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds != 0.01:  # the server's
            slept.append(seconds)
        await sleep(min(seconds, 0.001))

    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr(openai, "_LONGEST_DELAY", 0.1)
    waits = ["Retry-After: 7", "Retry-After: 99999", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT", "Retry-After: nan"]
    busy = [as_json({}, status=503)] * 6 + [as_json({}, wait, status=429) for wait in waits]
    call(chat, *busy, said("yes"))
    grown, told = slept[:6], slept[6:]
    for seconds, most in zip(grown, [0.02, 0.04, 0.08, 0.1, 0.1, 0.1], strict=True):
        assert most / 2 <= seconds <= most
    assert told[:2] == [7.0, 300.0] and all(seconds <= 0.1 for seconds in told[2:])


@pytest.mark.parametrize("do", [generate, hear_nothing, chat])
def test_a_server_that_stays_overloaded_is_named(do: Call) -> None:
    with pytest.raises(UnreachableError, match=r"http://127.0.0.1:\d+: /v1/.* answered 503.* \(asked for 0.3 s\)"):
        call(do, as_json({}, status=503), timeout=0.3)


@pytest.mark.parametrize("do", [generate, hear_nothing, chat])
def test_a_server_that_hangs(do: Call) -> None:
    with pytest.raises(UnreachableError, match=r"http://127.0.0.1:\d+: .*no (whole )?answer within 0.3 s"):
        call(do, None, timeout=0.3)


def test_a_server_that_is_not_there() -> None:
    async def main() -> None:
        url = OpenAiUrl("http://127.0.0.1:9", "judge", timeout=0.3)
        try:
            with pytest.raises(UnreachableError, match="http://127.0.0.1:9: .*ConnectError"):
                await url.chat([])
        finally:
            await url.close()

    asyncio.run(main())


def test_no_more_requests_are_in_flight_than_permitted() -> None:
    async def many(url: OpenAiUrl) -> list[str]:
        return await asyncio.gather(*(chat(url) for _ in range(12)))

    replies, address = call(many, said("yes"), at_once=3)
    assert replies == ["yes"] * 12 and address.most == 3


# ---- cancellation


@pytest.mark.parametrize(
    ("do", "answered"),
    [(generate, None), (chat, None), (hear_nothing, None), (hear_nothing, OPEN_STREAM)],
    ids=["completion", "chat", "stream", "stream behind a token"],
)
def test_a_call_that_is_cancelled_hangs_up(do: Call, answered: bytes | None) -> None:
    async def main() -> None:
        async with listening(answered) as address:
            url = OpenAiUrl(address.url, "judge", timeout=60.0, at_once=1)
            for _ in range(2):  # its place is free again
                task = asyncio.create_task(do(url))
                while not address.open:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                async with asyncio.timeout(5):
                    while address.open:
                        await asyncio.sleep(0.001)
            await url.close()

    asyncio.run(main())


# ---- answers that cannot be used


def without(name: str) -> bytes:
    return as_json({"choices": [{key: value for key, value in choice().items() if key != name}]})


BAD: list[tuple[Any, type[Exception], str]] = [
    (as_json([]), BadAnswerError, "no list of choices"),
    (as_json({"choices": [None]}), BadAnswerError, "no list of choices"),
    (as_json({"choices": []}), BadAnswerError, "finish_reason is None"),
    (answer(finish_reason="content_filter"), BadAnswerError, "finish_reason is 'content_filter'"),
    (without("token_ids"), ServerError, "returns no token ids: it must obey return_token_ids or"),
    (answer(token_ids=None), ServerError, "returns no token ids"),
    (answer(token_ids=[7, True]), BadAnswerError, r"token ids are \[7, True\]"),
    (answer(token_ids=[7, -1]), BadAnswerError, "token ids are"),
    (answer(token_ids="7"), BadAnswerError, "token ids are"),
    (answer(token_ids=[7] * 7), BadAnswerError, "has 7 tokens of completion 0: asked for 1 completions of at most 6"),
    (answer(index=1), BadAnswerError, "tokens of completion 1: asked for 1"),
    (without("logprobs"), BadAnswerError, "2 tokens and no log-probs"),
    (answer(logprobs={"token_logprobs": [-0.5]}), BadAnswerError, "2 tokens and 1 log-probs"),
    (answer(logprobs={"token_logprobs": [-0.5, None]}), BadAnswerError, "a log-prob is None"),
    (answer(logprobs={"token_logprobs": [-0.5, 0.5]}), BadAnswerError, "a log-prob is 0.5"),
    (answer(token_ids=None, logprobs={"tokens": ["token_id:x"]}), BadAnswerError, "token ids are None"),
    (with_headers(b"<html>welcome</html>"), BadAnswerError, "answered what is not JSON"),
    (as_json({}, status=400), ServerError, "/v1/completions answered 400"),
    (as_json({}, status=401), ServerError, "answered 401: .*; it needs the right api_key"),
    (as_json({}, "Location: http://127.0.0.1:1/", status=307), ServerError, "answered 307 and points to"),
    (with_headers(BOMB, "Content-Encoding: gzip"), BadAnswerError, "the answer is compressed"),
]


@pytest.mark.parametrize(("reply", "error", "words"), BAD)
def test_an_answer_that_cannot_be_used_is_not_asked_for_again(reply: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        call(generate, reply)
    assert "sampler." not in str(raised.value), "it is no server of the run's sampler"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (as_json({"choices": []}), "the answer has no message"),
        (as_json(None), "the answer has no message"),
        (said(None), "the message has no text"),
        (said([{"type": "text"}]), "the message has no text"),
    ],
)
def test_a_reply_without_a_text(reply: bytes, words: str) -> None:
    with pytest.raises(BadAnswerError, match=words):
        call(chat, reply)


@pytest.mark.parametrize("do", [generate, hear_nothing, chat])
def test_an_answer_that_never_ends_is_given_up(do: Call) -> None:
    def refused() -> None:
        with pytest.raises(BadAnswerError, match="is not read: it has more than 4 MiB"):
            call(do, b"HTTP/1.1 200 X\r\n\r\n" + b"data: [" * 4 * MIB)

    assert peak_of(refused) < 80 * MIB, "28 of them are the server's"


def test_a_stream_that_is_cut_short() -> None:
    """It is begun again as long as nobody has heard of it."""
    whole = stream(piece(5), piece(0, finish_reason="stop"))
    completion, address = call(hear_nothing, stream(last=""), whole)
    assert completion.token_ids == [5, 0] and len(address.asked) == 2
    heard: list[int] = []
    with pytest.raises(UnreachableError, match="the stream ended early, after 1 tokens"):
        call(lambda url: url.generate(asked(), heard.extend), stream(piece(5), last=""), whole)
    assert heard == [5]


def test_an_event_of_another_format() -> None:
    for event, words in (({"choices": 3}, "no list of choices"), ({"error": "died"}, "the stream says")):
        with pytest.raises(BadAnswerError, match=words):
            call(hear_nothing, stream(piece(5), event))


@pytest.mark.parametrize("error", [TypeError("mine"), TimeoutError("mine"), ValueError("mine")])
def test_an_error_of_the_listener_is_the_callers(error: Exception) -> None:
    def fails(tokens: Sequence[int]) -> None:
        raise error

    with pytest.raises(type(error), match="mine"):
        call(lambda url: url.generate(asked(), fails), stream(piece(5), piece(0, finish_reason="stop")))


def test_an_address_that_is_none_and_a_key_that_is_not_shown() -> None:
    with pytest.raises(ServerError, match="judge.example/v1 is no address of a server"):
        OpenAiUrl("judge.example/v1", "judge")
    with pytest.raises(ServerError) as raised:
        call(chat, as_json({"error": f"unknown key {KEY}"}, status=401), api_key=KEY)
    assert KEY not in str(raised.value)


def test_requests_of_a_prompt_are_each_a_request() -> None:
    async def both(url: OpenAiUrl) -> list[Completion]:
        request = asked()
        return await asyncio.gather(*(url.generate(replace(request, seed=(number,))) for number in range(2)))

    completions, address = call(both, answer())
    assert len(completions) == len(address.asked) == 2


@pytest.mark.parametrize(("replied", "rewarded"), [("Yes.", 1.0), (" no", 0.0)])
def test_the_reward_of_the_page_asks_a_judge(replied: str, rewarded: float, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read_page((ROOT / "docs/sampling.md").read_text(encoding="utf-8"), Path("docs/sampling.md"))
    (block,) = (block for block in page.of("python") if block.text.startswith("import asyncio"))
    names: dict[str, Any] = {}
    exec(compile(block.text, "docs/sampling.md", "exec"), names)
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def main() -> float:
        async with listening(said(replied)) as address:
            monkeypatch.setenv("JUDGE_URL", f"{address.url}/v1")
            reward: float = await asyncio.to_thread(names["reward"], "2 + 2", "4", answer="4")
            ((_, headers, body),) = address.asked
            assert headers["authorization"] == f"bearer {KEY}" and "2 + 2" in body["messages"][0]["content"]
            return reward

    assert asyncio.run(main()) == rewarded
