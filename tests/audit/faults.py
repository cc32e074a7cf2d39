"""The planted faults: what was done to which dump, and the finding that names it. docs/audit.md has a row of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audit.world import END, VOCABULARY, Rollout, World, changed, give_advantages, sample
from audit.writers import WRITERS, Change

PLAIN = World()
RECURRING = World(prompts=6)  # prompts come again at later steps
MANY = World(steps=9, groups=3)


@dataclass(frozen=True)
class Fault:
    format: str
    what: str
    finding: str
    world: World = PLAIN
    rollouts: Callable[[list[Rollout]], Any] | None = None  # changes them, or gives others
    record: Change | None = None  # changes a record, or slime's data of a step

    @property
    def name(self) -> str:
        return f"{self.format}: {self.what}"

    def write(self, folder: Path) -> list[Path]:
        drawn = sample(self.world)
        if self.rollouts is not None:
            drawn = self.rollouts(drawn) or drawn
        return WRITERS[self.format](drawn, folder, self.record)


# ---- changes of rollouts


def mask_moved(by: int) -> Callable[[list[Rollout]], None]:
    def change(rollouts: list[Rollout]) -> None:
        for one in rollouts:
            one.mask = np.roll(one.mask, by).tolist()
            one.mask[0] = 0

    return change


def end_masked(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        if one.drawn[-1] == END:
            one.mask[-1] = 0


def end_dropped(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        if one.drawn[-1] == END and len(one.drawn) > 1:
            for values in (one.drawn, one.logprobs, one.trainer, one.entropy, one.mask):
                values.pop()
            one.routes = one.routes[:-1]


def end_forced(rollouts: list[Rollout]) -> None:
    """Put an end token behind cut samples, as a label with a log-prob of 0."""
    draws = np.random.default_rng(4)
    for one in rollouts:
        if one.truncated:
            one.drawn.append(END)
            one.logprobs.append(0.0)
            one.trainer.append(-3 - 4 * draws.random())
            one.entropy.append(1.0)
            one.mask.append(1)
            one.routes, one.truncated = None, False


def all_finished(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.truncated = False


def rewards_moved(by: int) -> Callable[[list[Rollout]], None]:
    def change(rollouts: list[Rollout]) -> None:
        rewards = np.roll([one.reward for one in rollouts], by).tolist()
        for one, reward in zip(rollouts, rewards, strict=True):
            one.reward, one.parts = reward, {"right": float(reward >= 0.5), "short": reward - float(reward >= 0.5)}

    return change


def other_groups(rollouts: list[Rollout]) -> None:
    size = World().size
    give_advantages(rollouts, [(index + 2) // size for index in range(len(rollouts))])


def some_turned(rollouts: list[Rollout]) -> None:
    for one in rollouts[::17]:
        one.advantage = -one.advantage - 0.2


def groups_by_place(rollouts: list[Rollout]) -> None:
    for index, one in enumerate(rollouts):
        one.group = (index + 1) // 4


def group_copied(rollouts: list[Rollout]) -> list[Rollout]:
    longest = max(range(0, len(rollouts), 4), key=lambda at: min(len(one.drawn) for one in rollouts[at : at + 4]))
    again = [Rollout(**vars(one)) for one in rollouts[longest : longest + 4]]
    for one in again:
        one.step, one.group = one.step + 1, 1000
    return rollouts + again


def members_copied(rollouts: list[Rollout]) -> None:
    for index in range(0, len(rollouts), 4):
        first, group = rollouts[index], rollouts[index + 1]
        rollouts[index + 1] = Rollout(**(vars(first) | {"group": group.group}))


def members_lost(rollouts: list[Rollout]) -> list[Rollout]:
    slow = sorted(range(len(rollouts)), key=lambda index: -len(rollouts[index].drawn))[:6]
    return [one for index, one in enumerate(rollouts) if index not in slow]


def routes_moved(by: int) -> Callable[[list[Rollout]], None]:
    def change(rollouts: list[Rollout]) -> None:
        for one in rollouts:
            one.routes = np.concatenate([one.routes[:1], one.routes[:-1]]) if by > 0 else one.routes[1:]

    return change


def routes_padded(rollouts: list[Rollout]) -> None:
    for one in rollouts[::5]:
        one.routes = one.routes.copy()
        one.routes[:3] = 0


def tools_trained(rollouts: list[Rollout]) -> None:
    """Put what a tool answered into completions, as labels without log-probs."""
    for one in rollouts[::3]:
        at = len(one.drawn) // 2
        one.drawn[at:at] = [50 + n for n in range(10)]
        for values in (one.logprobs, one.trainer, one.entropy):
            values[at:at] = [0.0] * 10
        one.mask = [0] * len(one.prompt) + [1] * len(one.drawn)
        one.routes = None


def part_forgotten(rollouts: list[Rollout]) -> None:
    for one in rollouts[::9]:
        one.reward += 0.5
    give_advantages(rollouts)


def logprobs_moved(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.logprobs = [*one.logprobs[1:], one.logprobs[-1]]


def raw_logprobs(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.logprobs = one.plain


def other_weights(rollouts: list[Rollout]) -> None:
    generator = np.random.default_rng(0)
    for one in rollouts:
        one.logprobs = [min(-1e-4, value + generator.normal() * 0.6) for value in one.logprobs]


def noted(value: float) -> Callable[[list[Rollout]], None]:
    def change(rollouts: list[Rollout]) -> None:
        for one in rollouts:
            one.logprobs = [value] * len(one.logprobs)

    return change


def above_zero(rollouts: list[Rollout]) -> None:
    for one in rollouts[::7]:
        one.logprobs[len(one.logprobs) // 2] = 0.3


def begun_twice(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.prompt, one.mask, one.routes = [2, 2, *one.prompt], [0, 0, *one.mask], None


def padding_trained(rollouts: list[Rollout]) -> None:
    longest = max(len(one.drawn) for one in rollouts)
    for one in rollouts:
        missing = longest - len(one.drawn)
        for values in (one.drawn, one.logprobs, one.trainer, one.entropy):
            values += [0] * missing
        one.mask, one.routes = [0] * len(one.prompt) + [1] * longest, None


def each(change: Callable[[float], float]) -> Callable[[list[Rollout]], None]:
    """Change all log-probs of the sampler."""

    def planted(rollouts: list[Rollout]) -> None:
        for one in rollouts:
            one.logprobs = [change(value) for value in one.logprobs]

    return planted


def of_another(rollouts: list[Rollout]) -> None:
    values = [value for one in rollouts for value in one.logprobs]
    for index, one in enumerate(rollouts):
        one.logprobs = [values[(index * 7 + 97 + place) % len(values)] for place in range(len(one.drawn))]


def no_reward(rollouts: list[Rollout]) -> None:
    for one in rollouts[::7]:
        one.reward = math.nan


def all_turned(rollouts: list[Rollout]) -> None:
    for one in rollouts:
        one.advantage = -one.advantage


def dealt(rollouts: list[Rollout]) -> None:
    """Rewards are gathered from two ranks in turns, and samples one rank after the other."""
    for step in {one.step for one in rollouts}:
        members = [one for one in rollouts if one.step == step]
        half = len(members) // 2
        rewards = [members[place // 2 + half * (place % 2)].reward for place in range(2 * half)]
        for one, reward in zip(members, rewards, strict=False):
            one.reward = reward


def by_two_ranks(rollouts: list[Rollout]) -> list[Rollout]:
    return [*rollouts, *copy.deepcopy(rollouts)]


# ---- changes of records


def other_length(name: str, every: int, by: int) -> Change:
    def change(record: dict[str, Any], index: int) -> None:
        if index % every == 1:
            record[name] = record[name][:-by]

    return change


def masks_cut(data: dict[str, Any], step: int) -> None:
    data["loss_masks"] = [mask[:-2] for mask in data["loss_masks"]]


def few_masks_cut(data: dict[str, Any], step: int) -> None:
    data["rollout_log_probs"] = [
        values[:-1] if index % 6 == 1 and len(values) > 8 else values
        for index, values in enumerate(data["rollout_log_probs"])
    ]


def versions_fixed(data: dict[str, Any], step: int) -> None:
    data["weight_versions"] = [["0"] for _ in data["weight_versions"]]


def versions_late(data: dict[str, Any], step: int) -> None:
    data["weight_versions"] = [[str(step - step * 2 // 3)] for _ in data["weight_versions"]]


def step_late(record: dict[str, Any], index: int) -> None:
    record["sampling_client_step"] = record["iteration"] - record["iteration"] * 2 // 3


def past_stripped(record: dict[str, Any], index: int) -> None:
    for step in record["steps"][1:]:
        step["ob_len"] -= 6


def total_wrong(record: dict[str, Any], index: int) -> None:
    record["total_reward"] += 1.0 if index % 10 == 3 else 0.0


def made_again(record: dict[str, Any], turn: int) -> None:
    """Two tokens of the first turn come back as one of the same text."""
    prompt = record["response"]["prompt_token_ids"]
    if turn:
        prompt[11:13] = [VOCABULARY - 1]


def reasoning_dropped(record: dict[str, Any], turn: int) -> None:
    if turn:
        del record["response"]["prompt_token_ids"][10:17]


def logprob_lost(record: dict[str, Any], turn: int) -> None:
    content = record["response"]["choices"][0]["logprobs"]["content"]
    if turn == 0 and len(content) > 4:
        content[2]["logprob"] = None


def contrary(record: dict[str, Any], index: int) -> None:
    record["advantage"] = float(np.random.default_rng(index).normal())


PLANTED: tuple[Fault, ...] = (
    Fault("truestep", "labels one token late", "mask-shifted", rollouts=mask_moved(1)),
    Fault("truestep", "labels one token early", "mask-shifted", rollouts=mask_moved(-1)),
    Fault("truestep", "the end token is masked", "end-token-masked", rollouts=end_masked),
    Fault("truestep", "the end token is dropped", "end-token-missing", rollouts=end_dropped),
    Fault("truestep", "an end token behind cut samples", "end-token-forced", World(groups=24, longest=10),
          rollouts=end_forced),
    Fault("truestep", "truncated samples marked as finished", "truncated-as-finished", rollouts=all_finished),
    Fault("truestep", "log-probs after top-p 0.9", "logprob-truncated", World(top_p=0.9, groups=16)),
    Fault("truestep", "log-probs above 0", "logprob-invalid", rollouts=above_zero),
    Fault("truestep", "log-probs all 0", "logprob-constant", rollouts=noted(0.0)),
    Fault("truestep", "log-probs all -1", "logprob-constant", rollouts=noted(-1.0)),
    Fault("truestep", "rewards of the sample before", "rewards-mispaired", rollouts=rewards_moved(1)),
    Fault("truestep", "some advantages with the wrong sign", "advantages", rollouts=some_turned),
    Fault("truestep", "advantages over shifted groups", "advantages-other-group", rollouts=other_groups),
    Fault("truestep", "groups of two prompts", "groups-mixed", rollouts=groups_by_place),
    Fault("truestep", "a group written twice", "duplicated-groups", rollouts=group_copied),
    Fault("truestep", "members of groups with one seed", "duplicated-completions", rollouts=members_copied),
    Fault("truestep", "drawn greedily", "temperature-unused", World(drawn_at=0)),
    Fault("truestep", "routes one token late", "routes-shifted", rollouts=routes_moved(1)),
    Fault("truestep", "routes one token early", "routes-shifted", rollouts=routes_moved(-1)),
    Fault("truestep", "routes of padding", "routes-padded", rollouts=routes_padded),
    Fault("truestep", "slow members left out", "groups-incomplete", rollouts=members_lost),
    Fault("truestep", "a tool's answers as labels", "labels-not-drawn", rollouts=tools_trained),
    Fault("truestep", "rewards without one of their parts", "reward-parts", rollouts=part_forgotten),
    Fault("truestep", "log-probs of a text's other tokens", "retokenised", record=other_length("logprobs", 5, 1)),
    Fault("truestep", "a begin token twice", "begins-twice", rollouts=begun_twice),
    Fault("truestep", "padding as labels", "labels-not-drawn", rollouts=padding_trained),
    Fault("truestep", "probabilities in the place of log-probs", "logprob-invalid", rollouts=each(math.exp)),
    Fault("truestep", "log-probs as whole numbers", "logprob-invalid", rollouts=each(int)),
    Fault("truestep", "all advantages with the wrong sign", "advantages", rollouts=all_turned),
    Fault("prime-rl", "an end token behind cut samples", "end-token-forced", World(longest=10), rollouts=end_forced),
    Fault("prime-rl", "log-probs of base 2", "logprob-temperature", rollouts=each(lambda value: value / math.log(2))),
    Fault("prime-rl", "log-probs of another sample", "logprob-weights", rollouts=of_another),
    Fault("slime", "log-probs without their sign", "logprob-invalid", rollouts=each(abs)),
    Fault("verl", "rewards that are NaN", "reward-invalid", rollouts=no_reward),
    Fault("verl", "rewards gathered from two ranks in turns", "rewards-mispaired", World(groups=16), dealt),
    Fault("verl", "a batch written by two ranks", "duplicated-groups", rollouts=by_two_ranks),
    Fault("prime-rl", "log-probs beside the next label", "logprob-shifted", rollouts=logprobs_moved),
    Fault("prime-rl", "log-probs before the temperature", "logprob-temperature", World(temperature=0.6),
          raw_logprobs),
    Fault("prime-rl", "weights never delivered", "logprob-weights", changed(MANY, never=True, learning=0.4)),
    Fault("prime-rl", "log-probs of other weights", "logprob-weights", rollouts=other_weights),
    Fault("prime-rl", "a temperature of 0.5 for the sampler alone, log-probs of 1", "sampling-mismatch",
          World(drawn_at=0.5)),
    Fault("prime-rl", "log-probs after top-p 0.8", "logprob-truncated", World(top_p=0.8, groups=16)),
    Fault("prime-rl", "an adapter that changes nothing", "weights-never-changed",
          changed(RECURRING, learning=0.0, steps=5)),
    Fault("prime-rl", "labels one token late", "mask-shifted", rollouts=mask_moved(1)),
    Fault("slime", "masks without their last two values", "lengths", record=masks_cut),
    Fault("slime", "log-probs of a text's other tokens", "retokenised", record=few_masks_cut),
    Fault("slime", "one version of weights for all steps", "weights-never-changed", World(steps=6),
          record=versions_fixed),
    Fault("slime", "a sampler that falls behind", "staleness-grows", MANY, record=versions_late),
    Fault("slime", "advantages over shifted groups", "advantages-other-group", rollouts=other_groups),
    Fault("slime", "log-probs of other weights", "logprob-weights", rollouts=other_weights),
    Fault("slime", "the end token is masked", "end-token-masked", rollouts=end_masked),
    Fault("miles", "routes one token late", "routes-shifted", rollouts=routes_moved(1)),
    Fault("miles", "log-probs after top-p 0.9", "logprob-truncated", World(top_p=0.9, groups=16)),
    Fault("verl", "rewards of the sample before", "rewards-mispaired", World(groups=16), rewards_moved(1)),
    Fault("verl", "drawn greedily", "temperature-unused", World(drawn_at=0)),
    Fault("verl", "a batch's group written twice", "duplicated-groups", rollouts=group_copied),
    Fault("verl", "slow members left out", "groups-incomplete", rollouts=members_lost),
    Fault("trl", "rewards of the sample before", "rewards-mispaired", rollouts=rewards_moved(1)),
    Fault("trl", "some advantages with the wrong sign", "advantages", rollouts=some_turned),
    Fault("trl", "advantages that follow nothing", "advantages", record=contrary),
    Fault("trl", "advantages over shifted groups", "advantages-other-group", rollouts=other_groups),
    Fault("tinker", "a template that strips the past", "template-rewrites", record=past_stripped),
    Fault("tinker", "a sampler that falls behind", "staleness-grows", MANY, record=step_late),
    Fault("tinker", "totals that are no sums", "reward-parts", record=total_wrong),
    Fault("openai", "turns tokenised again", "retokenised", record=made_again),
    Fault("openai", "a template that drops reasoning", "template-rewrites", record=reasoning_dropped),
    Fault("openai", "a log-prob that is missing", "logprob-invalid", record=logprob_lost),
)  # fmt: skip


# ---- faults in the rows of real tables: those of our own run (tests/audit/test_runs.py), and those of TRL's trainer
# (tests/peers/test_trl_completions.py)

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class RowFault:
    format: str
    what: str
    finding: str
    change: Callable[[Rows], Rows | None]  # changes the rows, or gives others

    @property
    def name(self) -> str:
        return f"{self.format}: {self.what}"


def _moved(name: str, by: int) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        values = [row[name] for row in rows]
        for index, row in enumerate(rows):
            row[name] = values[(index - by) % len(rows)]

    return change


def _turned(rows: Rows) -> None:
    for row in rows[::9]:
        row["advantage"] = -row["advantage"] - 0.3


def _contrary(rows: Rows) -> None:
    for index, row in enumerate(rows):
        row["advantage"] = float(np.random.default_rng(index).normal())


def _copied(rows: Rows) -> Rows:
    """Write the group with the longest texts again, a step later."""
    at = max(range(0, len(rows), 4), key=lambda start: sum(len(row["completion"]) for row in rows[start : start + 4]))
    again = [
        row | {"step": row["step"] + 1} | ({"group_id": "again"} if "group_id" in row else {})
        for row in rows[at : at + 4]
    ]
    return sorted([*rows, *again], key=lambda row: row["step"])


def _ratios_of_others(rows: Rows) -> None:
    generator = np.random.default_rng(0)
    for row in rows:
        trainer = np.array(row["token_logprobs"])
        sampler = np.minimum(trainer + generator.normal(0, 0.7, len(trainer)), -0.01)
        row["token_log_ratios"] = (trainer - sampler).tolist()


def _ratios_moved(rows: Rows) -> None:
    for row in rows:
        sampler = np.subtract(row["token_logprobs"], row["token_log_ratios"])
        row["token_log_ratios"] = np.subtract(row["token_logprobs"], np.roll(sampler, -1)).tolist()


def _too_uncertain(rows: Rows) -> None:
    for row in rows:
        row["entropy"] *= 1.5


def _one_version(rows: Rows) -> None:
    for row in rows:
        row["staleness"] += row["model_version"]
        row["model_version"] = 0


def _greedy(rows: Rows) -> None:
    for index, row in enumerate(rows):
        row["completion"] = rows[index - index % 4]["completion"]


KEPT: tuple[RowFault, ...] = (
    RowFault("our run", "advantages of the sample before", "rewards-mispaired", _moved("advantage", 1)),
    RowFault("our run", "some advantages with the wrong sign", "advantages", _turned),
    RowFault("our run", "log-probs of other weights", "logprob-weights", _ratios_of_others),
    RowFault("our run", "log-probs beside the next label", "logprob-shifted", _ratios_moved),
    RowFault("our run", "tokens sharper than their distribution", "sampling-mismatch", _too_uncertain),
    RowFault("our run", "weights that were never delivered", "weights-never-changed", _one_version),
    RowFault("our run", "a group written twice", "duplicated-groups", _copied),
)
TRL_TABLES: tuple[RowFault, ...] = (
    RowFault("TRL's run", "advantages of the sample before", "rewards-mispaired", _moved("advantage", 1)),
    RowFault("TRL's run", "some advantages with the wrong sign", "advantages", _turned),
    RowFault("TRL's run", "advantages that follow nothing", "advantages", _contrary),
    RowFault("TRL's run", "a group written twice", "duplicated-groups", _copied),
    RowFault("TRL's run", "completions of a group are all the same", "temperature-unused", _greedy),
)
