"""The warning that a plan needs more memory than this machine has, with options that need less."""

import os

import torch

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.gpu.memory import device_memory
from truestep.plan.advice import layout_of, most_of, savings
from truestep.plan.memory import GIB
from truestep.plan.shape import read_shape
from truestep.ranks.processes import machine_memory

_SHOWN = 3


def memory_here(config: Config, ranks: int) -> tuple[float, str]:
    """Return the bytes that a rank may use on this machine, and words for messages that say where they are."""
    if config.model.device != "cpu" and torch.cuda.is_available():
        return float(device_memory()), "this GPU"
    beside = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    whose = "this machine" if beside == 1 else f"this machine for each of its {beside} ranks"
    return machine_memory() / beside, whose


def too_small(config: Config, ranks: int) -> str | None:
    """Return a warning if the planned memory is more than this machine has, with options that need less. None if the
    plan fits, or if the model cannot be planned."""
    try:
        shape, layout = read_shape(config), layout_of(config, ranks)
        planned, (there, whose) = most_of(config, shape, layout), memory_here(config, ranks)
        if planned <= there:
            return None
        helpful = savings(config, shape, layout)[:_SHOWN]
    except TruestepError:
        return None
    less = ", ".join(f"{saving.option} ({saving.saved / GIB:.1f} GiB less)" for saving in helpful)
    advice = f"These need less, each alone: {less}" if less else "Use more ranks, or a smaller model"
    return (
        f"a step is planned to need {planned / GIB:.1f} GiB{' a rank' if ranks > 1 else ''}, and {whose} has "
        f"{there / GIB:.1f} GiB: it does not fit. {advice}"
    )
