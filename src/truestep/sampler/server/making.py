"""Make a group: ask for completions of a prompt, have them rated, and make again what cannot be used."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError
from truestep.sampler.groups import TRIES, to_rollout
from truestep.sampler.server.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.sampler.server.fleet import Answer, Fleet, Server
from truestep.sampler.server.protocol import Asked, Choice
from truestep.types import Rejected, Rollout

_RETRY_SECONDS = 0.05  # before the next server is asked; the one that failed is closed until it is back


@dataclass(frozen=True)
class SamplingOptions:
    """Options of every request and group."""

    group_size: int
    seed: int
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    vocabulary_size: int
    stop_at_rejected: bool


@dataclass(frozen=True)
class Member:
    """A rated completion and the answer that it came in."""

    rollout: Rollout
    answer: Answer


@dataclass(eq=False)
class Group:
    """Completions of one prompt, as many as there are so far."""

    number: int
    prompt: Prompt
    members: list[Member] = field(default_factory=list)
    asked: int = 0  # completions so far
    dropped: int = 0  # times that it came too late

    @property
    def version(self) -> int:
        """The version of its oldest token."""
        return min(_oldest(member.rollout) for member in self.members)

    @property
    def unconfirmed(self) -> set[Server]:
        return {member.answer.server for member in self.members if not member.answer.confirmed}


def _oldest(rollout: Rollout) -> int:
    assert rollout.model_version is not None
    return int(rollout.model_version[rollout.loss_mask].min())


class GroupMaker:
    """Makes groups, many at a time."""

    def __init__(
        self,
        fleet: Fleet,
        options: SamplingOptions,
        rate: Callable[[Prompt, str], Awaitable[float]],
        read: Callable[[Sequence[int]], str],
    ):
        self._fleet, self._options = fleet, options
        self._rate, self._read = rate, read
        self.counts: Counter[str] = Counter()
        self.rejected: deque[Rejected] = deque()
        self.last_arrival = -math.inf  # on the loop's clock

    def reject(self, group: Group, name: str, reason: str) -> None:
        """Note a completion that is not trained on."""
        self.rejected.append(Rejected(group.prompt.id, group.number, reason, name, str(group.number)))

    async def make(self, group: Group) -> str | None:
        """Ask and rate until a group is whole. Return the last reason where it had to be given up."""
        failures, reason = 0, ""
        while (missing := self._options.group_size - len(group.members)) > 0:
            if failures == TRIES:
                self._give_up(group)
                return reason
            first = group.asked
            group.asked += missing
            try:
                answer = await self._fleet.ask(self._asked(group, missing))
            except UnreachableError:
                self.counts["unanswered"] += missing
                await asyncio.sleep(_RETRY_SECONDS)
            except VoidedError:
                self.counts["void"] += missing
            except BadAnswerError as error:
                self.counts["bad_answers"] += 1
                failures, reason = failures + 1, f"the server's answer is bad: {error}"
                self.reject(group, f"{group.number}-{first}", reason)
            else:
                if problems := await self._add(group, answer, first):
                    failures, reason = failures + 1, problems[0]
        return None

    def _give_up(self, group: Group) -> None:
        reason = f"its group could not be completed: {len(group.members)} of {group.asked} completions rated"
        for member in group.members:
            self.reject(group, member.rollout.id, reason)

    def _asked(self, group: Group, n: int) -> Asked:
        options = self._options
        return Asked(
            prompt=group.prompt.input_ids,
            n=n,
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            stop_ids=options.stop_ids,
            vocabulary_size=options.vocabulary_size,
        )

    async def _add(self, group: Group, answer: Answer, first: int) -> list[str]:
        """Add what could be rated; return why the rest could not. An aborted completion is asked for again."""
        self._progress()
        named = [(f"{group.number}-{first + at}", choice) for at, choice in enumerate(answer.choices)]
        ended = [(name, choice) for name, choice in named if not choice.aborted]
        self.counts["aborted"] += len(named) - len(ended)
        problems: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:  # one that ends the run ends the others
                ratings = [tasks.create_task(self._rated(group, name, choice, problems)) for name, choice in ended]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if not answer.void:
            group.members += [
                Member(self._rollout(name, group.prompt, choice, reward, answer.server.url), answer)
                for (name, choice), rating in zip(ended, ratings, strict=True)
                if (reward := rating.result()) is not None
            ]
        self._progress()
        return problems

    def _progress(self) -> None:
        self.last_arrival = asyncio.get_running_loop().time()

    async def _rated(self, group: Group, name: str, choice: Choice, problems: list[str]) -> float | None:
        try:
            return await self._rate(group.prompt, self._read(choice.token_ids))
        except RewardError as error:
            if self._options.stop_at_rejected:
                raise RewardError(
                    f"data.on_bad_record: stop: a completion of prompt {group.prompt.id}: {error}"
                ) from error
            self.reject(group, name, str(error))
            problems.append(str(error))
            return None

    def _rollout(self, name: str, prompt: Prompt, choice: Choice, reward: float, url: str) -> Rollout:
        return to_rollout(
            name,
            prompt,
            choice.token_ids,
            choice.logprobs,
            temperature=self._options.temperature,
            versions=choice.versions,
            reward=reward,
            metadata={"stopped": choice.stopped, "server": url},
        )
