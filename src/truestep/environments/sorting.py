"""A task whose answer can be checked: put digits in order. `sort 7 2 9 4 =` wants `2 4 7 9`."""

import math
import random
from collections.abc import Iterator

DIGITS = "0123456789"
WORDS = ("sort", "=", *DIGITS)


def prompts(seed: int, length: int = 4) -> Iterator[dict[str, str]]:
    """Generate different prompts until there is no other, the same ones for the same seed."""
    generator = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    wrongly_ordered = len(DIGITS) ** length - math.comb(len(DIGITS) + length - 1, length)
    while len(seen) < wrongly_ordered:
        digits = tuple(generator.choices(DIGITS, k=length))
        if digits not in seen and list(digits) != sorted(digits):
            seen.add(digits)
            yield {"prompt": f"sort {' '.join(digits)} =", "answer": " ".join(sorted(digits))}


def reward(prompt: str, completion: str, *, answer: str, **_: object) -> float:
    """Give 1 for the right digits in the right order, 0 for anything else."""
    return float(completion.split() == answer.split())
