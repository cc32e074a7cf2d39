"""What routers choose in a step: the terms of its loss that are theirs, and metrics of loads."""

import re
from collections.abc import Sequence
from functools import reduce

from truestep.losses.objective import Objective
from truestep.metrics.loads import LOADS, Counts, shares_of, together
from truestep.metrics.types import Metric, Sum
from truestep.model.experts.routing import RouterTerms, Routing
from truestep.types import StepTotals


def terms_of(routing: Routing, objective: Objective, totals: StepTotals, counts: Counts) -> RouterTerms:
    """Return the terms of a step. `counts`: its choices of experts, if they are balanced by a term."""
    settings, divisor = routing.settings, objective.gradient_divisor
    balance = settings.strength if settings.balance == "loss" else 0.0
    return RouterTerms(
        balance,
        settings.z_loss,
        totals.num_tokens,
        float(max(totals.num_documents, 1) if divisor == "deepspeed" else divisor),
        shares_of(counts),
    )


def summed(parts: Sequence[Counts]) -> Counts:
    """Add up what each rank has counted."""
    nothing: Counts = {}
    return reduce(together, parts, nothing)


def measure_routes(routing: Routing, level: str) -> dict[str, Metric]:
    """Return this rank's parts of the terms and of the metrics of loads."""
    metrics: dict[str, Metric] = {}
    if routing.terms is not None:
        balance, z_loss = routing.values()
        metrics["loss"] = Sum(balance + z_loss)
        if routing.settings.balance == "loss":
            metrics["expert_balance"] = Sum(balance)
        if routing.settings.z_loss:
            metrics["router_z_loss"] = Sum(z_loss)
    if level == "none":
        return metrics
    counts = routing.counts
    metrics |= {name: kind(counts) for name, kind in LOADS.items()}
    if level == "full":
        for layer, own in counts.items():
            number = next(iter(re.findall(r"\.(\d+)\.", layer)), layer)
            metrics |= {f"{name}/{number}": kind({layer: own}) for name, kind in LOADS.items()}
    return metrics
