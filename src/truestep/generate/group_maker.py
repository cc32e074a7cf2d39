"""Makes groups: asks for completions of a prompt, rates them, and asks again for those that cannot be used."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.generate.generator import Completion, DrawOptions, Generate, Request, run_all
from truestep.generate.groups import DRAWS, TRIES, reject, stopping_error, to_rollout
from truestep.types import Rejected, Rollout

_CHECKED_DRAWS = 4  # a random stream of its own; that of the probes is 3
_RETRY_SECONDS = 0.05  # before the next server is asked; the one that failed gets no requests until it is recovered

Rate = Callable[[Prompt, str, str], Awaitable[Rating]]  # prompt, text of the completion, seed of the reward's draws


@dataclass(frozen=True)
class GroupOptions:
    """Options of every group and of its requests."""

    group_size: int
    seed: int
    draw: DrawOptions
    stop_at_rejected: bool = False
    check_share: float = 0.0  # fraction of completions whose log-probs are compared with the policy's on arrival


def awaited(rater: Rates) -> Rate:
    """Return the rewards of a reward service as coroutines."""

    async def rate(prompt: Prompt, text: str, seed: str) -> Rating:
        return await asyncio.wrap_future(rater.submit(prompt, text, seed))

    return rate


def seed_text(request: Request) -> str:
    """Return the seed of the random numbers that a reward draws for a completion."""
    return " ".join(map(str, request.seed))


@dataclass(frozen=True)
class Member:
    """A rated completion, as a document and as it came."""

    rollout: Rollout
    completion: Completion


@dataclass(eq=False)
class Group:
    """The completions of one prompt that are rated so far."""

    number: int
    prompt: Prompt
    members: list[Member] = field(default_factory=list)
    num_asked: int = 0  # completions asked for so far
    num_drops: int = 0  # times that it was dropped as too stale

    @property
    def version(self) -> int:
        """The version of its oldest token."""
        return min(min(member.completion.versions) for member in self.members)


@dataclass(frozen=True)
class _Rated:
    completion: Completion
    text: str
    rating: Rating | RewardError


class GroupMaker:
    """Makes groups, many at a time."""

    def __init__(
        self,
        options: GroupOptions,
        rate: Rate,
        read: Callable[[Sequence[int]], str],
        note_progress: Callable[[], None] = lambda: None,
    ):
        """`read`: decodes tokens to the text that rewards get. `note_progress` is called when completions are rated."""
        self._options, self._rate, self._read, self._note_progress = options, rate, read, note_progress
        self.counts: Counter[str] = Counter()  # unused completions, by reason
        self.tokens = 0  # of all completions
        self.rejected: deque[Rejected] = deque()
        self.arrived: deque[Rollout] = deque()  # `check_share` of the completions; the trainer's thread takes them
        self._draw = random.Random(f"{options.seed} {_CHECKED_DRAWS}")

    def reject(self, group: Group, name: str, reason: str | RewardError, text: str | None = None) -> None:
        """Record a completion that is not trained on. `text`: what it says, if that is known."""
        self.rejected.append(reject(group.prompt, group.number, name, reason, text))

    async def make(self, group: Group, generate: Generate) -> str | None:
        """Ask for completions and rate them until the group is complete. Return None, or the last problem if the group
        is given up."""
        failures, reason = 0, ""
        while (missing := self._options.group_size - len(group.members)) > 0:
            if failures == TRIES:
                self._give_up(group)
                return reason
            first = group.num_asked
            group.num_asked += missing
            numbers = range(first, first + missing)
            answers = await run_all([self._one(group, number, generate) for number in numbers])
            if problems := self._add(group, first, answers):
                failures, reason = failures + 1, problems[0]
            if any(isinstance(answer, UnreachableError) for answer in answers):
                await asyncio.sleep(_RETRY_SECONDS)
        return None

    def _give_up(self, group: Group) -> None:
        reason = f"its group could not be completed: {len(group.members)} of {group.num_asked} completions rated"
        for member in group.members:
            self.reject(group, member.rollout.id, reason)

    async def _one(self, group: Group, number: int, generate: Generate) -> _Rated | Exception | None:
        """Ask for a completion and rate it. Return what went wrong instead, or None if a server gave it up."""
        options = self._options
        request = Request(group.prompt.input_ids, options.draw, (options.seed, DRAWS, group.number, number))
        try:
            completion = await generate(request)
        except (UnreachableError, VoidedError, BadAnswerError) as error:
            return error
        if completion.aborted:
            return None
        text = self._read(completion.token_ids)
        self.tokens += len(completion.token_ids)
        rating: Rating | RewardError
        try:
            rating = await self._rate(group.prompt, text, seed_text(request))
        except RewardError as error:
            if options.stop_at_rejected:
                raise stopping_error(group.prompt, error) from error
            rating = error
        self._note_progress()  # rewards may take long
        return _Rated(completion, text, rating)

    def _add(self, group: Group, first: int, answers: Sequence[_Rated | Exception | None]) -> list[str]:
        """Add rated completions to the group. Return the problems of others, which count as a failure."""
        problems: list[str] = []
        for number, answer in enumerate(answers, first):
            name = f"{group.number}-{number}"
            if answer is None:
                self.counts["aborted"] += 1
            elif isinstance(answer, UnreachableError):
                self.counts["unanswered"] += 1
            elif isinstance(answer, VoidedError):
                self.counts["void"] += 1
            elif isinstance(answer, Exception):
                if answer not in answers[: number - first]:  # one answer of a server for several completions
                    self.counts["bad_answers"] += 1
                    problems.append(f"the server's answer is bad: {answer}")
                    self.reject(group, name, problems[-1])
            elif isinstance(answer.rating, RewardError):
                self.reject(group, name, answer.rating, answer.text)
                problems.append(str(answer.rating))
            elif answer.completion.answer is None or not answer.completion.answer.void:
                group.members.append(self._member(name, group.prompt, answer.completion, answer.rating))
        return problems

    def _member(self, name: str, prompt: Prompt, completion: Completion, rating: Rating) -> Member:
        metadata: dict[str, Any] = {"stopped": completion.stopped}
        if completion.server is not None:
            metadata["server"] = completion.server
        if completion.truncated_logprobs is not None:
            metadata["truncated_logprobs"] = completion.truncated_logprobs
        rollout = to_rollout(
            name,
            prompt,
            completion.token_ids,
            completion.logprobs,
            temperature=self._options.draw.temperature,
            versions=completion.versions,
            rating=rating,
            truncated=not completion.stopped,
            metadata=metadata,
        )
        if self._draw.random() < self._options.check_share:
            self.arrived.append(rollout)
        return Member(rollout, completion)
