"""A reward for mathematics: the package math-verify compares a completion's last answer with the prompt's `answer`.

sampler: {prompts: problems.jsonl, reward: "truestep.environments.adapters.math_verify:reward"}
"""

import re
from functools import partial
from typing import Any

from truestep.environments.adapters import missing
from truestep.environments.adapters.apart import within

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise missing("sampler.reward: math_verify", "math-verify", error) from error

SECONDS = 10.0  # time limit for one completion; if the comparison takes longer, the completion counts as wrong
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_KINDS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def reward(prompt: Any, completion: str, *, answer: Any, **_: Any) -> float:
    """Return 1 if the completion's last answer is equal to `answer` as mathematics, else 0."""
    gold = _gold(str(answer))
    return float(bool(within(SECONDS, partial(_equal, gold, completion))))


def _gold(answer: str) -> list[Any]:
    """Parse the right answer, which may be LaTeX without dollars or braces around it."""
    for text in (f"\\boxed{{{answer}}}", answer):
        if found := parse(text, _KINDS):
            return list(found)
    raise ValueError(f"the prompt's answer {answer!r:.200} is nothing that math-verify can read")


def _equal(gold: list[Any], completion: str) -> bool:
    tagged = _TAG.findall(completion)
    found = parse(tagged[-1] if tagged else completion, _KINDS)
    return bool(verify(gold, found))
