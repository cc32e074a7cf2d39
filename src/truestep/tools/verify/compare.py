"""Measures the difference of a layout's results from the float64 reference, as docs/contract.md, section 2, defines it.

A scalar's difference is relative to the sum of its absolute terms; a tensor's is ‖Δ‖ / max(‖g‖, 1e-6 · global norm);
differences of log-probs and entropies are absolute; counts must be equal.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from truestep.metrics.spent import of_the_machine
from truestep.tools.verify.case import Case
from truestep.tools.verify.difference import BOUND, Difference
from truestep.tools.verify.oracle.advantages import documents_of
from truestep.tools.verify.oracle.losses import next_entropy_bonus
from truestep.tools.verify.oracle.records import Record
from truestep.tools.verify.oracle.routers import moved_biases
from truestep.tools.verify.oracle.step import OracleResult, oracle_logprobs, oracle_step
from truestep.tools.verify.reduced import without_routes
from truestep.tools.verify.reference import Reference
from truestep.tools.verify.updates import Updates, scheduled


def _kind(metric: str) -> str:
    """Return the kind of a metric's difference. Counts have a separate kind, since what is divided by a wrong count is
    wrong too. So have metrics of routing replay."""
    if metric.startswith("num_"):
        return "count"
    if metric.startswith(("route_", "replayed_")):
        return "routing"
    return "loss" if metric == "loss" else "metric"


# These metrics depend on the layout. So do the metrics that `of_the_machine` recognises.
_NOT_COMPARED = ("num_micro_batches", "computed_tokens", "recomputed_prefix_tokens")


class Comparer:
    """Compares layouts with the reference, which is computed once for the same weights and documents."""

    def __init__(self, case: Case, loss: dict[str, Any]):
        self._case, self._loss = case, loss
        self._custom_metrics = bool(case.options["logging"]["custom_metrics"])
        self._references: dict[str, OracleResult] = {}  # results by a hash of weights and documents
        self._first: dict[tuple[int, str], float] = {}  # the first layout's custom metrics, by step and name

    def differences(self, output: Path, options: dict[str, Any], records: Sequence[Record]) -> Iterator[Difference]:
        """Compare all steps that a layout has written with the reference for its options and records."""
        steps = self._case.steps(self._case.prepare(records, options["data"]))
        yield from scheduled(options, output)
        yield from self._first_weights(output)
        updates = self._updates(options)
        seen, bonus = 0, self._loss.get("entropy_bonus", 0.0)
        for number, documents in enumerate(steps, start=1):
            folder = output / str(number)
            if not (folder / "step.json").is_file():
                yield Difference(number, "documents", "the step was not made", math.inf)
                return
            written = json.loads((folder / "step.json").read_text(encoding="utf-8"))
            wanted = [record["id"] for record in documents]
            if sorted(written["documents"]) != sorted(wanted) or written["documents_seen"] != seen:
                yield Difference(number, "documents", _other_documents(written["documents"], wanted), math.inf)
            oracle = self._oracle_of(output, number, documents, seen, bonus)
            bonus = next_entropy_bonus(self._loss | {"entropy_bonus": bonus}, oracle.metrics.get("entropy", (None,))[0])
            for kind, name, value in chain(
                _of_step(written, load_file(folder / "gradients.safetensors"), oracle),
                self._unknown(written["metrics"], oracle, number),
            ):
                yield Difference(number, kind, name, value)
            yield from updates.differences(output, number)
            yield from self._moved(output, number, oracle)
            seen += len(documents_of(documents))

    def half_differences(
        self, output: Path, options: dict[str, Any], records: Sequence[Record]
    ) -> Iterator[tuple[float, float] | Difference]:
        """Compare the updates of a layout in half precision. For each step also yield the norm of the gradient's error,
        and the norm of the gradient."""
        steps = self._case.steps(self._case.prepare(records, options["data"]))
        yield from scheduled(options, output)
        yield from self._first_weights(output)
        updates = self._updates(options)
        seen, bonus = 0, self._loss.get("entropy_bonus", 0.0)
        for number, documents in enumerate(steps, start=1):
            oracle = self._oracle_of(output, number, documents, seen, bonus)
            bonus = next_entropy_bonus(self._loss | {"entropy_bonus": bonus}, oracle.metrics.get("entropy", (None,))[0])
            gradients = load_file(output / str(number) / "gradients.safetensors")
            squares = sum(float((gradients[n].double() - g).square().sum()) for n, g in oracle.gradients.items())
            yield math.sqrt(squares), oracle.grad_norm
            yield from updates.differences(output, number)
            seen += len(documents_of(documents))

    def _updates(self, options: dict[str, Any]) -> Updates:
        return Updates(options, self._began_with.ends, self._case.positions)

    def _oracle_of(
        self, output: Path, number: int, documents: Sequence[Record], seen: int, bonus: float
    ) -> OracleResult:
        """Return the reference for a step, with the weights that the layout had before it."""
        update = (number - 1) % self._case.options["schedule"]["updates_per_batch"]
        first = load_file(output / str(number - update) / "weights.safetensors") if update else None
        weights = load_file(output / str(number) / "weights.safetensors") | _biases(output / str(number))
        return self._reference(weights, documents, seen, first, bonus)

    def _moved(self, output: Path, number: int, oracle: OracleResult) -> Iterator[Difference]:
        """Compare the routers' biases after a step with the biases that follow from the step's choices."""
        before, after = _biases(output / str(number)), _biases(output / str(number + 1))
        if not before:
            return
        strength = self._case.options["model"]["experts"]["strength"]
        for name, expected in moved_biases(oracle.routes, before, strength).items():
            off = float((after[name] - expected).abs().max()) / strength
            yield Difference(
                number, "update", f"{name}: the bias of choices did not move as the step's choices say", off
            )

    def gradient_norms(self) -> list[float]:
        """Return the gradient norm of each batch, with the initial weights."""
        weights = {name: value.detach().float() for name, value in self._began_with.parameters.items()}
        steps = self._case.steps(self._case.prepare(self._case.records, self._case.options["data"]))
        updates = self._case.options["schedule"]["updates_per_batch"]
        seen, bonus, norms = 0, self._loss.get("entropy_bonus", 0.0), []
        for documents in steps[::updates]:
            norms.append(self._reference(weights, documents, seen, None, bonus).grad_norm)
            seen += updates * len(documents_of(documents))
        return norms

    @cached_property
    def _began_with(self) -> Reference:
        trusted = self._case.options["model"]["trust_remote_code"]
        return Reference(self._case.model, None, trusted, self._case.adapter)

    def _first_weights(self, output: Path) -> Iterator[Difference]:
        """Compare the initial trained weights with the model's files. float32 represents these exactly."""
        found = load_file(output / "1" / "weights.safetensors")
        trained = load_file(output / "1" / "gradients.safetensors").keys()
        for name, weight in self._began_with.parameters.items():
            if name in trained and name in found:
                off = float((found[name].double() - weight.detach()).norm() / weight.detach().norm().clamp(min=1e-30))
                yield Difference(1, "first weights", f"{name} are not those of the model's files", off, 0.0)

    def _unknown(self, metrics: dict[str, Any], oracle: OracleResult, step: int) -> Iterator[tuple[str, str, float]]:
        """Compare a user's own metrics, which the oracle does not compute, with those of the first layout."""
        unknown = _unknown_metrics(metrics, oracle)
        for name in unknown if self._custom_metrics else ():
            first = self._first.setdefault((step, name), metrics[name])
            yield "metric", name, abs(metrics[name] - first) / max(abs(first), 1e-6)
        missing = {name for at, name in self._first if at == step} - set(metrics)
        for name in [*missing, *(() if self._custom_metrics else unknown)]:
            yield "metric", f"{name} ({'missing' if name in missing else 'the reference has none'})", math.inf

    def _reference(
        self,
        weights: Mapping[str, torch.Tensor],
        records: Sequence[Record],
        seen: int,
        before: Mapping[str, torch.Tensor] | None = None,
        bonus: float | None = None,
    ) -> OracleResult:
        """Compute a step with these weights. `before`: the weights before the first update on the same documents; None:
        this is the first. `bonus`: the current weight of the entropy bonus, which a target may have changed."""
        recomputes = self._loss.get("old_logprobs") == "recompute"
        # records for half precision have other log-probs
        named = [(record["id"], record.get("logprobs")) for record in records]
        loss = self._loss if bonus is None else self._loss | {"entropy_bonus": bonus}
        digest = hashlib.sha256(f"{seen} {named} {bonus}".encode())
        for tensors in (weights, *((before,) if before is not None and recomputes else ())):
            for name in sorted(tensors):
                digest.update(tensors[name].numpy().tobytes())
        key = digest.hexdigest()
        if key not in self._references:
            options = self._case.options["model"]
            model = Reference(self._case.model, weights, options["trust_remote_code"], self._case.adapter)
            model.freeze(options["freeze"] or (), routers=options["experts"]["router"] == "frozen")
            data = self._case.options["data"] | {"prepared": True}
            config = {"loss": loss, "data": data, "seed": self._case.options["seed"]}
            config["model"] = {"experts": options["experts"]}
            own = self._logprobs(self._case.model, before, records) if before is not None and recomputes else None
            theirs = None
            if self._case.reference is not None:
                theirs = self._logprobs(self._case.reference, None, [without_routes(record) for record in records])
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
        # Without `weights`, the model is the reference model of the loss, which has no adapter.
        adapter = None if weights is None else self._case.adapter
        return oracle_logprobs(Reference(model, weights, trusted, adapter), list(records))


def _biases(folder: Path) -> dict[str, torch.Tensor]:
    """Read a layout's router biases. Empty unless `balance: bias` changes them."""
    file = folder / "biases.safetensors"
    return load_file(file) if file.is_file() else {}


def _other_documents(trained: Sequence[str], wanted: Sequence[str]) -> str:
    extra = [name for name in trained if trained.count(name) > wanted.count(name)]
    missing = [name for name in wanted if name not in trained]
    return f"trained on {len(trained)} for {len(wanted)}: more often {extra[:3]}, never {missing[:3]}"


def _unknown_metrics(metrics: dict[str, Any], oracle: OracleResult) -> list[str]:
    """List the metrics with a nonzero value that the oracle does not compute."""
    passed_over = {*_NOT_COMPARED, "policy_loss", "entropy_bonus", "z_loss", "kl_reference", "kl_cov", *oracle.metrics}
    # Percentiles are skipped: they are not sums of terms.
    return [
        name
        for name, value in metrics.items()
        if value and name not in passed_over and not name.startswith("log_ratio_p") and not of_the_machine(name)
    ]


def common_factor(found: torch.Tensor, right: torch.Tensor) -> float | None:
    """Return the factor between `found` and `right`, or None if they are not proportional."""
    factor = float((found * right).sum() / right.square().sum().clamp(min=1e-300))
    return factor if float((found - factor * right).norm()) <= 1e-4 * float(right.norm()) else None


def _advantages(written: Mapping[str, Sequence[float]], oracle: OracleResult) -> Iterator[tuple[str, str, float]]:
    """Compare the advantages of a step's documents with the oracle's."""
    pairs = [(document["id"], document["advantages"]) for document in oracle.documents if document["advantages"]]
    scale = max((abs(value) for _, values in pairs for value in values), default=0.0) or 1.0
    for name, values in pairs:
        found = written.get(name)
        if found is None or len(found) != len(values):
            yield "advantage", f"of document {name} is missing", math.inf
            continue
        off = max(abs(a - b) for a, b in zip(found, values, strict=True))
        yield "advantage", f"of document {name} is {found[0]:.4g}, not {values[0]:.4g}", off / scale


def _of_step(
    written: dict[str, Any], gradients: Mapping[str, torch.Tensor], oracle: OracleResult
) -> Iterator[tuple[str, str, float]]:
    metrics = written["metrics"]
    for name, value in metrics.items():
        if name in _NOT_COMPARED or name not in oracle.metrics:
            continue
        expected, scale = oracle.metrics[name]
        error = 0.0 if value == expected else abs(value - expected) / max(scale, 1e-30)
        yield _kind(name), name, error
    for name in set(oracle.metrics) - set(metrics) - {"policy_loss"}:
        yield _kind(name), f"{name} (missing)", math.inf
    yield from _advantages(written["advantages"], oracle)
    missing = oracle.gradients.keys() - gradients.keys()
    for name in missing:
        yield "gradient", f"{name} (missing)", math.inf
    found = {name: gradients[name].double() for name in oracle.gradients if name not in missing}
    errors = {
        name: float((found[name] - right).norm()) / max(float(right.norm()), 1e-6 * oracle.grad_norm, 1e-30)
        for name, right in oracle.gradients.items()
        if name in found
    }
    factor = None
    if any(not error <= BOUND for error in errors.values()):
        factor = common_factor(
            torch.cat([value.flatten() for value in found.values()]),
            torch.cat([oracle.gradients[name].flatten() for name in found]),
        )
    for name, error in errors.items():
        yield (
            "gradient",
            name if factor is None else f"{name} (every weight's is {factor:.4g} times the right one)",
            error,
        )
    # A weight that the reference does not have: most likely, tied weights were separated.
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
