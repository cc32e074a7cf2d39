"""Each document's contribution to a metric, and each label's, from the labels of one forward pass.

A document that is left out adds nothing to the metric, and all else stays the whole step's: totals, the counts that
means divide by, advantages.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from truestep.losses.labels import Labels, no_reduction
from truestep.losses.measure import BUILT_IN, Measure, StepFacts
from truestep.losses.objective import Objective
from truestep.metrics.types import Derived, Histogram, Max, Mean, Metric, Min, Sum
from truestep.rollouts.fields import Field
from truestep.step.compute.episodes import measure_episodes
from truestep.step.compute.groups import measure_answers
from truestep.step.compute.runner import StepRunner
from truestep.types import Rollout, StepPlan, StepTotals

_NUMBER, _PLACE = "bisect_number", "bisect_place"  # a document's place in the plan, and a label's in its document
_FIELDS = (Field(_NUMBER, "document", np.int64, has=False), Field(_PLACE, "label", np.int64, has=False))
KEPT = "bisect_kept"  # a field of labels
_NAME = "bisect"  # the metric that carries the result


@dataclass(frozen=True)
class ByDocument:
    """A value of each document, by its index in the plan: one for each of its sequences."""

    found: Mapping[int, tuple[Any, ...]]

    @staticmethod
    def of(pairs: Iterable[tuple[int, Any]]) -> "ByDocument":
        found: dict[int, tuple[Any, ...]] = {}
        for number, one in pairs:
            found[number] = (*found.get(number, ()), one)
        return ByDocument(found)

    def merge(self, other: "ByDocument") -> "ByDocument":
        return ByDocument.of(
            (number, one) for part in (self, other) for number, some in part.found.items() for one in some
        )

    def value(self) -> None:
        return None


def document_metrics(runner: StepRunner, plan: StepPlan, metric: str) -> dict[int, Metric] | None:
    """Return each document's own metric, by one forward pass. None if it cannot be attributed to single documents.
    Every rank calls this."""
    for measure in (measure_answers, measure_episodes):
        if metric in measure(plan.documents):
            alone = {number: measure([document]) for number, document in enumerate(plan.documents)}
            return {number: found[metric] for number, found in alone.items() if metric in found}
    measures = _measures(runner)

    def each(labels: Labels, step: StepFacts) -> dict[str, Metric]:
        known = [measure for measure in measures if metric in measure(labels, step)]
        if not known:
            return {}
        measured = ((number, known[0](own, step).get(metric)) for number, own in by_document(labels))
        return {_NAME: ByDocument.of((number, one) for number, one in measured if one is not None)}

    found = _carried(runner, plan, each)
    return {number: merged(some) for number, some in sorted(found.items())} or None


def _measures(runner: StepRunner) -> tuple[Measure, ...]:
    return (*(measure for _, measure in BUILT_IN), *runner.custom_metrics.values())


def labels_of(runner: StepRunner, plan: StepPlan) -> dict[int, list[Labels]]:
    """Return the labels of each document, one `Labels` for each of its sequences, by one forward pass. Every rank calls
    this."""

    def capture(labels: Labels, step: StepFacts) -> dict[str, Metric]:
        return {_NAME: ByDocument.of(by_document(labels))}

    found = _carried(runner, plan, capture)
    return {number: sorted(some, key=_first_place) for number, some in sorted(found.items())}


def _first_place(labels: Labels) -> int:
    return int(places_of(labels)[0]) if len(labels) else -1


def places_of(labels: Labels) -> torch.Tensor:  # [T]
    """Return the place of each label among the tokens of its document."""
    return labels.fields[_PLACE]


def _carried(runner: StepRunner, plan: StepPlan, measure: Measure) -> Mapping[int, tuple[Any, ...]]:
    measuring = replace(
        runner,
        metrics_level="none",
        custom_metrics={_NAME: measure},
        keep_scores=False,
        compares=None,
        fields=(*runner.fields, *_FIELDS),
    )
    carried = measuring.accumulate(numbered(plan), backward=False).metrics.get(_NAME)
    return carried.found if isinstance(carried, ByDocument) else {}


def numbered(plan: StepPlan) -> StepPlan:
    """Return the plan with documents that have their number, and each label its place."""

    def named(number: int, document: Rollout) -> Rollout:
        place = np.arange(document.num_tokens)
        return replace(
            document,
            document_fields={**document.document_fields, _NUMBER: np.array(number)},
            fields={**document.fields, _PLACE: place},
        )

    return replace(plan, documents=tuple(named(*pair) for pair in enumerate(plan.documents)))


def by_document(labels: Labels) -> Iterable[tuple[int, Labels]]:
    """Divide the labels of a micro-batch by sequence, on the host."""
    labels = _mapped(labels, lambda tensor: tensor.detach().cpu())
    numbers, counts = labels.document_fields[_NUMBER].tolist(), labels.num_labels.tolist()
    names = {item.name for item in Labels.label_fields()}
    start = 0
    for place, (number, count) in enumerate(zip(numbers, counts, strict=True)):
        span, one = slice(start, start + count), slice(place, place + 1)
        start += count
        own = {
            item.name: _cut(getattr(labels, item.name), span if item.name in names else one)
            for item in fields(labels)
            if item.name not in ("recomputed", "reduce_documents", "fields")
        }
        own["fields"] = _cut(labels.fields, span)
        own["document"] = torch.zeros(count, dtype=torch.int64)
        yield number, Labels(**own, recomputed=labels.recomputed)


def _mapped(labels: Labels, change: Callable[[torch.Tensor], torch.Tensor]) -> Labels:
    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: changed(item) for name, item in value.items()}
        return change(value) if isinstance(value, torch.Tensor) else value

    own = {item.name: changed(getattr(labels, item.name)) for item in fields(labels)}
    return replace(labels, **{**own, "reduce_documents": no_reduction})


def _cut(value: Any, span: slice) -> Any:
    return {name: item[span] for name, item in value.items()} if isinstance(value, Mapping) else value[span]


@dataclass(frozen=True, eq=False)
class SomeLabels(Labels):
    """Labels of which only those with the field `KEPT` count. The others contribute nothing, but values that all labels
    of a document share, such as its mean ratio, are unchanged."""

    @staticmethod
    def some(labels: Labels, kept: torch.Tensor) -> "SomeLabels":
        own = {item.name: getattr(labels, item.name) for item in fields(labels)}
        own["weight"] = torch.where(kept, labels.weight, 0)
        own["fields"] = {**labels.fields, KEPT: kept}
        return SomeLabels(**own)

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        return super().document_sums(torch.where(self.fields[KEPT], values, 0))

    def document_means(self, values: torch.Tensor) -> torch.Tensor:
        means = super().document_sums(values) / self.num_labels.clamp(min=1)
        return means.to(values.dtype)[self.document]

    def has_label(self, name: str) -> torch.Tensor:
        return super().has_label(name) & self.fields[KEPT]


@dataclass(frozen=True)
class _OfKeptLabels(Objective):
    def prepare(self, labels: Labels) -> Labels:
        labels = super().prepare(labels)
        return replace(labels, weight=torch.where(labels.fields[KEPT], labels.weight, 0))

    def _entropy_weights(self, labels: Labels, totals: StepTotals) -> torch.Tensor:
        return torch.where(labels.fields[KEPT], super()._entropy_weights(labels, totals), 0)


def of_kept_labels(objective: Objective) -> Objective:
    """Return the objective of only the labels with the field `KEPT`."""
    return _OfKeptLabels(**{item.name: getattr(objective, item.name) for item in fields(objective)})


def label_metric(
    labels: Sequence[Labels], kept: np.ndarray, metric: str, runner: StepRunner, plan: StepPlan
) -> Metric | None:
    """Return a document's own metric, counting only the labels at the indices `kept`."""
    facts = StepFacts(of_kept_labels(runner.objective), plan.documents_seen, plan.totals)
    wanted = torch.from_numpy(np.asarray(kept, dtype=np.int64))
    found = []
    for sequence in labels:
        some = SomeLabels.some(sequence, torch.isin(places_of(sequence), wanted))
        for measure in _measures(runner):
            if (measured := measure(some, facts).get(metric)) is not None:
                found.append(measured)
                break
    return merged(found) if found else None


def merged(metrics: Iterable[Metric]) -> Metric:
    return reduce(lambda first, second: first.merge(second), metrics)


def left_out(known: Mapping[int, Metric]) -> dict[int, Metric]:
    """Return by how much a metric of a user's own type falls if each document is left out."""
    numbers, metrics = list(known), list(known.values())
    before = list(accumulate(metrics, lambda first, second: first.merge(second)))
    behind = list(accumulate(reversed(metrics), lambda first, second: second.merge(first)))[::-1]
    whole = before[-1].value() or 0.0
    found: dict[int, Metric] = {}
    for place, number in enumerate(numbers):
        rest = [*before[place - 1 : place], *behind[place + 1 : place + 2]] if place else behind[1:2]
        found[number] = Sum(whole - ((merged(rest).value() or 0.0) if rest else 0.0))
    return found


def far_together(known: Mapping[int, Metric], usual: float, value: float) -> list[int]:
    """Return the fewest documents to leave out, so that a metric of a user's own type is at most half as far from its
    usual value. Documents are left out by their own values, the farthest in the direction of the jump first. The list
    is empty if that takes more than two documents and more than a tenth of all."""
    own = {number: found for number, one in known.items() if (found := one.value()) is not None}
    up = 1.0 if value > usual else -1.0
    ranked = sorted(own, key=lambda number: -up * own[number])
    rests = list(accumulate((known[number] for number in reversed(ranked)), lambda rest, one: one.merge(rest)))[::-1]
    for count, rest in enumerate(rests[1 : max(2, len(known) // 10) + 1], 1):
        left = rest.value()
        if left is not None and abs(left - usual) <= 0.5 * abs(value - usual):
            return ranked[:count]
    return []


@dataclass(frozen=True)
class Scale:
    """The scale for documents' contributions to a metric."""

    whole: Metric  # the step's
    value: float  # the step's
    usual: float | None  # the median of the steps around; None: no jump

    @property
    def jump(self) -> float:
        """The signed size of the jump; without a jump, the step's value."""
        return self.value if self.usual is None else self.value - self.usual

    @property
    def extreme(self) -> bool:
        return isinstance(self.whole, Max | Min)

    @property
    def least(self) -> float:
        """The least share of the jump that counts as large: a tenth for a sum; for a maximum or minimum, a value beyond
        the middle between the usual value and the step's."""
        return 0.5 if self.extreme else 0.1

    def share(self, part: Metric) -> float:
        """Return a contribution's share of the jump; 1 is the whole jump."""
        if self.extreme:
            value = part.value()
            if value is None:
                return -math.inf
            if self.usual is None:
                return float(value == self.value)
            return (value - self.usual) / self.jump
        return self.amount(part) / self.jump if self.jump else 0.0

    def weight(self, part: Metric, labels: int) -> float:
        """Return the weight by which a contribution is compared: the count of its mean, or its number of labels."""
        return float(part.count) if isinstance(part, Mean) else float(labels)

    @property
    def falls_short(self) -> bool:
        """True if a maximum fell or a minimum rose: no single document can cause that."""
        if self.usual is None:
            return False
        return (isinstance(self.whole, Max) and self.jump < 0) or (isinstance(self.whole, Min) and self.jump > 0)

    def amount(self, part: Metric) -> float:
        """Return a document's contribution to the step's value: the difference that leaving it out makes."""
        if isinstance(part, Max | Min):
            return part.value() or 0.0
        if isinstance(part, Sum):
            return float(part.total)
        if isinstance(part, Mean):
            return float(part.total) / float(self.whole.count) if self.whole.count else 0.0  # type: ignore[attr-defined]
        return self.value - (self.without(part) or 0.0)

    def without(self, part: Metric) -> float | None:
        """Return the step's value without some documents, for a metric that is a sum or a mean."""
        whole: Any = self.whole
        if isinstance(part, Sum):
            return float(whole.total - part.total)
        if isinstance(part, Mean):
            return replace(whole, total=whole.total - part.total).value()
        if isinstance(part, Derived):
            parts = zip(whole.parts, part.parts, strict=True)
            return replace(whole, parts=tuple(Sum(a.total - b.total) for a, b in parts)).value()
        if isinstance(part, Histogram):
            return replace(whole, counts=whole.counts - part.counts).value()
        return None

    @staticmethod
    def known(metric: Metric) -> bool:
        """Tell whether contributions to this type of metric can be computed."""
        return isinstance(metric, Sum | Mean | Derived | Histogram | Max | Min)
