"""Evaluation by inference servers: completions of held-out prompts with the current weights, and their rewards."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.completions import Completion, DecodeOptions, Request
from truestep.generate.groups import TRIES
from truestep.generate.rewarded import Rated
from truestep.generate.servers.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.generate.servers.fleet import Fleet, ServedCompletions
from truestep.generate.servers.protocol import CompletionRequest

_RETRY_SECONDS = 0.05


class ServerEvaluation:
    """Requests one completion of each prompt from a fleet, again if it is void, and rates each when it arrives."""

    def __init__(
        self,
        fleet: Fleet,
        options: DecodeOptions,
        vocabulary_size: int,
        rater: Rates,
        read: Callable[[Sequence[int]], str],
        at_once: int,
    ):
        self._fleet, self._options, self._size = fleet, options, vocabulary_size
        self._rater, self._read, self._places = rater, read, asyncio.Semaphore(at_once)

    async def run(self, prompts: Sequence[Prompt], requests: Sequence[Request]) -> list[Rated]:
        """Return the rated completions of all requests. Each is confirmed by a later probe, or requested again."""
        done: dict[int, tuple[Rated, ServedCompletions | None]] = {}
        missing = list(range(len(requests)))
        while missing:
            answered = await asyncio.gather(*(self._one(prompts[index], requests[index]) for index in missing))
            done |= dict(zip(missing, answered, strict=True))
            answers = [answer for _, answer in answered if answer is not None]
            await self._fleet.confirm({answer.server for answer in answers if not answer.confirmed})
            missing = [
                index
                for index, (_, answer) in done.items()
                if answer is not None and (answer.void or not answer.confirmed)
            ]
        return [done[index][0] for index in range(len(requests))]

    async def _one(self, prompt: Prompt, request: Request) -> tuple[Rated, ServedCompletions | None]:
        failures, reason = 0, ""
        while failures < TRIES:
            try:
                async with self._places:
                    answer = await self._fleet.ask(self._request(request))
            except (UnreachableError, VoidedError):
                await asyncio.sleep(_RETRY_SECONDS)
            except BadAnswerError as error:
                failures, reason = failures + 1, f"the server's answer is bad: {error}"
            else:
                (choice,) = answer.choices
                if not choice.aborted:
                    text = self._read(choice.token_ids)
                    completion = Completion(choice.token_ids, choice.logprobs, choice.stopped)
                    rating = await self._rate(prompt, text, request)
                    return Rated(completion, text, rating, answer.server.url), answer
        return Rated(Completion([], [], stopped=False), "", RewardError(reason)), None

    def _request(self, request: Request) -> CompletionRequest:
        options = self._options
        return CompletionRequest(
            request.input_ids, 1, options.temperature, options.max_new_tokens, options.stop_ids, self._size
        )

    async def _rate(self, prompt: Prompt, text: str, request: Request) -> Rating | RewardError:
        rating: Future[Any] = self._rater.submit(prompt, text, " ".join(map(str, request.seed)))
        try:
            rated: Rating = await asyncio.wrap_future(rating)
        except RewardError as error:
            return error
        return rated
