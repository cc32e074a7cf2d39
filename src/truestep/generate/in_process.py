"""A source whose documents are sampled in process, with the current weights, when a step asks for them: staleness 0."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.generate.engine.service import EngineGenerator, Spent
from truestep.generate.generator import Generate
from truestep.generate.group_maker import Group, GroupMaker, GroupOptions
from truestep.generate.groups import (
    HOPELESS,
    check_lengths,
    explain_hopeless,
    num_groups,
    place_of,
    refuse_other_groups,
    with_advantages,
)
from truestep.generate.order import PromptOrder, fingerprint
from truestep.generate.play import Plays
from truestep.rollouts.advantages import AdvantageRule
from truestep.rollouts.selection import choose_truncated, has_advantage, put_group_aside
from truestep.rollouts.source import Interrupted, SourceError, StillSource, Taken
from truestep.types import PutAside, Rejected, Rollout


@dataclass
class InProcessSource(StillSource):
    """Samples `group_size` completions of each prompt, in the order of a `PromptOrder`."""

    generator: EngineGenerator
    prompts: Sequence[Prompt]
    plays: Plays
    options: GroupOptions
    advantage_rule: AdvantageRule | str
    max_tokens: int
    truncated: str = "keep"  # or mask
    replace_limit: int = 0  # most groups that a step replaces because all their advantages are 0
    _put_aside: list[PutAside] = field(default_factory=list)
    _rejected: list[Rejected] = field(default_factory=list)
    _tokens: int = 0  # tokens sampled on all ranks since the last `aside`

    def __post_init__(self) -> None:
        check_lengths(self.prompts, self.options.draw.max_new_tokens, self.max_tokens)
        self._order = PromptOrder(self.prompts, self.options.seed, self.options.order)

    def take(self, count: int, documents_seen: int) -> Taken:
        """Sample exactly `count` documents, in whole groups. A completion that cannot be rated is sampled again; a
        group that stays incomplete is rejected, and the next prompt takes its place. Only complete groups are put
        aside, and only if all advantages are 0, so that selection does not depend on the length of completions. When
        the run is asked to stop, `Interrupted` is raised and the source's state is as before the call."""
        position, before = self._order.snapshot(), (list(self._rejected), list(self._put_aside))
        try:
            documents = self._take(count, documents_seen)
        except Interrupted:
            self._order.restore(position())
            self._rejected, self._put_aside = before
            raise
        except Exception:
            if self.put_rejected is not None:
                self.put_rejected(self.aside().rejected)
            raise
        aside = self.aside()
        return replace(aside, documents=documents, measured={**aside.measured, **self._order.measured})

    def aside(self) -> Taken:
        spent, self.generator.spent = self.generator.spent, Spent()
        measured = {
            "sampling_time": spent.sampling,
            "rating_time": spent.rating,
            "sampling_idle_time": spent.idle,
            "sampled_tokens_per_second": self._tokens / spent.sampling if spent.sampling else 0.0,
            "sampler_cache_use": spent.cache_use,
        }
        aside = Taken((), self._rejected, self._put_aside, measured)
        self._rejected, self._put_aside, self._tokens = [], [], 0
        return aside

    def _take(self, count: int, documents_seen: int) -> list[Rollout]:
        wanted, failed, replaced = num_groups(count, self.options.group_size), 0, 0
        complete: list[list[Rollout]] = []
        made: dict[int, list[Rollout]] = {}
        end = 0
        while len(complete) < wanted:
            groups = [Group(*self._order.next()) for _ in range(wanted - len(complete))]
            filled = self._fill(groups, documents_seen)
            made, end = made | filled, groups[-1].number + 1
            for number, rated in filled.items():
                rollouts = with_advantages(rated, number, self.advantage_rule)
                if replaced < self.replace_limit and not any(map(has_advantage, rollouts)):
                    self._put_aside += put_group_aside(rollouts)
                    replaced += 1
                else:
                    complete.append(rollouts)
            failed = 0 if filled else failed + len(groups)
            if failed >= HOPELESS:
                raise SourceError(explain_hopeless(failed, [rejected.reason for rejected in self._rejected]))
        self._order.told(made, end)
        return choose_truncated((rollout for group in complete for rollout in group), self.truncated)[0]

    def _fill(self, groups: Sequence[Group], version: int) -> dict[int, list[Rollout]]:
        """Sample and rate the completions of groups, on all ranks. Return those of complete groups, by their
        numbers."""
        maker = GroupMaker(self.options, self.plays)

        async def work(group: Group, generate: Generate) -> list[Rollout] | None:
            given_up = await maker.make(group, generate)
            return [member.rollout for member in group.members] if given_up is None else None

        self.generator.weights(version)
        try:
            made = self.generator.map(groups, work, self.asked_to_stop)
        except BaseException:
            self._rejected += maker.rejected
            raise
        for rejected, tokens in self.generator.policy.weights.ranks.gather((list(maker.rejected), maker.tokens)):
            self._rejected += rejected
            self._tokens += tokens
        self._rejected.sort(key=place_of)  # so that the order does not depend on which reward came first
        return {group.number: rated for group, rated in zip(groups, made, strict=True) if rated is not None}

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        position = self._order.snapshot()
        return lambda: position() | {"fingerprint": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.prompts, self.options.seed, self.options.group_size, self.options.order)

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_groups(state, self.state())
        self._order.restore(state)

    def close(self, finished: bool) -> None:
        self.plays.close()
