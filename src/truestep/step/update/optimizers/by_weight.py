"""An optimizer that updates each weight by the rule of its group. States may be offloaded to the host.

Weights are updated in batches, so that temporary memory does not grow with the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from truestep.gpu import marks
from truestep.gpu.pinned import zeros_on_host
from truestep.process import progress
from truestep.step.update.optimizers.conveyor import Conveyor
from truestep.weights.protocol import Weights, some_rows

State = dict[str, torch.Tensor]  # tensors with the weight's shape; only the last dimension may differ

# The number of elements per update, for rules that can update rows separately. It limits temporary memory, and the size
# of a copy between host and device.
_NUMBERS = 2**24
STEP = "step"  # key of a weight's update count in its state
_MASTER = "master"  # key of the master weight among tensors copied from the host


@dataclass(frozen=True)
class Home:
    """The place where states are stored between updates."""

    on_host: bool = False
    room: int = 0  # device bytes above a step's peak that may hold prefetched states during the passes


ON_DEVICE = Home()


@dataclass(frozen=True)
class Slot:
    """A weight, or some of its rows, on the device for its update."""

    name: str
    start: int  # first row within this rank's part
    number: int  # update count, from 1
    weight: torch.Tensor
    gradient: torch.Tensor
    state: State
    rounded: torch.Tensor | None = None  # the model's copy in its compute dtype, if there is one


# Updates slots, given the learning rate and the gradients' scale (from clipping).
Update = Callable[[float, float], None]


def scale_gradients(slots: Sequence[Slot], scale: float) -> None:
    """Multiply all gradients by `scale` in one pass."""
    if slots and scale != 1:
        torch._foreach_mul_([slot.gradient for slot in slots], scale)


def round_weights(slots: Sequence[Slot]) -> None:
    """Round the master weights into the model's copies, in one pass over all slots."""
    rounded = [slot.rounded for slot in slots if slot.rounded is not None]
    if rounded:
        torch._foreach_copy_(rounded, [slot.weight for slot in slots if slot.rounded is not None])


class Rule(Protocol):
    """The update rule of a group of weights."""

    @property
    def together(self) -> int | None:
        """Number of whole weights per update. 0: some rows of one weight per update. None: the rule needs no temporary
        memory. Then all weights are updated at once if they stay on a GPU, else some rows of one weight at a time."""
        ...

    def begin(self, name: str, part: torch.Tensor) -> State:
        """Return tensors with the dtypes and shapes of the state for a rank's part of a weight. The initial state is
        zeros."""
        ...

    def prepare(self, slots: Sequence[Slot]) -> Update:
        """Do the host's work of an update, and return a function that updates weights and states in place and rounds
        the weights. That function may overwrite gradients. All ranks must call both for parts of the same weights."""
        ...


class ByWeight(torch.optim.Optimizer):
    """Updates this rank's part of each weight by the rule of its group."""

    def __init__(self, weights: Weights, groups: Sequence[tuple[Rule, Mapping[str, torch.nn.Parameter]]], home: Home):
        self._weights, self._home = weights, home
        # the prepared next update: group, number of elements, function
        self._prepared: list[tuple[dict[str, Any], int, Update]] | None = None
        self._names = {id(master): name for name, master in weights.master.items()}
        # Memory used after the last layer's backward pass: the largest weight's gradient, and its reduced copy.
        largest = max((weights.pieces[name].shape.numel() for name in weights.master), default=0)
        self._conveyor = Conveyor(weights.device, reserve=2 * 4 * largest, room=home.room)
        self._moves = home.on_host or weights.masters_on_host
        if self._moves:
            weights.moved_beside(self._conveyor.settle)
            marks.listen(self)
        filled = [{"params": list(named.values()), "rule": rule} for rule, named in groups if named]
        super().__init__(filled, {"lr": 0.0})

    @property
    def state(self) -> Any:
        """Return the state of each weight, after all copies back to the host."""
        self._conveyor.settle()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self._forget()
        self._states = states

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state.pop("state")
        super().__setstate__(state)

    def restore(self, master: torch.nn.Parameter, state: State) -> None:
        """Set the state of a weight from tensors on the host."""
        self._forget()
        self._states[master] = {kind: self._place(value) for kind, value in state.items()}

    def forget_prepared(self) -> None:
        """Drop the result of `prepare`, because the gradients that it points to will not be used."""
        self._prepared = None

    def _forget(self) -> None:
        self._conveyor.forget()
        self._prepared = None

    def layer_ended(self) -> None:
        self._conveyor.layer_ended()

    def last_backward(self, weights: Any) -> None:
        """Prefetch offloaded state for the next update during the last backward pass before it."""
        if weights is self._weights and all(
            self._states.get(master) for group in self.param_groups for master in group["params"]
        ):
            self._conveyor.come(self._moving(batch) for group in self.param_groups for batch in self._batches(group))

    def begin(self, rule: Rule, master: torch.nn.Parameter) -> dict[str, Any]:
        """Allocate the state of a weight before its first update, on the host or on the device."""
        like = rule.begin(self._names[id(master)], torch.empty_like(master, device="meta"))
        state = {kind: self._zeros(value) for kind, value in like.items()}
        return {STEP: torch.zeros((), dtype=torch.float32), **state}

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        device = self._weights.device
        if not self._home.on_host:
            return torch.zeros(like.shape, dtype=like.dtype, device=device)
        return zeros_on_host(like.shape, like.dtype, pinned=device.type == "cuda")

    def _place(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a state tensor from the host to the place of states. A number stays on the host."""
        return self._zeros(value).copy_(value) if value.ndim else value

    def kinds(self, master: torch.nn.Parameter) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return the dtypes and shapes of a weight's state."""
        rule = next(group["rule"] for group in self.param_groups if any(master is other for other in group["params"]))
        like = rule.begin(self._names[id(master)], torch.empty_like(master, device="meta"))
        return {kind: (value.dtype, value.shape) for kind, value in like.items()}

    @torch.no_grad()
    def prepare(self) -> None:
        """Do the host's work for the next update while the device still computes the gradients."""
        self._begin_states()
        if self._moves:  # copies from the host have no device address yet
            return
        gradients, self._prepared = self._weights.gradients, []
        for group in self.param_groups:
            for batch in self._batches(group):
                slots = self._slots(batch, gradients, [{}] * len(batch))
                self._prepared.append((group, _numbers_of(slots), group["rule"].prepare(slots)))

    def _begin_states(self) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                if not self._states[master]:
                    self._states[master].update(self.begin(group["rule"], master))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
        """Update by the gradients times `scale`."""
        assert closure is None
        if self._moves:
            self._begin_states()
            gradients = self._weights.gradients
            self._conveyor.run(
                (self._moving(batch), partial(self._update, group, batch, gradients, scale))
                for group in self.param_groups
                for batch in self._batches(group)
            )
        else:
            if self._prepared is None:
                self.prepare()
            prepared, self._prepared = self._prepared, None
            for group, count, update in prepared or ():
                update(group["lr"], scale)
                progress.made("numbers updated", count)
        for group in self.param_groups:  # after the launches, while the device is busy
            for master in group["params"]:
                self._states[master][STEP] += 1

    def _batches(self, group: dict[str, Any]) -> Iterator[list[tuple[torch.nn.Parameter, slice]]]:
        """Yield the batches of a group: lists of pairs of a weight and a range of its rows, which are updated at
        once."""
        masters, together = group["params"], group["rule"].together
        if together is None:
            together = len(masters) if self._weights.device.type == "cuda" and not self._moves else 0
        if together:
            for first in range(0, len(masters), together):
                yield [(master, slice(0, _rows(master))) for master in masters[first : first + together]]
            return
        for master in masters:
            rows = _rows(master)
            most = max(1, _NUMBERS * rows // max(1, master.numel()))
            for start in range(0, rows, most):
                yield [(master, slice(start, min(rows, start + most)))]

    def _moving(self, batch: Sequence[tuple[torch.nn.Parameter, slice]]) -> list[State]:
        """Return the tensors of a batch that are stored on the host."""
        moving: list[State] = [{} for _ in batch]
        for found, (master, rows) in zip(moving, batch, strict=True):
            if self._home.on_host:
                found |= _of_rows(self._states[master], rows)
            if self._weights.masters_on_host:
                found[_MASTER] = some_rows(master.detach(), rows)
        return moving

    def _update(
        self,
        group: dict[str, Any],
        batch: Sequence[tuple[torch.nn.Parameter, slice]],
        gradients: Mapping[str, torch.Tensor],
        scale: float,
        here: Sequence[State],
    ) -> None:
        slots = self._slots(batch, gradients, here)
        group["rule"].prepare(slots)(group["lr"], scale)
        progress.made("numbers updated", _numbers_of(slots))

    def _slots(
        self,
        batch: Sequence[tuple[torch.nn.Parameter, slice]],
        gradients: Mapping[str, torch.Tensor],
        here: Sequence[State],
    ) -> list[Slot]:
        slots = []
        for (master, rows), moved in zip(batch, here, strict=True):
            name, state = self._names[id(master)], self._states[master]
            own = {**_of_rows(state, rows), **moved}
            weight, gradient = own.pop(_MASTER, some_rows(master.detach(), rows)), some_rows(gradients[name], rows)
            rounded = self._weights.computed_rows(name, rows)
            slots.append(Slot(name, rows.start, int(state[STEP]) + 1, weight, gradient, own, rounded))
        return slots


def _numbers_of(slots: Sequence[Slot]) -> int:
    return sum(slot.weight.numel() for slot in slots)


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _of_rows(state: Mapping[str, torch.Tensor], rows: slice) -> State:
    return {kind: some_rows(value, rows) for kind, value in state.items() if kind != STEP}
