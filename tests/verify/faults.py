"""Faults that other trainers had, planted in the ranks that `verify` starts: each must be found out, by name."""

from __future__ import annotations

import dataclasses
import itertools
from importlib import import_module
from typing import Any

import torch

from truestep.head import logits, passes
from truestep.losses import label_losses
from truestep.losses.corrections import Correction
from truestep.losses.label_losses import LabelTerm
from truestep.losses.labels import Labels
from truestep.losses.objective import Denominator, Objective
from truestep.metrics.types import Max, Mean, Metric, Min
from truestep.model.adapter import LoraLinear
from truestep.model.loading import adapter_source as adapting
from truestep.model.loading import load
from truestep.model.mixers import attention, paths
from truestep.model.mixers.context_parallel import Context
from truestep.ranks.group import Ranks
from truestep.rollouts import packing
from truestep.step.before.annotators import OwnLogprobs
from truestep.step.before.chosen import Chooser
from truestep.step.compute import runner
from truestep.step.compute.label_shares import MicroBatch
from truestep.step.compute.passes import Passes
from truestep.step.compute.runner import StepRunner
from truestep.step.compute.schedule import Pass
from truestep.step.plan import plan as plans
from truestep.types import PackedBatch, StepPlan, StepTotals
from truestep.weights import sharded, whole
from truestep.weights.pieces import WeightSlice, pieces_of
from truestep.weights.protocol import StagePass
from truestep.weights.sharded import ShardedWeights

train = import_module("truestep.run.train")  # the module: the package has the function of this name

_LOCAL_LABELS = [0]


def _know_local_labels() -> None:
    honest = StepRunner._accumulate

    def counting(self: StepRunner, plan: StepPlan, *given: Any) -> Any:
        mine = [index for members in plan.of_rank(self._ranks.data_rank) for index in members]
        _LOCAL_LABELS[0] = sum(plan.documents[index].num_labels for index in mine)
        return honest(self, plan, *given)

    StepRunner._accumulate = counting  # type: ignore[method-assign]


def _weights_over(divide: float) -> None:
    _know_local_labels()
    honest = Denominator.label_weights

    def local(self: Denominator, num_labels: torch.Tensor, totals: StepTotals) -> torch.Tensor:
        return honest(self, num_labels, dataclasses.replace(totals, num_labels=_LOCAL_LABELS[0])) / divide

    Denominator.label_weights = local  # type: ignore[method-assign]


def per_rank_mean() -> None:
    """Each rank's mean, and the mean of those."""
    _weights_over(2.0)


def local_label_count() -> None:
    """Each rank divides by the labels that it holds itself."""
    _weights_over(1.0)


def hidden_world_division() -> None:
    """FSDP's own default: an average over the ranks."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    honest = FSDPModule.set_force_sum_reduction_for_comms
    FSDPModule.set_force_sum_reduction_for_comms = lambda self, enable: honest(self, True)  # type: ignore[method-assign]


def last_micro_batch_only() -> None:
    """The gradient of the others is thrown away."""
    honest, place = StepRunner._head, [0, 0]
    told = ShardedWeights.before_forward

    def remember(self: ShardedWeights, coming: StagePass) -> None:
        place[:] = [coming.number, coming.of]
        told(self, coming)

    def only_last(self: Any, *arguments: Any) -> Any:
        statistics, gradient = honest(self, *arguments)
        return statistics, gradient if place[0] == place[1] - 1 else torch.zeros_like(gradient)

    ShardedWeights.before_forward = remember  # type: ignore[method-assign]
    StepRunner._head = only_last  # type: ignore[method-assign]


def document_on_two_ranks() -> None:
    honest = StepPlan.of_rank

    def greedy(self: StepPlan, rank: int) -> tuple[tuple[int, ...], ...]:
        mine = honest(self, rank)
        return mine if rank == 0 else ((*mine[0], honest(self, 0)[0][0]), *mine[1:])

    StepPlan.of_rank = greedy  # type: ignore[method-assign]


def untied_head() -> None:
    """What happens where sharding comes after the tie was lost: the head trains a copy of the embedding."""
    honest = ShardedWeights.__init__

    def untying(self: ShardedWeights, model: Any, dtype: Any, ranks: Ranks, pieces: Any, **options: Any) -> None:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        honest(self, model, dtype, ranks, pieces_of(model), **options)

    ShardedWeights.__init__ = untying  # type: ignore[method-assign]


def mean_of_means() -> None:
    def merge(self: Mean, other: Mean) -> Mean:
        mine, theirs = self.value(), other.value()
        if mine is None or theirs is None:
            return self if theirs is None else other
        return Mean((mine + theirs) / 2, 1.0)

    Mean.merge = merge  # type: ignore[method-assign]


def wrong_temperature() -> None:
    def ignored(temperature: torch.Tensor, settings: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full_like(temperature, settings.scale, dtype=dtype)

    logits.multiplier = passes.multiplier = ignored


def labels_shifted_by_one() -> None:
    honest = runner.pack

    def shifted(*arguments: Any, **named: Any) -> PackedBatch:
        batch = honest(*arguments, **named)
        labels = dataclasses.replace(batch.labels, rows=batch.labels.rows + 1)
        return dataclasses.replace(batch, labels=labels)

    runner.pack = shifted


def clip_sides_swapped() -> None:
    honest = label_losses.round_bounds
    label_losses.round_bounds = lambda low, high: honest(high, low)


def counted_on_every_rank() -> None:
    """A metric that each rank of a context or tensor group has whole is added up over them."""
    StepRunner.reports_metrics = property(lambda self: True)  # type: ignore[method-assign, assignment]


def norms_not_summed_over_tensor_ranks() -> None:
    """Each rank trains its norms on its own tokens."""
    whole.sum_parts = sharded.sum_parts = lambda ranks, pieces, gradients: None


def ragged_ranks_hang() -> None:
    """A rank without documents runs no pass: the others wait for it, and it for them."""
    forward, back = Passes._forward, Passes._back
    skipped = set()

    def skipping(self: Passes, made: Pass) -> None:
        if self._packed(made.micro_batch).tokens.num_segments:
            forward(self, made)
        else:
            skipped.add(made.micro_batch)

    def none_of_those(self: Passes, made: Pass) -> None:
        if made.micro_batch not in skipped:
            back(self, made)

    Passes._forward, Passes._back = skipping, none_of_those  # type: ignore[method-assign]


def document_sums_of_one_rank() -> None:
    """Each context rank takes the labels that it has of a document for all of them."""
    Context.sum = lambda self, values: values  # type: ignore[method-assign]


def labels_counted_from_each_ranks_first() -> None:
    """A rank takes its first label for the micro-batch's first: old log-probs, advantages and documents of others."""
    honest = MicroBatch.score

    def local(self: MicroBatch, labels: Any, *arguments: Any) -> Any:
        context = self.share.context
        if context is not None and isinstance(labels, slice) and labels.start is not None:
            first = len(self.labels) // 2 * context.rank
            labels = slice(labels.start - first, labels.stop - first)
        return honest(self, labels, *arguments)

    MicroBatch.score = local  # type: ignore[method-assign]


def tied_gradient_of_one_stage() -> None:
    """What the head adds to a tied embedding never comes to the embedding."""
    honest = whole.sum_parts

    def dropping(ranks: Ranks, pieces: dict[str, WeightSlice], gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            if ranks.stage > 0 and len(pieces[name].stages) > 1:
                gradient.zero_()
        honest(ranks, pieces, gradients)

    whole.sum_parts = sharded.sum_parts = dropping


def extremes_of_a_stage_without_a_loss() -> None:
    """What was reported as a pipeline's largest and smallest is of the first stage, which has none: 0."""
    honest = StepRunner._accumulate

    def reporting(self: StepRunner, plan: StepPlan, *given: Any) -> Any:
        sums, passes = honest(self, plan, *given)
        extremes: dict[str, Metric] = {"max_advantage": Max(0.0), "min_advantage": Min(0.0)}
        if sums.metrics:
            for name in extremes:
                del sums.metrics[name]
        else:
            sums.metrics.update(extremes)
        return sums, passes

    StepRunner._accumulate = reporting  # type: ignore[method-assign]


def recomputed_after_the_update() -> None:
    """Old log-probs are computed anew at every update: the ratio is always 1."""
    OwnLogprobs.computed = lambda self, plan, scores: plan  # type: ignore[method-assign]


def reference_that_is_trained() -> None:
    """The policy itself stands for the reference."""
    honest = train.make_annotators
    train.make_annotators = lambda config, runner, load: honest(config, runner, lambda path: runner.policy)


def masked_labels_leave_the_denominator() -> None:
    """A mask that changes N: the mean is over the labels that are left."""
    honest = Objective.policy_weights

    def renormalised(self: Objective, labels: Labels) -> torch.Tensor | None:
        weights = honest(self, labels)
        return None if weights is None else weights * len(weights) / (weights != 0).sum().clamp(min=1)

    Objective.policy_weights = renormalised  # type: ignore[method-assign]


def corrections_that_learn() -> None:
    """The weight is differentiated as if it were part of the ratio."""
    honest = Objective.policy_term

    def learning(self: Objective, labels: Labels) -> LabelTerm:
        term = honest(self, labels)
        return dataclasses.replace(term, slope=term.slope + term.loss)

    Objective.policy_term = learning  # type: ignore[method-assign]


def corrections_by_the_label() -> None:
    """Every label is weighed by its own ratio, where its document's was asked for."""
    Correction.log_importance = lambda self, labels: labels.log_importance  # type: ignore[method-assign]


def masked_whatever_way_they_move() -> None:
    """The sign of the advantage is forgotten."""
    honest = label_losses.Dppo.__call__

    def unsigned(self: label_losses.Dppo, labels: Labels) -> LabelTerm:
        term = honest(self, labels)
        masked = self.moved(labels) > self.threshold
        return dataclasses.replace(term, slope=torch.where(masked, 0, term.slope), clipped=masked)

    label_losses.Dppo.__call__ = unsigned  # type: ignore[method-assign]


def nothing_frozen() -> None:
    """The patterns of model.freeze are forgotten."""
    load.freeze_weights = lambda model, patterns: None


def labels_chosen_in_each_micro_batch() -> None:
    """Each micro-batch chooses its own share of labels."""
    honest = StepRunner._pack

    def choosing(self: StepRunner, plan: StepPlan, members: tuple[int, ...], *rest: Any) -> MicroBatch:
        rule = self.objective.clip_cov or self.objective.kl_cov
        assert rule is not None
        own = Chooser(rule, 0).choose([plan.documents[index] for index in members], plan.documents_seen)
        chosen = dict(zip(members, own, strict=True))
        documents = tuple(chosen.get(index, document) for index, document in enumerate(plan.documents))
        return honest(self, dataclasses.replace(plan, documents=documents), members, *rest)

    StepRunner._pack = choosing  # type: ignore[method-assign]


def steered_by_one_micro_batch() -> None:
    """The weight of the entropy bonus follows the entropy of this rank's last micro-batch."""
    honest, last = StepRunner._measure, [0.0]

    def remembering(self: StepRunner, sums: Any, micro_batch: MicroBatch, plan: StepPlan, statistics: Any) -> None:
        if len(statistics.entropy):
            last[0] = float(statistics.entropy.mean())
        honest(self, sums, micro_batch, plan, statistics)

    StepRunner._measure = remembering  # type: ignore[method-assign]
    StepRunner.steered = lambda self, metrics: dataclasses.replace(  # type: ignore[method-assign]
        self, objective=self.objective.steered(last[0])
    )


def adapter_without_its_scale() -> None:
    """A product with an adapter that forgets alpha / rank."""
    honest = LoraLinear.__init__

    def unscaled(self: LoraLinear, *arguments: Any) -> None:
        honest(self, *arguments)
        self.scale = 1.0

    LoraLinear.__init__ = unscaled  # type: ignore[method-assign]


def base_trained_with_its_adapter() -> None:
    """The base gets gradients and updates of its own."""
    honest = adapting.attach

    def thawed(model: Any, *arguments: Any) -> None:
        honest(model, *arguments)
        model.requires_grad_(True)

    adapting.attach = thawed


def sibling_seen() -> None:
    """A branch that follows the one before it, as if that were its parent."""
    honest = attention.make_paths

    def chained(spans: Any, parents: Any, device: torch.device) -> Any:
        return honest(spans, [number - 1 if parent >= 0 else -1 for number, parent in enumerate(parents)], device)

    attention.make_paths = chained


def prefix_gradient_counted_once() -> None:
    """The gradient of a prefix's keys and values is that of one branch, not the sum."""

    def one_copy(gradient: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
        total = gradient.new_zeros(len(index[1]), *gradient.shape[1:])
        total[index[0]] = gradient
        return total

    paths.sum_paths = one_copy  # type: ignore[assignment]


def positions_begin_anew() -> None:
    """A branch's positions begin at 0, as a document's do."""
    honest = packing.pack_tokens

    def anew(*given: Any, **named: Any) -> Any:
        tokens = honest(*given, **named)
        bounds = tokens.segments.tolist()
        places = [torch.arange(end - start) for start, end in itertools.pairwise(bounds)]
        return dataclasses.replace(tokens, position_ids=torch.cat(places))

    packing.pack_tokens = anew


def labels_of_a_prefix_counted_once() -> None:
    """A label that several sequences have in their shared prefix is one of the step's labels, as it is one row."""
    honest = plans.make_plan

    def counted(*given: Any, **named: Any) -> StepPlan:
        plan = honest(*given, **named)
        if plan.sharing is None:
            return plan
        labels = {
            sequence.input_ids[: place + 1].tobytes()
            for sequence in plan.sequences
            for place in sequence.loss_mask.nonzero()[0]
        }
        return dataclasses.replace(plan, totals=dataclasses.replace(plan.totals, num_labels=len(labels)))

    plans.make_plan = counted
