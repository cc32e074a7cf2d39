"""Runs the passes of one step on a rank in the order of the schedule, with transfers between pipeline stages.

Dimensions: S tokens of the micro-batch, T its labels, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from truestep.gpu import marks
from truestep.metrics.spent import Stopwatch
from truestep.model.experts.routing import OwnTokens
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.ranks.group import Ranks
from truestep.ranks.pipeline import wire
from truestep.step.compute.label_shares import MicroBatch
from truestep.step.compute.schedule import Pass, PipelineSchedule, make_schedule
from truestep.weights.protocol import StagePass

# Takes a micro-batch and the hidden states for this rank's labels. Returns their gradient, or None without a backward
# pass.
Head = Callable[[MicroBatch, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class _Activations:
    """The tensors of a forward pass that the backward pass needs."""

    input: torch.Tensor | None  # [S, H], an autograd leaf; None in the first stage
    output: torch.Tensor  # [S, H]; in the last stage, the hidden states for the labels [T, H]
    gradient: torch.Tensor | None  # gradient of the output, in the last stage


class Passes:
    """The forward and backward passes of one step on this rank, for any pipeline."""

    def __init__(
        self,
        policy: Policy,
        micro_batches: int,
        batch: Callable[[int], MicroBatch],
        head: Head,
        *,
        backward: bool,
        group: int = 1,
        stopwatch: Stopwatch | None = None,
    ):
        """`batch` packs a micro-batch by its number; `group` micro-batches share one gather of the weights."""
        self._policy, self._batch, self._head = policy, batch, head
        self._stopwatch = stopwatch or Stopwatch(policy.device)
        self._micro_batches, self._backward, self._group = micro_batches, backward, group
        self._pipeline = policy.pipeline
        self._schedule = make_schedule(self._pipeline, micro_batches, backward)
        self._rank = policy.weights.ranks.stage
        self._stages = self._pipeline.stages_of(self._rank)
        self._wires = _Wires(policy.weights.ranks, self._schedule)
        self._batches: dict[int, MicroBatch] = {}
        self._activations: dict[tuple[int, int], _Activations] = {}
        self._tokens: dict[int, OwnTokens] = {}  # this rank's tokens, by micro-batch

    def run(self) -> None:
        name = "training" if self._backward else "scoring"
        # the stage of a micro-batch's last pass on this rank
        last = self._stages[0] if self._backward else self._stages[-1]
        with marks.layers_report(), progress.working(name, "micro-batches", self._micro_batches):
            passes = self._schedule.ranks[self._rank]
            for current in passes:
                if self._backward and current == passes[-1]:
                    marks.last_backward(self._policy.weights)
                with self._stopwatch.measure("forward" if current.forward else "backward"):
                    if current.forward:
                        self._forward(current)
                    else:
                        self._back(current)
                marks.mark("passes", self._policy.device)
                if current.stage == last and current.forward != self._backward:
                    progress.made("micro-batches")

    def settle(self) -> None:
        """Wait for all sends, which end once every rank has run its passes."""
        with progress.waiting_for(progress.OTHER_RANKS):
            self._wires.settle()

    def _forward(self, current: Pass) -> None:
        received = None if current.stage == 0 else self._wires.receive(current, self._like)
        if received is not None and self._backward:
            received.requires_grad_()
        micro_batch, gradient = self._packed(current.micro_batch), None
        self._policy.weights.before_forward(self._describe(current))
        self._tokens[current.micro_batch] = self._policy.own_tokens(micro_batch.tokens)
        with torch.set_grad_enabled(self._backward), self._routing(current):
            output = self._policy.through(current.stage, micro_batch.tokens, received)
            if current.stage == self._pipeline.last:
                output = micro_batch.rows(output)
                with self._stopwatch.measure("head"):
                    gradient = self._head(micro_batch, output)
            else:
                self._wires.send(current.following, output.detach())
        if current.stage == self._stages[-1]:
            del self._batches[current.micro_batch]
            if not self._backward:
                del self._tokens[current.micro_batch]
        if self._backward:
            self._activations[current.stage, current.micro_batch] = _Activations(received, output, gradient)

    def _back(self, current: Pass) -> None:
        received = None if current.stage == self._pipeline.last else self._wires.receive(current, self._like)
        forward = self._activations.pop((current.stage, current.micro_batch))
        gradient = forward.gradient if received is None else received
        assert gradient is not None
        self._policy.weights.before_backward(self._describe(current))
        if forward.output.requires_grad:  # False if all weights up to this stage are frozen
            # This also runs with zero rows: all ranks must take part in the collectives of every weight.
            with self._routing(current):
                forward.output.backward(gradient.to(forward.output.dtype))
        if current.stage == self._stages[0]:
            del self._tokens[current.micro_batch]
        if forward.input is not None:
            assert forward.input.grad is not None
            self._wires.send(current.following, forward.input.grad)

    def _routing(self, current: Pass) -> AbstractContextManager[None]:
        """Return a context in which routers count the micro-batch's tokens. A backward pass, which may recompute
        layers, counts nothing."""
        routing = self._policy.routing
        if routing is None:
            return nullcontext()
        return routing.passing(self._tokens[current.micro_batch], counts=current.forward)

    def _packed(self, number: int) -> MicroBatch:
        if number not in self._batches:
            self._batches[number] = self._batch(number)
        return self._batches[number]

    def _like(self, receiving: Pass) -> torch.Tensor:
        """Allocate the input of a pass that another stage sends. Every stage packs the micro-batch, so the size is
        known."""
        if not receiving.forward:
            return torch.empty_like(self._activations[receiving.stage, receiving.micro_batch].output)
        policy, stages = self._policy, self._policy.stages
        assert stages is not None
        # Between layers, context and tensor ranks each have an equal share of the tokens.
        tokens = len(self._packed(receiving.micro_batch).tokens) // policy.weights.ranks.token_share
        return torch.empty(tokens, stages.width, dtype=policy.weights.dtype, device=policy.device)

    def _describe(self, current: Pass) -> StagePass:
        cut = None if self._policy.stages is None else self._policy.stages.cut[current.stage]
        return StagePass(
            layers=slice(None) if cut is None else slice(cut.start, cut.stop),
            begins=current.stage == 0,
            ends=current.stage == self._pipeline.last,
            final=current.stage == self._stages[0],
            number=current.micro_batch,
            of=self._micro_batches,
            group=self._group,
            backward=self._backward,
        )


class _Wires:
    """Point-to-point transfers between pipeline stages: asynchronous sends, blocking receives."""

    def __init__(self, ranks: Ranks, schedule: PipelineSchedule):
        self._ranks, self._schedule = ranks, schedule
        self._expected: dict[tuple[int, bool], Iterator[Pass]] = {}
        self._received: dict[Pass, torch.Tensor] = {}  # inputs that were received before they were needed
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def receive(self, current: Pass, like: Callable[[Pass], torch.Tensor]) -> torch.Tensor:
        """Return the input of a pass. Inputs that the sender sent before it are received first, and kept. `like`
        allocates them."""
        sender = self._schedule.pipeline.rank_of(current.source)
        key = (sender, current.forward)
        if key not in self._expected:
            self._expected[key] = iter(self._schedule.received(sender, self._ranks.stage, current.forward))
        while current not in self._received:
            receiving = next(self._expected[key])
            room = self._received[receiving] = like(receiving)
            if room.numel():
                dist.recv(room, src=self._ranks.of_stage(sender), group=self._group(sender, current.forward))
        return self._received.pop(current)

    def send(self, receiving: Pass, value: torch.Tensor) -> None:
        """Start sending a value to the rank of the pass `receiving`."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        receiver = self._ranks.of_stage(self._schedule.pipeline.rank_of(receiving.stage))
        if value.numel():
            contiguous = value.contiguous()
            work = dist.isend(contiguous, dst=receiver, group=self._group(self._ranks.stage, receiving.forward))
            assert work is not None
            self._sent.append((work, contiguous))

    def settle(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _group(self, sender: int, forward: bool) -> dist.ProcessGroup | None:
        return self._ranks.group(wire(self._ranks.pipeline, sender, forward))
