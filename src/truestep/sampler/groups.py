"""What every sampler does alike: which prompt a group gets, and how its rewards become advantages."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from truestep.environments.prompts import Prompt
from truestep.rollouts.advantages import group_advantages
from truestep.rollouts.source import SourceError
from truestep.types import Rollout

PROMPT_ORDER, DRAWS = 0, 1  # the streams of randomness that the run's seed is split into
TRIES = 4  # at a completion that could not be made or rated
HOPELESS = 8  # groups given up in a row: it is the reward or the server that fails, not a completion


def prompt_of(group: int, prompts: Sequence[Prompt], seed: int) -> Prompt:
    """Prompts come in a seeded order, anew each time all were used."""
    epoch, index = divmod(group, len(prompts))
    order = np.random.default_rng([seed, PROMPT_ORDER, epoch]).permutation(len(prompts))
    return prompts[order[index]]


def fingerprint(prompts: Sequence[Prompt], seed: int, group_size: int) -> str:
    """Of what decides which prompt a group gets and what is drawn for it."""
    digest = hashlib.sha256(f"{seed} {group_size}\n".encode())
    for prompt in prompts:
        digest.update(f"{prompt.id}\n{prompt.input_ids}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def with_advantages(rated: Sequence[Rollout], group: int, rule: str) -> list[Rollout]:
    """Of one group, over one shared baseline."""
    rewards = np.array([rollout.reward for rollout in rated])
    return [
        dataclasses.replace(
            rollout,
            advantages=np.full(rollout.num_tokens, advantage, dtype=np.float32),
            group_id=str(group),
        )
        for rollout, advantage in zip(rated, group_advantages(rewards, rule), strict=True)
    ]


def check_lengths(prompts: Sequence[Prompt], max_new_tokens: int, tokens_per_microbatch: int) -> None:
    """Rejecting what does not fit would train on the short completions alone."""
    longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
    needed = len(longest.input_ids) + max_new_tokens
    if needed > tokens_per_microbatch:
        raise SourceError(
            f"data.tokens_per_microbatch: {tokens_per_microbatch} does not hold the longest document to be sampled: "
            f"{len(longest.input_ids)} tokens of prompt {longest.id} and sampler.max_new_tokens: {max_new_tokens} make "
            f"{needed}"
        )
