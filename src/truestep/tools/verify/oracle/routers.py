"""The loss terms and metrics of routers in plain loops: docs/contract.md, sections 7 and 9."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truestep.tools.verify.oracle.records import Document

Metric = tuple[float, float]


@dataclass
class Routes:
    """The results of one layer's router for the tokens of a document."""

    logits: Tensor  # [T, E], on the autograd graph
    choices: list[list[int]]  # the experts of each token: those in its record, else the router's own choice
    own: list[list[int]]  # the router's own choice
    sigmoid: bool  # True: scores are sigmoids of the logits; False: their softmax


@dataclass
class StepRoutes:
    """The results of a layer's router for all tokens of a step."""

    name: str
    documents: list[Routes]

    @property
    def counts(self) -> list[int]:
        """How often each expert was computed."""
        return self._count([document.choices for document in self.documents])

    @property
    def own_counts(self) -> list[int]:
        """How often the router chose each expert."""
        return self._count([document.own for document in self.documents])

    def balanced_counts(self, documents: list[Document]) -> list[int]:
        """The counts for the balance term. If all records have experts for all tokens but the last one, these are the
        records' choices; else all computed choices."""
        if not all(len(document.routes or []) >= len(document.input_ids) - 1 for document in documents):
            return self.counts
        pairs = zip(self.documents, documents, strict=True)
        return self._count([routes.choices[: len(document.routes or [])] for routes, document in pairs])

    def _count(self, documents: list[list[list[int]]]) -> list[int]:
        counts = [0] * self.documents[0].logits.shape[1]
        for choices in documents:
            for numbers in choices:
                for number in numbers:
                    counts[number] += 1
        return counts


def step_routes(model: Any, documents: list[Document]) -> list[StepRoutes]:
    """Run the routers on every token, one document at a time. Empty: the model has no routers."""
    layers: dict[str, list[Routes]] = {}
    for document in documents:
        found = model.routes(document.input_ids, document.routes) if hasattr(model, "routes") else {}
        for name, routes in found.items():
            layers.setdefault(name, []).append(routes)
    return [StepRoutes(name, found) for name, found in layers.items()]


def router_terms(
    layers: list[StepRoutes], documents: list[Document], options: dict[str, Any]
) -> list[tuple[str, Tensor]]:
    """List each layer's part of the balance term and of the z loss."""
    terms = []
    for layer in layers:
        counts, tokens = layer.balanced_counts(documents), sum(len(document.choices) for document in layer.documents)
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


def _replay_metrics(layers: list[StepRoutes], documents: list[Document]) -> dict[str, Metric]:
    """Compute how many tokens are replayed, and how often records and router disagree."""
    if not layers:
        return {}
    all_tokens = replayed = others = choices = differ = 0
    metrics: dict[str, Metric] = {}
    for layer in layers:
        of_layer = [0, 0]
        for routes, document in zip(layer.documents, documents, strict=True):
            all_tokens += len(routes.own)
            for named, own in zip(routes.choices[: len(document.routes or [])], routes.own, strict=False):
                missed = sum(number not in own for number in named)
                replayed, choices, differ = replayed + 1, choices + len(named), differ + (missed > 0)
                of_layer = [of_layer[0] + missed, of_layer[1] + len(named)]
        others += of_layer[0]
        if of_layer[1]:
            metrics[f"route_disagreement/{_number_of(layer.name)}"] = (of_layer[0] / of_layer[1], 1.0)
    metrics["replayed_tokens"] = (replayed / all_tokens, 1.0)
    if replayed:
        metrics["route_disagreement"] = (others / choices, 1.0)
        metrics["route_disagreement_tokens"] = (differ / replayed, 1.0)
    return metrics


def _number_of(name: str) -> str:
    return next(part for part in name.split(".") if part.isdigit())


def load_metrics(layers: list[StepRoutes], documents: list[Document], options: dict[str, Any]) -> dict[str, Metric]:
    """Compute how evenly experts are used, over all layers and in each, and how often records and router disagree."""
    metrics = _loads([layer.counts for layer in layers], "") if layers else {}
    if options.get("replay", "auto") != "off":
        metrics |= _replay_metrics(layers, documents)
    for layer in layers:
        metrics |= _loads([layer.counts], f"/{_number_of(layer.name)}")
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
    """Return the biases after a step, by name. An expert's bias rises if it was chosen less often than the mean, and
    falls if it was chosen more often. The bias is a buffer of the layer's MoE block or of the router in it, so its name
    begins with the block's name."""
    moved = {}
    for layer in layers:
        counts = layer.own_counts
        name = next(name for name in biases if name.startswith(layer.name.rpartition(".")[0] + "."))
        mean = sum(counts) / len(counts)
        steps = [strength * ((mean > count) - (mean < count)) for count in counts]
        moved[name] = biases[name].double() + torch.tensor(steps, dtype=torch.float64)
    return moved
