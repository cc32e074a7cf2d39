"""Finds the documents and labels that made a metric jump: by replays of the step with parts of it left out.

What is left out adds nothing; totals, denominators and advantages stay the whole step's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from truestep.config.schema import Config
from truestep.losses.labels import Labels
from truestep.metrics.observers import Computed, Observer
from truestep.metrics.types import Metric
from truestep.run.again import ReplayError
from truestep.run.trainer import Trainer
from truestep.step.compute.runner import StepRunner
from truestep.step.update.blame import MOST_NAMED, only
from truestep.tools.replay.files import RunFiles
from truestep.tools.replay.found import FoundDocument, describe, wrapped, write_found
from truestep.tools.replay.gradient_parts import Direction, GradientParts
from truestep.tools.replay.jumps import Jump, find_jump, jump_at, values_of
from truestep.tools.replay.parts import Scale, document_metrics, label_metric, labels_of, merged, places_of
from truestep.tools.replay.replay import Replay, making_again
from truestep.tools.replay.search import MOST_MEASURED, Part, Searched, search
from truestep.types import StepPlan

GRADIENT_NORM = "grad_norm"
_OVER_OTHERS = 10.0  # a document stands out if its part is so many times the mean of the others'
_FEW = 0.1  # of a step's documents are few


@dataclass(frozen=True)
class Bisection:
    """The documents that made a metric of a step what it is."""

    metric: str
    step: int | None
    """The step; None if none stands out."""
    jumped: bool
    """True if the step stands out from the steps around it."""
    documents: tuple[FoundDocument, ...]
    """Those that make it, the largest part first."""
    together: tuple[str, ...]
    """The ids of documents of which none makes it alone, if some few do together."""
    without: float | None
    """The metric without these documents."""
    replays: int
    """How often the step or a part of it was computed."""
    computed: float
    """The same in whole steps."""
    replay: Replay | None
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def bisect(
    run: Path, metric: str, step: int | None = None, output: Path | None = None, overrides: Sequence[str] = ()
) -> Bisection:
    """Find the step at which a metric jumped, if none is given, and the documents and labels that made it. Every rank
    calls this."""
    files = RunFiles(run)
    files.check()
    values = values_of(run, metric, files.metrics)
    if step is None:
        jump = find_jump(metric, values)
        if jump is None:
            line = f"{metric} stands out at none of {len(values)} steps; --step looks into one all the same"
            return Bisection(metric, None, False, (), (), None, 0, 0.0, None, (line,))
    elif step not in values:
        raise ReplayError(f"{run} has no {metric} of step {step}: it has steps {min(values)} to {max(values)}")
    else:
        jump = jump_at(metric, values, step)
    with making_again(run, jump.step, output, overrides) as again:
        trainer = again.made.trainer
        finder = _Finder(jump, trainer, again.config)
        trainer.observers.add(finder)
        replayed = again.run()
        return again.ranks.share(lambda: finder.result(replayed, None if output is None else again.folder))


@dataclass
class _Finder(Observer):
    """Looks for the documents when the step's gradient is there, before the update, and leaves all as it was."""

    jump: Jump
    trainer: Trainer
    config: Config
    documents: list[FoundDocument] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    plan: StepPlan | None = None
    without: float | None = None
    replays: int = 1  # the step itself
    computed: float = 1.0
    of_documents: int = 0  # replays of single documents, to find labels

    def gradient(self, plan: StepPlan, computed: Computed, norm: float) -> None:
        if self.trainer.step + 1 != self.jump.step:
            return
        self.plan = plan
        self.trainer.watch.phase(f"looking for the documents that make {self.jump.metric}")
        if self.jump.metric == GRADIENT_NORM:
            self._of_gradient(plan, norm)
        else:
            self._of_labels(plan)

    @property
    def _usual(self) -> float | None:
        return self.jump.usual if self.jump.jumped else None

    # ---- the norm of the gradient

    def _of_gradient(self, plan: StepPlan, norm: float) -> None:
        direction = Direction(self.trainer.policy.weights, norm)
        parts = GradientParts(self.trainer.runner, plan, direction)
        ranks = self.trainer.ranks
        jump = norm if self._usual is None else norm - self._usual

        def measure(some: Sequence[int]) -> float:
            part = parts.of_documents(some)
            return ranks.share(lambda: part)

        order = parts.order()
        searched = search(order, norm, measure, 0.1 * abs(jump), most=MOST_MEASURED - 2)
        self.replays += searched.measured
        self.computed += searched.members / max(len(order), 1)
        found = _standing_out(searched, norm)
        self.together = [] if found or not self.jump.jumped else _few_together(searched, 0.5 * jump)
        if named := [*(number for one in found for number in one.members), *self.together]:
            self.without = parts.norm_without(named)
            self.replays, self.computed = self.replays + 1, self.computed + 1 - len(named) / len(order)
        shown = found[:MOST_NAMED]
        labels = labels_of(self.trainer.runner, only(plan, [one.members[0] for one in shown])) if shown else {}
        for place, one in enumerate(shown):
            self._add(one.members[0], one.part, one.part / jump, labels[place], self._labels_by_gradient(parts, one))
        direction.restore()

    def _labels_by_gradient(self, parts: GradientParts, one: Part) -> Searched:
        number, ranks = one.members[0], self.trainer.ranks

        def measure(places: Sequence[int]) -> float:
            part = parts.of_labels(number, places)
            return ranks.share(lambda: part)

        places = np.flatnonzero(parts.plan.documents[number].loss_mask).tolist()
        searched = search(places, one.part, measure, 0.1 * abs(one.part))
        self.of_documents += searched.measured
        return searched

    # ---- metrics of labels

    def _of_labels(self, plan: StepPlan) -> None:
        runner, metric = self.trainer.runner, self.jump.metric
        known = document_metrics(runner, plan, metric)
        if not known or not Scale.known(next(iter(known.values()))):
            raise ReplayError(f"{metric} is not made of single documents, so none of them can be left out of it")
        self.replays, self.computed = self.replays + 1, self.computed + 1
        whole = merged(known.values())
        scale = Scale(whole, whole.value() or 0.0, self._usual)
        shares = {number: scale.share(one) for number, one in known.items()}
        parts = sorted((Part(share, [number]) for number, share in shares.items()), key=lambda one: -one.part)
        large = [one for one in parts if one.part >= scale.least]
        others = parts[len(large) :]
        found = large if scale.extreme else _standing_out(Searched(large, others, 0, 0), sum(shares.values()))
        if not found and self.jump.jumped and not scale.extreme:
            self.together = _few_together(Searched([], parts, 0, 0), 0.5)
        named = [*(one.members[0] for one in found), *self.together]
        if named and scale.extreme:
            rest = [one for number, one in known.items() if number not in set(named)]
            self.without = merged(rest).value() if rest else None
        elif named:
            self.without = scale.without(merged(known[number] for number in named))
        shown = found[:MOST_NAMED]
        labels = labels_of(runner, only(plan, [one.members[0] for one in shown])) if shown else {}
        for place, one in enumerate(shown):
            number = one.members[0]
            searched = self._labels_by_metric(runner, plan, labels[place], scale, known[number])
            self._add(number, scale.amount(known[number]), one.part, labels[place], searched)

    def _labels_by_metric(
        self, runner: StepRunner, plan: StepPlan, labels: Sequence[Labels], scale: Scale, own: Metric
    ) -> Searched:
        """Find labels by their part of a document's own metric."""
        places = [place for sequence in labels for place in places_of(sequence).tolist()]
        metric = self.jump.metric

        def amount(some: Sequence[int]) -> float:
            found = label_metric(labels, np.array(some), metric, runner, plan)
            return scale.share(found) if found is not None else 0.0

        whole = scale.share(own)
        if not places or amount(places[:0]) == whole:  # such as a reward, which no label makes
            return Searched([], [], 0, 0)
        if scale.extreme:
            alone = [Part(amount([place]), [place]) for place in places]
            large = [one for one in alone if one.part >= scale.least]
            return Searched(large if len(large) < len(alone) else [], [], 0, 0)
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
        found = describe(self.config, self.trainer.policy, jump, plan, self.documents, together, self.without)
        verdict = next((line for line in replayed.lines if line.startswith(f"step {jump.step}")), replayed.lines[0])
        lines = [*wrapped(jump.text), *wrapped(verdict), *found]
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


def _standing_out(searched: Searched, whole: float) -> list[Part]:
    """Return the found members whose parts are far above the others'."""
    others = sum(len(one.members) for one in searched.others)
    if not others:
        return []
    if all(len(one.members) == 1 for one in searched.others):
        mean = sum(abs(one.part) for one in searched.others) / others
    else:
        mean = abs(whole - sum(one.part for one in searched.found)) / others
    return [one for one in searched.found if one.part >= _OVER_OTHERS * mean]


def _few_together(searched: Searched, wanted: float) -> list[int]:
    """Return the few members that make so much together, though none does alone; none if it takes many."""
    parts = sorted((*searched.found, *searched.others), key=lambda one: -one.part / len(one.members))
    total, chosen, count = 0.0, list[int](), sum(len(one.members) for one in parts)
    for one in parts:
        if total >= wanted:
            break
        total, chosen = total + one.part, [*chosen, *one.members]
    return sorted(chosen) if total >= wanted > 0 and len(chosen) <= _FEW * count else []


def _densest(others: Sequence[Part], total: float) -> tuple[int, int, float] | None:
    """Return the first and last place and the share of the run of labels that has most for its length."""
    runs = [one for one in others if one.members and one.part / total >= 0.02]
    if not runs:
        return None
    best = max(runs, key=lambda one: one.part / len(one.members))
    return best.members[0], best.members[-1], best.part / total
