"""A rank's passes of one step, in the order of their schedule: what they need is received, what they give is sent.

Dimensions: S tokens of the micro-batch, T its labels, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from truestep.policy.policy import Policy
from truestep.policy.weights.protocol import StagePass
from truestep.ranks.group import Ranks
from truestep.ranks.pipeline import wire
from truestep.step.dealing import MicroBatch
from truestep.step.schedule import Pass, Schedule, make_schedule

# Of a micro-batch and the hidden states of this rank's labels: their gradient, or None where none is wanted.
Head = Callable[[MicroBatch, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class _Alive:
    """What a backward pass needs of its forward pass."""

    received: torch.Tensor | None  # [S, H], a leaf; None in the first stage
    given: torch.Tensor  # [S, H]; [T, H] in the last stage
    gradient: torch.Tensor | None  # of `given`, where it is known already


class Passes:
    def __init__(
        self,
        policy: Policy,
        micro_batches: int,
        batch: Callable[[int], MicroBatch],
        head: Head,
        *,
        backward: bool,
        group: int = 1,
    ):
        """`batch` makes a micro-batch by its number; so many of a `group` share a gathering of the weights."""
        self._policy, self._batch, self._head = policy, batch, head
        self._micro_batches, self._backward, self._group = micro_batches, backward, group
        self._pipeline = policy.pipeline
        self._schedule = make_schedule(self._pipeline, micro_batches, backward)
        self._rank = policy.weights.ranks.stage
        self._stages = self._pipeline.stages_of(self._rank)
        self._wires = _Wires(policy.weights.ranks, self._schedule, self._like)
        self._batches: dict[int, MicroBatch] = {}
        self._alive: dict[tuple[int, int], _Alive] = {}

    def run(self) -> None:
        for made in self._schedule.ranks[self._rank]:
            if made.forward:
                self._forward(made)
            else:
                self._back(made)

    def settle(self) -> None:
        """Once every rank has run its passes: what was sent has been received, and need not be kept."""
        self._wires.settle()

    def _forward(self, made: Pass) -> None:
        received = None if made.stage == 0 else self._wires.receive(made)
        if received is not None and self._backward:
            received.requires_grad_()
        one, gradient = self._packed(made.micro_batch), None
        self._policy.weights.before_forward(self._turn(made))
        with torch.set_grad_enabled(self._backward):
            given = self._policy.through(made.stage, one.tokens, received)
            if made.stage == self._pipeline.last:
                given = one.rows(given)
                gradient = self._head(one, given)
            else:
                self._wires.send(made.following, given.detach())
        if made.stage == self._stages[-1]:
            del self._batches[made.micro_batch]
        if self._backward:
            self._alive[made.stage, made.micro_batch] = _Alive(received, given, gradient)

    def _back(self, made: Pass) -> None:
        gradient = None if made.stage == self._pipeline.last else self._wires.receive(made)
        alive = self._alive.pop((made.stage, made.micro_batch))
        gradient = alive.gradient if gradient is None else gradient
        assert gradient is not None
        self._policy.weights.before_backward(self._turn(made))
        # Also of no rows: a rank without a label touches every weight, as its fellows do.
        alive.given.backward(gradient.to(alive.given.dtype))
        if alive.received is not None:
            assert alive.received.grad is not None
            self._wires.send(made.following, alive.received.grad)

    def _packed(self, number: int) -> MicroBatch:
        if number not in self._batches:
            self._batches[number] = self._batch(number)
        return self._batches[number]

    def _like(self, taken: Pass) -> torch.Tensor:
        """Room for what a pass takes from another stage: every rank packs every micro-batch, so its size is known."""
        if not taken.forward:
            return torch.empty_like(self._alive[taken.stage, taken.micro_batch].given)
        policy, stages = self._policy, self._policy.stages
        assert stages is not None
        # Context and tensor ranks each have an equal share of the tokens between layers.
        ranks = policy.weights.ranks
        tokens = len(self._packed(taken.micro_batch).tokens) // ranks.token_share
        return torch.empty(tokens, stages.width, dtype=policy.weights.dtype, device=policy.device)

    def _turn(self, made: Pass) -> StagePass:
        stages = self._policy.stages
        return StagePass(
            layers=slice(None) if stages is None else slice(stages.cut[made.stage].start, stages.cut[made.stage].stop),
            begins=made.stage == 0,
            ends=made.stage == self._pipeline.last,
            final=made.stage == self._stages[0],
            number=made.micro_batch,
            of=self._micro_batches,
            group=self._group,
            backward=self._backward,
        )


class _Wires:
    """To and from the other ranks of this one's pipeline. Sending waits for nobody; receiving waits for the sender."""

    def __init__(self, ranks: Ranks, schedule: Schedule, like: Callable[[Pass], torch.Tensor]):
        self._ranks, self._schedule, self._like = ranks, schedule, like
        self._expected: dict[tuple[int, bool], Iterator[Pass]] = {}
        self._there: dict[Pass, torch.Tensor] = {}  # received before it was needed
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def receive(self, made: Pass) -> torch.Tensor:
        """What the pass needs. What was sent before it comes before it."""
        sender = self._schedule.pipeline.rank_of(made.source)
        key = (sender, made.forward)
        if key not in self._expected:
            self._expected[key] = iter(self._schedule.takes(sender, self._ranks.stage, made.forward))
        while made not in self._there:
            taken = next(self._expected[key])
            room = self._there[taken] = self._like(taken)
            if room.numel():
                dist.recv(room, src=self._ranks.of_stage(sender), group=self._group(sender, made.forward))
        return self._there.pop(made)

    def send(self, taken: Pass, value: torch.Tensor) -> None:
        """To the rank of the pass that takes it."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        receiver = self._ranks.of_stage(self._schedule.pipeline.rank_of(taken.stage))
        if value.numel():
            whole = value.contiguous()
            work = dist.isend(whole, dst=receiver, group=self._group(self._ranks.stage, taken.forward))
            assert work is not None
            self._sent.append((work, whole))

    def settle(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _group(self, sender: int, forward: bool) -> dist.ProcessGroup | None:
        return self._ranks.group(wire(self._ranks.pipeline, sender, forward))
