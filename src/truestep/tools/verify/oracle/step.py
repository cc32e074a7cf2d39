"""One optimizer step in float64: the loss is the sum of weight * term over labels; autograd computes its gradient."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from truestep.tools.verify.oracle.losses import (
    Metric,
    choose_labels,
    complete_loss_config,
    loss_terms,
    sum_terms,
    value_and_scale,
)
from truestep.tools.verify.oracle.metrics import metric_ratios, step_metrics
from truestep.tools.verify.oracle.records import Document, Record, read_document, read_documents, whole_documents
from truestep.tools.verify.oracle.routers import StepRoutes, load_metrics, router_terms, step_routes
from truestep.tools.verify.oracle.values import Model, label_values


@dataclass
class OracleResult:
    loss: float
    metrics: dict[str, Metric]
    documents: list[dict[str, Any]]
    gradients: dict[str, Tensor]
    grad_norm: float
    routes: list[StepRoutes] = field(default_factory=list)  # one per layer with a router


def oracle_step(
    model: Model,
    records: list[Record],
    config: dict[str, Any],
    *,
    documents_seen_before_step: int = 0,
    recomputed_logprobs: list[list[float]] | None = None,
    reference_logprobs: list[list[float]] | None = None,
) -> OracleResult:
    """Compute one step over all of `records`. `config` has the sections of the YAML file (contract, section 10).

    `recomputed_logprobs`: log-probs by the weights before the first update on these documents; None: this is the first
    update. `reference_logprobs`: log-probs of the reference model; None: the records' own are used.
    """
    loss_config = complete_loss_config(config["loss"])
    documents = read_documents(records, config.get("data", {}))
    choose_labels(documents, loss_config, config.get("seed", 0), documents_seen_before_step)
    values = [label_values(model, document) for document in documents]
    if loss_config["old_logprobs"] == "recompute":
        for index, (document, labels) in enumerate(zip(documents, values, strict=True)):
            document.sampler_logprobs = document.old_logprobs
            own = [label.logprob.item() for label in labels]
            document.old_logprobs = own if recomputed_logprobs is None else recomputed_logprobs[index]
    if loss_config["kl_reference"]:
        for index, document in enumerate(documents):
            if reference_logprobs is not None:
                document.reference_logprobs = reference_logprobs[index]
        if loss_config["kl_reference"].get("in") == "reward":
            penalise_advantages(documents, loss_config["kl_reference"]["weight"])
    terms = loss_terms(documents, values, loss_config)
    routes = step_routes(model, documents)
    experts = config.get("model", {}).get("experts") or {}
    terms += router_terms(routes, documents, experts)

    total = sum_terms(terms)
    gradients = differentiate(total, model.parameters)
    divisor = loss_config["gradient_divisor"]
    if divisor not in (None, "none"):
        # The gradient is divided again, by D or by a number. The reported loss is not.
        divisor = len(whole_documents(documents)) if divisor == "deepspeed" else divisor
        gradients = {name: gradient / divisor for name, gradient in gradients.items()}
    grad_norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients.values()))

    loss, _ = value_and_scale(terms)
    metrics = step_metrics(documents, values, terms, loss_config, documents_seen_before_step)
    metrics |= load_metrics(routes, documents, experts)
    metrics["grad_norm"] = (grad_norm, grad_norm)
    outputs = []
    for document, labels in zip(documents, values, strict=True):
        ratios = metric_ratios(document, labels, loss_config["document_ratio"])
        outputs.append(
            {
                "id": document.id,
                "logprobs": [label.logprob.item() for label in labels],
                "entropy": [label.entropy.item() for label in labels],
                "ratio": [] if ratios is None else ratios,
                "advantages": document.unpenalised or document.advantages,
            }
        )
    return OracleResult(loss, metrics, outputs, gradients, grad_norm, routes)


def penalise_advantages(documents: list[Document], weight: float) -> None:
    """Subtract weight * (old log-prob - reference log-prob) from the advantage of every label, in place."""
    for document in documents:
        triples = zip(
            document.advantages or [], document.old_logprobs or [], document.reference_logprobs or [], strict=True
        )
        document.unpenalised = document.advantages
        document.advantages = [advantage - weight * (old - reference) for advantage, old, reference in triples]


def oracle_logprobs(model: Model, records: list[Record], default_temperature: float = 1.0) -> list[list[float]]:
    """Return the model's log-probs of every record's labels."""
    with torch.no_grad():
        values = [label_values(model, read_document(record, default_temperature)) for record in records]
    return [[label.logprob.item() for label in labels] for labels in values]


def differentiate(total: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    if not total.requires_grad:  # there are no labels, or all are clipped
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    leaves = list(parameters.values())
    # The graph is kept, because some models cache their logits for several losses.
    gradients = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True, allow_unused=True)
    return dict(zip(parameters, gradients, strict=True))
