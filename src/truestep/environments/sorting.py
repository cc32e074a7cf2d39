"""A task with checkable answers: sort digits. The answer to `sort 7 2 9 4 =` is `2 4 7 9`."""

import math
import random
from collections.abc import Iterator

DIGITS = "0123456789"
WORDS = ("sort", "=", *DIGITS)


def prompts(seed: int, length: int = 4) -> Iterator[dict[str, str]]:
    """Yield all distinct prompts of unsorted digits, in an order determined by the seed."""
    generator = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    wrongly_ordered = len(DIGITS) ** length - math.comb(len(DIGITS) + length - 1, length)
    while len(seen) < wrongly_ordered:
        digits = tuple(generator.choices(DIGITS, k=length))
        if digits not in seen and list(digits) != sorted(digits):
            seen.add(digits)
            yield {"prompt": f"sort {' '.join(digits)} =", "answer": " ".join(sorted(digits))}


def reward(prompt: str, completion: str, *, answer: str, **_: object) -> float:
    """Return 1 for the right digits in the right order, else 0."""
    return float(completion.split() == answer.split())
