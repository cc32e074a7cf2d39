"""Samples groups ahead of the trainer, as far as max_staleness permits.

A group is started only if it is expected to be fresh enough when it is trained on, `open documents / docs_per_step`
steps after the next one. With `max_staleness` 0 exactly the next step's documents are sampled, once the servers have
its weights: that is synchronous training.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.generate.group_maker import Group, GroupMaker, GroupOptions
from truestep.generate.groups import HOPELESS, TRIES, explain_hopeless, prompt_of
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
    concurrency: int  # most groups in flight
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
        self.server_error: Exception | None = None  # with which no server can be used any more
        self.maker = GroupMaker(sampling, plays, self.fleet.note_progress)
        self._prompts, self._sampling, self._limit = prompts, sampling, limit
        self._next_number = 0
        self._restored: deque[int] = deque()  # numbers of groups that were open in the checkpoint: they come first
        self._open: dict[int, Group] = {}  # groups started and not handed over, by number
        self._ready: list[Group] = []  # complete groups, in the order of their completion
        self._tasks: dict[int, asyncio.Task[str | None]] = {}
        self._seen = 0  # `documents_seen` at the next take
        self._failures: list[str] = []  # why groups were given up, since the last complete group
        self._fatal: Exception | None = None
        self._changed = Signal()
        self._sorted_out: Callable[[Group], bool] | None = None
        self._replace_limit, self._replaced = 0, 0  # groups replaced since the last hand-over

    def replace(self, sorted_out: Callable[[Group], bool], limit: int) -> None:
        """Replace complete groups for which `sorted_out` returns True by new ones, at most `limit` for each hand-over.

        Only complete groups are replaced, never slow ones: a step waits for a slow group, so that selection does not
        depend on the length of completions.
        """
        self._sorted_out, self._replace_limit = sorted_out, limit

    def _replaces(self, group: Group) -> bool:
        if self._sorted_out is None or self._replaced >= self._replace_limit or not self._sorted_out(group):
            return False
        self._replaced += 1
        return True

    async def publish(self, published: Published) -> None:
        """Publish new weights to the servers, and start the groups that max_staleness then permits."""
        self._seen = max(self._seen, published.version)
        try:
            await self.fleet.publish(published)
            self._admit()
        except Exception as error:
            self._fail_with_servers(error)

    async def collect(self, wanted: int, documents_seen: int) -> list[Group]:
        """Wait for `wanted` complete groups that are fresh enough and confirmed, and return them by number."""
        self._seen, start = documents_seen, asyncio.get_running_loop().time()
        while True:
            if self._fatal is not None:
                raise self._fatal
            self._drop_stale()
            self._admit()
            chosen = self._choose(wanted)
            unconfirmed = {server for group in chosen for server in _unconfirmed(group)}
            if len(chosen) == wanted and not unconfirmed:
                return self._hand_over(chosen)
            reachable = {server for server in unconfirmed if server.lost_at is None}
            if len(chosen) == wanted and reachable:
                await self.fleet.confirm(reachable)
            else:
                await self._wait(start)

    def _choose(self, wanted: int) -> list[Group]:
        """Choose complete groups in the order of their completion. But groups that were once dropped as too stale come
        first, and the step waits for them: otherwise prompts with slow completions would never be trained on."""
        owed = sorted((group for group in self._open.values() if group.num_drops), key=lambda group: group.number)
        first = owed[:wanted]
        if any(group not in self._ready for group in first):
            return []
        return (first + [group for group in self._ready if group not in first])[:wanted]

    def _hand_over(self, chosen: Sequence[Group]) -> list[Group]:
        for group in chosen:
            self._ready.remove(group)
            del self._open[group.number]
        self._seen += self._limit.documents_per_take
        self._replaced = 0
        self._admit()
        return sorted(chosen, key=lambda group: group.number)

    async def _wait(self, start: float) -> None:
        quiet = asyncio.get_running_loop().time() - max(start, self.fleet.last_progress)
        if quiet >= self._limit.stall_timeout:
            raise SourceError(
                f"sampler: no completion for {quiet:.0f} s (schedule.stall_timeout: {self._limit.stall_timeout:g}): "
                f"{self.fleet.report()}"
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _POLL_SECONDS)

    async def state(self) -> dict[str, Any]:
        return {"groups": self._next_number, "open": sorted({*self._open, *self._restored})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state: groups that were open then are sampled again first."""
        self._next_number = state["groups"]
        self._restored.extend(state.get("open", ()))  # an in_process sampler has no open groups

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.fleet.close()

    def _admit(self) -> None:
        limit, version = self._limit, self.fleet.version
        while self._fatal is None and version is not None and len(self._tasks) < limit.concurrency:
            steps_ahead = len(self._open) * self._sampling.group_size // limit.docs_per_step
            if self._seen + steps_ahead * limit.documents_per_take - version > limit.max_staleness:
                return
            if self._restored:
                number = self._restored.popleft()
            else:
                number, self._next_number = self._next_number, self._next_number + 1
            self._start(Group(number, prompt_of(number, self._prompts, self._sampling.seed)))

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
                replaced = self._replaces(group)
            except Exception as failure:  # a user's own advantages
                self._fail(failure)
                return
            if replaced:
                del self._open[group.number]
            else:
                self._ready.append(group)
        self._admit()
        self._changed.set()

    def _drop_stale(self) -> None:
        """Drop the completions of groups that are too stale, and sample these groups again, up to `TRIES` times."""
        for group in list(self._ready):
            staleness = self._seen - group.version
            if staleness <= self._limit.max_staleness:
                continue
            self._ready.remove(group)
            self.maker.counts["stale"] += len(group.members)
            reason = (
                f"too stale: sampled {staleness} documents before its step, and sampler.max_staleness is "
                f"{self._limit.max_staleness}"
            )
            for member in group.members:
                self.maker.reject(group, member.rollout.id, reason)
            group.members, group.num_drops = [], group.num_drops + 1
            if group.num_drops < TRIES:
                self._start(group)
            else:
                del self._open[group.number]

    def _void(self) -> None:
        """Drop void completions, whose versions are unknown, and sample them again."""
        for group in self._open.values():
            kept = [member for member in group.members if not any(one.answer.void for one in member.completions)]
            self.maker.counts["void"] += len(group.members) - len(kept)
            group.members = kept
        for group in [group for group in self._ready if len(group.members) < self._sampling.group_size]:
            self._ready.remove(group)
            self._start(group)
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
