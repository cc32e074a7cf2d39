"""The reward of a problem: 1 for the right number, 0.1 for a wrong one, 0 for none."""

import re

_WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"  # 1,234 or 1234
_NUMBER = re.compile(rf"(?:(?<![\d)])-)?(?:{_WHOLE})(?:\.\d+)?(?:/\d+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{\s*(-?\d+)\s*\}\{\s*(\d+)\s*\}")
_DIGITS = re.compile(r"-?\s*\d(\s+\d)+")  # of a model that writes digits as words


def reward(prompt: object, completion: str, *, answer: float | str, **_: object) -> float:
    """Compare the number of a completion with `answer`: a number, or a worked solution that ends with it."""
    value, right = last_number(completion), right_number(answer)
    if value is None:
        return 0.0
    return 1.0 if abs(value - right) < 1e-6 * max(1.0, abs(right)) else 0.1


def right_number(answer: float | str) -> float:
    """Return the number of an answer. A text has it behind `####`, as in GSM8K, or as its last number."""
    value = last_number(answer.rpartition("####")[2]) if isinstance(answer, str) else float(answer)
    if value is None:
        raise ValueError(f"the answer has no number: {answer!r}")
    return value


def last_number(text: str) -> float | None:
    """Return the number in the last box, or else the last one of the text: `1,234`, `-0.5` and `3/4` are numbers."""
    text = _FRACTION.sub(r" \1\2/\3", last_box(text) or text).strip()
    if _DIGITS.fullmatch(text):
        text = "".join(text.split())
    found = _NUMBER.findall(text)
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    return float(above) / float(below) if below and float(below) else float(above)


def last_box(text: str) -> str | None:
    """Return what is in the last \\boxed{...}, which may have braces itself."""
    _, box, inside = text.rpartition("\\boxed{")
    if not box:
        return None
    depth = 1  # of braces that are open
    for place, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return inside[:place]
    return None
