"""Freezes weights whose names match a pattern."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from truestep.weights.errors import ModelError


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that match at least one pattern."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def freeze_weights(model: Any, patterns: Sequence[str]) -> None:
    """Freeze the weights whose names match a pattern. A tied weight has two names; matching either freezes it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not matching(named, [pattern]):
            some = ", ".join(sorted(named)[:3])
            raise ModelError(f"model.freeze: {pattern!r} matches no weight of {type(model).__name__} (it has {some} …)")
    for name in matching(named, patterns):
        named[name].requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in named.values()):
        raise ModelError("model.freeze: its patterns match every weight, so that nothing is left to train")
