"""Plays episodes of several turns: the policy and its environment take turns, and sampled tokens are kept as
they are."""

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from truestep.environments.episodes.conversation import Conversation, ConversationError
from truestep.environments.episodes.environment import End
from truestep.environments.episodes.service import Episode as Handle
from truestep.environments.episodes.service import EpisodeService, Said
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.generator import Completion, Generate, Request
from truestep.generate.play import Episode, EpisodeLimits, Played, played_of, turn_of
from truestep.rollouts.episodes import OTHER_TOOL, TurnFacts, told_apart


@dataclass
class _Progress:
    """The state of an episode in progress."""

    conversation: Conversation
    tools: tuple[str, ...]  # the names of tools whose calls are counted separately
    completions: list[Completion] = field(default_factory=list)
    turns: list[TurnFacts] = field(default_factory=list)  # one for each completion
    rating: Rating | RewardError | None = None
    turn_rewards: list[float | None] = field(default_factory=list)
    ended_by: str = "environment"  # the environment, or the limit that cut the episode off
    in_environment: bool = False  # the environment has a call that it has not answered


class EnvironmentPlay:
    """Plays the episodes of an environment, with the processes of one service."""

    def __init__(self, service: EpisodeService, tokenizer: Any, limits: EpisodeLimits):
        self._service, self._tokenizer, self._limits = service, tokenizer, limits

    def close(self) -> None:
        self._service.close_all()

    async def play(self, episode: Episode, generate: Generate) -> Played:
        handle, progress = None, None
        try:
            begun = await asyncio.wrap_future(
                self._service.begin(episode.prompt.record, episode.reward_seed, episode.name)
            )
            handle = begun.episode
            tools = self._service.tools()
            conversation = Conversation(self._tokenizer, list(tools.values()))
            progress = _Progress(conversation, told_apart(tools))
            progress.conversation.begin(_said(begun.said))
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await self._converse(episode, handle, progress, generate)
            except TimeoutError:
                progress.ended_by = "episode_timeout"
                await self._cut(handle, progress)
        except (RewardError, ConversationError) as error:
            problem = error if isinstance(error, RewardError) else RewardError(str(error))
            if progress is None:
                return Played((), (), "", problem, truncated=False)
            progress.rating = problem
        finally:
            if handle is not None:
                self._service.close(handle)
        return self._played(progress)

    async def _converse(self, episode: Episode, handle: Handle, progress: _Progress, generate: Generate) -> None:
        """Let policy and environment take turns until the episode ends or is cut."""
        conversation, number, drawing = progress.conversation, 0, 0.0
        while True:
            prompt = conversation.prompt
            room = min(episode.draw.max_new_tokens, self._limits.tokens - len(prompt))
            if room < 1 or number == self._limits.turns:
                progress.ended_by = "max_episode_tokens" if room < 1 else "max_turns"
                break
            seed = (*episode.seed, number) if number else episode.seed
            request = Request(prompt, replace(episode.draw, max_new_tokens=room), seed, episode.name)
            start = time.perf_counter()
            completion = await generate(request)
            drawing += time.perf_counter() - start
            if completion.aborted:  # because of new weights; the turn is sampled again
                continue
            number += 1
            progress.completions.append(completion)
            answer = conversation.drawn(completion)
            turn = turn_of(answer, drawing, progress.tools)
            progress.turns.append(turn)
            drawing = 0.0
            if not completion.stopped:
                whole = room == episode.draw.max_new_tokens
                progress.ended_by = "max_new_tokens" if whole else "max_episode_tokens"
                break
            progress.in_environment = True
            with _timed(turn):
                reply = await asyncio.wrap_future(self._service.step(handle, answer))
            progress.in_environment = False
            _add_seconds(turn, handle.tool_seconds, progress.tools)
            if isinstance(reply, End):
                progress.rating, progress.turn_rewards = _rating(reply), list(reply.turn_rewards)
                return
            conversation.say(_said(reply))
        await self._cut(handle, progress)

    async def _cut(self, handle: Handle, progress: _Progress) -> None:
        """Ask for the reward of an episode that is cut off. If the environment has not answered its last call, the
        reward is 0."""
        if not progress.completions:
            raise RewardError(self._why_no_turn(progress.ended_by))
        progress.rating = Rating(0.0)
        if not progress.in_environment:
            progress.rating = await asyncio.wrap_future(self._service.cut(handle, progress.ended_by))

    def _why_no_turn(self, ended_by: str) -> str:
        value, advice = self._limits.seconds, "raise the limit"
        if ended_by == "max_episode_tokens":
            value, advice = self._limits.tokens, "raise the limit, or shorten the prompts"
        return (
            f"sampler.{ended_by}: {value:,.12g} ended an episode before the policy drew a token, so there is nothing "
            f"to learn from the episode: {advice}"
        )

    def _played(self, progress: _Progress) -> Played:
        assert progress.rating is not None
        return played_of(
            progress.conversation.sequences,
            progress.completions,
            progress.rating,
            progress.turn_rewards,
            ended_by=progress.ended_by,
            turns=progress.turns,
            tools=progress.tools,
            tokenizer=self._tokenizer,
        )


def _add_seconds(turn: TurnFacts, seconds: Mapping[str, float], known: Collection[str]) -> None:
    """Add the seconds that the episode's process measured for the tools that the policy called."""
    for name, spent in seconds.items():
        use = turn.tools.get(name if name in known else OTHER_TOOL)
        if use is not None:
            use.seconds = (use.seconds or 0.0) + spent


@contextmanager
def _timed(turn: TurnFacts) -> Iterator[None]:
    """Measure how long the environment takes, even if a time limit ends it."""
    start = time.perf_counter()
    try:
        yield
    finally:
        turn.environment = time.perf_counter() - start


def _said(said: Said) -> Any:
    if said.messages is not None:
        return said.messages
    return said.tokens if said.text is None else said.text


def _rating(end: End) -> Rating:
    assert isinstance(end.reward, Rating)
    return end.reward
