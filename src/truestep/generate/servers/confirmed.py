"""Work with completions of servers that a later probe has confirmed, for evaluation."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from truestep.generate.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.generate.generator import Completion, Generate, OnTokens, Request, run_all
from truestep.generate.groups import TRIES
from truestep.generate.servers.fleet import Fleet, ServedCompletions

T = TypeVar("T")
R = TypeVar("R")

_RETRY_SECONDS = 0.05


async def confirmed_results(
    fleet: Fleet,
    items: Sequence[T],
    work: Callable[[T, Generate], Coroutine[Any, Any, R]],
    places: asyncio.Semaphore,  # for requests in flight
) -> list[R]:
    """Run `work` for all items. Each result is of completions that a later probe has confirmed, or is made again."""
    results: dict[int, R] = {}
    missing = list(range(len(items)))
    while missing:
        used = {index: _Recorder(fleet, places) for index in missing}
        made = await run_all([work(items[index], used[index].generate) for index in missing])
        results |= dict(zip(missing, made, strict=True))
        await fleet.confirm(
            {answer.server for each in used.values() for answer in each.answers if not answer.confirmed}
        )
        missing = [
            index for index, each in used.items() if any(answer.void or not answer.confirmed for answer in each.answers)
        ]
    return [results[index] for index in range(len(items))]


class _Recorder:
    """Completes requests, again where a server is lost or gives up, and records which answers were used."""

    def __init__(self, fleet: Fleet, places: asyncio.Semaphore):
        self._fleet, self._places = fleet, places
        self.answers: list[ServedCompletions] = []

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        failures = 0
        while True:
            try:
                async with self._places:
                    completion = await self._fleet.generate(request, on_tokens)
            except (UnreachableError, VoidedError):
                await asyncio.sleep(_RETRY_SECONDS)
            except BadAnswerError:
                failures += 1
                if failures == TRIES:
                    raise
            else:
                if not completion.aborted:
                    self.answers.append(completion.answer)
                    return replace(completion, answer=None)
