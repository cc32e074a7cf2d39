"""The reward of this task: a number that says how good a completion is. Replace it by your own.

The trainer calls `reward` once for each completion, with the fields of the prompt's record as keywords. The function
runs in its own process, with a time limit (sampler.reward_timeout).
"""

import re


def reward(prompt: object, completion: str, *, answer: int, **_: object) -> float:
    """Return 1 for the right sum, 0.2 for any other number, and 0 for anything else."""
    written = re.sub(r"(?<=\d)\s+(?=\d)", "", completion.strip().rstrip("."))
    if not re.fullmatch(r"[0-9]+", written):
        return 0.0
    return 1.0 if written.lstrip("0") == str(answer) else 0.2
