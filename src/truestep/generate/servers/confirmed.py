"""Work with completions of servers that a later probe has confirmed, as `Generator.map` runs it."""

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
    places: asyncio.Semaphore,  # limits the requests in flight
) -> list[R]:
    """Run `work` for all items. If a later probe does not confirm the completions of a result, its work is repeated."""
    results: dict[int, R] = {}

    async def attempt(index: int) -> None:
        try:
            results[index] = await work(items[index], used[index].generate)
        except Exception:
            if not used[index].lost:
                raise

    missing = list(range(len(items)))
    while missing:
        used = {index: _Recorder(fleet, places) for index in missing}
        await run_all([attempt(index) for index in missing])
        await fleet.confirm(
            {answer.server for each in used.values() for answer in each.answers if not answer.confirmed}
        )
        missing = [index for index, each in used.items() if not each.all_confirmed]
    return [results[index] for index in range(len(items))]


class _Recorder:
    """Completes requests, repeats them if a server is lost or gives up, and records which answers were used."""

    def __init__(self, fleet: Fleet, places: asyncio.Semaphore):
        self._fleet, self._places = fleet, places
        self.answers: list[ServedCompletions] = []
        self.lost = False  # True: a stream was lost after some of its tokens, so the work begins again

    @property
    def all_confirmed(self) -> bool:
        return not self.lost and all(answer.confirmed and not answer.void for answer in self.answers)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        failures, streamed = 0, False

        def pass_on(tokens: Sequence[int]) -> None:
            nonlocal streamed
            streamed = True
            assert on_tokens is not None
            on_tokens(tokens)

        while True:
            try:
                async with self._places:
                    completion = await self._fleet.generate(request, None if on_tokens is None else pass_on)
                if not completion.aborted:
                    self.answers.append(completion.answer)
                    return replace(completion, answer=None)
                problem: Exception = VoidedError()
            except (UnreachableError, VoidedError) as error:
                problem = error
                await asyncio.sleep(_RETRY_SECONDS)
            except BadAnswerError as error:
                failures, problem = failures + 1, error
                if failures == TRIES or streamed:
                    raise
            if streamed:  # the caller already has tokens of a completion that failed
                self.lost = True
                raise problem
