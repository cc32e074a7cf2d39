"""Rules that all samplers share: from completions to documents, advantages, and restarts."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError
from truestep.rollouts.advantages import AdvantageRule, as_rule, with_group_advantages
from truestep.rollouts.source import SourceError, refuse_other_kind
from truestep.types import Rejected, Rollout

DRAWS = 1  # the number of the random stream for draws; the order of prompts has stream 0
TRIES = 4  # attempts to complete a group before it is given up
HOPELESS = 8  # groups given up in a row after which the run ends: the reward function or the server is at fault


def num_groups(count: int, group_size: int) -> int:
    """Return how many whole groups make `count` documents."""
    if count % group_size:
        raise ValueError(f"{count} documents are not a multiple of groups of {group_size}")
    return count // group_size


def refuse_other_groups(state: dict[str, Any], own_state: dict[str, Any]) -> None:
    """Raise an error if a checkpoint's state was made with other prompts, another seed or another group size."""
    refuse_other_kind("sampler", "groups", state)
    if state["fingerprint"] != own_state["fingerprint"]:
        raise SourceError(
            "sampler.prompts, their weights, data.group_size or seed is not what this run was started with, or the "
            "environment now makes other prompts, so the groups would differ; give the run the same, or another "
            "checkpoint.directory"
        )


def with_advantages(rated: Sequence[Rollout], group: int, rule: AdvantageRule | str) -> list[Rollout]:
    """Return a group's documents with their advantages."""
    named = [dataclasses.replace(rollout, group_id=str(group)) for rollout in rated]
    return with_group_advantages(named, as_rule(rule))


def reject(prompt: Prompt, group: int, name: str, reason: str | RewardError, completion: str | None = None) -> Rejected:
    """Make an entry of rejected.jsonl for a completion that is not trained on. `completion`: its text, if known."""
    traceback = reason.traceback if isinstance(reason, RewardError) else None
    asked = prompt.prompt if isinstance(prompt.prompt, str) else json.dumps(prompt.prompt, ensure_ascii=False)
    known = None if completion is None else asked
    return Rejected(prompt.id, group, str(reason), name, str(group), known, completion, traceback)


def name_of(group: int, number: int) -> str:
    """Return the name of an episode, which is also its document's name."""
    return f"{group}-{number}"


def place_of(rejected: Rejected) -> tuple[int, int]:
    """Return the group and the number of an episode that is not trained on."""
    group, _, number = str(rejected.id).partition("-")
    return int(group), int(number)


def stopping_error(prompt: Prompt, error: RewardError) -> RewardError:
    """Return the error that ends the run when a completion cannot be rated and data.on_bad_record is stop."""
    return RewardError(f"data.on_bad_record: stop: a completion of prompt {prompt.id}: {error}")


def explain_hopeless(groups: int, reasons: Sequence[str]) -> str:
    """Return the message for too many groups given up in a row, with the most frequent reason."""
    reason, count = Counter(reasons).most_common(1)[0]
    return (
        f"no group of {groups} prompts in a row could be completed, each tried {TRIES} times: {reason} "
        f"({count} times; all are in rejected.jsonl)"
    )


def check_lengths(prompts: Sequence[Prompt], max_new_tokens: int, tokens_per_microbatch: int) -> None:
    """Raise an error if the longest prompt and `max_new_tokens` exceed a micro-batch. Otherwise long completions would
    have to be dropped, and training would be biased towards short ones."""
    longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
    needed = len(longest.input_ids) + max_new_tokens
    if needed > tokens_per_microbatch:
        raise SourceError(
            f"data.tokens_per_microbatch: {tokens_per_microbatch} does not hold the longest document to be sampled: "
            f"{len(longest.input_ids)} tokens of prompt {longest.id} and sampler.max_new_tokens: {max_new_tokens} make "
            f"{needed}"
        )
