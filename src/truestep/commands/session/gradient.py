"""The gradient of a session's step, over its calls."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from truestep.commands.session.errors import SessionError
from truestep.losses.objective import Objective
from truestep.metrics.loads import Counts
from truestep.metrics.types import Metric, merge, values
from truestep.types import StepTotals

_TERMS = ("loss", "policy_loss", "kl_reference", "kl_cov", "entropy_bonus", "z_loss")  # metrics with a denominator
_COUNTS = ("num_sequences", "num_micro_batches", "computed_tokens", "recomputed_prefix_tokens")


@dataclass
class Gradient:
    """The gradient of the current step, to which each call of `forward_backward` adds."""

    kind: object  # the kind of denominator, which must be the same in all calls
    counted: Objective | None  # its denominators count all calls; None: calls divided by their own
    complete: str = ""  # if set, no further call may add to it, for this reason
    totals: StepTotals = field(default_factory=lambda: StepTotals(0, 0, 0))
    metrics: dict[str, Metric] = field(default_factory=dict)
    loads: Counts | None = None
    reduced: bool = False  # True: it is summed over the ranks
    norm: float | None = None  # before clipping

    @property
    def scale(self) -> float:
        """The factor from the sum of the calls' gradients to the step's gradient."""
        scale = 1.0 if self.counted is None else self.counted.step_scale(self.totals)
        assert scale is not None
        return scale

    def line(self) -> dict[str, Any]:
        """Return the metrics of all calls, and the step's counts."""
        line: dict[str, Any] = values(self.metrics)
        if self.counted is not None:
            scale = self.counted.denominator.step_scale(self.totals)
            line |= {name: line[name] * scale for name in _TERMS if name in line}
        return line | {name: int(line[name]) for name in _COUNTS if name in line} | asdict(self.totals)

    def add(self, totals: StepTotals, metrics: Mapping[str, Metric], loads: Counts | None) -> None:
        counts = {name: count + getattr(totals, name) for name, count in asdict(self.totals).items()}
        self.totals, self.metrics = StepTotals(**counts), merge(self.metrics, metrics)
        if loads is not None:
            before = self.loads or {}
            self.loads = {layer: count + before[layer] if layer in before else count for layer, count in loads.items()}

    def check_accepts(self, kind: object) -> None:
        """Raise if the step accepts no further call, or none with this kind of denominator."""
        if self.norm is not None or self.complete:
            raise SessionError("the gradient of this step is complete: call step() or drop() before forward_backward")
        if self.kind != kind:
            raise SessionError(
                "all calls of a step need the same denominators: all without `totals` and with the same normalize_by, "
                "or all with the same `totals`, or all with functions as the loss"
            )
