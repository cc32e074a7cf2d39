"""Presets: published recipes, as names for plain options. What the user gives wins. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

PresetName = Literal[
    "dapo",
    "dr_grpo",
    "bnpo",
    "luspo",
    "icepop",
    "tis",
    "rloo",
    "reinforce++",
    "opo",
    "on_policy_distillation",
]
Name = tuple[str, ...]
"""A dotted name in parts."""


@dataclass(frozen=True)
class Preset:
    """A recipe. Example: the options of `tis` are `loss.old_logprobs: recompute` and a correction."""

    meaning: str
    options: Mapping[str, Any]  # by dotted name
    sampled: Mapping[str, Any] = field(default_factory=dict)  # only where the configuration has a sampler
    needs: Mapping[str, str] = field(default_factory=dict)  # options that the user has to give, and what they are


_CORRECTION = {"loss.old_logprobs": "recompute", "loss.correction.level": "label"}

PRESETS: dict[str, Preset] = {
    "dapo": Preset(
        "a wider clip above than below, every label weighs the same, groups without a difference are sampled anew",
        {
            "loss.type": "grpo",
            "loss.epsilon_low": 0.2,
            "loss.epsilon_high": 0.28,
            "loss.normalize_by": "labels",
            "data.advantages": "group_normalized",
        },
        sampled={"data.zero_advantage": "replace"},
    ),
    "dr_grpo": Preset(
        "no length and no spread in a denominator",
        {"loss.type": "grpo", "loss.normalize_by": "constant", "data.advantages": "group_mean"},
        needs={"loss.max_labels": "the longest completion allowed, in tokens"},
    ),
    "bnpo": Preset(
        "grpo over the labels of the batch, which here is the whole step",
        {"loss.type": "grpo", "loss.normalize_by": "labels", "data.advantages": "group_normalized"},
    ),
    "luspo": Preset(
        "gspo in which a document weighs as much as it has labels",
        {"loss.type": "gspo", "loss.normalize_by": "documents", "data.advantages": "group_normalized"},
    ),
    "icepop": Preset(
        "labels weigh the sampler's ratio within bounds, and nothing beyond them",
        _CORRECTION | {"loss.correction.type": "mask", "loss.correction.low": 0.5, "loss.correction.high": 5.0},
    ),
    "tis": Preset(
        "labels weigh the sampler's ratio, up to a bound",
        _CORRECTION | {"loss.correction.type": "truncate", "loss.correction.high": 2.0},
    ),
    "rloo": Preset(
        "the policy gradient of whole completions, less the mean reward of the others of the group",
        {"loss.type": "reinforce", "loss.normalize_by": "documents", "data.advantages": "leave_one_out"},
    ),
    "reinforce++": Preset(
        "the clip of grpo, with advantages less the group's mean over the spread of the whole step",
        {"loss.type": "grpo", "loss.normalize_by": "labels", "data.advantages": "batch_normalized"},
    ),
    "opo": Preset(
        "the policy gradient with the baseline of least variance: the group's mean reward, weighed by length",
        {"loss.type": "reinforce", "loss.normalize_by": "documents", "data.advantages": "length_weighted"},
    ),
    "on_policy_distillation": Preset(
        "the divergence from a teacher is all that is rewarded",
        {
            "loss.type": "reinforce",
            "loss.kl_reference.weight": 1.0,
            "loss.kl_reference.in": "reward",
            "data.advantages": "truestep.rollouts.advantages:zero",
        },
        needs={"loss.kl_reference.path": "the teacher's directory"},
    ),
}
assert tuple(PRESETS) == get_args(PresetName)


class PresetError(ValueError):
    """The reason why a preset cannot be filled in, as a sentence that names the options."""


def names_of(value: Any) -> list[str]:
    """List the presets that the option `preset` names; a value of any other kind is the schema's to refuse."""
    names = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
    return [name for name in names if isinstance(name, str) and name in PRESETS]


def fill(options: dict[str, Any]) -> dict[Name, str]:
    """Put the options of the presets that `options` names into it, where they are not given.

    Returns the name of each option that was put in, with its preset. Filling in twice changes nothing.
    """
    filled: dict[Name, str] = {}
    sampled = options.get("sampler") is not None
    for preset in names_of(options.get("preset")):
        for dotted, value in _options_of(preset, sampled):
            name = tuple(dotted.split("."))
            before = _given(options, name)
            if name in filled and before != value:
                way_out = "" if name == ("loss", "type") else f"give {dotted} yourself, or "
                raise PresetError(
                    f"preset: {preset} has {dotted}: {value}, and {filled[name]} has {dotted}: {before}: {way_out}take "
                    "one of the two"
                )
            if name == ("loss", "type") and before not in (None, value, _ABSENT):
                raise PresetError(
                    f"preset: {preset} is a recipe for loss.type: {value}, and loss.type is {before}: remove one of "
                    "the two"
                )
            if before is _ABSENT and _put(options, name, value):
                filled[name] = preset
        _check_needs(preset, options)
    return filled


def _options_of(preset: str, sampled: bool) -> Iterator[tuple[str, Any]]:
    yield from PRESETS[preset].options.items()
    if sampled:
        yield from PRESETS[preset].sampled.items()


def overridden(options: dict[str, Any], preset: str) -> dict[str, tuple[Any, Any]]:
    """Find the options of a preset that are given otherwise: by dotted name, the value and that of the preset."""
    found = {}
    for dotted, value in _options_of(preset, options.get("sampler") is not None):
        given = _given(options, tuple(dotted.split(".")))
        if given != value:
            found[dotted] = (None if given is _ABSENT else given, value)
    return found


_ABSENT: Any = object()


def _given(options: Any, name: Name) -> Any:
    """Find what is given for an option. A section that is given as null has none of its options."""
    for part in name:
        if not isinstance(options, dict) or part not in options:
            return _ABSENT
        options = options[part]
    return options


def _put(options: dict[str, Any], name: Name, value: Any) -> bool:
    """Put an option in; False where a section around it was given as something else, such as null."""
    section = options
    for depth, part in enumerate(name[:-1]):
        inner = section.setdefault(part, {})
        if inner is None and depth == 0:  # `loss:` without a value in the file
            inner = section[part] = {}
        if not isinstance(inner, dict):
            return False
        section = inner
    section[name[-1]] = value
    return True


def _check_needs(preset: str, options: dict[str, Any]) -> None:
    for dotted, meaning in PRESETS[preset].needs.items():
        name = tuple(dotted.split("."))
        switched_off = any(_given(options, name[:depth]) is None for depth in range(2, len(name)))
        if _given(options, name) in (_ABSENT, None) and not switched_off:
            raise PresetError(f"preset: {preset} needs {dotted}: {meaning}")
