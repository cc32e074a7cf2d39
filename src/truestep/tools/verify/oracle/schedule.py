"""The learning rate of a step, and gradient clipping: docs/contract.md, section 8."""

import math
from typing import Any


def learning_rate(optimizer: dict[str, Any], steps: int | None, number: int) -> float:
    """Return the learning rate of step `number`, from 1, in a run of `steps`. `optimizer`: the section `optimizer` of
    the YAML file."""
    highest, lowest, warm = optimizer["learning_rate"], optimizer["minimum_learning_rate"], optimizer["warmup_steps"]
    if number <= warm:
        return float(highest * number / warm)
    kind = optimizer["schedule"]
    if kind == "constant" or steps is None:
        return float(highest)
    # The first step after warm-up has the highest rate. The lowest rate would be reached one step after the last.
    done = min(1.0, (number - warm - 1) / max(1, steps - warm))
    falls = done if kind == "linear" else 0.5 - 0.5 * math.cos(math.pi * done)
    return float(highest - (highest - lowest) * falls)


def clip_scale(norm: float, threshold: float | None) -> float:
    """Return the factor that clips a gradient of this norm. `threshold` None: no clipping."""
    return 1.0 if threshold is None or norm <= threshold else threshold / norm
