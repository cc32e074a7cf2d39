"""Measures how far a layout's results are from the float64 reference, as docs/contract.md, section 2, defines it.

A scalar's difference is relative to the same sum of absolute terms; a tensor's is ‖Δ‖ / max(‖g‖, 1e-6 · global norm);
log-probs and entropies are absolute; counts are equal.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from truestep.metrics.spent import of_the_machine
from truestep.step.optimizer import grouped, load_optimizer
from truestep.verify.case import Case
from truestep.verify.oracle.losses import next_entropy_bonus
from truestep.verify.oracle.records import Record
from truestep.verify.oracle.step import OracleResult, oracle_logprobs, oracle_step
from truestep.verify.oracle.updates import Bounds, UpdateOracle
from truestep.verify.reference import Reference

# These depend on the layout by their nature; so does all that `of_the_machine` names.
_NOT_COMPARED = ("num_micro_batches",)


@dataclass(frozen=True)
class Difference:
    step: int
    kind: str  # loss, metric, gradient, log-prob, update or documents
    name: str
    value: float


class Comparer:
    """Holds one layout after another against the reference, which is computed once for the same weights."""

    def __init__(self, case: Case, loss: dict[str, Any]):
        self._case, self._loss = case, loss
        self._custom_metrics = bool(case.options["logging"]["custom_metrics"])
        self._references: dict[str, OracleResult] = {}  # by a digest of weights and documents
        self._first: dict[tuple[int, str], float] = {}  # the first layout's unknown metrics, by step and name

    def differences(self, output: Path, steps: Sequence[Sequence[Record]]) -> Iterator[Difference]:
        """Compare every step that a layout wrote."""
        updates = _Updates(self._case.options["optimizer"], self._ends)
        seen, bonus = 0, self._loss.get("entropy_bonus", 0.0)
        for number, records in enumerate(steps, start=1):
            folder = output / str(number)
            if not (folder / "step.json").is_file():
                yield Difference(number, "documents", "the step was not made", math.inf)
                return
            written = json.loads((folder / "step.json").read_text(encoding="utf-8"))
            weights, gradients = load_file(folder / "weights.safetensors"), load_file(folder / "gradients.safetensors")
            wanted = [record["id"] for record in records]
            if sorted(written["documents"]) != sorted(wanted) or written["documents_seen"] != seen:
                yield Difference(number, "documents", _other_documents(written["documents"], wanted), math.inf)
            update = (number - 1) % self._case.options["schedule"]["updates_per_batch"]
            before = load_file(output / str(number - update) / "weights.safetensors") if update else None
            oracle = self._reference(weights, records, seen, before, bonus)
            bonus = next_entropy_bonus(self._loss | {"entropy_bonus": bonus}, oracle.metrics.get("entropy", (None,))[0])
            after = load_file(output / str(number + 1) / "weights.safetensors")
            for kind, name, value in chain(
                _of_step(written, gradients, oracle),
                self._unknown(written["metrics"], oracle, number),
                updates.differences(weights, gradients, after, written["learning_rate"]),
            ):
                yield Difference(number, kind, name, value)
            seen += len(records)

    def _ends(self) -> Collection[str]:
        return Reference(self._case.model, None, self._case.options["model"]["trust_remote_code"]).ends

    def _unknown(self, metrics: dict[str, Any], oracle: OracleResult, step: int) -> Iterator[tuple[str, str, float]]:
        """Compare a user's own metrics, which have no reference, with those of the first layout, of one process."""
        unknown = _unknown_metrics(metrics, oracle)
        for name in unknown if self._custom_metrics else ():
            first = self._first.setdefault((step, name), metrics[name])
            yield "metric", name, abs(metrics[name] - first) / max(abs(first), 1e-6)
        missing = {name for at, name in self._first if at == step} - set(metrics)
        for name in [*missing, *(() if self._custom_metrics else unknown)]:
            yield "metric", f"{name} ({'missing' if name in missing else 'the reference has none'})", math.inf

    def total_gradient_error(self, output: Path, records: Sequence[Record]) -> float:
        """Compute the relative error of the first step's whole gradient; the step is of these records."""
        weights, gradients = (load_file(output / "1" / f"{name}.safetensors") for name in ("weights", "gradients"))
        oracle = self._reference(weights, records, 0)
        squares = sum(float((gradients[n].double() - g).square().sum()) for n, g in oracle.gradients.items())
        return math.sqrt(squares) / max(oracle.grad_norm, 1e-30)

    def _reference(
        self,
        weights: Mapping[str, torch.Tensor],
        records: Sequence[Record],
        seen: int,
        before: Mapping[str, torch.Tensor] | None = None,
        bonus: float | None = None,
    ) -> OracleResult:
        """Compute a step of these weights. `before`: those of the first update on the same documents, if it was not
        this one. `bonus`: the weight of the entropy bonus, where a target has moved it."""
        recomputes = self._loss.get("old_logprobs") == "recompute"
        named = [(record["id"], record.get("logprobs")) for record in records]  # half precision has other log-probs
        loss = self._loss if bonus is None else self._loss | {"entropy_bonus": bonus}
        digest = hashlib.sha256(f"{seen} {named} {bonus}".encode())
        for tensors in (weights, *((before,) if before is not None and recomputes else ())):
            for name in sorted(tensors):
                digest.update(tensors[name].numpy().tobytes())
        key = digest.hexdigest()
        if key not in self._references:
            trusted = self._case.options["model"]["trust_remote_code"]
            model = Reference(self._case.model, weights, trusted, self._case.adapter)
            model.freeze(self._case.options["model"]["freeze"] or ())
            data = self._case.options["data"]
            if data["advantages"] != "none":
                data = data | {"advantages": "given"}
            config = {"loss": loss, "data": data, "seed": self._case.options["seed"]}
            own = self._logprobs(self._case.model, before, records) if before is not None and recomputes else None
            theirs = None
            if self._case.reference is not None:
                theirs = self._logprobs(self._case.reference, None, records)
            self._references[key] = oracle_step(
                model,
                list(records),
                config,
                documents_seen_before_step=seen,
                recomputed_logprobs=own,
                reference_logprobs=theirs,
            )
        return self._references[key]

    def _logprobs(
        self, model: Path, weights: Mapping[str, torch.Tensor] | None, records: Sequence[Record]
    ) -> list[list[float]]:
        trusted = self._case.options["model"]["trust_remote_code"]
        # Without weights it is a reference, which has no adapter.
        adapter = None if weights is None else self._case.adapter
        return oracle_logprobs(Reference(model, weights, trusted, adapter), list(records))


def _other_documents(trained: Sequence[str], wanted: Sequence[str]) -> str:
    extra = [name for name in trained if trained.count(name) > wanted.count(name)]
    missing = [name for name in wanted if name not in trained]
    return f"trained on {len(trained)} for {len(wanted)}: more often {extra[:3]}, never {missing[:3]}"


def _unknown_metrics(metrics: dict[str, Any], oracle: OracleResult) -> list[str]:
    """List the metrics that measured something and that the oracle does not know."""
    passed_over = {*_NOT_COMPARED, "policy_loss", "entropy_bonus", "z_loss", "kl_reference", "kl_cov", *oracle.metrics}
    # Percentiles of a histogram are passed over: they are no sums of terms.
    return [
        name
        for name, value in metrics.items()
        if value and name not in passed_over and not name.startswith("log_ratio_p") and not of_the_machine(name)
    ]


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
    for name, gradient in oracle.gradients.items():
        if name not in gradients:
            yield "gradient", f"{name} (missing)", math.inf
            continue
        floor = max(float(gradient.norm()), 1e-6 * oracle.grad_norm, 1e-30)
        yield "gradient", name, float((gradients[name].double() - gradient).norm()) / floor
    # The reference has no such weight: most likely a tie was lost.
    for name in set(gradients) - set(oracle.gradients):
        yield "gradient", f"{name} (the reference has none)", math.inf
    documents = {document["id"]: document for document in oracle.documents}
    for score in written["scores"]:
        document = documents.get(score["id"])
        for name in ("logprobs", "entropy"):
            if document is None or len(document[name]) != len(score[name]):
                worst = math.inf
            else:
                worst = max((abs(a - b) for a, b in zip(score[name], document[name], strict=True)), default=0.0)
            yield "log-prob", f"{name} of document {score['id']}", worst


class _Updates:
    """The optimizer's clipping and steps in float64, on whole tensors: by formula, or the user's own code."""

    def __init__(self, options: dict[str, Any], ends: Callable[[], Collection[str]]):
        self._options = options
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        # Only Muon has a rule for matrices between the ends.
        self._oracle = UpdateOracle(options, ends() if options["type"] == "muon" else ())

    def differences(
        self,
        before: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
        rate: float,
    ) -> Iterator[tuple[str, str, float]]:
        """Compare the weights that a layout went on with, given its own gradient."""
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        threshold = self._options["gradient_clip"]
        factor = threshold / norm if threshold is not None and norm > threshold else 1.0
        trained = {name: before[name].double() for name in gradients if name in before}
        clipped = {name: gradients[name].double() * factor for name in trained}
        step = self._custom if self._options["type"] == "custom" else self._oracle.step
        expected = step(trained, clipped, rate)
        for name, weight in before.items():
            if name not in expected:  # frozen
                yield "update", name, float((after[name] - weight).abs().max())
                continue
            low, high = expected[name]
            found = after[name].double()
            beyond = (found - torch.minimum(torch.maximum(found, low), high)).norm()
            yield "update", name, float(beyond / low.norm().clamp(min=1e-30))

    def _custom(
        self, weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], rate: float
    ) -> dict[str, Bounds]:
        if self._optimizer is None:
            self._parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
            make = load_optimizer(self._options["function"], self._options["options"])
            self._optimizer = make(grouped(self._parameters))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                parameter.grad = gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return {name: (parameter.detach(), parameter.detach()) for name, parameter in self._parameters.items()}
