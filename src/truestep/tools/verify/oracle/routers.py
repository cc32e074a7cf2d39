"""The terms and metrics of routers in plain loops: docs/contract.md, sections 7 and 9."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truestep.tools.verify.oracle.records import Document

Metric = tuple[float, float]


@dataclass
class Routes:
    """What one layer's router gives the tokens of a document."""

    logits: Tensor  # [T, E], on the autograd graph
    choices: list[list[int]]  # the experts of each token
    sigmoid: bool  # scores are sigmoids of logits; else their softmax


@dataclass
class StepRoutes:
    """What a layer's router gives all tokens of a step."""

    name: str
    documents: list[Routes]

    @property
    def counts(self) -> list[int]:
        """How often each expert was chosen."""
        counts = [0] * self.documents[0].logits.shape[1]
        for document in self.documents:
            for numbers in document.choices:
                for number in numbers:
                    counts[number] += 1
        return counts


def step_routes(model: Any, documents: list[Document]) -> list[StepRoutes]:
    """Route every token of every document, each document alone. Empty: the model has no routers."""
    layers: dict[str, list[Routes]] = {}
    for document in documents:
        for name, routes in model.routes(document.input_ids).items() if hasattr(model, "routes") else ():
            layers.setdefault(name, []).append(routes)
    return [StepRoutes(name, found) for name, found in layers.items()]


def router_terms(layers: list[StepRoutes], options: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """List each layer's part of the balance term and of the z term."""
    terms = []
    for layer in layers:
        counts, tokens = layer.counts, sum(len(document.choices) for document in layer.documents)
        experts, chosen = len(counts), sum(counts)
        balance = squares = torch.zeros((), dtype=torch.float64)
        for document in layer.documents:
            for row in document.logits:
                values = torch.sigmoid(row) if document.sigmoid else torch.exp(row - row.max())
                probabilities = values / values.sum()
                for number in range(experts):
                    balance = balance + experts * (counts[number] / chosen) * probabilities[number] / tokens
                squares = squares + (row.max() + torch.log(torch.exp(row - row.max()).sum())) ** 2 / tokens
        if options.get("balance") == "loss":
            terms.append(("expert_balance", options["strength"] * balance / len(layers)))
        if options.get("z_loss"):
            terms.append(("router_z_loss", options["z_loss"] * squares / len(layers)))
    return terms


def load_metrics(layers: list[StepRoutes]) -> dict[str, Metric]:
    """Compute how evenly experts are loaded, in all layers and in each."""
    metrics = _loads([layer.counts for layer in layers], "") if layers else {}
    for layer in layers:
        number = next(part for part in layer.name.split(".") if part.isdigit())
        metrics |= _loads([layer.counts], f"/{number}")
    return metrics


def _loads(layers: list[list[int]], suffix: str) -> dict[str, Metric]:
    largest = max(max(counts) / sum(counts) for counts in layers)
    entropies = []
    for counts in layers:
        shares = [count / sum(counts) for count in counts if count]
        entropies.append(-sum(share * math.log(share) for share in shares) / math.log(len(counts)))
    dead = float(sum(count == 0 for counts in layers for count in counts))
    entropy = sum(entropies) / len(entropies)
    values = {"largest_expert_share": largest, "expert_load_entropy": entropy, "dead_experts": dead}
    return {f"{name}{suffix}": (value, max(abs(value), 1.0)) for name, value in values.items()}


def moved_biases(layers: list[StepRoutes], biases: dict[str, Tensor], strength: float) -> dict[str, Tensor]:
    """Return the biases after a step, by name: each expert's rises if it was chosen less often than the mean. A bias is
    the buffer of its layer's block, or of the router in it, whose name begins as that of the router's block."""
    moved = {}
    for layer in layers:
        counts = layer.counts
        name = next(name for name in biases if name.startswith(layer.name.rpartition(".")[0] + "."))
        mean = sum(counts) / len(counts)
        steps = [strength * ((mean > count) - (mean < count)) for count in counts]
        moved[name] = biases[name].double() + torch.tensor(steps, dtype=torch.float64)
    return moved
