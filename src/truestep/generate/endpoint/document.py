"""A document that a program writes by requests to the endpoint."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from truestep.environments.episodes.answers import end_of
from truestep.environments.episodes.conversation import ConversationError
from truestep.environments.episodes.environment import Answer, End
from truestep.environments.episodes.program import CUT
from truestep.environments.process import fit
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.endpoint.branches import Branch, Branches, Shown
from truestep.generate.endpoint.errors import RequestError
from truestep.generate.endpoint.messages import to_client
from truestep.generate.endpoint.requests import Asked
from truestep.generate.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.generate.generator import Completion, DrawOptions, Generate, OnTokens, Request, run_all
from truestep.generate.play import EpisodeLimits, turn_of
from truestep.rollouts.episodes import TurnFacts, told_apart
from truestep.text import printable

_MOST_AT_ONCE = 256  # requests of one document
_LONGEST_TOKEN = 128  # characters; a text with more than this for each allowed token is not tokenised

OnChoice = Callable[
    [int, Sequence[int]], None
]  # called with a choice's number and the tokens drawn since its last call


@dataclass(frozen=True)
class Choice:
    """One completion of a request."""

    prompt: Sequence[int]
    completion: Completion
    shown: Shown  # as the program sees it
    reason: str  # why it ended: stop, length or tool_calls


class Document:
    """A document in progress. All of this runs in the generator's event loop."""

    def __init__(
        self,
        tokenizer: Any,
        generate: Generate,
        draw: DrawOptions,
        limits: EpisodeLimits,
        failed: Callable[[Exception], None],
        *,
        seed: tuple[int, ...] = (),
        name: str | None = None,
        obeys: bool = False,
        stops_by_text: bool = True,
    ):
        """`failed` is called with errors of the generator, which are not the program's fault. `obeys`: completions use
        the temperature, top_p and so on of each request instead of those in `draw`. `stops_by_text`: the generator
        supports stop texts."""
        self.tokenizer, self.draw, self.obeys = tokenizer, draw, obeys
        self._generate, self._limits, self._seed, self._name = generate, limits, seed, name
        self._stops_by_text, self._failed = stops_by_text, failed
        self._branches = Branches(tokenizer)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_begun = 0  # turns
        self.completions: list[Completion] = []
        self.turns: list[TurnFacts] = []  # one for each completion
        self.tools: tuple[str, ...] = ()  # the names of the tools that requests offered
        self.cut_by: str | None = None  # the limit that was reached
        self.rating: Rating | None = None  # the reward that was posted
        self.turn_rewards: list[float | None] = []
        self.group_id: str | None = None  # the group id that was posted, for `truestep serve`
        self.differs: str | None = None  # sampling options that a request asked for and did not get
        self.temperatures: set[float] = set()  # the temperatures of its completions
        self.is_closed = False

    @property
    def sequences(self) -> list[Any]:
        return self._branches.sequences

    def close(self) -> None:
        """End all requests, and accept no more."""
        self.is_closed = True
        for task in self._tasks:
            task.cancel()

    async def complete(self, asked: Asked, on_tokens: OnChoice | None = None) -> list[Choice]:
        """Complete a request. Raises RequestError."""
        if self.is_closed:
            raise RequestError("the document has ended", status=404, code="document_ended")
        if len(self._tasks) >= _MOST_AT_ONCE:
            raise RequestError(f"more than {_MOST_AT_ONCE} requests at once", status=429, code="too_many_requests")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._complete(asked, on_tokens)
        except RequestError:
            raise
        except Exception as error:  # not the program's fault
            self._failed(error)
            raise
        finally:
            self._tasks.discard(task)

    async def _complete(self, asked: Asked, on_tokens: OnChoice | None) -> list[Choice]:
        if asked.stop and not self._stops_by_text:
            raise RequestError("stop: servers that sample for a run take no stop texts", param="stop")
        # Otherwise a server would refuse the request, and this would count as the run's error.
        if max(asked.stop_ids, default=0) >= len(self.tokenizer):
            raise RequestError("stop_token_ids: one is not in the vocabulary", param="stop_token_ids")
        self.tools = told_apart([*self.tools, *(tool["function"]["name"] for tool in asked.tools)])
        if not self.obeys:
            self.differs = self.differs or asked.differs(self.draw)
        self._check_size(asked)
        try:
            branch = self._branches.open(asked.said, asked.tools)
        except ConversationError as error:
            raise RequestError(printable(error), param="messages") from None
        room = min(
            self._limits.tokens - len(branch.conversation.prompt),
            self.draw.max_new_tokens,
            asked.max_tokens or self.draw.max_new_tokens,
        )
        if room < 1:
            self._cut("max_episode_tokens", "context_length_exceeded", f"{self._limits.tokens} tokens")
        first, self._num_begun = self._num_begun, self._num_begun + asked.count
        if self._num_begun > self._limits.turns:
            self._cut("max_turns", "max_turns", f"{self._limits.turns} turns")
        if branch.conversation.is_thinking:
            on_tokens = None  # which part is reasoning is known only when the turn has ended
        branches = [branch, *(branch.again() for _ in range(asked.count - 1))]
        works = [
            self._one(asked, one, room, first + index, None if on_tokens is None else _of_choice(on_tokens, index))
            for index, one in enumerate(branches)
        ]
        return await run_all(works)

    def _check_size(self, asked: Asked) -> None:
        """Refuse a prompt that is too long, without tokenising it, because that would delay all other documents."""
        size = len(asked.said) if isinstance(asked.said, str | tuple) else len(str(asked.said)) + len(str(asked.tools))
        each = 1 if isinstance(asked.said, tuple) else _LONGEST_TOKEN
        if size > each * self._limits.tokens + _LONGEST_TOKEN:
            self._cut("max_episode_tokens", "context_length_exceeded", f"{self._limits.tokens} tokens")

    def _cut(self, limit: str, code: str, most: str) -> None:
        self.cut_by = self.cut_by or limit
        raise RequestError(f"{CUT}{limit}: {most}", code=code)

    async def _one(self, asked: Asked, branch: Branch, room: int, number: int, on_tokens: OnTokens | None) -> Choice:
        options = asked.options(self.draw, room, self.obeys)
        seed = (*self._seed, number) if number else self._seed
        if self.obeys and asked.draw.seed is not None:
            seed = (asked.draw.seed % 2**63, number)
        prompt, start = branch.conversation.prompt, time.perf_counter()
        completion = await self._drawn(Request(prompt, options, seed, self._name), on_tokens)
        seconds = time.perf_counter() - start
        self.completions.append(completion)
        self.temperatures.add(options.temperature)
        text, reason = "", "stop" if completion.stopped else "length"

        def show(answer: Answer) -> Shown:
            nonlocal text, reason
            written = cut_at_stop(self._decoded(completion.token_ids), asked.stop)
            self.turns.append(turn_of(answer, seconds, self.tools))
            if isinstance(asked.said, str):
                return written
            if isinstance(asked.said, tuple):
                return list(completion.token_ids)
            message = to_client(answer, number, cut_at_stop(answer.text, asked.stop), written)
            if "tool_calls" in message:
                reason = "tool_calls"
            return message

        shown = self._branches.add(branch, completion, show)
        return Choice(prompt, completion, shown, reason)

    async def _drawn(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        told = False

        def tell(tokens: Sequence[int]) -> None:
            nonlocal told
            told = True
            assert on_tokens is not None
            on_tokens(tokens)

        try:
            while True:
                completion = await self._generate(request, None if on_tokens is None else tell)
                if not completion.aborted:
                    return completion
                if told:  # its first tokens were sent already, and cannot be taken back
                    raise RequestError("new weights ended the completion: ask again", status=503)
        except (UnreachableError, VoidedError, BadAnswerError) as error:
            self._failed(error)
            raise RequestError("no completion can be drawn now", status=503) from error

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def post(self, body: Any) -> None:
        """Record the reward that the program posts, and optional rewards of its turns. Raises RequestError."""
        known = {"reward", "turn_rewards", *(("group_id",) if self.obeys else ())}
        if not isinstance(body, dict) or "reward" not in body or body.keys() - known:
            raise RequestError('expected {"reward": a number or its parts}, and turn_rewards if wanted', param="reward")
        if not isinstance(body.get("group_id", ""), str):
            raise RequestError("group_id: expected a text", param="group_id")
        self.group_id = body.get("group_id")
        try:
            self.rating, self.turn_rewards = rating_of_end(
                End(body["reward"], body.get("turn_rewards") or ()), len(self.completions)
            )
        except RewardError as error:
            raise RequestError(printable(error), param="reward") from None


def rating_of_end(end: End, turns: int) -> tuple[Rating, list[float | None]]:
    """Check the reward that a program gave. Raises RewardError."""
    found = end_of(end, "the program", turns)
    return fit(Rating.of(found["reward"], found["parts"]), "the program"), found["turn_rewards"]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop text, as OpenAI's clients get it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def _of_choice(on_tokens: OnChoice, number: int) -> OnTokens:
    return lambda tokens: on_tokens(number, tokens)
