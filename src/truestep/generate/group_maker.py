"""Makes groups: plays episodes of a prompt, and further ones in place of those that cannot be used."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError
from truestep.generate.errors import BadAnswerError, UnreachableError, VoidedError
from truestep.generate.generator import Completion, DrawOptions, Generate, run_all
from truestep.generate.groups import DRAWS, TRIES, name_of, reject, stopping_error
from truestep.generate.order import OrderOptions
from truestep.generate.parts import part_of_work
from truestep.generate.play import Episode, Played, Plays
from truestep.types import Rejected, Rollout

_CHECKED_DRAWS = 4  # the number of a random stream for this module; the probes have stream 3
_RETRY_SECONDS = 0.05  # before the next server is asked; the one that failed gets no requests until it is recovered


@dataclass(frozen=True)
class GroupOptions:
    """Options of every group and of its requests."""

    group_size: int
    seed: int
    draw: DrawOptions
    stop_at_rejected: bool = False
    # True: an episode that cannot be used is played again at once. False: it is played again when the others of its
    # group have ended, so that the requests that the engine computes together, and with them the rounding of sums, do
    # not depend on when rewards arrive.
    anew_at_once: bool = False
    check_share: float = 0.0  # fraction of completions whose log-probs are compared with the policy's on arrival
    order: OrderOptions = field(default_factory=OrderOptions)  # the order of the groups' prompts


@dataclass(frozen=True)
class Member:
    """A rated episode: its document, and its completions in the order received."""

    number: int  # its number in the group
    rollout: Rollout
    completions: Sequence[Completion]


@dataclass(eq=False)
class Group:
    """A group: the episodes of one prompt that have been rated so far."""

    number: int
    prompt: Prompt
    members: list[Member] = field(default_factory=list)
    num_asked: int = 0  # episodes begun so far

    @property
    def version(self) -> int:
        """The version of its oldest token."""
        return min(min(one.versions) for member in self.members for one in member.completions)


class GroupMaker:
    """Makes groups, many at a time."""

    def __init__(self, options: GroupOptions, plays: Plays, note_progress: Callable[[], None] = lambda: None):
        """`note_progress` is called when an episode has been rated and, if it can be used, added to its group."""
        self._options, self._plays, self._note_progress = options, plays, note_progress
        self.counts: Counter[str] = Counter()  # unused completions, by reason
        self.tokens = 0  # the number of sampled tokens
        self.rejected: deque[Rejected] = deque()
        self.arrived: deque[Rollout] = deque()  # `check_share` of the completions; the trainer's thread takes them
        self._draw = random.Random(f"{options.seed} {_CHECKED_DRAWS}")

    def reject(self, group: Group, name: str, reason: str | RewardError, text: str | None = None) -> None:
        """Record a completion that is not trained on. `text`: its text, if known."""
        self.rejected.append(reject(group.prompt, group.number, name, reason, text))

    async def make(self, group: Group, generate: Generate) -> str | None:
        """Play episodes until the group is complete. Return None, or the last problem if the group is given up."""
        problems: list[Exception] = []
        while (missing := self._options.group_size - len(group.members)) > 0:
            await run_all([self._fill(group, problems, generate) for _ in range(missing)])
            if self._is_hopeless(problems):
                self._give_up(group)
                return _said(problems[-1])
        group.members.sort(key=lambda member: member.number)
        return None

    def _is_hopeless(self, problems: Sequence[object]) -> bool:
        """Return whether to give up the group: it has more than `TRIES - 1` times as many failed episodes as members.
        Episodes that no server finished do not count."""
        return len(problems) > (TRIES - 1) * self._options.group_size

    async def _fill(self, group: Group, problems: list[Exception], generate: Generate) -> None:
        """Play an episode; with `anew_at_once`, play more until one can be used. `problems` has the failures of the
        whole group, so their final number does not depend on their order."""
        while not self._is_hopeless(problems):
            number, group.num_asked = group.num_asked, group.num_asked + 1
            played = await self._one(group, number, generate)
            is_usable = self._add(group, number, played, problems)
            if isinstance(played, UnreachableError):
                await asyncio.sleep(_RETRY_SECONDS)
            if is_usable or not self._options.anew_at_once:
                return

    def _give_up(self, group: Group) -> None:
        reason = f"its group could not be completed: {len(group.members)} of {group.num_asked} completions rated"
        for member in group.members:
            self.reject(group, member.rollout.id, reason)

    async def _one(self, group: Group, number: int, generate: Generate) -> Played | Exception:
        """Play an episode. If something went wrong with a server, return the error instead."""
        options = self._options
        seed, name = (options.seed, DRAWS, group.number, number), name_of(group.number, number)
        try:
            with part_of_work():
                played = await self._plays.play(Episode(group.prompt, options.draw, seed, name), generate)
        except (UnreachableError, VoidedError, BadAnswerError) as error:
            return error
        if played.aborted:
            return played
        self.tokens += played.num_drawn
        if options.stop_at_rejected and isinstance(played.rating, RewardError):
            raise stopping_error(group.prompt, played.rating) from played.rating
        return played

    def _add(self, group: Group, number: int, answer: Played | Exception, problems: list[Exception]) -> bool:
        """Add a rated episode to the group. Return False if it cannot be used."""
        name = name_of(group.number, number)
        if isinstance(answer, UnreachableError):
            self.counts["unanswered"] += 1
        elif isinstance(answer, VoidedError):
            self.counts["void"] += 1
        elif isinstance(answer, Exception):
            if not any(answer is known for known in problems):  # one answer of a server may be for several completions
                self.counts["bad_answers"] += 1
                self.reject(group, name, _said(answer))
            problems.append(answer)
        elif answer.aborted:
            self.counts["aborted"] += 1
        elif isinstance(answer.rating, RewardError):
            self.reject(group, name, answer.rating, answer.text)
            problems.append(answer.rating)
            self._note_progress()
        else:
            is_void = any(one.answer is not None and one.answer.void for one in answer.completions)
            if not is_void:
                group.members.append(self._member(number, name, group.prompt, answer))
            self._note_progress()  # rewards may take long
            return not is_void
        return False

    def _member(self, number: int, name: str, prompt: Prompt, played: Played) -> Member:
        rollout = played.document(name, prompt, self._options.draw.temperature)
        if self._draw.random() < self._options.check_share:
            self.arrived.append(rollout)
        return Member(number, rollout, played.completions)


def _said(problem: Exception) -> str:
    return f"the server's answer is bad: {problem}" if isinstance(problem, BadAnswerError) else str(problem)
