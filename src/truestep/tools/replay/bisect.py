"""Finds the documents and labels that made a metric jump, by replays of the step without some of them.

Documents and labels that are left out add nothing; totals, denominators and advantages stay the whole step's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from truestep.config.schema import Config
from truestep.losses.labels import Labels
from truestep.metrics.observers import Computed, Observer
from truestep.metrics.types import Max, Metric, Sum
from truestep.run.again import ReplayError
from truestep.run.trainer import Trainer
from truestep.step.compute.runner import StepRunner
from truestep.step.update.blame import MOST_NAMED, only
from truestep.tools.replay.files import RunFiles
from truestep.tools.replay.found import Found, FoundDocument, describe, wrapped, write_found
from truestep.tools.replay.gradient_parts import Direction, GradientParts
from truestep.tools.replay.jumps import FAR, Jump, farthest, find_jump, jump_at, number, values_of
from truestep.tools.replay.outliers import Typical
from truestep.tools.replay.parts import (
    Scale,
    document_metrics,
    far_together,
    label_metric,
    labels_of,
    left_out,
    merged,
    places_of,
)
from truestep.tools.replay.replay import Replay, making_again
from truestep.tools.replay.search import MOST_MEASURED, Part, Searched, search, search_extreme
from truestep.types import Rollout, StepPlan

GRADIENT_NORM = "grad_norm"
NOTHING = Searched([], [], [], 0, 0)


@dataclass(frozen=True)
class Bisection:
    """The documents that caused a metric's jump or, if it did not jump, contribute much to its value."""

    metric: str
    step: int | None
    """The step; None if none stands out."""
    jumped: bool
    """True if the step stands out from the steps around it."""
    documents: tuple[FoundDocument, ...]
    """The documents that caused the jump (or the value), the largest contribution first."""
    together: tuple[str, ...]
    """The ids of a few documents that caused the jump together, if no single document did."""
    without: float | None
    """The metric without these documents."""
    replays: int
    """The number of replays of the step or of a part of it."""
    computed: float
    """The cost of these replays, in whole steps."""
    replay: Replay | None
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def bisect(
    run: Path, metric: str, step: int | None = None, output: Path | None = None, overrides: Sequence[str] = ()
) -> Bisection:
    """Find the step at which a metric jumped, if none is given, and the documents and labels that caused it. Every rank
    calls this."""
    files = RunFiles(run)
    files.check()
    values = values_of(run, metric, files.metrics)
    if step is None:
        jump = find_jump(metric, values)
        if jump is None:
            line = f"{metric} stands out at none of {len(values)} steps; --step looks into one all the same. "
            far = farthest(metric, values)
            line += (
                f"Farthest is step {far.step}, {far.spreads:.1f} spreads from the usual; a step with more than {FAR:g} "
                "stands out"
            )
            return Bisection(metric, None, False, (), (), None, 0, 0.0, None, tuple(wrapped(line)))
    elif step not in values:
        raise ReplayError(f"{run} has no {metric} of step {step}: it has steps {min(values)} to {max(values)}")
    else:
        jump = jump_at(metric, values, step)
    missing = sum(other not in files.metrics for other in files.ledger)
    with making_again(run, jump.step, output, overrides) as again:
        trainer = again.made.trainer
        finder = _Finder(jump, trainer, again.config, again.changed, missing)
        trainer.observers.add(finder)
        replayed = again.run()
        return again.ranks.share(lambda: finder.result(replayed, None if output is None else again.folder))


@dataclass
class _Finder(Observer):
    """Searches for the documents after the step's backward passes and before its update, and restores the gradient."""

    jump: Jump
    trainer: Trainer
    config: Config
    what_if: bool  # options were changed
    missing: int  # steps without a line of metrics
    value: float = math.nan  # of the metric in the replay
    documents: list[FoundDocument] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not searched, or why no document can be found."""
    searched: bool = False
    plan: StepPlan | None = None
    without: float | None = None
    replays: int = 1  # the step itself
    computed: float = 1.0
    of_documents: int = 0  # replays of single documents, to find labels
    _known: bool = False  # whether the metric is known to be attributable to single documents

    def gradient(self, plan: StepPlan, computed: Computed, norm: float) -> None:
        metric, step = self.jump.metric, self.trainer.step + 1
        if step != self.jump.step:
            if not self._known:  # refused at the first replayed step, not at the last
                self._check(plan)
            return
        self.plan = plan
        line = self.trainer.ranks.share(computed.line)
        self.value = norm if metric == GRADIENT_NORM else float(line.get(metric, self.jump.value))
        known = self._check(plan)
        if (why := self._pointless()) is not None:
            self.notes.append(why)
            return
        self.searched = True
        self.trainer.watch.phase(f"looking for the documents that make {metric}")
        if metric == GRADIENT_NORM:
            self._of_gradient(plan, norm)
        else:
            self._of_labels(plan, known)

    def _check(self, plan: StepPlan) -> dict[int, Metric]:
        """Return each document's metric. Refuse a metric that cannot be attributed to single
        documents."""
        metric, runner = self.jump.metric, self.trainer.runner
        self._known = True
        if metric == GRADIENT_NORM:
            routing = runner.policy.routing
            if routing is not None and runner.objective.routers and routing.settings.balance == "loss":
                raise ReplayError(
                    "grad_norm is not made of single documents: the balance loss of the experts depends on all of them "
                    "together. Name a metric of labels"
                )
            return {}
        known = document_metrics(runner, plan, metric)
        if not known:
            raise ReplayError(f"{metric} is not made of single documents, so none of them can be left out of it")
        self.replays, self.computed = self.replays + 1, self.computed + 1
        whole = merged(known.values()).value()
        if self.plan is not None and (whole is None or not math.isclose(whole, self.value, rel_tol=1e-3, abs_tol=1e-6)):
            raise ReplayError(
                f"{metric} is not made of single documents alone: with each computed by itself it is "
                f"{'nothing' if whole is None else number(whole)}, and the step's is {number(self.value)}"
            )
        return known

    def _pointless(self) -> str | None:
        """Return why no documents are searched for; None if they are."""
        jump, metric = self.jump, self.jump.metric
        if jump.jumped and jump.unusual(self.value) < 0.5:
            where = f"the jump is not in the replay: there {metric} is {number(self.value)}"
            if self.what_if:
                return f"{where}, with the options that were changed. No documents were looked for"
            return (
                f"{where}. So it is not the documents: a faulty machine, code that was changed, or a function of yours "
                "that is not the same twice"
            )
        if not self.value and self._usual is None:
            return f"{metric} is 0, so no document contributes to it"
        if metric == GRADIENT_NORM and (not self.value or (self._usual is not None and self.value < self._usual)):
            return (
                "grad_norm fell. Leaving documents out does not show which ones are missing, so none was looked for. "
                "Look at advantages that are 0, and at gradients that cancel each other"
            )
        return None

    @property
    def _usual(self) -> float | None:
        return self.jump.usual if self.jump.jumped else None

    def _measured(self, part: float) -> float:
        """Return the first rank's value on all; stop if the first rank was asked to."""
        part, stopped = self.trainer.ranks.share(lambda: (part, self.trainer.stopped_by is not None))
        if stopped:
            raise KeyboardInterrupt
        return part

    # ---- the norm of the gradient

    def _of_gradient(self, plan: StepPlan, norm: float) -> None:
        direction = Direction(self.trainer.policy.weights, norm)
        parts = GradientParts(self.trainer.runner, plan, direction)
        jump = norm if self._usual is None else norm - self._usual
        order = parts.order()
        searched = search(
            order, norm, lambda some: self._measured(parts.of_documents(some)), 0.1 * jump, most=MOST_MEASURED - 2
        )
        self.replays += searched.measured
        self.computed += searched.members / max(len(order), 1)
        if searched.left:
            many, share = sum(len(one.members) for one in searched.left), sum(one.part for one in searched.left) / norm
            self.notes.append(
                f"the search ended at {MOST_MEASURED} replays: {share:.0%} of {self.jump.metric} is among {many} "
                "documents that were not looked into"
            )
        weights = {number: self._weight(document) for number, document in enumerate(plan.documents)}
        typical = Typical.of([*searched.found, *searched.others, *searched.left], weights)
        found = self._choose(searched.found, searched.others, typical, jump)
        if named := [*(one.members[0] for one in found), *self.together]:
            self.without = self._measured(parts.norm_without(named))
            self.replays, self.computed = self.replays + 1, self.computed + 1 - len(named) / len(order)
        labels = labels_of(self.trainer.runner, only(plan, [one.members[0] for one in found])) if found else {}
        for place, one in enumerate(found):
            of_it = self._labels_by_gradient(parts, one) if place < MOST_NAMED else NOTHING
            self._add(one.members[0], one.part, typical.excess(one) / jump, labels[place], of_it)
        direction.restore()

    def _weight(self, document: Rollout) -> float:
        """Return the weight by which a contribution is compared: its labels, or 1 if all documents weigh the same."""
        if self.trainer.runner.objective.denominator.normalize_by == "document_means":
            return float(document.num_labels > 0)
        return float(document.num_labels)

    def _choose(self, single: Sequence[Part], others: Sequence[Part], typical: Typical, jump: float) -> list[Part]:
        """Return the documents that stand out, the largest first. If only several together stand out, note them."""
        ranked = sorted(single, key=lambda one: -typical.excess(one))
        found = [one for one in ranked if typical.excess(one) >= 0.1 * jump and typical.far(one)]
        if found or not self.jump.jumped:
            return found
        together = typical.few_together([*single, *others], 0.5 * jump)
        alone = [one for one in (*single, *others) if together == [*one.members] and len(together) == 1]
        self.together = [] if alone else together
        return alone

    def _labels_by_gradient(self, parts: GradientParts, one: Part) -> Searched:
        number = one.members[0]

        def measure(places: Sequence[int]) -> float:
            return self._measured(parts.of_labels(number, places))

        places = np.flatnonzero(parts.plan.documents[number].loss_mask).tolist()
        searched = search(places, one.part, measure, 0.1 * abs(one.part))
        self.of_documents += searched.measured
        return searched

    # ---- metrics of labels

    def _of_labels(self, plan: StepPlan, known: Mapping[int, Metric]) -> None:
        runner, metric = self.trainer.runner, self.jump.metric
        own_type = not Scale.known(next(iter(known.values())))
        measured, whole = known, merged(known.values())
        if own_type:
            known, whole = left_out(known), Sum(whole.value() or 0.0)
        scale = Scale(whole, whole.value() or 0.0, self._usual)
        if scale.falls_short:
            kind = "maximum that fell" if isinstance(whole, Max) else "minimum that rose"
            self.notes.append(
                f"{metric} is a {kind}: no document can have caused that, only documents that are missing"
            )
            self.searched = False
            return
        parts = sorted((Part(scale.share(one), [number]) for number, one in known.items()), key=lambda one: -one.part)
        weights = {n: scale.weight(one, plan.documents[n].num_labels) for n, one in known.items()}
        if metric == "loss":
            weights = {n: self._weight(plan.documents[n]) for n in known}
        typical = Typical.of(parts, weights)
        if scale.extreme:
            found = [one for one in parts if one.part >= scale.least]
        else:
            found = self._choose(parts, (), typical, 1.0)
        if own_type and not (found or self.together):
            found = self._by_own_values(parts, measured)
        named = [*(one.members[0] for one in found), *self.together]
        if named and (scale.extreme or own_type):
            rest = [one for number, one in measured.items() if number not in set(named)]
            self.without = merged(rest).value() if rest else None
        elif named:
            self.without = scale.without(merged(known[number] for number in named))
        labels = labels_of(runner, only(plan, [one.members[0] for one in found])) if found else {}
        for place, one in enumerate(found):
            number, of_it = one.members[0], NOTHING
            if place < MOST_NAMED and not own_type:
                of_it = self._labels_by_metric(runner, plan, labels[place], scale, known[number])
            share = one.part if scale.extreme else typical.excess(one)
            self._add(number, scale.amount(known[number]), share, labels[place], of_it)

    def _by_own_values(self, parts: Sequence[Part], measured: Mapping[int, Metric]) -> list[Part]:
        """Find documents that hide each other in a metric of a user's own type: leaving one out changes little, as with
        two documents that have the same maximum. Return one that causes the jump alone; note several."""
        if self._usual is None:
            return []
        chosen = far_together(measured, self._usual, self.value)
        if len(chosen) == 1:
            return [one for one in parts if one.members[0] == chosen[0]]
        self.together, share = sorted(chosen), sum(one.part for one in parts)
        if not chosen and share < 0.5:
            self.notes.append(
                f"the type of {self.jump.metric} is your own: leaving documents out one by one explains {share:.0%} of "
                "the jump, and leaving out the few with the farthest values less than half of it. Which of them make "
                "it is not known"
            )
        return []

    def _labels_by_metric(
        self, runner: StepRunner, plan: StepPlan, labels: Sequence[Labels], scale: Scale, own: Metric
    ) -> Searched:
        """Find labels by their contributions to the document's metric."""
        places = [place for sequence in labels for place in places_of(sequence).tolist()]
        metric = self.jump.metric

        def amount(some: Sequence[int]) -> float:
            found = label_metric(labels, np.array(some), metric, runner, plan)
            return scale.share(found) if found is not None else 0.0

        whole = scale.share(own)
        if not places or amount(places[:0]) == whole:  # such as a reward, to which no label contributes
            return NOTHING
        if scale.extreme:
            large = search_extreme(places, amount, scale.least, most=4 * MOST_MEASURED)
            return replace(NOTHING, found=large if len(large) < len(places) else [])
        return search(places, whole, amount, 0.1 * abs(whole), most=4 * MOST_MEASURED)

    def _add(self, number: int, part: float, share: float, labels: Sequence[Labels], searched: Searched) -> None:
        assert self.plan is not None
        document = self.plan.documents[number]
        total = sum(one.part for one in (*searched.found, *searched.others)) if searched.measured else share
        shares = {one.members[0]: one.part / total for one in searched.found if total}
        spread = _densest(searched.others, total) if total else None
        self.documents.append(FoundDocument.of(document, part, share, labels, shares, spread))

    # ---- what was found

    def result(self, replayed: Replay, output: Path | None) -> Bisection:
        assert self.plan is not None
        plan, jump = self.plan, self.jump
        together = [plan.documents[number] for number in self.together]
        found = Found(jump, self.value, plan, self.documents, together, self.without, self.notes)
        lines = wrapped(jump.text)
        if self.missing:
            lines += wrapped(
                f"{self.missing} steps of the ledger have no line in metrics.jsonl: they were not looked at"
            )
        lines += [line for said in replayed.said for line in wrapped(said)]
        lines += [line for note in self.notes for line in wrapped(note)]
        if self.searched:
            lines += describe(self.config, self.trainer.policy, found)
        if jump.jumped and not (self.documents or together):
            lines += replayed.grown
        counted = f"computed: {self.replays} times the step or a part of it, {self.computed:.1f} steps in all"
        if self.of_documents:
            counted += f"; and {self.of_documents} times a single document"
        lines = [*lines, "", *wrapped(counted)]
        if output is not None and self.documents:
            lines += wrapped(write_found(self.trainer.policy, output, jump, plan, self.documents))
        return Bisection(
            jump.metric,
            jump.step,
            jump.jumped,
            tuple(self.documents),
            tuple(one.id for one in together),
            self.without,
            self.replays,
            self.computed,
            replayed,
            tuple(lines),
        )


def _densest(others: Sequence[Part], total: float) -> tuple[int, int, float] | None:
    """Return the span of labels that contributes most for its length: its first and last index, and its share."""
    runs = [one for one in others if one.members and one.part / total >= 0.02]
    if not runs:
        return None
    best = max(runs, key=lambda one: one.part / len(one.members))
    return best.members[0], best.members[-1], best.part / total
