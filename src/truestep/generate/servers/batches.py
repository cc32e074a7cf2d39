"""Sends equal requests that are made at once as one. So a group's requests become one request for several
completions."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from truestep.generate.generator import Completion, OnTokens, Request

# A function that requests a number of completions from a server.
Ask = Callable[[Request, int, OnTokens | None], Awaitable[Sequence[Completion]]]


@dataclass(eq=False)
class _Batch:
    request: Request
    on_tokens: OnTokens | None
    callers: list[asyncio.Future[Completion]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None  # None: not sent yet


class Batches:
    """Requests that wait for the end of this turn of the event loop, and those that were sent."""

    def __init__(self, ask: Ask):
        self._ask = ask
        self._unsent: dict[object, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        batch = self._join(request, on_tokens)
        caller: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        batch.callers.append(caller)
        try:
            return await caller
        finally:
            if batch.task is not None and all(other.done() for other in batch.callers):
                batch.task.cancel()  # nobody waits for the server's answer any more

    def _join(self, request: Request, on_tokens: OnTokens | None) -> _Batch:
        """Return the batch of equal requests. A streamed request has its own batch. So has a greedy one, because vLLM
        refuses to give several greedy completions."""
        key: object = (request.token_ids, request.options, request.session)
        if on_tokens is not None or request.options.temperature == 0:
            key = object()
        batch = self._unsent.get(key)
        if batch is None:
            batch = self._unsent[key] = _Batch(request, on_tokens)
            asyncio.get_running_loop().call_soon(self._send, key)
        return batch

    def _send(self, key: object) -> None:
        batch = self._unsent.pop(key)
        batch.callers = [caller for caller in batch.callers if not caller.done()]
        if batch.callers:
            batch.task = asyncio.get_running_loop().create_task(self._answer(batch))
            self._tasks.add(batch.task)
            batch.task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: _Batch) -> None:
        try:
            choices = await self._ask(batch.request, len(batch.callers), batch.on_tokens)
        except Exception as error:
            for caller in batch.callers:
                if not caller.done():
                    caller.set_exception(error)
        else:
            for caller, choice in zip(batch.callers, choices, strict=True):
                if not caller.done():
                    caller.set_result(choice)
        finally:
            for caller in batch.callers:
                caller.cancel()  # this matters only if this task was cancelled; otherwise all callers are done

    async def close(self) -> None:
        """Cancel all requests, and wait until their connections are closed."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
