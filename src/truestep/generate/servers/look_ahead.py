"""Samples groups ahead of the trainer, as far as max_staleness permits, and hands them over in the order begun.

A step waits for its own groups, even if they are slow, so short documents are not preferred. A group is begun only if
it will be fresh enough when it is trained on. That is known in advance: the groups before it fill a known number of
steps, and no other group comes before it. With `max_staleness` 0, exactly the next step's documents are sampled, when
the servers have the step's weights. This is synchronous training.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.generate.group_maker import Group, GroupMaker, GroupOptions
from truestep.generate.groups import HOPELESS, explain_hopeless, num_groups
from truestep.generate.order import PromptOrder
from truestep.generate.play import Plays
from truestep.generate.servers.fleet import Fleet, Published, Server, Signal
from truestep.rollouts.source import SourceError

_POLL_SECONDS = 0.25  # between checks of lost servers and of stall_timeout while documents are awaited


@dataclass(frozen=True)
class StalenessLimit:
    """Limits on the groups that are sampled ahead of the trainer."""

    docs_per_step: int
    documents_per_take: int  # added to `documents_seen` by each take
    max_staleness: int
    concurrency: int  # most episodes in flight, in groups
    stall_timeout: float  # seconds without any completion after which the run ends


class LookAhead:
    """The queue of groups, in flight and complete. Its coroutines run in one event loop."""

    def __init__(
        self,
        make_fleet: Callable[..., Fleet],
        prompts: Sequence[Prompt],
        sampling: GroupOptions,
        limit: StalenessLimit,
        plays: Plays,
    ):
        self.fleet = make_fleet(on_void=self._void, on_fatal=self._fail_with_servers)
        self.server_error: Exception | None = None  # an error after which no server can be used any more
        self.maker = GroupMaker(sampling, plays, self._progressed)
        self._sampling, self._limit = sampling, limit
        self._groups_per_step = num_groups(limit.docs_per_step, sampling.group_size)
        # The groups of a step are begun when at most `steps_ahead` steps before it have not been trained on.
        steps_ahead = limit.max_staleness // limit.documents_per_take
        self.order = PromptOrder(prompts, sampling.seed, sampling.order, steps_ahead * self._groups_per_step)
        self._open: dict[int, Group] = {}  # groups begun and not handed over, by number, in the order begun
        self._complete: dict[int, bool] = {}  # the complete ones among them; true: the group is to be replaced
        self._tasks: dict[int, asyncio.Task[str | None]] = {}
        self._seen = 0  # `documents_seen` at the next take
        self._failures: list[str] = []  # why groups were given up, since the last complete group
        self._fatal: Exception | None = None
        self._changed = Signal()
        self._is_to_replace: Callable[[Group], bool] = lambda group: False
        self._replace_limit = 0

    def replace(self, is_to_replace: Callable[[Group], bool], limit: int) -> None:
        """Replace complete groups for which `is_to_replace` returns True by new ones, the first `limit` of each step.

        Groups are counted in the order begun, and counting waits for slow ones. So the selection does not depend on the
        length of completions.
        """
        self._is_to_replace, self._replace_limit = is_to_replace, limit

    async def publish(self, published: Published) -> None:
        """Publish new weights to the servers, and start the groups that max_staleness then permits."""
        self._seen = max(self._seen, published.version)
        try:
            await self.fleet.publish(published)
            self._admit()
        except Exception as error:
            self._fail_with_servers(error)

    async def collect(self, wanted: int, documents_seen: int) -> tuple[list[Group], list[Group]]:
        """Wait until the next `wanted` groups are complete and confirmed. Return them in the order begun, and the
        groups between them that were replaced."""
        self._seen, start = documents_seen, asyncio.get_running_loop().time()
        while True:
            if self._fatal is not None:
                raise self._fatal
            self._admit()
            kept, replaced = self._next_step(self._open.values(), wanted)
            if len(kept) < wanted or any(group.number not in self._complete for group in kept):
                await self._wait(start)
                continue
            unconfirmed = {server for group in (*kept, *replaced) for server in _unconfirmed(group)}
            if not unconfirmed:
                self._hand_over(kept, replaced)
                return kept, replaced
            reachable = {server for server in unconfirmed if server.lost_at is None}
            if reachable:
                await self.fleet.confirm(reachable)
            else:
                await self._wait(start)

    def _next_step(self, groups: Iterable[Group], wanted: int) -> tuple[list[Group], list[Group]]:
        """Take the next step's groups from `groups`, and the groups that the step replaces. An incomplete group counts
        as not replaced."""
        kept, replaced = list[Group](), list[Group]()
        for group in groups:
            if self._complete.get(group.number, False) and len(replaced) < self._replace_limit:
                replaced.append(group)
            else:
                kept.append(group)
            if len(kept) == wanted:
                break
        return kept, replaced

    def _hand_over(self, kept: Sequence[Group], replaced: Sequence[Group]) -> None:
        oldest = min(group.version for group in kept)
        assert self._seen - oldest <= self._limit.max_staleness, "every group is fresh enough at its step"
        taken = {group.number: [member.rollout for member in group.members] for group in (*kept, *replaced)}
        self.order.told(taken, kept[-1].number + 1)
        for number in taken:
            del self._open[number], self._complete[number]
        self._seen += self._limit.documents_per_take
        self._admit()

    async def _wait(self, start: float) -> None:
        quiet = asyncio.get_running_loop().time() - max(start, self.fleet.last_progress)
        if quiet >= self._limit.stall_timeout:
            raise SourceError(
                f"sampler: no completion for {quiet:.0f} s (schedule.stall_timeout: {self._limit.stall_timeout:g}): "
                f"{self.fleet.report()}"
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _POLL_SECONDS)

    async def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Record the position from which a restarted run continues. A group that was given up counts as open until its
        rejections have been fetched."""
        untold = {rejected.line for rejected in self.maker.rejected}
        return self.order.snapshot({*self._open, *untold})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state: groups that were open then are sampled again first."""
        self.order.restore(state)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.fleet.close()

    def _admit(self) -> None:
        limit, version, size = self._limit, self.fleet.version, self._sampling.group_size
        ahead, missing = self._num_ahead(), self._num_missing()
        while self._fatal is None and version is not None and missing + size <= limit.concurrency * size:
            steps = ahead // self._groups_per_step
            if self._seen + steps * limit.documents_per_take - version > limit.max_staleness:
                return
            if not self.order.may_begin(self._next_end()):
                return
            self._start(Group(*self.order.next()))
            ahead, missing = ahead + 1, missing + size

    def _next_end(self) -> int:
        """Return one more than the number of the last group that the next step certainly has."""
        kept = self._next_step(self._open.values(), self._groups_per_step)[0]
        return kept[-1].number + 1 if len(kept) == self._groups_per_step else self.order.number + 1

    def _num_ahead(self) -> int:
        """Return the largest number of open groups that may be trained on. All of them come before the next group to
        begin."""
        rest, count = iter(self._open.values()), 0
        while kept := self._next_step(rest, self._groups_per_step)[0]:
            count += len(kept)
        return count

    def _num_missing(self) -> int:
        """Return how many episodes are in flight. Complete groups that wait for their step do not count, so the servers
        are not idle behind a slow group."""
        return sum(self._sampling.group_size - len(self._open[number].members) for number in self._tasks)

    def _progressed(self) -> None:
        self.fleet.note_progress()
        self._admit()

    def _start(self, group: Group) -> None:
        self._open[group.number] = group
        task = asyncio.get_running_loop().create_task(self.maker.make(group, self.fleet.generate))
        self._tasks[group.number] = task
        task.add_done_callback(lambda done: self._ended(group, done))

    def _ended(self, group: Group, task: asyncio.Task[str | None]) -> None:
        del self._tasks[group.number]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        elif (reason := task.result()) is not None:
            del self._open[group.number]
            self._failures.append(reason)
            if len(self._failures) >= HOPELESS:
                self._fail(SourceError(explain_hopeless(len(self._failures), self._failures)))
        elif len(group.members) < self._sampling.group_size:  # members became void after `make` had finished
            self._start(group)
        else:
            self._failures.clear()
            try:
                self._complete[group.number] = self._is_to_replace(group)
            except Exception as failure:  # a user's own advantages
                self._fail(failure)
                return
        self._admit()
        self._changed.set()

    def _void(self) -> None:
        """Drop void completions, whose versions are unknown, and sample them again."""
        group_size = self._sampling.group_size
        for group in self._open.values():
            kept = [member for member in group.members if not any(one.answer.void for one in member.completions)]
            self.maker.counts["void"] += len(group.members) - len(kept)
            group.members = kept
        for number in [number for number in self._complete if len(self._open[number].members) < group_size]:
            del self._complete[number]
            self._start(self._open[number])
        self._changed.set()

    def _fail_with_servers(self, error: Exception) -> None:
        self.server_error = self.server_error or error
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._fatal = self._fatal or error
        self._changed.set()


def _unconfirmed(group: Group) -> set[Server]:
    """Return the servers that have not been probed since they answered."""
    completions = [completion for member in group.members for completion in member.completions]
    return {completion.answer.server for completion in completions if not completion.answer.confirmed}
