"""Weights that are not trained, by patterns of their names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from truestep.weights.errors import ModelError


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Find the names that match a pattern."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def freeze_weights(model: Any, patterns: Sequence[str]) -> None:
    """Freeze the weights whose names match. A tied weight has two names, and either of them freezes it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not matching(named, [pattern]):
            some = ", ".join(sorted(named)[:3])
            raise ModelError(f"model.freeze: {pattern!r} matches no weight of {type(model).__name__} (it has {some} …)")
    for name in matching(named, patterns):
        named[name].requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in named.values()):
        raise ModelError("model.freeze: its patterns match every weight, so that nothing is left to train")
