"""Dumps without a fault that look odd: empty completions, tools, rounded log-probs, unequal groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from audit.world import END, VOCABULARY, Rollout, World, give_advantages, routes, sample
from audit.writers import WRITERS, Change

TOKENS = ("truestep", "prime-rl", "slime", "miles")
FORMATS = (*TOKENS, "verl", "trl")
MANY = World(groups=12, longest=60)


@dataclass(frozen=True)
class Odd:
    what: str
    formats: tuple[str, ...]
    rollouts: Callable[[list[Rollout]], list[Rollout] | None] = lambda rollouts: None  # changes them, or gives others
    world: World = MANY
    record: Change | None = None

    def write(self, source: str, folder: Path) -> list[Path]:
        rollouts = sample(self.world)
        rollouts = self.rollouts(rollouts) or rollouts
        for one in rollouts:
            one.routes = routes(one.ids) if len(one.ids) > 1 else None
        return WRITERS[source](rollouts, folder, self.record)


def large_vocabulary(rollouts: list[Rollout]) -> None:
    names = np.random.default_rng(1).permutation(250_000)[:VOCABULARY].tolist()
    for one in rollouts:
        one.prompt, one.drawn = ([names[token] for token in some] for some in (one.prompt, one.drawn))


def nothing_but(drawn: list[int]) -> Callable[[list[Rollout]], None]:
    """Every ninth completion is this one."""

    def change(rollouts: list[Rollout]) -> None:
        for one in rollouts[::9]:
            values = [-3.0 - 0.001 * one.group] * len(drawn)
            one.drawn, one.logprobs, one.trainer = list(drawn), list(values), list(values)
            one.entropy, one.truncated = [2.0] * len(drawn), False
            one.mask = [0] * len(one.prompt) + [1] * len(drawn)

    return change


def put_in(one: Rollout, at: int, tokens: list[int]) -> None:
    """Put tokens that the policy did not draw into a completion, masked."""
    one.drawn[at:at] = tokens
    for values in (one.logprobs, one.trainer, one.entropy):
        values[at:at] = [0.0] * len(tokens)
    one.mask[len(one.prompt) + at : len(one.prompt) + at] = [0] * len(tokens)


def tools_in_the_middle(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        if len(one.drawn) > 4:
            put_in(one, len(one.drawn) // 2, [50 + number for number in range(10)])


def tools_at_the_end(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        put_in(one, len(one.drawn), [50 + number for number in range(6)])


def rounded(digits: int) -> Callable[[list[Rollout]], None]:
    def change(rollouts: list[Rollout]) -> None:
        for one in rollouts:
            one.logprobs = [round(value, digits) for value in one.logprobs]

    return change


def in_half_precision(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        bits = np.array(one.logprobs, np.float32).view(np.uint32)
        one.logprobs = ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).tolist()


def clipped(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.advantage = max(-0.5, min(0.5, one.advantage))


def penalised(rollouts: list[Rollout]) -> None:
    draws = np.random.default_rng(3)
    for one in rollouts:
        one.advantage -= 0.05 * abs(float(draws.normal()))


def positive_alone(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.advantage = max(0.0, one.advantage)


def right_or_wrong(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.reward = one.parts["right"]
        one.parts = {"right": one.reward, "short": 0.0}
    give_advantages(rollouts)


def all_right(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.reward, one.parts = 1.0, {"right": 1.0, "short": 0.0}
    give_advantages(rollouts)


def one_token_answers(rollouts: list[Rollout]) -> None:
    draws = np.random.default_rng(5)
    for one in rollouts:
        chance = 0.3 + 0.4 * (one.group * 7 % 10) / 10
        right = float(draws.random()) < chance
        values = [math.log(chance if right else 1 - chance), -1e-3]
        one.drawn, one.logprobs, one.trainer = [3 if right else 4, END], list(values), list(values)
        one.entropy, one.mask, one.truncated, one.answer = [0.6, 0.01], [0] * len(one.prompt) + [1, 1], False, 3
        one.reward, one.parts = float(right), {"right": float(right), "short": 0.0}
    give_advantages(rollouts)


def two_answers(rollouts: list[Rollout]) -> None:
    """Of the four samples of each prompt, chance made two answers of each kind."""
    for place, one in enumerate(rollouts):
        one.drawn, one.reward = [3 + place % 2, END], float(place % 2)
        one.logprobs = one.trainer = [math.log(0.5), -1e-3]
        one.entropy, one.mask = [0.6, 0.01], [0] * len(one.prompt) + [1, 1]
        one.truncated, one.parts = False, {"right": one.reward, "short": 0.0}
    give_advantages(rollouts)


def answer(one: Rollout, words: np.ndarray, logprobs: ArrayLike, trainer: ArrayLike) -> None:
    """Give a rollout these words and an end, all drawn, with the sampler's and the trainer's log-probs."""
    one.drawn = [*words.tolist(), END]
    one.logprobs, one.trainer = np.asarray(logprobs).tolist(), np.asarray(trainer).tolist()
    one.entropy = (-np.asarray(trainer)).tolist()
    one.mask, one.truncated = [0] * len(one.prompt) + [1] * len(one.drawn), False


def certain_ends(rollouts: list[Rollout]) -> None:
    """The longest answers end with certainty, and shorter ones nearly so."""
    for place, one in enumerate(rollouts):
        length = 6 if place % 3 else 4
        draws = np.random.default_rng((7, place))
        values = [*np.log(draws.uniform(0.2, 0.9, length)).tolist(), 0.0 if place % 3 else -2e-4]
        answer(one, draws.integers(2, VOCABULARY, length), values, values)


def up_to_three_digits(rollouts: list[Rollout]) -> None:
    """A grammar allows no fourth digit, so an end behind the third is certain."""
    for place, one in enumerate(rollouts):
        draws = np.random.default_rng((8, place))
        count = 3 if place % 2 else int(draws.integers(1, 3))
        values = [*np.log(draws.uniform(0.05, 0.5, count)).tolist(), float(np.log(draws.uniform(0.2, 0.6)))]
        values[-1] = 0.0 if count == 3 else values[-1]
        answer(one, draws.integers(10, 20, count), values, values)


def certain_ends_of_four_digits(rollouts: list[Rollout]) -> None:
    """The longest answers end with a probability of 0.99999, which is rounded; one in ten words is nearly certain."""
    for place, one in enumerate(rollouts):
        draws = np.random.default_rng((9, place))
        length = 12 if place % 3 else int(draws.integers(3, 12))
        exact = np.log(draws.uniform(0.2, 0.9, length + 1))
        exact[:-1][draws.random(length) < 0.1] = -3e-4
        exact[-1] = -1e-5 if length == 12 else exact[-1]
        answer(one, draws.integers(2, VOCABULARY, length), exact.round(4), exact)


def unequal_groups(rollouts: list[Rollout]) -> list[Rollout]:
    draws = np.random.default_rng(2)
    chosen = []
    for key in sorted({one.group for one in rollouts}):
        members = [one for one in rollouts if one.group == key]
        chosen += members[: int(draws.integers(2, len(members) + 1))]
    give_advantages(chosen)
    return chosen


def telling_groups(rollouts: list[Rollout]) -> list[Rollout]:
    rewards: dict[int, set[float]] = {}
    for one in rollouts:
        rewards.setdefault(one.group, set()).add(one.reward)
    return [one for one in rollouts if len(rewards[one.group]) > 1]


def four_ways_to_end(rollouts: list[Rollout]) -> None:
    draws = np.random.default_rng(1)
    for one in rollouts:
        if not one.truncated and draws.random() < 0.5:
            one.drawn[-1] = int(draws.choice([0, 5, 7]))


def missing_at_prompts(value: Any) -> Change:
    def change(record: dict[str, Any], index: int) -> None:
        name = "logprobs" if "logprobs" in record else "inference_logprobs"
        count = record["loss_mask"].index(1)
        record[name] = [value] * count + record[name][count:]

    return change


def versions_by_hash(record: dict[str, Any], index: int) -> None:
    record["model_version"] = "5f2c0e"


def without_rewards(record: dict[str, Any], index: int) -> None:
    for name in ("reward", "rewards", "advantage"):
        record.pop(name)


ODD: tuple[Odd, ...] = (
    Odd("token ids up to 250,000", FORMATS, large_vocabulary),
    Odd("empty completions", ("truestep", "prime-rl", "verl", "trl"), nothing_but([])),
    Odd("completions that are an end token alone", FORMATS, nothing_but([END])),
    Odd("a tool's answers, masked", TOKENS, tools_in_the_middle),
    Odd("episodes that end with a tool's answer", TOKENS, tools_at_the_end),
    Odd("log-probs that are null before the labels", ("truestep", "prime-rl"), record=missing_at_prompts(None)),
    Odd("log-probs that are NaN before the labels", ("truestep", "prime-rl"), record=missing_at_prompts(math.nan)),
    Odd("log-probs in bfloat16", TOKENS, in_half_precision),
    Odd("log-probs of two digits", TOKENS, rounded(2)),
    Odd("log-probs of four digits", TOKENS, rounded(4)),
    Odd("groups of 64", (*FORMATS, "tinker", "openai"), world=World(groups=2, size=64, steps=2)),
    Odd("groups of two to eight", FORMATS, unequal_groups, World(size=8, groups=12)),
    Odd("groups whose rewards are all equal left out", FORMATS, telling_groups),
    Odd("rewards of 0 and 1", (*FORMATS, "tinker", "openai"), right_or_wrong, World(groups=16)),
    Odd("rewards that are all 1", (*FORMATS, "tinker", "openai"), all_right, World(groups=16)),
    Odd("answers of one token", (*FORMATS, "tinker", "openai"), one_token_answers, World(groups=20)),
    Odd("ends that are certain", TOKENS, certain_ends, World(groups=20)),
    Odd("answers of up to three digits, by a grammar", TOKENS, up_to_three_digits, World(groups=20)),
    Odd("ends that are certain, in log-probs of four digits", TOKENS, certain_ends_of_four_digits, World(groups=20)),
    Odd("two answers, each twice a prompt", ("verl",), two_answers),
    Odd("advantages that are clipped", ("truestep", "prime-rl", "slime", "trl"), clipped),
    Odd("advantages less a penalty", ("truestep", "prime-rl", "slime", "trl"), penalised),
    Odd("positive advantages alone", ("truestep", "prime-rl", "slime", "trl"), positive_alone),
    Odd("three stop strings beside the end token", TOKENS, four_ways_to_end),
    Odd("versions that are hashes", ("truestep",), record=versions_by_hash),
    Odd("no rewards", ("truestep",), record=without_rewards),
    Odd("one sample", FORMATS, world=World(groups=1, size=1, steps=1)),
)
