"""A source whose documents are groups that the inference servers sample."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.generate.group_maker import Group, GroupOptions
from truestep.generate.groups import num_groups, refuse_other_groups, with_advantages
from truestep.generate.order import fingerprint
from truestep.generate.servers.servers import Servers
from truestep.rollouts.advantages import AdvantageRule
from truestep.rollouts.selection import choose_truncated, has_advantage, put_group_aside
from truestep.rollouts.source import StillSource, Taken
from truestep.types import Rejected, Rollout


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
        servers.ahead.replace(self._is_without_difference, replace_limit)

    def take(self, count: int, documents_seen: int) -> Taken:
        """Take exactly `count` documents, in whole groups."""
        wanted = num_groups(count, self._sampling.group_size)
        try:
            groups, replaced = self._servers.collect(wanted, documents_seen, self.asked_to_stop)
        except BaseException:
            if self.put_rejected is not None:
                self.put_rejected(self._rejected())
            raise
        rollouts = [rollout for group in groups for rollout in self._with_advantages(group)]
        put_aside = [one for group in replaced for one in put_group_aside(self._with_advantages(group))]
        measured = self._servers.ahead.order.measured
        return Taken(choose_truncated(rollouts, self._truncated)[0], self._rejected(), put_aside, measured)

    def aside(self) -> Taken:
        return Taken((), self._rejected())

    def _rejected(self) -> list[Rejected]:
        rejected = self._servers.ahead.maker.rejected  # the event loop's thread may add to it meanwhile
        return [rejected.popleft() for _ in range(len(rejected))]

    def _with_advantages(self, group: Group) -> list[Rollout]:
        return with_advantages([member.rollout for member in group.members], group.number, self._advantage_rule)

    def _is_without_difference(self, group: Group) -> bool:
        """Return whether all advantages of a complete group are zero. The event loop's thread calls this."""
        return not any(map(has_advantage, self._with_advantages(group)))

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    @cached_property
    def _fingerprint(self) -> str:
        sampling = self._sampling
        return fingerprint(self._prompts, sampling.seed, sampling.group_size, sampling.order)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Record which groups are open now."""
        position = self._servers.run(self._servers.ahead.snapshot())
        return lambda: position() | {"fingerprint": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_groups(state, self.state())
        self._servers.ahead.restore(state)

    def close(self, finished: bool) -> None:
        self._servers.close(finished)
