"""Plays episodes: the policy's turns and the answers to them, up to a finished document.

With a reward function, an episode has one turn. `environment` and `command` play episodes of several turns.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from truestep.environments.episodes.conversation import Sequence as ConversationSequence
from truestep.environments.episodes.environment import Answer
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.generator import Completion, DrawOptions, Generate, Request
from truestep.rollouts.episodes import OTHER_TOOL, ToolUse, TurnFacts
from truestep.rollouts.sequences import join
from truestep.types import ROUTES, Rollout, Turn


@dataclass(frozen=True)
class Episode:
    """An episode to be played."""

    prompt: Prompt
    draw: DrawOptions
    seed: tuple[int, ...]  # the seed of the draws of its first turn
    name: str | None = None  # requests with one name go to the server whose cache has their tokens

    @property
    def reward_seed(self) -> str:
        """The seed of the random numbers that the episode's reward or environment draws."""
        return " ".join(map(str, self.seed))


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits at which an episode is cut off."""

    turns: int  # the most turns of the policy
    tokens: int  # the most tokens of a sequence
    seconds: float = math.inf


@dataclass(frozen=True)
class PlayedSequence:
    """One sequence of tokens, as the policy saw it."""

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]  # true: the policy sampled the token
    logprobs: Sequence[float]  # log-probs of the sampled tokens; other entries have no meaning
    versions: Sequence[int]  # weight versions that sampled the tokens; other entries have no meaning. Empty: unknown
    turns: tuple[Turn, ...] = ()
    # [tokens, layers, k] the experts of the tokens that the model processed; None: unknown.
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class Played:
    """An episode that has ended."""

    sequences: Sequence[PlayedSequence]
    completions: Sequence[Completion]  # in the order received
    text: str  # the text that rewards and people read
    rating: Rating | RewardError  # the reward, or why there is none
    truncated: bool  # a limit of tokens, turns or time cut it off
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_drawn(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def aborted(self) -> bool:
        """True if a server gave up a completion because of new weights. Then the episode is not trained on."""
        return any(completion.aborted for completion in self.completions)

    def document(self, name: str, prompt: Prompt, temperature: float) -> Rollout:
        """Make a document of the episode. It has one sequence or several."""
        rating = None if isinstance(self.rating, RewardError) else self.rating
        named = {"prompt_id": prompt.id, "source": prompt.source} if prompt.source else {"prompt_id": prompt.id}
        metadata = {**named, **self.metadata, **_of_completions(self.completions)}
        shared: dict[str, Any] = {
            "reward": None if rating is None else float(rating),
            "rewards": {} if rating is None else dict(rating.parts),
            "truncated": self.truncated,
            "temperature": temperature,
            "metadata": metadata,
        }
        sequences = [sequence for sequence in self.sequences if any(sequence.loss_mask)]
        if len(sequences) == 1:
            return rollout_of(sequences[0], id=name, **shared)
        shared |= {"document_id": name, "num_sequences": len(sequences)}
        return join([rollout_of(one, id=f"{name}.{number}", **shared) for number, one in enumerate(sequences)])


def _of_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    known: dict[str, Any] = {"stopped": all(completion.stopped for completion in completions)}
    servers = list(dict.fromkeys(one.server for one in completions if one.server is not None))
    if servers:
        known["server"] = servers[0] if len(servers) == 1 else servers
    truncated = [one.truncated_logprobs for one in completions if one.truncated_logprobs is not None]
    if truncated:
        known["truncated_logprobs"] = [value for each in truncated for value in each]
    return known


def rollout_of(sequence: PlayedSequence, **others: Any) -> Rollout:
    """Make a document, or a record of one, from a sequence. `others`: its other fields."""
    mask = np.array(sequence.loss_mask, dtype=bool)
    versions = np.array(sequence.versions, dtype=np.int64) if len(sequence.versions) else None
    routes = sequence.routes
    if versions is not None:
        versions[~mask] = versions[mask][0]
    return Rollout(
        input_ids=np.array(sequence.input_ids, dtype=np.int64),
        loss_mask=mask,
        logprobs=np.where(mask, np.array(sequence.logprobs, dtype=np.float32), np.float32(0)),
        model_version=versions,
        turns=sequence.turns,
        token_fields={} if routes is None else {ROUTES: routes[: len(mask)]},
        **others,
    )


def sequence_of(prompt: Sequence[int], completion: Completion) -> PlayedSequence:
    """Return a prompt and its completion. All tokens of the completion are labels."""
    drawn = len(completion.token_ids)
    return PlayedSequence(
        (*prompt, *completion.token_ids),
        [False] * len(prompt) + [True] * drawn,
        [0.0] * len(prompt) + list(completion.logprobs),
        [0] * len(prompt) + list(completion.versions) if len(completion.versions) == drawn else (),
        routes=completion.routes,
    )


def turn_of(answer: Answer, drawing: float, known: Collection[str]) -> TurnFacts:
    """Count the tool calls of a turn."""
    turn = TurnFacts(drawing)
    for call in answer.tool_calls:
        if call.problem is not None:
            turn.malformed += 1
        else:
            turn.tools.setdefault(call.name if call.name in known else OTHER_TOOL, ToolUse()).calls += 1
    return turn


def played_sequences(
    sequences: Sequence[ConversationSequence], rewards: Sequence[float | None]
) -> list[PlayedSequence]:
    """Return the sequences up to their last drawn tokens, with the rewards of the policy's turns, in order."""
    played, left = [], iter(rewards)
    for sequence in sequences:
        ids, mask = sequence.input_ids, sequence.loss_mask
        # Leave out the tokens after the last sampled one: computing them is useless, and they might not fit.
        end = max((turn.end for turn in sequence.turns if mask[turn.start]), default=0)
        turns = tuple(
            replace(turn, reward=next(left, None)) if mask[turn.start] else turn
            for turn in sequence.turns
            if turn.end <= end
        )
        logprobs, versions = sequence.logprobs[:end], sequence.versions[:end]
        played.append(PlayedSequence(ids[:end], mask[:end], logprobs, versions, turns, sequence.routes))
    return played


def played_of(
    sequences: Sequence[ConversationSequence],
    completions: Sequence[Completion],
    rating: Rating | RewardError,
    turn_rewards: Sequence[float | None],
    *,
    ended_by: str,
    turns: Sequence[TurnFacts],
    tools: Sequence[str],
    tokenizer: Any,
) -> Played:
    """Return a finished episode of several turns. `turns` are facts about the policy's turns, `tools` the names of the
    tools that it could call."""
    metadata = {
        "ended_by": ended_by,
        "num_turns": len(turns),
        "num_tool_calls": sum(turn.calls for turn in turns),
        "tools": list(tools),
        "by_turn": [turn.line() for turn in turns],
    }
    return Played(
        played_sequences(sequences, turn_rewards),
        completions,
        tokenizer.decode(sequences[-1].input_ids if sequences else []),
        rating,
        truncated=ended_by != "environment",
        metadata=metadata,
    )


class Plays(Protocol):
    """Plays episodes, many at a time."""

    async def play(self, episode: Episode, generate: Generate) -> Played:
        """Play an episode. Errors of `generate` are raised. An error of the reward or the environment becomes the
        episode's rating."""
        ...

    def close(self) -> None: ...


class SingleTurn:
    """Episodes of one turn, which a reward function rates."""

    def __init__(self, rater: Rates, read: Callable[[Sequence[int]], str]):
        """`read`: decodes tokens to the text that rewards get."""
        self._rater, self._read = rater, read

    async def play(self, episode: Episode, generate: Generate) -> Played:
        request = Request(episode.prompt.input_ids, episode.draw, episode.seed)
        completion = await generate(request)
        text = self._read(completion.token_ids)
        rating: Rating | RewardError = Rating()
        if not completion.aborted:
            try:
                future = self._rater.submit(episode.prompt, text, episode.reward_seed)
                rating = await asyncio.wrap_future(future)
            except RewardError as error:
                rating = error
        sequences = (sequence_of(request.token_ids, completion),)
        return Played(sequences, (completion,), text, rating, not completion.stopped)

    def close(self) -> None:
        self._rater.close()
