"""Requests of a fleet as they reach servers: how many, with what in them, and when the connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.address import Address, as_json, listening
from server.fake import VOCABULARY, asked
from truestep.generate.errors import UnreachableError
from truestep.generate.generator import run_all
from truestep.generate.servers.fleet import Fleet
from truestep.generate.servers.http import HttpServer
from truestep.generate.servers.sglang import Sglang
from truestep.generate.servers.vllm import Vllm


def vllm_answer(n: int) -> bytes:
    logprobs = {"token_logprobs": [-1.0, -1.0]}
    made = {"token_ids": [7, 0], "logprobs": logprobs, "finish_reason": "stop"}
    return as_json({"choices": [made | {"index": index, "token_ids": [7 + index, 0]} for index in range(n)]})


def sglang_answer(n: int) -> bytes:
    def one(index: int) -> dict[str, Any]:
        scored = [[-1.0, 7 + index], [-1.0, 0]]
        return {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": scored}}

    return as_json([one(index) for index in range(n)])


def open_stream(event: Any) -> bytes:
    """A stream that goes on for ever behind its first event."""
    return b"HTTP/1.1 200 X\r\n\r\n" + f"data: {json.dumps(event)}\n\n".encode() + b"..."


VLLM_EVENT = {"choices": [{"index": 0, "token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}}]}
SGLANG_EVENT = {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 7]]}}
KINDS = [(Vllm, vllm_answer, VLLM_EVENT), (Sglang, sglang_answer, SGLANG_EVENT)]


@contextlib.asynccontextmanager
async def fleet_of(kind: type[HttpServer], *answers: bytes | None) -> AsyncIterator[tuple[Fleet, Address]]:
    """A fleet of one server that has weights, as if they were published."""
    async with listening(*answers) as address:
        fleet = Fleet(
            [kind(address.url, "m", None, 30.0)],
            vocabulary_size=VOCABULARY,
            pause="wait",
            tolerance=0.01,
            on_void=lambda: None,
            on_fatal=lambda error: None,
        )
        fleet.servers[0].version, fleet.servers[0].is_open = 0, True
        try:
            yield fleet, address
        finally:
            await fleet.close()


async def hung_up(address: Address) -> None:
    async with asyncio.timeout(5):
        while address.open:
            await asyncio.sleep(0.001)


async def reached(address: Address) -> None:
    async with asyncio.timeout(5):
        while not address.open:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("kind", "answer", "event"), KINDS)
def test_a_group_is_one_request_for_several_completions(kind: type[HttpServer], answer: Any, event: Any) -> None:
    async def main() -> None:
        async with fleet_of(kind, answer(5)) as (fleet, address):
            completions = await run_all([fleet.generate(asked()) for _ in range(5)])
            ((_, _, body),) = address.asked
            assert (body.get("n") or body["sampling_params"]["n"]) == 5
            assert [completion.token_ids for completion in completions] == [[7 + index, 0] for index in range(5)]
            assert {completion.server for completion in completions} == {address.url}

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("kind", "answer", "event"), KINDS)
def test_the_connection_ends_when_nobody_waits(kind: type[HttpServer], answer: Any, event: Any, streamed: bool) -> None:
    async def main() -> None:
        async with fleet_of(kind, open_stream(event) if streamed else None) as (fleet, address):
            heard: list[int] = []
            callers = 1 if streamed else 2
            tasks = [
                asyncio.create_task(fleet.generate(asked(), heard.extend if streamed else None)) for _ in range(callers)
            ]
            await reached(address)
            while streamed and not heard:
                await asyncio.sleep(0.001)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.sleep(0.05)
            assert address.open == 1, "one still waits"
            tasks[0].cancel()
            await hung_up(address)
            assert len(address.asked) == 1 and heard == [7] * streamed
            assert fleet.servers[0].is_open and not fleet.servers[0].in_flight

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("kind", "answer", "event"), KINDS)
def test_a_fleet_that_closes_ends_its_connections(
    kind: type[HttpServer], answer: Any, event: Any, streamed: bool
) -> None:
    async def main() -> None:
        async with fleet_of(kind, open_stream(event) if streamed else None) as (fleet, address):
            listener = [].extend if streamed else None  # type: ignore[var-annotated]
            waiting = asyncio.create_task(fleet.generate(asked(), listener))
            await reached(address)
            await fleet.close()
            await hung_up(address)
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_many_requests_leave_nothing_behind() -> None:
    """Answered, cancelled and refused."""

    async def main() -> None:
        async with fleet_of(Vllm, vllm_answer(1)) as (fleet, address):
            for number in range(60):
                request = asked((3, number % 7), session=f"s{number % 5}")
                await fleet.generate(request)
                address.answers[:] = [None]
                task = asyncio.create_task(fleet.generate(request))
                await reached(address)
                task.cancel()
                await hung_up(address)
                address.answers[:] = [as_json({"detail": "busy"}, status=503)]
                with pytest.raises(UnreachableError):
                    await fleet.generate(request)
                fleet.servers[0].is_open, fleet.servers[0].lost_at = True, None
                for recovery in list(fleet._tasks):
                    recovery.cancel()
                address.answers[:] = [vllm_answer(1)]
            await asyncio.sleep(0.01)
            assert not fleet._batches._unsent and not fleet._batches._tasks and not fleet._tasks
            assert len(fleet._sessions) == 5 and fleet.servers[0].in_flight == 0
            assert len(fleet.servers[0].unconfirmed) == 60, "until the next probe"

    asyncio.run(main())
