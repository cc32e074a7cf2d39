"""The reward of a problem: 1 for the right number, 0.1 for a wrong one, 0 for none."""

import re

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")


def reward(prompt: object, completion: str, *, answer: float, **_: object) -> float:
    value = last_number(completion)
    if value is None:
        return 0.0
    return 1.0 if abs(value - answer) < 1e-6 * max(1.0, abs(answer)) else 0.1


def last_number(text: str) -> float | None:
    """Return the number in the last box, or else the last one of the text: `1,234`, `-0.5` and `3/4` are numbers."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    plain = re.sub(r"(?<=\d)[\s,]+(?=\d)", "", boxed[-1] if boxed else text)
    found = _NUMBER.findall(plain)
    if not found:
        return None
    above, _, below = found[-1].partition("/")
    return float(above) / float(below) if below and float(below) else float(above)
