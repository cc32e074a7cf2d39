"""The order in which groups get their prompts: a mixture of sources, without resting prompts.

The prompt of a group is decided when the group begins. It depends only on groups of earlier steps, namely steps that
end at least `lag` groups before it. So it does not depend on when rewards come, nor on which rank plays an episode.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from truestep.environments.prompts import Prompt
from truestep.generate.pools import EASY, HOPELESS, Curriculum, Pool
from truestep.types import Rollout


@dataclass(frozen=True)
class OrderOptions:
    # Weights of the sources; empty: their numbers of prompts.
    weights: Mapping[str, float] = field(default_factory=dict)
    curriculum: Curriculum | None = None  # None: no prompt rests


class Place(NamedTuple):
    """The place of a group's prompt in the data."""

    source: str
    prompt: int  # index in its source
    drawn_in: int  # the pass over its source


class PromptOrder:
    """Gives groups their numbers and prompts. After each step, `told` receives the step's groups."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: OrderOptions, lag: int = 0):
        sources: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            sources.setdefault(prompt.source, []).append(prompt)
        self._pools = {
            name: Pool(members, seed, number, options.curriculum)
            for number, (name, members) in enumerate(sources.items())
        }
        weights = {name: Fraction(options.weights.get(name, len(members))) for name, members in sources.items()}
        self._shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        self._rests, self._lag = options.curriculum is not None, lag
        self._number = 0  # the number of the next group
        self._begun: dict[int, Place] = {}  # groups of steps that `told` has not received yet
        self._restored: deque[int] = deque()  # groups of `_begun` that the checkpoint had; they are given first
        # Steps that do not count yet because of the lag: the end of each, and the mean rewards of its groups.
        self._waiting: deque[tuple[int, list[tuple[Place, float]]]] = deque()
        self.measured: dict[str, float] = {}  # metrics of the last step that `told` received

    def may_begin(self, next_end: int) -> bool:
        """Return whether the next group's prompt can be decided: `told` has received all steps on which it depends.
        `next_end` is one more than the number of the last group that the next step certainly has."""
        return bool(self._restored) or self._number - self._lag < next_end

    @property
    def number(self) -> int:
        """The number of the next group that is drawn."""
        return self._number

    def next(self) -> tuple[int, Prompt]:
        """Begin a group: return its number and its prompt."""
        if self._restored:
            number = self._restored.popleft()
        else:
            number, self._number = self._number, self._number + 1
            self._count_until(number)
            name = self._next_source()
            self._begun[number] = Place(name, *self._pools[name].next())
        place = self._begun[number]
        return number, self._pools[place.source].prompts[place.prompt]

    def _next_source(self) -> str:
        """Return the source that is furthest below its share."""
        if len(self._pools) == 1:
            return next(iter(self._pools))
        count = 1 + sum(pool.drawn for pool in self._pools.values())
        return max(self._pools, key=lambda name: self._shares[name] * count - self._pools[name].drawn)

    def told(self, groups: Mapping[int, Sequence[Rollout]], end: int) -> None:
        """Receive the groups of a step, by number, including replaced ones. `end` is one more than the number of the
        last group. Groups before `end` that are missing were given up."""
        rated = [(self._begun[number], mean_reward(groups[number])) for number in sorted(groups)]
        self._begun = {number: place for number, place in self._begun.items() if number >= end}
        if self._rests:
            self._waiting.append((end, rated))
            self._count_until(self._number)
        self.measured = self._measure(rated)

    def _count_until(self, number: int) -> None:
        """Decide which prompts rest, by the rewards of all steps that count for the group `number`."""
        while self._waiting and self._waiting[0][0] + self._lag <= number:
            for place, reward in self._waiting.popleft()[1]:
                self._pools[place.source].note(place.prompt, place.drawn_in, reward)

    def _measure(self, rated: Sequence[tuple[Place, float]]) -> dict[str, float]:
        """Return the metrics of a step: of all sources together, and of each source if there are several."""
        measured: dict[str, float] = {}
        if self._rests:
            resting = {name: pool.resting() for name, pool in self._pools.items()}
            sizes = {name: len(pool.prompts) for name, pool in self._pools.items()}
            for why, metric in ((EASY, "easy_prompts"), (HOPELESS, "hopeless_prompts")):
                total = sum(resting[name][why] * sizes[name] for name in sizes)
                measured[metric] = total / sum(sizes.values())
                if len(sizes) > 1:
                    measured |= {f"{metric}/{name}": resting[name][why] for name in sizes}
        if len(self._pools) > 1:
            for name, pool in self._pools.items():
                rewards = [reward for place, reward in rated if place.source == name]
                measured[f"source_groups/{name}"] = float(len(rewards))
                measured[f"source_passes/{name}"] = float(pool.pass_number + 1)
                if rewards:
                    measured[f"source_reward/{name}"] = math.fsum(rewards) / len(rewards)
        return measured

    def snapshot(self, still_open: Collection[int] = ()) -> Callable[[], dict[str, Any]]:
        """Record the position, and return a function that builds its state as JSON values. `still_open`: groups that
        were begun and are to be made again."""
        numbers = sorted({*still_open, *self._restored})
        number, begun = self._number, [[each, *self._begun[each]] for each in numbers if each in self._begun]
        pools = {name: pool.snapshot() for name, pool in self._pools.items()}
        waiting = [[end, [[*place, reward] for place, reward in rated]] for end, rated in self._waiting]
        return lambda: {
            "groups": number,
            "open": numbers,
            "order": {
                "begun": begun,
                "waiting": waiting,
                "sources": {name: state() for name, state in pools.items()},
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. For a state of a version without sources and resting prompts, draw groups up to its
        number."""
        still_open = sorted(state.get("open", ()))
        self._restored.clear()
        if (order := state.get("order")) is None:
            while self._number < state["groups"]:
                self.next()
            self._begun = {number: place for number, place in self._begun.items() if number in still_open}
        else:
            self._number = state["groups"]
            self._begun = {number: Place(*place) for number, *place in order["begun"]}
            self._waiting = deque(
                (end, [(Place(*place), reward) for *place, reward in rated]) for end, rated in order["waiting"]
            )
            for name, pool in self._pools.items():
                pool.restore(order["sources"][name])
        self._restored.extend(number for number in still_open if number in self._begun)


def mean_reward(group: Sequence[Rollout]) -> float:
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    return math.fsum(rewards) / len(rewards)


def fingerprint(prompts: Sequence[Prompt], seed: int, group_size: int, options: OrderOptions) -> str:
    """Return a hash of the prompts, the seed, the group size and the mixture: they decide each group's draws."""
    digest = hashlib.sha256(f"{seed} {group_size}\n".encode())
    for name, weight in options.weights.items():
        digest.update(f"{name} {weight}\n".encode())
    source = ""
    for prompt in prompts:
        if prompt.source != source:
            source = prompt.source
            digest.update(f"source {source}\n".encode())
        digest.update(f"{prompt.id}\n{prompt.input_ids}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()
