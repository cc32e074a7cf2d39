"""The message of a run that ran out of GPU memory: the part that exceeded its plan, and options that need less."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from truestep.config.schema import Config
from truestep.errors import MachineError, TruestepError
from truestep.plan.advice import layout_of, savings
from truestep.plan.memory import GIB, GRADIENTS, MASTERS, REFERENCE, STATES, UNREDUCED, WEIGHTS, plan_memory
from truestep.plan.shape import read_shape
from truestep.text import printable

_LASTING = (MASTERS, WEIGHTS, GRADIENTS, STATES, REFERENCE, UNREDUCED)
_LOADING = "the model's weights"
_SAMPLING = "the sampler's cache"
_SHOWN = 3


class MemoryExhaustedError(MachineError):
    """Raised if the GPU's memory ran out."""


@contextmanager
def exhaustion_explained(config: Config, ranks: int, phase: Callable[[], str]) -> Iterator[None]:
    """Replace the allocator's error by one that names the part that exceeded its plan. `phase` returns the current
    phase of the run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        raise MemoryExhaustedError(explain_exhausted(config, ranks, phase(), peak, error)) from error


def explain_exhausted(config: Config, ranks: int, phase: str, peak: float, error: torch.OutOfMemoryError) -> str:
    """Return the message: the phase in which memory ran out, the plan for it, and options that need less."""
    said = printable(str(error).split(". ")[0], 300)
    problem = f"the GPU's memory ran out while {phase}: {said}."
    try:
        shape, layout = read_shape(config), layout_of(config, ranks)
        kinds = max(plan_memory(config, shape, layout), key=lambda rank: rank.total).kinds
        helpful = savings(config, shape, layout)
    except TruestepError:
        return problem
    lines = [problem, f"It is {_outgrown(phase, peak, kinds)}."]
    lines += [f"{saving.option} would need {saving.saved / GIB:.2f} GiB less." for saving in helpful[:_SHOWN]]
    lines.append("truestep plan CONFIG --memory GIB shows what each part takes, and what fits.")
    return "\n".join(lines)


def _outgrown(phase: str, peak: float, kinds: Mapping[str, float]) -> str:
    """Describe the part that used the memory, with its planned size."""
    lasting = sum(kinds.get(kind, 0.0) for kind in _LASTING)
    passing = sum(size for kind, size in kinds.items() if kind not in _LASTING)
    if "loading" in phase:
        return f"{_LOADING} and what is made of them, planned with {lasting / GIB:.2f} GiB"
    if "documents" in phase or "evaluating" in phase:
        return f"{_SAMPLING}, beside {lasting / GIB:.2f} GiB that training keeps: lower sampler.batch_size"
    over = (peak - lasting) / GIB
    if peak and over < 0:  # memory ran out before all lasting parts, such as the optimizer's state, were allocated
        return (
            f"what training keeps (weights, gradients, the optimizer's state), planned with {lasting / GIB:.2f} GiB, "
            f"of which {peak / GIB:.2f} GiB had room"
        )
    return (
        f"the activations and the head's logits: {max(over, 0.0):.2f} GiB of them, planned with {passing / GIB:.2f} "
        f"GiB, beside {lasting / GIB:.2f} GiB of weights, gradients and optimizer"
    )
