"""Presets: published recipes, each a name for a set of options. The user's own options win. Imports no torch."""

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
"""The parts of a dotted name."""


@dataclass(frozen=True)
class Preset:
    """Option values under a name, which a configuration can start from. Example: `tis` sets
    `loss.old_logprobs: recompute` and `loss.correction`."""

    meaning: str
    options: Mapping[str, Any]  # by dotted name
    sampled: Mapping[str, Any] = field(default_factory=dict)  # only if the configuration has a sampler
    needs: Mapping[str, str] = field(default_factory=dict)  # options that the user must give, with their meanings


_CORRECTION = {"loss.old_logprobs": "recompute", "loss.correction.level": "label"}

PRESETS: dict[str, Preset] = {
    "dapo": Preset(
        "clip range wider above than below, all labels weigh the same, groups with equal rewards are replaced",
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
        "no division by a completion's length or by the standard deviation of rewards",
        {"loss.type": "grpo", "loss.normalize_by": "constant", "data.advantages": "group_mean"},
        needs={"loss.max_labels": "the longest completion allowed, in tokens"},
    ),
    "bnpo": Preset(
        "grpo with the mean over all labels of the batch, which here is the whole step",
        {"loss.type": "grpo", "loss.normalize_by": "labels", "data.advantages": "group_normalized"},
    ),
    "luspo": Preset(
        "gspo in which the weight of a document is its number of labels",
        {"loss.type": "gspo", "loss.normalize_by": "documents", "data.advantages": "group_normalized"},
    ),
    "icepop": Preset(
        "weights labels by the ratio of trainer to sampler, and masks labels whose ratio is out of bounds",
        _CORRECTION | {"loss.correction.type": "mask", "loss.correction.low": 0.5, "loss.correction.high": 5.0},
    ),
    "tis": Preset(
        "weights labels by the ratio of trainer to sampler, truncated at a bound",
        _CORRECTION | {"loss.correction.type": "truncate", "loss.correction.high": 2.0},
    ),
    "rloo": Preset(
        "policy gradient with the mean reward of the group's other completions as baseline",
        {"loss.type": "reinforce", "loss.normalize_by": "documents", "data.advantages": "leave_one_out"},
    ),
    "reinforce++": Preset(
        "grpo with the group's mean reward as baseline, divided by the standard deviation over the step",
        {"loss.type": "grpo", "loss.normalize_by": "labels", "data.advantages": "batch_normalized"},
    ),
    "opo": Preset(
        "policy gradient with the baseline of least variance: the group's mean reward, weighted by length",
        {"loss.type": "reinforce", "loss.normalize_by": "documents", "data.advantages": "length_weighted"},
    ),
    "on_policy_distillation": Preset(
        "the only reward is minus the KL divergence from a teacher",
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
    """A preset that contradicts other options. The message names them."""


def names_of(value: Any) -> list[str]:
    """List the known presets in the value of the option `preset`. The schema refuses all other values."""
    names = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
    return [name for name in names if isinstance(name, str) and name in PRESETS]


def fill(options: dict[str, Any]) -> dict[Name, str]:
    """Add to `options` the options of the presets that it names, except those that are given.

    Returns the name of each added option, with its preset. Idempotent.
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


_ABSENT: Any = object()


def _given(options: Any, name: Name) -> Any:
    """Return the given value of an option, or `_ABSENT`, also if a section around it is null."""
    for part in name:
        if not isinstance(options, dict) or part not in options:
            return _ABSENT
        options = options[part]
    return options


def _put(options: dict[str, Any], name: Name, value: Any) -> bool:
    """Set an option. Return False if a section around it was given as another value, such as null."""
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
