"""The learning rate and the options of one update of a session."""

from collections.abc import Mapping
from numbers import Real

import torch

from truestep.commands.session.errors import SessionError
from truestep.config.sections import OptimizerConfig
from truestep.step.update.optimizer import set_adamw
from truestep.step.update.optimizers.adamw import AdamWOptions

_LARGEST_RATE = 1e30  # the bound in the configuration


def set_options(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, options: Mapping[str, float | None]
) -> float | None:
    """Set the options of an update. Return the norm to which its gradient is clipped."""
    own = config.model_dump()
    names = ("beta1", "beta2", "epsilon", "weight_decay")
    if unknown := sorted(set(options) - {*names, "gradient_clip"}):
        raise SessionError(f"step: {unknown[0]} is unknown: it may be {', '.join(names)} or gradient_clip")
    if own["type"] == "adamw":
        beta1, beta2, epsilon, decay = ({**own, **options}[name] for name in names)
        set_adamw(optimizer, AdamWOptions((beta1, beta2), epsilon, decay))
    elif set(options) - {"gradient_clip"}:
        raise SessionError("step: the betas, epsilon and weight decay of an update are those of AdamW alone")
    return options.get("gradient_clip", own["gradient_clip"])


def check_rate(rate: float) -> None:
    """Raise before an update that could only ruin the weights."""
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate <= _LARGEST_RATE:
        raise SessionError(f"the learning rate cannot be {rate!r}: give a number from 0 to {_LARGEST_RATE:g}")
