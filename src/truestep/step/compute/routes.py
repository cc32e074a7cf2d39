"""Router loss terms of a step, and metrics of expert loads and routing replay."""

import re
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
import torch

from truestep.losses.objective import Objective
from truestep.metrics.loads import LOADS, Counts, shares_of, together
from truestep.metrics.types import Mean, Metric, Sum
from truestep.model.experts.routing import RouterTerms, Routing
from truestep.types import ROUTES, Rollout, StepTotals


def terms_of(routing: Routing, objective: Objective, totals: StepTotals, counts: Counts) -> RouterTerms:
    """Return the router terms of a step. `counts`: how often each expert is chosen in the step, if there is a balance
    term."""
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
    """Add up the counts of all ranks."""
    nothing: Counts = {}
    return reduce(together, parts, nothing)


def recorded_counts(routing: Routing, sequences: Sequence[Rollout], members: Iterable[int]) -> Counts | None:
    """Count the experts in the records of this rank's sequences. None: a sequence of the step lacks experts for some
    token. The last token needs none, because no sampler computes it."""
    if not routing.replays or not all(map(is_replayed, sequences)):
        return None
    counts = {name: np.zeros(experts, np.int64) for name, experts in routing.experts.items()}
    for index in members:
        values = sequences[index].value(ROUTES)
        for place, own in enumerate(counts.values()) if values is not None else ():
            chosen = values[:, place].ravel()
            own += np.bincount(chosen[chosen >= 0], minlength=len(own))
    return {name: torch.from_numpy(own) for name, own in counts.items()}


def is_replayed(sequence: Rollout) -> bool:
    """Tell whether a record has experts for all tokens except the last."""
    values, tokens = sequence.value(ROUTES), sequence.num_tokens - 1
    return tokens == 0 or (values is not None and len(values) >= tokens and bool((values[:tokens, 0, 0] >= 0).all()))


def measure_routes(routing: Routing, level: str) -> dict[str, Metric]:
    """Return this rank's parts of the router terms and of the metrics of loads."""
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
    metrics |= {name: kind(counts) for name, kind in LOADS.items()} | _measure_replay(routing, counts)
    if level == "full":
        for layer, own in counts.items():
            number = number_of(layer)
            metrics |= {f"{name}/{number}": kind({layer: own}) for name, kind in LOADS.items()}
            alone = _measure_replay(routing, {layer: own})
            metrics |= {f"{name}/{number}": metric for name, metric in alone.items() if name == "route_disagreement"}
    return metrics


def number_of(layer: str) -> str:
    """Return a layer's number, from the name of its experts' module."""
    return next(iter(re.findall(r"\.(\d+)\.", layer)), layer)


def _measure_replay(routing: Routing, counts: Counts) -> dict[str, Metric]:
    """Compare the number of replayed tokens with all computed tokens, and the replayed experts with the routers' own
    choices."""
    if routing.shape is None:
        return {}
    chosen = routing.shape.chosen
    replayed, tokens, choices = sum((routing.layers[name].replayed.cpu() for name in counts), torch.zeros(3)).tolist()
    computed = sum(int(own.sum()) for own in counts.values()) / chosen
    return {
        "replayed_tokens": Mean(replayed, computed),
        "route_disagreement": Mean(choices, replayed * chosen),
        "route_disagreement_tokens": Mean(tokens, replayed),
    }
