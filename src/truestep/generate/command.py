"""Plays episodes that request completions from the endpoint: programs, and other environments that call the policy
themselves. Each episode has a key, which names its document."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from truestep.environments.episodes.environment import Answer
from truestep.environments.episodes.program import RUNNING
from truestep.environments.episodes.service import Episode as Handle
from truestep.environments.episodes.service import EpisodeError, EpisodeService
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.endpoint.document import Document
from truestep.generate.endpoint.errors import RequestError
from truestep.generate.endpoint.keys import SecretKeys, Served
from truestep.generate.endpoint.server import Endpoint
from truestep.generate.generator import Generate
from truestep.generate.play import Episode, EpisodeLimits, Played, played_of

_NO_REWARD = (
    "the program gave no reward: it posts one to $OPENAI_BASE_URL/documents/$OPENAI_API_KEY/reward, or its last line "
    'is {"reward": a number or its parts}'
)


class CommandPlay:
    def __init__(
        self,
        service: EpisodeService,
        tokenizer: Any,
        limits: EpisodeLimits,
        *,
        stops_by_text: bool,
        say: Callable[[str], None],
        longest_step: float = 10.0,
    ):
        """`stops_by_text`: the generator supports stop texts. `say` shows a message. `longest_step`: the most seconds
        of one wait for the end of an episode. It must be less than the time limit of a call."""
        self._service, self._tokenizer, self._limits = service, tokenizer, limits
        self._stops_by_text, self._say, self._longest_step = stops_by_text, say, longest_step
        self._keys = SecretKeys()
        self._endpoint = Endpoint(self._keys, "policy")
        self._has_said = False

    def close(self) -> None:
        self._service.close_all()
        self._endpoint.close()

    async def play(self, episode: Episode, generate: Generate) -> Played:
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        document = Document(
            self._tokenizer,
            generate,
            episode.draw,
            self._limits,
            lambda error: None if failed.done() else failed.set_result(error),
            seed=episode.seed,
            name=episode.name,
            stops_by_text=self._stops_by_text,
        )
        key, handle = self._keys.add(Served(document)), None
        cut_by, problem = None, None
        try:
            where = {"url": self._endpoint.url, "key": key}
            given = {**where, "row": episode.prompt.record, "seconds": self._longest_step}
            begun = await asyncio.wrap_future(self._service.begin(given, episode.reward_seed, episode.name))
            handle = begun.episode
            async with asyncio.timeout(self._limits.seconds):
                await self._until_end(handle, document, failed)
        except TimeoutError:
            cut_by = "episode_timeout"
        except RewardError as error:
            problem = error  # after a limit was reached, the program often fails because of it
        finally:
            self._keys.remove(key)
            document.close()
            if handle is not None:
                self._service.close(handle)
        return self._played(document, document.cut_by or cut_by, problem)

    async def _until_end(self, handle: Handle, document: Document, failed: "asyncio.Future[Exception]") -> None:
        """Wait for the program's end. Raise an error of the generator as it is."""
        last = RUNNING
        while last == RUNNING:
            stepping = asyncio.wrap_future(self._service.step(handle, Answer("")))
            waits: set[asyncio.Future[Any]] = {stepping, failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                stepping.cancel()
                raise failed.result()
            last = getattr(stepping.result(), "text", None) or ""
        if document.rating is None:
            try:
                document.post(json.loads(last))
            except (ValueError, RecursionError, RequestError):
                if document.cut_by is None:
                    raise self._service.judge(handle, EpisodeError(_NO_REWARD)) from None
        self._service.judge(handle, _rating_of(document))

    def _played(self, document: Document, cut_by: str | None, problem: RewardError | None) -> Played:
        if document.differs is not None and not self._has_said:
            self._has_said = True
            self._say(
                f"sampler.environment: a program asked for {document.differs}, but completions to train on are drawn "
                "as the sampler's section says"
            )
        rating: Rating | RewardError = _rating_of(document)
        if problem is not None and document.cut_by is None:
            rating = problem
        elif not document.completions:
            rating = RewardError("the program asked for no completion, so there is nothing to learn from")
        return played_of(
            document.sequences,
            document.completions,
            rating,
            document.turn_rewards,
            ended_by=cut_by or "environment",
            turns=document.turns,
            tools=document.tools,
            tokenizer=self._tokenizer,
        )


def _rating_of(document: Document) -> Rating:
    """Return the reward that was posted, with its parts; 0 if none was posted."""
    return Rating(0.0) if document.rating is None else document.rating
