"""How far what a layout wrote is from the float64 reference, relative as docs/contract.md defines it.

A scalar's difference is over the same sum of absolute terms; a tensor's is ‖Δ‖ / max(‖g‖, 1e-6 · global norm);
log-probs and entropies are absolute; counts are equal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from truestep.verify.oracle.records import Record
from truestep.verify.oracle.step import OracleResult, oracle_step
from truestep.verify.reference import Reference

# These are of the layout by their nature, or counted elsewhere.
_NOT_COMPARED = ("num_micro_batches", "data_wait_time")


@dataclass(frozen=True)
class Difference:
    step: int
    kind: str  # loss, metric, gradient, log-prob, update or documents
    name: str
    value: float


class Comparer:
    """Holds one layout after another against the reference; where weights are the same it is computed once."""

    def __init__(
        self,
        model: Path,
        steps: Sequence[Sequence[Record]],
        loss: dict[str, Any],
        optimizer: dict[str, Any],
        custom_metrics: bool = False,
    ):
        self._model, self._steps, self._loss, self._optimizer = model, steps, loss, optimizer
        self._custom_metrics = custom_metrics
        self._known: dict[str, OracleResult] = {}
        self._first: dict[tuple[int, str], float] = {}  # by step and name: the first layout's unknown metrics

    def differences(self, output: Path, steps: Sequence[Sequence[Record]] | None = None) -> Iterator[Difference]:
        moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        seen = 0
        for number, records in enumerate(steps or self._steps, start=1):
            folder = output / str(number)
            if not (folder / "step.json").is_file():
                yield Difference(number, "documents", "the step was not made", math.inf)
                return
            written = json.loads((folder / "step.json").read_text(encoding="utf-8"))
            weights, gradients = load_file(folder / "weights.safetensors"), load_file(folder / "gradients.safetensors")
            wanted = [record["id"] for record in records]
            if sorted(written["documents"]) != sorted(wanted) or written["documents_seen"] != seen:
                yield Difference(number, "documents", _other_documents(written["documents"], wanted), math.inf)
            oracle = self._reference(weights, records, seen)
            for kind, name, value in _of_step(written, gradients, oracle):
                yield Difference(number, kind, name, value)
            for name, value in self._unknown(written["metrics"], oracle, number):
                yield Difference(number, "metric", name, value)
            after = load_file(output / str(number + 1) / "weights.safetensors")
            for name, value in _update(weights, gradients, after, written, moments, self._optimizer, number):
                yield Difference(number, "update", name, value)
            seen += len(records)

    def _unknown(self, metrics: dict[str, Any], oracle: OracleResult, step: int) -> Iterator[tuple[str, float]]:
        """A user's own metrics have no reference: each must be what the first layout, of one process, gave."""
        unknown = _unknown_metrics(metrics, oracle)
        for name in unknown if self._custom_metrics else ():
            first = self._first.setdefault((step, name), metrics[name])
            yield name, abs(metrics[name] - first) / max(abs(first), 1e-6)
        missing = {name for at, name in self._first if at == step} - set(metrics)
        for name in [*missing, *(() if self._custom_metrics else unknown)]:
            yield f"{name} ({'missing' if name in missing else 'the reference has none'})", math.inf

    def total_gradient_error(self, output: Path) -> float:
        """Of the first step's whole gradient, relative."""
        weights, gradients = (load_file(output / "1" / f"{name}.safetensors") for name in ("weights", "gradients"))
        oracle = self._reference(weights, self._steps[0], 0)
        squares = sum(float((gradients[n].double() - g).square().sum()) for n, g in oracle.gradients.items())
        return math.sqrt(squares) / max(oracle.grad_norm, 1e-30)

    def _reference(self, weights: Mapping[str, torch.Tensor], records: Sequence[Record], seen: int) -> OracleResult:
        digest = hashlib.sha256(f"{seen} {[record['id'] for record in records]}".encode())
        for name in sorted(weights):
            digest.update(weights[name].numpy().tobytes())
        key = digest.hexdigest()
        if key not in self._known:
            model = Reference(self._model, weights)
            config = {"loss": self._loss, "data": {"advantages": "none"}}
            self._known[key] = oracle_step(model, list(records), config, documents_seen_before_step=seen)
        return self._known[key]


def _other_documents(trained: Sequence[str], wanted: Sequence[str]) -> str:
    extra = [name for name in trained if trained.count(name) > wanted.count(name)]
    missing = [name for name in wanted if name not in trained]
    return f"trained on {len(trained)} for {len(wanted)}: more often {extra[:3]}, never {missing[:3]}"


def _unknown_metrics(metrics: dict[str, Any], oracle: OracleResult) -> list[str]:
    """The metrics that measured something and that the oracle does not know."""
    passed_over = {*_NOT_COMPARED, "policy_loss", "entropy_bonus", "z_loss", *oracle.metrics}
    # A percentile of a histogram is no sum of terms.
    return [n for n, v in metrics.items() if v and n not in passed_over and not n.startswith("log_ratio_p")]


def _of_step(
    written: dict[str, Any], gradients: Mapping[str, torch.Tensor], oracle: OracleResult
) -> Iterator[tuple[str, str, float]]:
    metrics = written["metrics"]
    for name, value in metrics.items():
        if name in _NOT_COMPARED or name not in oracle.metrics:
            continue
        expected, scale = oracle.metrics[name]
        error = 0.0 if value == expected else abs(value - expected) / max(scale, 1e-30)
        yield "loss" if name == "loss" else "metric", name, error
    for name in set(oracle.metrics) - set(metrics) - {"policy_loss"}:
        yield "metric", f"{name} (missing)", math.inf
    for name, expected_gradient in oracle.gradients.items():
        if name not in gradients:
            yield "gradient", f"{name} (missing)", math.inf
            continue
        floor = max(float(expected_gradient.norm()), 1e-6 * oracle.grad_norm, 1e-30)
        yield "gradient", name, float((gradients[name].double() - expected_gradient).norm()) / floor
    # A weight that the architecture does not have: a tie that was lost, most of all.
    for name in set(gradients) - set(oracle.gradients):
        yield "gradient", f"{name} (the reference has none)", math.inf
    expected_scores = {document["id"]: document for document in oracle.documents}
    for score in written["scores"]:
        known = expected_scores.get(score["id"])
        for name in ("logprobs", "entropy"):
            if known is None or len(known[name]) != len(score[name]):
                yield "log-prob", f"{name} of document {score['id']}", math.inf
                continue
            worst = max((abs(a - b) for a, b in zip(score[name], known[name], strict=True)), default=0.0)
            yield "log-prob", f"{name} of document {score['id']}", worst


def _update(
    before: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    written: dict[str, Any],
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]],
    options: dict[str, Any],
    number: int,
) -> Iterator[tuple[str, float]]:
    """Clipping and AdamW of the layout's own gradient, in float64, against the weights it went on with."""
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    threshold = options["gradient_clip"]
    factor = threshold / norm if threshold is not None and norm > threshold else 1.0
    rate, beta1, beta2 = written["learning_rate"], options["beta1"], options["beta2"]
    for name, weight in before.items():
        if name not in gradients:  # frozen
            yield name, float((after[name] - weight).abs().max())
            continue
        gradient = gradients[name].double() * factor
        first, second = moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient.square()
        moments[name] = (first, second)
        decay = options["weight_decay"] if weight.ndim >= 2 else 0.0
        corrected = (second / (1 - beta2**number)).sqrt() + options["epsilon"]
        expected = weight.double() * (1 - rate * decay) - rate * (first / (1 - beta1**number)) / corrected
        yield name, float((after[name].double() - expected).norm() / expected.norm().clamp(min=1e-30))
