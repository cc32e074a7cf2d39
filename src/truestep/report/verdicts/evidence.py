"""The data that verdicts use: the metrics of a run's steps and evaluations, with trends and windows."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from truestep.report.formats import format_number

Level = Literal["bad", "warning", "note", "good"]
# A function from a metric's name to the steps at which it is finite, and its values there.
Column = Callable[[str], tuple[np.ndarray, np.ndarray]]

FEWEST_STEPS = 3  # the smallest number of steps in the window of "the last steps"
# The smallest number of documents in this window: three small steps without a reward prove little.
FEWEST_DOCUMENTS = 128
_LONGEST_WINDOW = 20  # the largest number of steps in this window, unless these have too few documents
_FIRST_STEPS = 5  # the largest number of "first steps" in a trend
_FEWEST_FOR_TREND = 6  # in steps
_CERTAIN = 3.0  # in standard errors; a larger difference is not noise
_SMALLEST_CHANGE = 0.02  # fraction of the range of rewards; a smaller change is ignored
_HELD_OUT_MARGIN = 1.96  # in standard errors, for 95 % confidence


@dataclass(frozen=True)
class Verdict:
    """A judgement of a run: a title, the numbers that show it, and advice."""

    kind: str  # an identifier; a run has at most one verdict of a kind
    level: Level
    title: str
    evidence: str
    advice: str = ""

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self.sentence, self.advice)))

    @property
    def sentence(self) -> str:
        return f"{self.title}. {self.evidence[:1].upper()}{self.evidence[1:]}"


@dataclass(frozen=True)
class Trend:
    """The change of a metric from the first steps to the last steps."""

    first: float
    last: float
    rose: bool  # rose by more than the noise
    fell: bool
    spans: tuple[int, int]  # the number of steps over which `first` is a mean, and the same for `last`

    @property
    def text(self) -> str:
        first, last = (f"{span} steps" if span > 1 else "step" for span in self.spans)
        return f"from {short(self.first)} (mean of the first {first}) to {short(self.last)} (of the last {last})"

    @property
    def change(self) -> str:
        return f"from {short(self.first)} to {short(self.last)}"


@dataclass(frozen=True)
class HeldOut:
    """The change of a held-out reward from the first to the last evaluation."""

    name: str  # greedy or sampled
    first: float
    last: float
    prompts: float | None
    margin: float | None  # a change smaller than the margin may be chance; None if the spread of rewards is unknown
    best: tuple[float, float]  # the largest reward of all evaluations, and its step

    @property
    def rose(self) -> bool:
        return self.margin is not None and self.last - self.first > self.margin

    @property
    def fell(self) -> bool:
        return self.margin is not None and self.first - self.last > self.margin

    @property
    def text(self) -> str:
        return f"the held-out {self.name} reward went from {self.first:.3f} to {self.last:.3f}"


@dataclass(frozen=True)
class Evidence:
    """The metrics of a run. If the run does not log a metric, there are no verdicts on it."""

    metric: Column
    evaluated: Column
    names: Collection[str]  # the names of the metrics
    rejected: Mapping[str, int] = field(default_factory=dict)  # numbers of rejected completions, by reason
    rejected_in: str = "rejected.jsonl"
    pass_reward: float | None = None  # the smallest reward that counts as passing, if the run declares one
    updates: int = 1  # updates per batch; the steps of one batch have the same documents and count as one observation
    quote: Callable[[], str | None] = lambda: None  # returns the most common completion among the last kept ones

    @cached_property
    def steps(self) -> np.ndarray:
        return max((self.metric(name)[0] for name in ("num_documents", "loss", "reward")), key=len)

    def values(self, name: str) -> np.ndarray:
        return self.metric(name)[1]

    @cached_property
    def window(self) -> int:
        """The number of steps in "the last steps"; 0 if the run does not have enough steps yet."""
        sizes = self.observations("num_documents")
        count = len(sizes)
        steps = min(_LONGEST_WINDOW, max(FEWEST_STEPS, count // 5))
        steps = max(steps, math.ceil(FEWEST_DOCUMENTS / max(1.0, float(sizes.mean())))) if count else steps
        return steps * self.updates if steps * self.updates <= len(self.steps) else 0

    def observations(self, name: str) -> np.ndarray:
        """Return a metric's values at the first step of each batch."""
        return self.values(name)[:: self.updates]

    def recent(self, name: str) -> np.ndarray:
        """Return a metric's last `window` values; an empty array if there are fewer."""
        found = self.values(name)[-self.window :] if self.window else np.empty(0)
        return found if len(found) == self.window else np.empty(0)

    def recent_mean(self, name: str) -> float | None:
        found = self.recent(name)
        return _mean(found) if len(found) else None

    def recent_sum(self, name: str) -> float:
        """Return the sum of a metric over the last `window` steps; a step without the metric counts as 0."""
        steps, values = self.metric(name)
        return float(values[steps >= self.steps[-self.window]].sum()) if self.window else 0.0

    def since(self) -> str:
        """Return the last steps as text: `steps 81 to 100`."""
        first, last = self.steps[-self.window], self.steps[-1]
        return f"steps {format_number(float(first))} to {format_number(float(last))}"

    @cached_property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest reward that a document got so far, not the bounds of the reward function."""
        rewards = self.values("reward")
        low, high = self.values("min_reward"), self.values("max_reward")
        ends = np.concatenate([rewards, low, high])
        return (float(ends.min()), float(ends.max())) if len(ends) else (0.0, 0.0)

    def trend(self, name: str) -> Trend | None:
        values = self.observations(name)
        if len(values) < _FEWEST_FOR_TREND:
            return None
        early = min(_FIRST_STEPS, len(values) // 3)
        late = min(self.window // self.updates or FEWEST_STEPS, len(values) // 3)
        first, last = _mean(values[:early]), _mean(values[-late:])
        # The noise from step to step: the square root of half the mean squared difference between neighbouring values.
        changes = values[1:] - values[:-1]
        scatter = math.sqrt(float(changes @ changes) / len(changes) / 2)
        margin = _CERTAIN * scatter * math.sqrt(1 / early + 1 / late)
        if name == "reward":
            margin = max(margin, _SMALLEST_CHANGE * (self.range[1] - self.range[0]))
        return Trend(
            first, last, last - first > margin, first - last > margin, (early * self.updates, late * self.updates)
        )

    @cached_property
    def reward(self) -> Trend | None:
        return self.trend("reward")

    @cached_property
    def parts(self) -> list[str]:
        """The names of the reward's parts."""
        return [name.removeprefix("rewards/") for name in self.names if name.startswith("rewards/")]

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """The changes of the held-out rewards; empty before the second evaluation."""
        found = []
        for name in ("greedy", "sampled"):
            steps, rewards = self.evaluated(f"{name}_reward")
            if len(rewards) < 2:
                continue
            prompts, spreads = (self.evaluated(key)[1] for key in ("num_prompts", f"{name}_reward_std"))
            count = float(prompts[-1]) if len(prompts) else None
            if len(spreads) != len(rewards) and min(self.range) >= 0 and max(self.range) <= 1:
                spreads = np.sqrt(np.clip(rewards * (1 - rewards), 0, None))  # the largest spread of rewards in [0, 1]
            margin = None
            if count and len(spreads) == len(rewards):
                margin = _HELD_OUT_MARGIN * math.sqrt((spreads[0] ** 2 + spreads[-1] ** 2) / count)
            place = int(rewards.argmax())
            best = float(rewards[place]), float(steps[place])
            found.append(HeldOut(name, float(rewards[0]), float(rewards[-1]), count, margin, best))
        return found

    @property
    def early(self) -> bool:
        """True while the run has too few steps for a trend."""
        return len(self.steps) < _FEWEST_FOR_TREND * self.updates

    @property
    def held_out_rose(self) -> HeldOut | None:
        return next((one for one in self.held_out if one.rose), None)

    @property
    def held_out_fell(self) -> HeldOut | None:
        return next((one for one in self.held_out if one.fell), None)


def _mean(values: np.ndarray) -> float:
    """Return the mean of few values. NumPy's own mean takes several times as long."""
    try:
        return math.fsum(values.tolist()) / len(values)
    except OverflowError:  # the sum is too large for a float
        return float(values.mean())


def short(value: float) -> str:
    return format_number(value, 3)
