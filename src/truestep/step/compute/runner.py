"""Runs the plan of one step: computes its metrics, reduced over micro-batches and ranks, and its whole gradient.

Dimensions: S tokens of the micro-batch, T its labels, D its sequences.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from truestep.gpu import marks
from truestep.gpu.side_stream import Beside
from truestep.head import chunked
from truestep.head.chunked import HeadRows, SharedDocuments
from truestep.losses.agreement import COLUMNS, compare
from truestep.losses.measure import MEASURED, Measure, StepFacts, measure_labels
from truestep.losses.objective import Objective
from truestep.metrics.loads import Counts
from truestep.metrics.spent import Stopwatch
from truestep.metrics.types import Metric, Sum, merge, on_host, values
from truestep.model.policy import Policy
from truestep.ranks.group import Ranks
from truestep.rollouts.fields import Field
from truestep.rollouts.packing import pack
from truestep.rollouts.prefixes import forest_of
from truestep.rollouts.selection import has_advantage
from truestep.step.compute.episodes import measure_episodes
from truestep.step.compute.exact import score_exactly
from truestep.step.compute.groups import measure_answers, measure_groups
from truestep.step.compute.label_shares import LabelShare, MicroBatch
from truestep.step.compute.passes import Passes
from truestep.step.compute.routes import measure_routes, recorded_counts, summed, terms_of
from truestep.types import Coefficients, DocumentScore, RowStatistics, StepPlan, StepTotals

_COUNTS = ("num_documents", "num_sequences", "num_labels", "num_tokens", "num_micro_batches")
_COMPUTED = ("computed_tokens", "recomputed_prefix_tokens")


@dataclass(frozen=True)
class Accumulated:
    """The results of a plan, reduced over all ranks. The gradient itself is in the policy's float32 buffers."""

    metrics: dict[str, Metric]
    scores: tuple[DocumentScore, ...]  # scores of the documents whose scores are kept, in the plan's order
    compared: np.ndarray | None = None  # [documents, COLUMNS] float64, from `compare`; None: not compared
    # How often the policy's routers chose each expert in the step, by layer; None: `balance: bias` is off.
    loads: Counts | None = None

    def line(self) -> dict[str, Any]:
        """Return the metrics as they are logged, with counts as integers."""
        line: dict[str, Any] = values(self.metrics)
        return line | {name: int(line[name]) for name in (*_COUNTS, *_COMPUTED) if name in line}


@dataclass(frozen=True)
class _RankSums:
    """The results of this rank's own micro-batches, on the host."""

    metrics: dict[str, Metric]
    scores: dict[int, tuple[np.ndarray, np.ndarray]]  # log-probs and entropies of labels, by index in the plan
    compared: list[tuple[Sequence[int], np.ndarray]]  # indices in the plan, and one row for each


@dataclass(frozen=True)
class StepRunner:
    """Computes the gradient and the metrics of steps, with fixed options."""

    policy: Policy
    objective: Objective
    metrics_level: str | None = "basic"  # None: no metrics
    pad_to_multiple: int = 1
    breadth_first: int = 1  # micro-batches per gather of the weights
    custom_metrics: Mapping[str, Measure] = field(default_factory=dict)  # the user's, by import path
    # keep the scores of all documents (True), or of those with these indices in the plan
    keep_scores: bool | Collection[int] = False
    skip_zero_advantage: bool = False  # skip the backward pass of micro-batches in which no label has an advantage
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    exact: bool = False  # compute log-probs that are bitwise equal to the sampler's
    # tolerance in nats for comparing the sampler's log-probs with the policy's; None: no comparison
    compares: float | None = None
    fields: tuple[Field, ...] = ()  # the user's own fields, packed like the built-in ones

    def steered(self, metrics: Mapping[str, Metric]) -> "StepRunner":
        """Return the runner for the next step. With an entropy target, the measured entropy changes the weight of the
        entropy bonus."""
        entropy = metrics.get("entropy")
        return replace(self, objective=self.objective.steered(None if entropy is None else entropy.value()))

    def with_entropy_bonus(self, weight: float | None) -> "StepRunner":
        """Return the runner with the bonus weight from a checkpoint, if an entropy target controls this weight."""
        if weight is None or self.objective.steered_weight is None:
            return self
        return replace(self, objective=replace(self.objective, entropy_bonus=weight))

    @property
    def _ranks(self) -> Ranks:
        return self.policy.weights.ranks

    @property
    def reports_metrics(self) -> bool:
        """True on the one rank that reports a micro-batch's metrics: last stage, first context and tensor rank."""
        ranks, pipeline = self._ranks, self.policy.pipeline
        return ranks.stage == pipeline.rank_of(pipeline.last) and ranks.first_of_stage

    @property
    def _multiple(self) -> int:
        """Multiple to which micro-batches are padded, so that the ranks that share one get equal parts."""
        return math.lcm(self.pad_to_multiple, self._ranks.token_share)

    def accumulate(
        self,
        plan: StepPlan,
        *,
        backward: bool = True,
        extra_metrics: Mapping[str, Metric] | None = None,
        first: bool = True,
        last: bool = True,
    ) -> Accumulated:
        """Run the plan. Reduce its metrics and each rank's `extra_metrics` over all ranks. With `backward`, compute the
        whole gradient. All ranks must call this, since each has a part of the weights. A plan that is not the `first`
        of its step adds to the gradient. The gradient is reduced over ranks only after the `last` plan."""
        sums, runs = self._accumulate(plan, backward, first, last)
        parts = self._ranks.gather((sums.metrics | on_host(extra_metrics or {}), sums.scores, sums.compared))
        routing, loads = self.policy.routing, None
        if routing is not None and routing.settings.balance == "bias":
            loads = summed(self._ranks.gather(routing.own_counts))
        for passes in runs:
            passes.settle()
        metrics = _counts(plan)
        if self.metrics_level in MEASURED:
            documents = plan.documents
            metrics |= measure_groups(documents) | measure_answers(documents) | measure_episodes(documents)
        for part, _, _ in parts:
            metrics = merge(metrics, part)
        if plan.distinct is not None and "computed_tokens" in metrics:
            computed = metrics["computed_tokens"].value() or 0.0
            # The difference is negative if micro-batches share prefixes that are too short to keep documents together.
            metrics["recomputed_prefix_tokens"] = Sum(max(0.0, computed - plan.distinct))
        scores = {index: score for _, part, _ in parts for index, score in part.items()}
        rows = [of_micro_batch for _, _, part in parts for of_micro_batch in part]
        compared = None if self.compares is None else _table(plan, rows)
        return Accumulated(metrics, _of_documents(plan, scores), compared, loads)

    def _accumulate(self, plan: StepPlan, backward: bool, first: bool, last: bool) -> tuple[_RankSums, list[Passes]]:
        if plan.ranks != self._ranks.data:
            raise ValueError(f"the plan is for {plan.ranks} data ranks, but there are {self._ranks.data}")
        sums = _RankSums({}, {}, [])
        if backward and first:
            self.policy.weights.zero_gradients()
        micro_batches = plan.of_rank(self._ranks.data_rank)
        computed, counted = self._begin(plan, micro_batches)
        exact: dict[int, torch.Tensor] = {}
        if self.exact:
            with self.stopwatch.measure("exact"):
                exact = score_exactly(self.policy, plan.sequences, micro_batches)

        def run(numbers: Sequence[int], backward: bool) -> Passes:
            scored: list[tuple[MicroBatch, RowStatistics]] = []
            beside = Beside(self.policy.device)

            def head(micro_batch: MicroBatch, rows: torch.Tensor) -> torch.Tensor | None:
                statistics, gradient = self._head(micro_batch, plan.totals, rows, backward)
                scored.append((micro_batch, statistics))
                beside.here()
                return gradient

            def packed(number: int) -> MicroBatch:
                return self._pack(plan, micro_batches[numbers[number]], exact)

            count, group = len(numbers), self.breadth_first
            passes = Passes(self.policy, count, packed, head, backward=backward, group=group, stopwatch=self.stopwatch)
            passes.run()
            # Metrics need host-device syncs, so they come after all passes: the device never idles between two passes.
            with beside.run():
                for micro_batch, statistics in scored if self.reports_metrics else ():
                    self._measure(sums, micro_batch, plan, statistics)
                    computed = {"computed_tokens": Sum(float(micro_batch.tokens.num_tokens))}
                    sums.metrics.update(merge(sums.metrics, computed if self.metrics_level is not None else {}))
            return passes

        # Micro-batches whose gradient is 0 get a forward pass for their metrics only.
        measured = [number for number in computed if self.skip_zero_advantage and _no_advantage(plan, number)]
        measured = sorted([*measured, *counted])
        runs = [run(measured, False)] if measured and backward else []
        every = sorted([*computed, *counted])
        runs.append(run([number for number in every if not runs or number not in measured], backward))
        if self.policy.routing is not None and self.metrics_level is not None:
            sums.metrics.update(merge(sums.metrics, measure_routes(self.policy.routing, self.metrics_level)))
        if self.reports_metrics:
            for number, members in enumerate(micro_batches):
                if members and number not in every:
                    nothing = torch.zeros(0, device=self.policy.device)
                    self._measure(
                        sums, self._pack(plan, members, exact), plan, RowStatistics(nothing, nothing, nothing)
                    )
        if backward and last:
            self.reduce()
            marks.mark("gradients", self.policy.device)
        return sums, runs

    def reduce(self) -> None:
        """Sum the gradient over the ranks."""
        with self.stopwatch.measure("reduce"):
            self.policy.weights.reduce()

    def _begin(self, plan: StepPlan, micro_batches: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """Divide the micro-batches of a step into those with a loss, and those that are run only to count routers'
        choices. Start a new step in the policy's routers."""
        numbers, routing = range(len(micro_batches)), self.policy.routing
        # A micro-batch without labels on any rank contributes no label loss and no gradient of it.
        computed = [number for number in numbers if _any_label(plan, plan.at_once(number))]
        if routing is None:
            return computed, []
        every = [number for number in numbers if any(plan.at_once(number))]
        if not (self.objective.routers and routing.settings.has_terms):
            routing.begin(None)
            return computed, [number for number in every if number not in computed]
        counts: Counts = {}
        if routing.settings.balance == "loss":
            counts = self._choices(plan, micro_batches, every)
        routing.begin(terms_of(routing, self.objective, plan.totals, counts))
        return every, []

    def _choices(self, plan: StepPlan, own: Sequence[tuple[int, ...]], every: Sequence[int]) -> Counts:
        """Count how often each expert is chosen in the step, over all ranks. Counts come from the records if all have
        experts, else from a forward pass of the micro-batches `every`."""
        routing = self.policy.routing
        assert routing is not None
        recorded = recorded_counts(routing, plan.sequences, itertools.chain.from_iterable(own))
        if recorded is not None:
            return summed(self._ranks.gather(recorded if self.reports_metrics else {}))
        micro_batches = [own[number] for number in every]
        routing.begin(None)
        passes = Passes(
            self.policy,
            len(micro_batches),
            lambda number: self._pack(plan, micro_batches[number], {}),
            lambda micro_batch, rows: None,
            backward=False,
            group=self.breadth_first,
            stopwatch=self.stopwatch,
        )
        passes.run()
        counts = summed(self._ranks.gather(routing.counts))
        passes.settle()
        return counts

    def _pack(self, plan: StepPlan, members: tuple[int, ...], exact: Mapping[int, torch.Tensor]) -> MicroBatch:
        """Pack a micro-batch of the plan on this rank's device."""
        sequences = [plan.sequences[index] for index in members]
        fields, sharing = self.policy.token_fields, plan.sharing
        if sharing is not None and not set(fields) <= set(sharing.alike):
            raise ValueError(f"the plan shares tokens whose {', '.join(fields)} may differ")
        packed = pack(sequences, self._multiple, self.fields, fields, forest=forest_of(plan, members))
        share = LabelShare.of(packed, self.policy.context).to(self.policy.device)
        counts = tuple(sequence.num_labels for sequence in sequences)
        packed = packed.to(self.policy.device)
        label_counts = packed.labels.document_labels[packed.labels.document]
        weight = self.objective.denominator.label_weights(label_counts, plan.totals)
        known = [exact[index] for index in members if index in exact]
        logprobs = torch.cat(known) if known else None
        return MicroBatch(members, counts, packed.tokens, packed.labels, weight, share, logprobs)

    def _measure(self, sums: _RankSums, micro_batch: MicroBatch, plan: StepPlan, statistics: RowStatistics) -> None:
        """Add the metrics of a micro-batch, and its scores if they are kept, to the rank's sums."""
        if self.metrics_level is not None:
            labels = self.objective.prepare(micro_batch.score(slice(None), statistics))
            facts = StepFacts(self.objective, plan.documents_seen, plan.totals)
            measured = on_host(measure_labels(labels, facts, self.metrics_level, self.custom_metrics))
            sums.metrics.update(merge(sums.metrics, measured))
        if self.keep_scores is not False:
            sums.scores.update(_scores(micro_batch, statistics, _wanted(plan, self.keep_scores)))
        if self.compares is not None:
            rows = _compare(micro_batch, statistics, plan.documents_seen, self.compares)
            sums.compared.append((micro_batch.members, rows))

    def _head(
        self, micro_batch: MicroBatch, totals: StepTotals, rows: torch.Tensor, backward: bool
    ) -> tuple[RowStatistics, torch.Tensor | None]:
        """Compute the statistics of all labels of the micro-batch, and the gradient of the hidden states that predict
        this rank's share of the labels. The gradient is None without `backward`."""
        share, objective = micro_batch.share, self.objective

        def loss(chunk: slice, statistics: RowStatistics) -> Coefficients:
            among_all = slice(share.own.start + chunk.start, share.own.start + chunk.stop)
            return objective.coefficients(objective.prepare(micro_batch.score(among_all, statistics)), totals)

        def shared_loss(rows: torch.Tensor, statistics: RowStatistics) -> Coefficients:
            assert share.context is not None
            labels = micro_batch.score(share.own.start + rows, statistics, share.context.sum)
            return objective.coefficients(objective.prepare(labels), totals)

        labels, shard = micro_batch.labels[share.own], self.policy.vocabulary_shard
        runs = share.token_runs(micro_batch.label_counts) if objective.whole_documents else None
        with self.policy.weights.head(self.policy.model) as (weight, weight_gradient), torch.no_grad():
            head = HeadRows(rows.detach(), weight, labels.ids, labels.temperature, self.policy.head, shard)
            whole = None if runs is None else runs.whole
            shared = SharedDocuments(runs.lead, runs.tail, shared_loss) if runs and share.context else None
            if not backward:
                return share.gather(chunked.forward(head, document_labels=whole, shared=shared)), None
            result = chunked.forward_backward(
                head, loss, weight_gradient=weight_gradient, document_labels=whole, shared=shared
            )
        return share.gather(result.statistics), result.hidden_gradient


def _compare(
    micro_batch: MicroBatch, statistics: RowStatistics, documents_seen: int, tolerance: float
) -> np.ndarray:  # [sequences, COLUMNS]
    """Compare the sampler's log-probs of a micro-batch with the policy's, and return the sums on the host."""
    logprobs = micro_batch.logprobs(statistics)
    return compare(micro_batch.labels, logprobs, statistics.entropy, documents_seen, tolerance)


def _table(plan: StepPlan, compared: Sequence[tuple[Sequence[int], np.ndarray]]) -> np.ndarray:
    """Sum the rows of each document's sequences: [documents, COLUMNS]."""
    table = np.zeros((len(plan.documents), len(COLUMNS)))
    for members, rows in compared:
        if plan.sequences is plan.documents:
            table[list(members)] = rows
        else:
            np.add.at(table, [plan.document_of[index] for index in members], rows)
    return table


def _counts(plan: StepPlan) -> dict[str, Metric]:
    micro_batches = len(plan.micro_batches) // plan.ranks
    counts = {"loss": 0, **asdict(plan.totals), "num_sequences": len(plan.sequences)}
    counts["num_micro_batches"] = micro_batches
    return {name: Sum(float(count)) for name, count in counts.items()}


def _scores(
    micro_batch: MicroBatch, statistics: RowStatistics, wanted: bool | Collection[int]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Copy the wanted scores of a micro-batch to the host."""
    members = zip(
        micro_batch.members,
        micro_batch.logprobs(statistics).split(micro_batch.label_counts),
        statistics.entropy.split(micro_batch.label_counts),
        strict=True,
    )
    return {
        index: (logprobs.cpu().numpy(), entropy.cpu().numpy())
        for index, logprobs, entropy in members
        if wanted is True or (wanted is not False and index in wanted)
    }


def _wanted(plan: StepPlan, keep_scores: bool | Collection[int]) -> bool | Collection[int]:
    """Return the indices of the sequences that belong to documents whose scores are kept."""
    if isinstance(keep_scores, bool) or plan.sequences is plan.documents:
        return keep_scores
    return {place for place, document in enumerate(plan.document_of) if document in keep_scores}


def _of_documents(plan: StepPlan, scores: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> tuple[DocumentScore, ...]:
    """Return the documents' scores, each the concatenation of its sequences' scores."""
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for place in sorted(scores):
        found.setdefault(plan.document_of[place], []).append(scores[place])
    return tuple(
        DocumentScore(plan.documents[index].id, *(np.concatenate(parts) for parts in zip(*own, strict=True)))
        for index, own in found.items()
    )


def _no_advantage(plan: StepPlan, number: int) -> bool:
    return not any(has_advantage(plan.sequences[index]) for members in plan.at_once(number) for index in members)


def _any_label(plan: StepPlan, micro_batches: Sequence[Sequence[int]]) -> bool:
    return any(plan.sequences[index].num_labels for members in micro_batches for index in members)
