"""Makes groups: requests completions of a prompt, rates them, and requests again those that cannot be used."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.groups import TRIES, reject, stopping_error, to_rollout
from truestep.generate.servers.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.generate.servers.fleet import Fleet, ServedCompletions, Server
from truestep.generate.servers.protocol import CompletionRequest, ServerCompletion
from truestep.types import Rejected, Rollout

_CHECKED_DRAWS = 4  # a random stream of its own; that of the probes is 3
_RETRY_SECONDS = 0.05  # before the next server is asked; the one that failed gets no requests until it is recovered


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
    check_share: float = 0.0  # fraction of completions whose log-probs are compared with the policy's on arrival


@dataclass(frozen=True)
class Member:
    """A rated completion and the answer that it came in."""

    rollout: Rollout
    versions: Sequence[int]  # of the weights that sampled each token
    answer: ServedCompletions


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
        return min(min(member.versions) for member in self.members)

    @property
    def unconfirmed(self) -> set[Server]:
        return {member.answer.server for member in self.members if not member.answer.confirmed}


class GroupMaker:
    """Makes groups, many at a time."""

    def __init__(
        self,
        fleet: Fleet,
        options: SamplingOptions,
        rate: Callable[[Prompt, str, str], Awaitable[Rating]],
        read: Callable[[Sequence[int]], str],
    ):
        self._fleet, self._options = fleet, options
        self._rate, self._read = rate, read
        self.counts: Counter[str] = Counter()  # unused completions, by reason
        self.rejected: deque[Rejected] = deque()
        self.arrived: deque[Rollout] = deque()  # `check_share` of the completions; the trainer's thread takes them
        self._draw = random.Random(f"{options.seed} {_CHECKED_DRAWS}")

    def reject(self, group: Group, name: str, reason: str | RewardError, completion: str | None = None) -> None:
        """Record a completion that is not trained on."""
        self.rejected.append(reject(group.prompt, group.number, name, reason, completion))

    async def make(self, group: Group) -> str | None:
        """Request and rate completions until the group is complete. Return None, or the last problem if the group is
        given up."""
        failures, reason = 0, ""
        while (missing := self._options.group_size - len(group.members)) > 0:
            if failures == TRIES:
                self._give_up(group)
                return reason
            first = group.num_asked
            group.num_asked += missing
            try:
                answer = await self._fleet.ask(self._request(group.prompt, missing))
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
        reason = f"its group could not be completed: {len(group.members)} of {group.num_asked} completions rated"
        for member in group.members:
            self.reject(group, member.rollout.id, reason)

    def _request(self, prompt: Prompt, n: int) -> CompletionRequest:
        options = self._options
        return CompletionRequest(
            prompt.input_ids, n, options.temperature, options.max_new_tokens, options.stop_ids, options.vocabulary_size
        )

    async def _add(self, group: Group, answer: ServedCompletions, first: int) -> list[str]:
        """Add an answer's rated completions to the group. Return why others could not be rated. Aborted completions are
        skipped: `make` requests them again."""
        named = [(f"{group.number}-{first + at}", choice) for at, choice in enumerate(answer.choices)]
        ended = [(name, choice) for name, choice in named if not choice.aborted]
        self.counts["aborted"] += len(named) - len(ended)
        problems: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:  # an error that ends the run cancels the other rewards
                ratings = [tasks.create_task(self._rated(group, name, choice, problems)) for name, choice in ended]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if not answer.void:
            group.members += [
                self._member(name, group.prompt, choice, rating, answer)
                for (name, choice), rated in zip(ended, ratings, strict=True)
                if (rating := rated.result()) is not None
            ]
        if ended:
            self._fleet.note_progress()  # rewards may take long
        return problems

    async def _rated(self, group: Group, name: str, choice: ServerCompletion, problems: list[str]) -> Rating | None:
        text = self._read(choice.token_ids)
        try:
            return await self._rate(group.prompt, text, name)
        except RewardError as error:
            if self._options.stop_at_rejected:
                raise stopping_error(group.prompt, error) from error
            self.reject(group, name, error, text)
            problems.append(str(error))
            return None

    def _member(
        self, name: str, prompt: Prompt, choice: ServerCompletion, rating: Rating, answer: ServedCompletions
    ) -> Member:
        rollout = to_rollout(
            name,
            prompt,
            choice.token_ids,
            choice.logprobs,
            temperature=self._options.temperature,
            versions=choice.versions,
            rating=rating,
            truncated=not choice.stopped,
            metadata={"stopped": choice.stopped, "server": answer.server.url},
        )
        if self._draw.random() < self._options.check_share:
            self.arrived.append(rollout)
        return Member(rollout, choice.versions, answer)
