"""A policy in NumPy that draws rollouts, with everything that trainers dump: exact log-probs, entropies, routes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

VOCABULARY, END, LAYERS, EXPERTS, CHOSEN = 64, 1, 3, 16, 2


@dataclass(frozen=True)
class World:
    """How a run samples. The defaults are those of a run without a fault."""

    seed: int = 0
    steps: int = 3
    groups: int = 8  # a step
    size: int = 4
    longest: int = 40
    prompt: int = 9
    temperature: float = 1.0  # of log-probs
    drawn_at: float | None = None  # the temperature that tokens are really drawn at; 0: greedily
    top_p: float = 1.0
    lag: int = 0  # steps by which the sampler's weights are old
    never: bool = False  # the sampler keeps its first weights
    learning: float = 0.05  # how much a step changes the weights
    prompts: int = 1000  # different ones: few come again

    def table(self, version: int) -> np.ndarray:
        """Logits of the next token [previous, next] after so many steps."""
        start = np.random.default_rng(self.seed).normal(size=(VOCABULARY, VOCABULARY)) * 2
        for token in range(0, VOCABULARY, 3):  # contexts that are nearly certain
            start[token, (7 * token + 5) % VOCABULARY] += 5 + 10 * token / VOCABULARY
        start[:, END] += 0.5
        for step in range(version):
            start = start + self.learning * np.random.default_rng((self.seed, step)).normal(size=start.shape)
        return start


@dataclass
class Rollout:
    step: int
    group: int
    prompt: list[int]
    drawn: list[int]
    logprobs: list[float]
    trainer: list[float]
    entropy: list[float]
    plain: list[float]  # the sampler's at temperature 1, of the whole distribution
    answer: int
    version: int
    truncated: bool
    temperature: float
    reward: float = 0.0
    advantage: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    mask: list[int] = field(default_factory=list)  # of prompt and completion
    routes: Any = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.drawn]


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def kept(p: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-p)
    mass = np.cumsum(p[order])
    chosen = np.zeros_like(p)
    chosen[order[: int(np.searchsorted(mass, top_p)) + 1]] = 1
    q = p * chosen
    return q / q.sum()


def sample(world: World) -> list[Rollout]:
    rng = np.random.default_rng((world.seed, 1))
    rollouts = []
    for step in range(world.steps):
        behind = 0 if world.never else max(0, step - world.lag)
        sampler, trainer = world.table(behind), world.table(step)
        for number in range(world.groups):
            which = int(rng.integers(world.prompts))
            prompt = np.random.default_rng((world.seed, 2, which)).integers(2, VOCABULARY, world.prompt).tolist()
            answer = int(rng.integers(2, VOCABULARY))
            members = [_draw(world, sampler, trainer, prompt, rng) for _ in range(world.size)]
            for one in members:
                one.step, one.group, one.answer, one.version = step, step * world.groups + number, answer, behind
                short = round(0.1 * len(one.drawn) / world.longest, 3)
                one.parts = {"right": float(answer in one.drawn), "short": short}
                one.reward = one.parts["right"] + short
                one.mask = [0] * len(one.prompt) + [1] * len(one.drawn)
                one.routes = routes(one.ids)
            rollouts += members
    give_advantages(rollouts)
    return rollouts


def _draw(
    world: World, sampler: np.ndarray, trainer: np.ndarray, prompt: list[int], rng: np.random.Generator
) -> Rollout:
    drawn: list[int] = []
    columns: tuple[list[float], ...] = tuple([] for _ in range(4))
    sampled, trained, entropies, plain = columns
    state, last = hash(tuple(prompt)) % 2**31, prompt[-1]
    while len(drawn) < world.longest and (not drawn or drawn[-1] != END):
        # What stood before the last token has a small part in the next one.
        context = 0.3 * np.sin(np.arange(VOCABULARY) * (1 + state % 997) / 99)
        z = sampler[last] + context
        p = softmax(z / world.temperature)
        q = kept(p, world.top_p)
        if world.drawn_at == 0:
            token = int(p.argmax())
        else:
            token = int(rng.choice(VOCABULARY, p=q if world.drawn_at is None else softmax(z / world.drawn_at)))
        own = softmax((trainer[last] + context) / world.temperature)
        values = (np.log(q[token]), np.log(own[token]), -(own * np.log(own)).sum(), np.log(softmax(z)[token]))
        for column, value in zip(columns, values, strict=True):
            column.append(float(np.float32(value)))
        drawn.append(token)
        state, last = hash((state, token)) % 2**31, token
    truncated = drawn[-1] != END
    return Rollout(0, 0, prompt, drawn, sampled, trained, entropies, plain, 0, 0, truncated, world.temperature)


def routes(ids: list[int]) -> np.ndarray:
    """Experts [tokens - 1, layers, k] that depend on a token and, as hidden states do, on all before it."""
    rows, state = [], 0
    for token in ids[:-1]:
        state = hash((state, token)) % 2**31
        first = np.arange(LAYERS) * 7 + state
        rows.append(np.stack([first % EXPERTS, (first + 1 + first // EXPERTS % (EXPERTS - 1)) % EXPERTS], -1))
    return np.array(rows, np.int64)


def give_advantages(rollouts: list[Rollout], by: list[int] | None = None) -> None:
    """Give normalised advantages. `by`: the group of each, if it is another than its own."""
    keys = by or [one.group for one in rollouts]
    for key in set(keys):
        members = [one for one, own in zip(rollouts, keys, strict=True) if own == key]
        rewards = np.array([one.reward for one in members])
        spread = rewards.std(ddof=1) if len(members) > 1 else 0.0
        for one, reward in zip(members, rewards, strict=True):
            one.advantage = float((reward - rewards.mean()) / (spread + 1e-4))


def changed(world: World, **options: Any) -> World:
    return replace(world, **options)
