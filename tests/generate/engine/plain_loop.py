"""The oracle of sampling: one completion at a time, the whole sequence through transformers' own model for each token,
in float64, and draws written in plain Python from docs/engine.md and not from the code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

WORD = 2**64 - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def exponential(seed: Sequence[int], position: int, counter: int) -> float:
    key = int(np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0])
    row = mix((key + (position + 1) * 0x9E3779B97F4A7C15) & WORD)
    bits = mix((row + counter * 0xD1B54A32D192ED03) & WORD) >> 32
    return -math.log1p(-(bits + 0.5) / 2**32)


def kept(log_p: np.ndarray, top_p: float, top_k: int, min_p: float) -> list[int]:
    """The likeliest tokens: `top_k` of them, of these the fewest that have `top_p` of their probability, and of these
    those that have at least `min_p` of the likeliest's."""
    order = sorted(range(len(log_p)), key=lambda token: (-log_p[token], token))[: top_k or None]
    p = {token: math.exp(log_p[token]) for token in order}
    wanted, reached, left = top_p * sum(p.values()), 0.0, []
    for token in order:
        if reached >= wanted:
            break
        left.append(token)
        reached += p[token]
    return [token for token in left if p[token] >= min_p * p[order[0]]]


def draw(z: np.ndarray, inside: Sequence[int], seed: Sequence[int], position: int) -> int:
    """Draw a block of 16 ids by its summed probability, and one of its tokens; of those inside alone."""

    def best(scores: dict[int, float]) -> int:
        return max(scores, key=scores.__getitem__)

    blocks = {one // 16 for one in inside}
    sums = {block: np.logaddexp.reduce([z[one] for one in inside if one // 16 == block]) for block in blocks}
    block = best({one: sums[one] - math.log(exponential(seed, position, -(one + 1))) for one in sorted(blocks)})
    tokens = [one for one in inside if one // 16 == block]
    return best({one: z[one] - math.log(exponential(seed, position, one + 1)) for one in tokens})


class PlainLoop:
    def __init__(self, directory: Path):
        how = {"experts_implementation": "eager"}  # the others have no float64
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **how)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0, -1].numpy()

    def sample(
        self,
        prompt: Sequence[int],
        seed: Sequence[int],
        count: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> tuple[list[int], list[float], list[float]]:
        """Its tokens, their log-probs, and those in the distribution that is left to draw from."""
        tokens: list[int] = []
        logprobs, cut = [], []
        while len(tokens) < count and not (tokens and tokens[-1] in stop_ids):
            z = self.logits([*prompt, *tokens]) / (temperature or 1.0)
            log_p = z - np.logaddexp.reduce(z)
            if temperature == 0:
                token, inside = int(log_p.argmax()), list(range(len(log_p)))
            else:
                inside = kept(log_p, top_p, top_k, min_p)
                token = draw(z, inside, seed, len(tokens))
            tokens.append(token)
            logprobs.append(float(log_p[token]))
            cut.append(float(log_p[token] - np.logaddexp.reduce(log_p[inside])))
        return tokens, logprobs, cut
