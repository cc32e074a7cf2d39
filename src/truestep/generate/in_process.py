"""A source that samples its documents in process, with the current weights, when a step asks for them: staleness 0."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import RewardError
from truestep.generate.decode import Completion, DecodeOptions, Request
from truestep.generate.groups import (
    DRAWS,
    HOPELESS,
    TRIES,
    check_lengths,
    explain_hopeless,
    fingerprint,
    num_groups,
    prompt_of,
    refuse_other_groups,
    reject,
    stopping_error,
    to_rollout,
    with_advantages,
)
from truestep.generate.rewarded import Rated, Spent, decode_rated
from truestep.model.policy import Policy
from truestep.rollouts.advantages import AdvantageRule
from truestep.rollouts.selection import choose_truncated, has_advantage, put_group_aside
from truestep.rollouts.source import Interrupted, SourceError, StillSource, Taken
from truestep.types import PutAside, Rejected, Rollout


@dataclass
class _Group:
    """The completions of one prompt that are rated so far."""

    number: int
    prompt: Prompt
    rated: list[Rollout] = field(default_factory=list)
    num_sampled: int = 0


@dataclass
class InProcessSource(StillSource):
    """Samples `group_size` completions of each prompt. Each epoch has its own seeded order of the prompts."""

    policy: Policy
    prompts: Sequence[Prompt]
    rater: Rates
    options: DecodeOptions
    group_size: int
    advantage_rule: AdvantageRule | str
    seed: int
    max_tokens: int
    stop_at_rejected: bool = False
    truncated: str = "keep"  # or mask
    replace_limit: int = 0  # most groups that a step replaces because all their advantages are 0
    _groups: int = 0  # groups started so far
    _put_aside: list[PutAside] = field(default_factory=list)
    _rejected: list[Rejected] = field(default_factory=list)
    _spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        check_lengths(self.prompts, self.options.max_new_tokens, self.max_tokens)

    def take(self, count: int, documents_seen: int) -> Taken:
        """Sample exactly `count` documents, in whole groups. A completion that cannot be rated is sampled again; a
        group that stays incomplete is rejected, and the next prompt takes its place. Only complete groups are put
        aside, and only if all advantages are 0, so that selection does not depend on the length of completions. When
        the run is asked to stop, `Interrupted` is raised and the source's state is as before the call."""
        before = self._groups, list(self._rejected), list(self._put_aside)
        try:
            documents = self._take(count, documents_seen)
        except Interrupted:
            self._groups, self._rejected, self._put_aside = before
            raise
        except Exception:
            if self.put_rejected is not None:
                self.put_rejected(self.aside().rejected)
            raise
        return replace(self.aside(), documents=documents)

    def aside(self) -> Taken:
        aside = Taken((), self._rejected, self._put_aside, self._spent.measured())
        self._rejected, self._put_aside, self._spent = [], [], Spent()
        return aside

    def _take(self, count: int, documents_seen: int) -> list[Rollout]:
        wanted, failed, replaced = num_groups(count, self.group_size), 0, 0
        complete: list[list[Rollout]] = []
        while len(complete) < wanted:
            first, self._groups = self._groups, self._groups + wanted - len(complete)
            groups = [
                _Group(number, prompt_of(number, self.prompts, self.seed)) for number in range(first, self._groups)
            ]
            self._fill(groups, documents_seen)
            filled = [group for group in groups if len(group.rated) == self.group_size]
            for group in filled:
                rollouts = with_advantages(group.rated, group.number, self.advantage_rule)
                if replaced < self.replace_limit and not any(map(has_advantage, rollouts)):
                    self._put_aside += put_group_aside(rollouts)
                    replaced += 1
                else:
                    complete.append(rollouts)
            failed = 0 if filled else failed + len(groups)
            if failed >= HOPELESS:
                raise SourceError(explain_hopeless(failed, [rejected.reason for rejected in self._rejected]))
        return choose_truncated((rollout for group in complete for rollout in group), self.truncated)[0]

    def _fill(self, groups: Sequence[_Group], version: int) -> None:
        """Sample the missing completions, in up to `TRIES` attempts. A group that is still incomplete is rejected."""
        for _ in range(TRIES):
            members = [
                (group, group.num_sampled + number)
                for group in groups
                for number in range(self.group_size - len(group.rated))
            ]
            if not members:
                return
            requests = [
                Request(group.prompt.input_ids, (self.seed, DRAWS, group.number, member)) for group, member in members
            ]
            prompts = [group.prompt for group, _ in members]
            done = decode_rated(
                self.policy, prompts, requests, self.options, self.rater, self.asked_to_stop, self._spent
            )
            for (group, member), rated in zip(members, done, strict=True):
                self._add(group, member, rated, version)
        for group in groups:
            if len(group.rated) < self.group_size:
                reason = (
                    f"its group could not be completed: {len(group.rated)} of {group.num_sampled} completions rated"
                )
                self._rejected += [reject(group.prompt, group.number, rollout.id, reason) for rollout in group.rated]

    def _add(self, group: _Group, member: int, rated: Rated, version: int) -> None:
        group.num_sampled += 1
        name, completion, rating = f"{group.number}-{member}", rated.completion, rated.rating
        if isinstance(rating, RewardError):
            if self.stop_at_rejected:
                raise stopping_error(group.prompt, rating)
            self._rejected.append(reject(group.prompt, group.number, name, rating, rated.text))
            return
        rollout = to_rollout(
            name,
            group.prompt,
            completion.token_ids,
            completion.logprobs,
            temperature=self.options.temperature,
            versions=np.full(len(completion.token_ids), version),
            rating=rating,
            truncated=not completion.stopped,
            metadata={"stopped": completion.stopped, **_cut(completion)},
        )
        group.rated.append(rollout)

    def state(self) -> dict[str, Any]:
        return {"groups": self._groups, "fingerprint": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.prompts, self.seed, self.group_size)

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_groups(state, self.state())
        self._groups = state["groups"]

    def close(self, finished: bool) -> None:
        self.rater.close()


def _cut(completion: Completion) -> dict[str, Any]:
    """Return metadata with the log-probs of the truncated distribution, where top_p, top_k or min_p are used."""
    cut = completion.truncated_logprobs
    return {} if cut is None else {"truncated_logprobs": cut}


def stop_ids(policy: Policy) -> frozenset[int]:
    """Return the ids of all end-of-text tokens, by the model's generation config, its config and its tokenizer."""
    ids: set[int] = set()
    for settings in (getattr(policy.model, "generation_config", None), policy.model.config, policy.tokenizer):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            ids |= set(found if isinstance(found, list) else [found])
    return frozenset(ids)
