"""Which prompt each group gets, in plain Python: written from docs/sampling.md, with whole histories and no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np


@dataclass
class Draw:
    """`weights` by source, or None: its number of prompts. `rest`: None where no prompt rests."""

    sizes: Mapping[str, int]
    seed: int = 0
    weights: Mapping[str, float] | None = None
    easy: float = 1.0
    hopeless: float = 0.0
    rest: int | None = None
    lag: int = 0  # groups
    drawn: list[tuple[str, int, int]] = field(default_factory=list)  # by group: source, prompt, pass
    steps: list[tuple[int, dict[int, float]]] = field(default_factory=list)  # end, and mean rewards by group

    def next(self) -> tuple[str, int]:
        """The source and the index of the next group's prompt."""
        source = self._source()
        mine = [place for place in self.drawn if place[0] == source]
        number, index = 0, -1
        if mine:
            _, prompt, number = mine[-1]
            index = self._pass(source, number).index(prompt)
        while True:
            for prompt in self._pass(source, number)[index + 1 :]:
                if not self._rests(source, prompt, number):
                    self.drawn.append((source, prompt, number))
                    return source, prompt
            number, index = number + 1, -1

    def _pass(self, source: str, number: int) -> list[int]:
        which = list(self.sizes).index(source)
        words = [self.seed, 0, number] + ([which] if which else [])
        order: list[int] = np.random.default_rng(words).permutation(self.sizes[source]).tolist()
        return order

    def _source(self) -> str:
        """The first of those that are furthest behind their share of the groups."""
        weights = {name: Fraction((self.weights or self.sizes)[name]) for name in self.sizes}
        best, most = "", None
        for name, weight in weights.items():
            due = (len(self.drawn) + 1) * weight / sum(weights.values())
            behind = due - sum(place[0] == name for place in self.drawn)
            if most is None or behind > most:
                best, most = name, behind
        return best

    def _rests(self, source: str, prompt: int, number: int) -> bool:
        if self.rest is None:
            return False
        known = [
            (group, reward)
            for end, rewards in self.steps
            if end + self.lag <= len(self.drawn)
            for group, reward in rewards.items()
            if self.drawn[group][:2] == (source, prompt)
        ]
        if not known:
            return False
        group, reward = max(known)
        extreme = reward >= self.easy or reward <= self.hopeless
        return extreme and number <= self.drawn[group][2] + self.rest

    def step(self, rewards: Mapping[int, float], end: int) -> None:
        self.steps.append((end, dict(rewards)))
