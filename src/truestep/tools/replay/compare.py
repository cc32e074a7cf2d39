"""Finds the first difference between two runs, or between a run and its replay, and the cause of the difference."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from truestep.errors import TruestepError
from truestep.rollouts.kept.records import RecordsError
from truestep.run.weight_lines import WeightLine
from truestep.text import printable
from truestep.tools.replay.differences import (
    BOUND,
    HALF_BOUND,
    Difference,
    WeightDifferences,
    compare_documents,
    compare_metrics,
    compare_weights,
    table,
)
from truestep.tools.replay.files import Changed, RunFiles
from truestep.tools.replay.stage import Stage, find_stage

Cause = Literal["nothing", "order", "data", "option", "numerics"]
_MOST = 3  # documents or weights that are named
# If so many steps differ by rounding, the differences of later steps are compared with the largest of theirs.
_ENOUGH = 3
_FAR = 30.0  # more than so many times as large: not rounding
_NOISE = 3.0  # at most so many times as large: rounding
# Metrics that one label or document changes by far more than rounding: extremes, and shares of labels or documents.
_OF_FEW = re.compile(
    r"max_|min_|ratio_new_old_squared|ended_by/|source_|.*(fraction|disagreement)|.*_(completions?|groups|prompts|tokens"
    r"|tool_calls|expert_share)(/|$)"
)


@dataclass(frozen=True)
class Comparison:
    """The first difference between two runs."""

    step: int | None
    """The first step in which they differ; None if they do not."""
    cause: Cause
    """The cause of the difference: the order of documents, the data, an option, or numerics of layout and machine."""
    lines: tuple[str, ...]
    """The difference in words."""
    stage: Stage | None = None
    """The first place where numbers differ: the forward pass, the gradient or the update."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def compare(first: Path, second: Path) -> Comparison:
    """Compare two runs step by step, over the steps that both have."""
    runs = RunFiles(first), RunFiles(second)
    for run in runs:
        run.check()
    found = _first_difference(*runs)
    unread = [run.directory.config for run in runs if not run.options(max(run.ledger))]
    said = [f"{file} cannot be read, so options were not compared" for file in unread]
    return replace(found, lines=(*found.lines, *said))


def _first_difference(mine: RunFiles, theirs: RunFiles) -> Comparison:
    steps = sorted(mine.ledger.keys() & theirs.ledger.keys())
    if not steps:
        raise TruestepError(f"{mine.path} and {theirs.path} have no step in common")
    rounded: list[_Numbers] = []  # steps that differ by rounding
    for step in steps:
        if (documents := _of_documents(mine, theirs, step)) is not None:
            if rounded and not (mine.reads_a_file(step) and theirs.reads_a_file(step)):
                return rounded[0].said([])  # after different rounding, a policy draws other documents
            cause, lines = documents
            return Comparison(
                step, cause, (f"{_first_step(step, rounded)}: {lines[0]}", *lines[1:], *_earlier(rounded))
            )
        numbers = _Numbers.of(mine, theirs, step, carried=bool(rounded))
        if numbers is not None and (not numbers.rounding or numbers.stands_out(rounded)):
            return numbers.said(rounded)
        rounded += [] if numbers is None else [numbers]
    if rounded:
        return rounded[0].said([])
    lines = [
        f"{len(steps)} steps, {steps[0]} to {steps[-1]}, are the same: {_what_is_compared(mine, theirs, steps[0])}"
    ]
    changed = Changed.of(mine.options(steps[-1]), theirs.options(steps[-1]))
    if changed.all:
        lines.append(f"options that differ, without effect on these steps: {changed.said([*changed.all])}")
    if only := len(mine.ledger.keys() ^ theirs.ledger.keys()):
        lines.append(f"{only} steps are in one of them only")
    return Comparison(None, "nothing", tuple(lines))


def _what_is_compared(first: RunFiles, second: RunFiles, step: int) -> str:
    there = [
        ("documents", all("digests" in run.ledger[step] for run in (first, second))),
        ("metrics", all(step in run.metrics for run in (first, second))),
        ("the bits of the weights", all(step in run.weights for run in (first, second))),
    ]
    has, lacks = ([what for what, known in there if known is wanted] for wanted in (True, False))
    not_noted = f" (not noted by both: {', '.join(lacks)})" if lacks else ""
    return f"{', '.join(has)}{not_noted}"


def _of_documents(first: RunFiles, second: RunFiles, step: int) -> tuple[Cause, list[str]] | None:
    mine, theirs = first.ledger[step], second.ledger[step]
    names, others = mine["documents"], theirs["documents"]
    digests = [line.get("digests") or ["?" * 16] * len(line["documents"]) for line in (mine, theirs)]
    if names == others and (digests[0] == digests[1] or "?" * 16 in (digests[0][0], digests[1][0])):
        return None
    changed = Changed.of(first.options(step), second.options(step))
    if sorted(names) == sorted(others) and names != others:
        at = next(place for place, pair in enumerate(zip(names, others, strict=True)) if pair[0] != pair[1])
        lines = [
            f"the same documents are in another order: number {at + 1} is {printable(names[at])} in the first run and "
            f"{printable(others[at])} in the second"
        ]
        cause: Cause = "order"
    elif names != others:
        known, new = set(names), set(others)
        lines = [
            f"other documents: {_some(names, new)} only in the first run, {_some(others, known)} only in the second"
        ]
        cause = "data"
    else:
        odd = [place for place, pair in enumerate(zip(*digests, strict=True)) if pair[0] != pair[1]]
        lines = [
            f"{len(odd)} of {len(names)} documents are not the same: {_which(first, second, step, place, digests)}"
            if number == 0
            else f"  and {_which(first, second, step, place, digests)}"
            for number, place in enumerate(odd[:_MOST])
        ]
        cause = "data"
    if changed.of_documents:
        return "option", [*lines, f"options that choose documents differ: {changed.said(changed.of_documents)}"]
    return cause, [*lines, "no option that chooses documents differs"]


def _some(names: list[str], others: set[str]) -> str:
    only = [name for name in names if name not in others]
    more = f" and {len(only) - _MOST} more" if len(only) > _MOST else ""
    return f"{', '.join(map(printable, only[:_MOST])) or 'none'}{more}"


def _which(first: RunFiles, second: RunFiles, step: int, place: int, digests: list[list[str]]) -> str:
    """Describe how the documents with one id differ between two runs."""
    name = printable(first.ledger[step]["documents"][place])
    was, now = digests[0][place], digests[1][place]
    blocks = [run.records.get(step) for run in (first, second)]
    if blocks[0] is not None and blocks[1] is not None:
        try:
            fields = compare_documents(blocks[0].read()[place], blocks[1].read()[place])
        except (RecordsError, IndexError):
            fields = []
        if fields:
            return f"{name} has other {'; '.join(fields)}"
    return (
        f"{name} has other {'tokens or labels' if was[:8] != now[:8] else 'values (log-probs, advantages or fields)'}"
    )


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a step that differ between two runs."""

    step: int
    cause: Cause
    lines: list[str]
    metrics: list[Difference]
    made: tuple[WeightLine | None, WeightLine | None]
    before_same: bool  # the weights before the step are known to be the same, to the last bit
    size: float  # of the largest difference
    bound: float  # of rounding
    rounding: bool  # True: a reason is known why the runs round differently

    @staticmethod
    def of(first: RunFiles, second: RunFiles, step: int, carried: bool) -> "_Numbers | None":
        """`carried`: steps before this one differ by rounding, so the weights, and with them this step, do too."""
        metrics, compared = compare_metrics(first.metrics.get(step, {}), second.metrics.get(step, {}))
        weights = compare_weights(first.weights.get(step), second.weights.get(step))
        if not metrics and (weights is None or not (weights.weights or weights.norms)):
            return None
        options, others = first.options(step), second.options(step)
        changed = Changed.of(options, others)
        differences = [*metrics, *_norms(weights)]
        lines = [_what_differs(metrics, compared, weights), *table(differences, ("first", "second"))]
        size = max((one.size for one in _steady(differences)), default=0.0)
        made = first.weights.get(step), second.weights.get(step)
        made_by = [dict(line.made_by) if line else {} for line in made]
        why, rounding = numerics(changed, *made_by), rounds(changed, *made_by)
        cause: Cause = "numerics"
        first_weights = compare_weights(first.weights.get(0), second.weights.get(0))
        if first_weights is not None and first_weights.weights:
            odd = named_weights(first_weights)
            cause, why = "option", f"the runs began with other weights (model.path): the bits of {odd} differ"
        elif changed.of_numbers:
            cause, why = "option", f"the documents are the same, and options differ: {changed.said(changed.of_numbers)}"
        else:
            why = f"documents{' and options' if options and others else ''} are the same: {why}"
        before_same = _same_weights(first.weights.get(step - 1), second.weights.get(step - 1))
        bound = BOUND.get(str(options.get("model.dtype")), HALF_BOUND)
        # Equal weights do not rule out rounding: the optimizer's states, which have no digests, may differ by it.
        rounding |= carried and not (before_same and metrics)
        rounding &= cause == "numerics"
        return _Numbers(step, cause, [*lines, why], metrics, made, before_same, size, bound, rounding)

    def stands_out(self, before: Sequence["_Numbers"]) -> bool:
        """Tell whether a step differs far more than the steps `before`, which differ by rounding."""
        if len(before) < _ENOUGH:
            return False
        return self.size > max(_FAR * max(one.size for one in before), self.bound)

    def said(self, before: Sequence["_Numbers"]) -> Comparison:
        lines, least, metrics, far = list(self.lines), 0.0, self.metrics, self.rounding and bool(before)
        if far:
            least, metrics = _NOISE * max(one.size for one in before), _steady(metrics)
            lines[-1] = "this is another matter than rounding: code that was changed, or a faulty machine"
        elif self.rounding and self.size > self.bound:
            lines[-1] += f". But it is more than rounding makes ({self.bound:g})"
        where = None
        if self.cause == "numerics" and not (self.rounding and self.size <= self.bound):
            where = find_stage(metrics, *self.made, self.before_same, least)
        said = [] if where is None else [f"where: {where.text}"]
        head = f"{_first_step(self.step, before, far)}: {lines[0]}"
        stage = None if where is None else where.stage
        return Comparison(self.step, self.cause, (head, *said, *lines[1:], *_earlier(before)), stage)


def _first_step(step: int, rounded: Sequence[_Numbers], far: bool = False) -> str:
    """Name the step of a difference. `far`: the difference is larger than those of the steps `rounded`."""
    if not rounded:
        return f"step {step} is the first that differs"
    return f"step {step} is the first that differs " + ("by more than rounding" if far else "for another reason too")


def _earlier(rounded: Sequence[_Numbers]) -> list[str]:
    """Say by how much the steps before differ, and why."""
    if not rounded:
        return []
    most, why = max(one.size for one in rounded), rounded[0].lines[-1]
    which = (
        f"{len(rounded)} steps from {rounded[0].step} to {rounded[-1].step} differ"
        if len(rounded) > 1
        else (f"step {rounded[0].step} differs")
    )
    return [f"before it, {which} by at most {most:.1e}: {why.removeprefix('documents and options are the same: ')}"]


def _steady(differences: Sequence[Difference]) -> list[Difference]:
    """Leave out metrics that one label or document can change by much: extremes, shares, and counts."""

    def of_few(one: Difference) -> bool:
        return _OF_FEW.match(one.name) is not None or one.first % 1 == one.second % 1 == 0

    return [one for one in differences if one.name.endswith("norm") or not of_few(one)]


def _same_weights(first: WeightLine | None, second: WeightLine | None) -> bool:
    """Tell whether two lines show that all weights are the same. Digests of copies do not show that masters are."""
    found = compare_weights(first, second)
    if found is None or first is None or first.made_by.get("digests_of") == "copies":
        return False
    return found.same


def _norms(weights: WeightDifferences | None) -> list[Difference]:
    return [] if weights is None else list(weights.norms)


def _what_differs(metrics: list[Difference], compared: int, weights: WeightDifferences | None) -> str:
    parts = []
    if metrics:
        parts.append(f"{len(metrics)} metrics, by at most {metrics[0].size:.1e} ({metrics[0].name})")
    if weights is not None and weights.weights:
        parts.append(f"the bits of {named_weights(weights)}")
    if metrics:
        return " and ".join(parts)
    beside = "while all metrics are the same" if compared else "and no metrics were noted by both"
    return f"{parts[0] if parts else 'norms of layers'}, {beside}"


def named_weights(weights: WeightDifferences) -> str:
    """Name the weights whose bits differ."""
    odd = weights.weights
    if len(odd) == weights.compared > _MOST:
        return f"all {len(odd)} weights"
    more = f" and {len(odd) - _MOST} more of {weights.compared} weights" if len(odd) > _MOST else ""
    return f"{', '.join(odd[:_MOST])}{more}"


def rounds(changed: Changed, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Tell whether there is a known reason why two computations of a step round differently."""
    deterministic = first.get("deterministic") and second.get("deterministic")
    return first != second or bool(changed.of_layout) or not deterministic


def numerics(changed: Changed, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Name the reason why two computations of a step round differently: layout, machine, versions, or none known."""
    odd = [
        f"{name} {first.get(name)} and {second.get(name)}"
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    ]
    if changed.of_layout:
        odd.append(changed.said(changed.of_layout))
    if odd:
        return f"layout or machine round otherwise ({'; '.join(odd)})"
    if not (first.get("deterministic") and second.get("deterministic")):
        return "without deterministic: true a step is not the same to the last bit, even on the same machine"
    return (
        "layout and machine are the same too, and deterministic: true. Something else made the difference: code that "
        "was changed, a bit that flipped in memory or in a file, a user's function that is not the same twice"
    )
