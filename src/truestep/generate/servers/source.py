"""A source whose documents are groups that the inference servers sample."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.generate.group_maker import Group, GroupOptions
from truestep.generate.groups import fingerprint, num_groups, refuse_other_groups, with_advantages
from truestep.generate.servers.servers import Servers
from truestep.rollouts.advantages import AdvantageRule
from truestep.rollouts.selection import choose_truncated, has_advantage, put_group_aside
from truestep.rollouts.source import StillSource, Taken
from truestep.types import PutAside, Rejected, Rollout


class ServerSource(StillSource):
    """Documents from the inference servers, on the first rank."""

    def __init__(
        self,
        servers: Servers,
        *,
        prompts: Sequence[Prompt],
        sampling: GroupOptions,
        advantage_rule: AdvantageRule | str,
        truncated: str = "keep",  # or mask
        replace_limit: int = 0,  # most groups that a step replaces because all their advantages are 0
    ):
        self._servers, self._prompts, self._sampling = servers, prompts, sampling
        self._advantage_rule, self._truncated = advantage_rule, truncated
        self._put_aside: list[PutAside] = []  # not returned by `take` yet; the event loop's thread adds to it
        servers.ahead.replace(self._sorted_out, replace_limit)

    def take(self, count: int, documents_seen: int) -> Taken:
        """Take exactly `count` documents, in whole groups."""
        wanted = num_groups(count, self._sampling.group_size)
        try:
            groups = self._servers.collect(wanted, documents_seen, self.asked_to_stop)
        except BaseException:
            if self.put_rejected is not None:
                self.put_rejected(self._rejected())
            raise
        rollouts = [rollout for group in groups for rollout in self._with_advantages(group)]
        return replace(self.aside(), documents=choose_truncated(rollouts, self._truncated)[0])

    def aside(self) -> Taken:
        async def sorted_out() -> list[PutAside]:
            put_aside, self._put_aside = self._put_aside, []
            return put_aside

        return Taken((), self._rejected(), self._servers.run(sorted_out()))

    def _rejected(self) -> list[Rejected]:
        rejected = self._servers.ahead.maker.rejected  # the event loop's thread may add to it meanwhile
        return [rejected.popleft() for _ in range(len(rejected))]

    def _with_advantages(self, group: Group) -> list[Rollout]:
        return with_advantages([member.rollout for member in group.members], group.number, self._advantage_rule)

    def _sorted_out(self, group: Group) -> bool:
        """Put a complete group aside if all its advantages are zero. The event loop's thread calls this."""
        rollouts = self._with_advantages(group)
        if any(map(has_advantage, rollouts)):
            return False
        self._put_aside.extend(put_group_aside(rollouts))
        return True

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._prompts, self._sampling.seed, self._sampling.group_size)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Record the open groups, and the documents put aside that `take` has not returned yet. Documents put aside
        later belong to groups that are open now; a run that continues from this state puts them aside again."""

        async def note() -> dict[str, Any]:
            put_aside = [[one.id, one.reason, one.group_id] for one in self._put_aside]
            return await self._servers.ahead.state() | {"put_aside": put_aside}

        state = self._servers.run(note())
        return lambda: state | {"fingerprint": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_groups(state, self.state())
        self._servers.ahead.restore(state)
        self._put_aside = [PutAside(*one) for one in state.get("put_aside", ())]

    def close(self, finished: bool) -> None:
        self._servers.close(finished)
