"""Rollouts from the policy itself: a source whose documents are made when a step asks for them, never stale."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Reward, RewardError, rate
from truestep.policy.policy import Policy
from truestep.rollouts.source import SourceError, StillSource
from truestep.sampler.decode import Completion, DecodeOptions, Request, decode
from truestep.sampler.groups import (
    DRAWS,
    HOPELESS,
    TRIES,
    check_lengths,
    fingerprint,
    prompt_of,
    refuse_other_groups,
    to_rollout,
    with_advantages,
)
from truestep.types import Rejected, Rollout


@dataclass
class _Group:
    """Completions of one prompt."""

    number: int
    rated: list[Rollout] = field(default_factory=list)
    members: int = 0  # sampled so far

    def next_member(self) -> int:
        self.members += 1
        return self.members - 1


@dataclass
class InProcessSource(StillSource):
    """Prompts in a seeded order, anew each time all were used; `group_size` completions of each."""

    policy: Policy
    prompts: Sequence[Prompt]
    reward: Reward
    options: DecodeOptions
    group_size: int
    advantage_rule: str
    seed: int
    max_tokens: int
    stop_at_rejected: bool = False
    _groups: int = 0  # taken so far
    _rejected: list[Rejected] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_lengths(self.prompts, self.options.max_new_tokens, self.max_tokens)

    def take(self, count: int, documents_seen: int) -> list[Rollout]:
        """Make exactly `count` documents, in whole groups: a completion that could not be rated is sampled anew, and a
        prompt none of whose groups can be completed gives its place to the next."""
        if count % self.group_size:
            raise ValueError(f"{count} documents are no whole number of groups of {self.group_size}")
        wanted, failed = count // self.group_size, 0
        done: list[_Group] = []
        while len(done) < wanted:
            groups = [_Group(self._groups + number) for number in range(wanted - len(done))]
            self._groups += len(groups)
            self._fill(groups, documents_seen)
            complete = [group for group in groups if len(group.rated) == self.group_size]
            done += complete
            failed = 0 if complete else failed + len(groups)
            if failed >= HOPELESS:
                raise SourceError(self._hopeless(failed))
        return [
            rollout for group in done for rollout in with_advantages(group.rated, group.number, self.advantage_rule)
        ]

    def _fill(self, groups: Sequence[_Group], version: int) -> None:
        """Sample what is missing, a few times over. A group that stays short is given up whole."""
        for _ in range(TRIES):
            missing = [group for group in groups for _ in range(self.group_size - len(group.rated))]
            if not missing:
                return
            asked = [(group, group.next_member()) for group in missing]
            requests = [
                Request(self._prompt(group.number).input_ids, (self.seed, DRAWS, group.number, member))
                for group, member in asked
            ]
            completions = decode(self.policy, requests, self.options)
            ratings = self._ratings([self._prompt(group.number) for group, _ in asked], completions)
            for (group, member), completion, rating in zip(asked, completions, ratings, strict=True):
                self._add(group, member, completion, rating, version)
        for group in groups:
            if len(group.rated) < self.group_size:
                reason = f"its group could not be completed: {len(group.rated)} of {group.members} completions rated"
                prompt = self._prompt(group.number)
                self._rejected += [
                    Rejected(prompt.id, group.number, reason, rollout.id, str(group.number)) for rollout in group.rated
                ]

    def _ratings(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | str]:
        """Rate on one rank: a reward may be dear, draw random numbers or count its calls."""
        pairs = list(zip(prompts, completions, strict=True))
        return self.policy.weights.ranks.share(lambda: [self._rate(*pair) for pair in pairs])

    def _rate(self, prompt: Prompt, completion: Completion) -> float | str:
        """Ask for the reward; give it, or why there is none."""
        try:
            return rate(self.reward, prompt, completion_text(self.policy, completion))
        except RewardError as error:
            if self.stop_at_rejected:
                raise RewardError(f"data.on_bad_record: stop: a completion of prompt {prompt.id}: {error}") from error
            return str(error)

    def _add(self, group: _Group, member: int, completion: Completion, rating: float | str, version: int) -> None:
        prompt, name = self._prompt(group.number), f"{group.number}-{member}"
        if isinstance(rating, str):
            self._rejected.append(Rejected(prompt.id, group.number, rating, name, str(group.number)))
            return
        group.rated.append(
            to_rollout(
                name,
                prompt,
                completion.token_ids,
                completion.logprobs,
                temperature=self.options.temperature,
                versions=[version] * len(completion.token_ids),
                reward=rating,
                metadata={"stopped": completion.stopped},
            )
        )

    def _hopeless(self, groups: int) -> str:
        reason, count = Counter(rejected.reason for rejected in self._rejected).most_common(1)[0]
        return (
            f"no completion of {groups} prompts in a row could be rated, each tried {TRIES} times: {reason} "
            f"({count} times; all are in rejected.jsonl)"
        )

    def _prompt(self, group: int) -> Prompt:
        return prompt_of(group, self.prompts, self.seed)

    def state(self) -> dict[str, Any]:
        return {"groups": self._groups, "fingerprint": self._fingerprint()}

    def _fingerprint(self) -> str:
        return fingerprint(self.prompts, self.seed, self.group_size)

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_groups(state, self._fingerprint())
        self._groups = state["groups"]

    def drain_rejected(self) -> list[Rejected]:
        rejected, self._rejected = self._rejected, []
        return rejected


def completion_text(policy: Policy, completion: Completion) -> str:
    """Decode what a reward reads: special tokens, the end of text among them, are left out."""
    return policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def stop_ids(policy: Policy) -> frozenset[int]:
    """Find every token that ends a text, as the model's own generation settings and its tokenizer say."""
    generation = getattr(policy.model, "generation_config", None)
    named = [
        getattr(generation, "eos_token_id", None),
        policy.model.config.eos_token_id,
        getattr(policy.tokenizer, "eos_token_id", None),
    ]
    return frozenset(token for value in named if value is not None for token in _as_list(value))


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]
