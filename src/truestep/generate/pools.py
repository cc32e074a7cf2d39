"""The prompts of one source: its passes over them, and which of them rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from truestep.environments.prompts import Prompt

PROMPT_ORDER = 0  # the number of the random stream for the order of prompts
EASY, HOPELESS = "easy", "hopeless"  # why a prompt rests


@dataclass(frozen=True)
class Curriculum:
    """When prompts rest."""

    easy: float  # a prompt rests if the mean reward of its group is at least this
    hopeless: float  # a prompt rests if the mean reward of its group is at most this
    rest: int  # the number of passes that leave out a resting prompt

    def verdict(self, reward: float) -> str | None:
        """Return why a prompt rests if its group has this mean reward; None: it does not rest."""
        if reward >= self.easy:
            return EASY
        return HOPELESS if reward <= self.hopeless else None


class Pool:
    """Gives the prompts of one source, pass after pass. Each pass has its own seeded order, without resting prompts."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, number: int, curriculum: Curriculum | None):
        """`number`: the number of the source among those of the run."""
        self.prompts, self.drawn = prompts, 0
        self._curriculum = curriculum
        self._seed, self._own_seed = seed, (number,) if number else ()
        # By reason, for each prompt: the first pass that includes it again. 0: it does not rest for this reason.
        self._back = {why: np.zeros(len(prompts), dtype=np.int64) for why in (EASY, HOPELESS) if curriculum}
        self._begin(0)

    def _begin(self, number: int, index: int = 0) -> None:
        self.pass_number, self._index = number, index
        generator = np.random.default_rng([self._seed, PROMPT_ORDER, number, *self._own_seed])
        self._order = generator.permutation(len(self.prompts))

    def next(self) -> tuple[int, int]:
        """Return the index of the next prompt, and the pass in which it is drawn. If all prompts rest, continue with
        the first pass that includes a prompt again."""
        while True:
            while self._index < len(self._order):
                prompt = int(self._order[self._index])
                self._index += 1
                if all(back[prompt] <= self.pass_number for back in self._back.values()):
                    self.drawn += 1
                    return prompt, self.pass_number
            soonest = int(np.maximum(*self._back.values()).min()) if self._back else 0
            self._begin(max(self.pass_number + 1, soonest))

    def note(self, prompt: int, drawn_in: int, reward: float) -> None:
        """Decide whether a prompt rests, by the mean reward of its group, which was drawn in the pass `drawn_in`."""
        if self._curriculum is None:
            return
        verdict = self._curriculum.verdict(reward)
        for why, back in self._back.items():
            back[prompt] = drawn_in + 1 + self._curriculum.rest if why == verdict else 0

    def resting(self) -> dict[str, float]:
        """Return the share of the prompts that rest, by reason."""
        return {why: float((back > self.pass_number).mean()) for why, back in self._back.items()}

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Record the position, and return a function that builds its state as JSON values."""
        own = {"drawn": self.drawn, "pass": self.pass_number, "index": self._index}
        copies = {why: back.copy() for why, back in self._back.items()}

        def state() -> dict[str, Any]:
            resting = {}
            for why, back in copies.items():
                found = np.flatnonzero(back > own["pass"])
                resting[why] = {"prompts": found.tolist(), "back_in": back[found].tolist()}
            return own | {"resting": resting}

        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]
        self._begin(state["pass"], state["index"])
        for why, back in self._back.items():
            back[:] = 0
            resting = state["resting"].get(why, {"prompts": [], "back_in": []})
            back[resting["prompts"]] = resting["back_in"]
