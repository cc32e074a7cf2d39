"""The optimizer of the float32 weights (built-in or custom), its state in checkpoints, and the learning rate."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep.config.custom import check_options, load_custom
from truestep.errors import TruestepError
from truestep.gpu import marks
from truestep.step.update.optimizers import adamw
from truestep.step.update.optimizers import eight_bits as eight_bits_
from truestep.step.update.optimizers.adamw import AdamW, AdamWOptions
from truestep.step.update.optimizers.by_weight import ON_DEVICE, STEP, ByWeight, Home
from truestep.step.update.optimizers.eight_bits import AdamW8Bit, check_blocks
from truestep.step.update.optimizers.muon import Muon, MuonOptions
from truestep.weights.finite import named_by_all, not_finite, some
from truestep.weights.protocol import Weights
from truestep.weights.tensor_parts import NUMBER, STATE, TensorPart, Tensors, own_box, written_here

# This rank's parts of the float32 weights by name, under the keys `matrices` and `vectors`.
Groups = dict[str, dict[str, torch.nn.Parameter]]


class OptimizerError(TruestepError):
    """Raised for an optimizer that cannot be used, or for the state of another optimizer."""


class StateError(TruestepError):
    """Raised for optimizer state with which no run can continue."""


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the step, so that a resumed run needs no state for it."""

    peak: float
    schedule: str
    warmup_steps: int
    minimum: float
    steps: int | None

    def at(self, step: int) -> float:
        """Compute the learning rate of update number `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.peak
        # Progress is 0 at the first step after warm-up, which has the peak rate. It would be 1 only after the last
        # step, so no update has the minimum rate, which may be 0.
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        remaining = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.minimum + (self.peak - self.minimum) * remaining


def grouped(weights: Mapping[str, torch.nn.Parameter]) -> Groups:
    """Divide weights into matrices, which may have weight decay, and vectors (norms and biases), which have none."""
    matrices = {name: weight for name, weight in weights.items() if weight.ndim >= 2}
    return {"matrices": matrices, "vectors": {name: weight for name, weight in weights.items() if weight.ndim < 2}}


def kernels_serve(weights: Weights, *, eight_bits: bool = False) -> bool:
    """Return whether the AdamW kernel (with `eight_bits`, also the 8-bit one) can be used on every rank. Ranks with the
    same weights must update them in the same way. Every rank must call this, even one without trained weights."""
    kinds = (adamw.kernel_serves, eight_bits_.kernel_serves) if eight_bits else (adamw.kernel_serves,)
    here = not weights.master or all(serves(weights.device, weights.dtype) for serves in kinds)
    return all(weights.ranks.gather(here))


def make_adamw(weights: Weights, options: AdamWOptions, home: Home = ON_DEVICE, *, kernels: bool = False) -> ByWeight:
    """Make AdamW, without weight decay for vectors (norms and biases)."""
    matrices, vectors = grouped(weights.master).values()
    decaying = AdamW(options, kernels)
    return ByWeight(weights, [(decaying, matrices), (decaying.without_decay(), vectors)], home)


def make_adamw_8bit(
    weights: Weights, options: AdamWOptions, home: Home = ON_DEVICE, *, kernels: bool = False
) -> ByWeight:
    """Make AdamW with 8-bit moments. Moments of vectors, which ranks may cut within blocks, stay float32."""
    matrices, vectors = grouped(weights.master).values()
    check_blocks(weights, [name for name, piece in weights.pieces.items() if len(piece.shape) >= 2])
    plain = AdamW(options, kernels).without_decay()
    return ByWeight(weights, [(AdamW8Bit(weights, options, kernels), matrices), (plain, vectors)], home)


def make_muon(
    weights: Weights, muon: MuonOptions, options: AdamWOptions, home: Home = ON_DEVICE, *, kernels: bool = False
) -> ByWeight:
    """Make Muon for the matrices between the embedding and the head, with AdamW for all other weights."""
    matrices, vectors = grouped(weights.master).values()
    ends = {name: weight for name, weight in matrices.items() if weights.pieces[name].at_end}
    inner = {name: weight for name, weight in matrices.items() if name not in ends}
    decaying = AdamW(options, kernels)
    return ByWeight(
        weights, [(Muon(weights, muon), inner), (decaying, ends), (decaying.without_decay(), vectors)], home
    )


def load_optimizer(function: str, options: Mapping[str, Any] | None) -> Callable[[Groups], torch.optim.Optimizer]:
    """Import a user's function and check its options. The returned function makes the optimizer of some weights."""
    make = load_custom("optimizer.function", function)
    checked = check_options("optimizer.options", make, options or {})

    def make_checked(groups: Groups) -> torch.optim.Optimizer:
        optimizer = make(groups, **checked)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(f"optimizer.function {function!r}: it made {optimizer!r}, not a torch.optim.Optimizer")
        updated = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
        for name, weight in (item for group in groups.values() for item in group.items()):
            if id(weight) not in updated:
                raise OptimizerError(f"optimizer.function {function!r}: its optimizer does not update {name}")
        return optimizer

    return make_checked


def make_custom_optimizer(make: Callable[[Groups], torch.optim.Optimizer], weights: Weights) -> torch.optim.Optimizer:
    """Make a user's optimizer, and check after each update that a checkpoint can keep all of its state."""
    optimizer = make(grouped(weights.master))
    options = _numbers(optimizer)

    def check(*_: object) -> None:
        _kept_states(optimizer, weights)
        changed = {
            name for before, after in zip(options, _numbers(optimizer), strict=True) for name, _ in before ^ after
        }
        if changed:
            raise OptimizerError(
                f"optimizer.function: its step changed the option {min(changed)} of a parameter group, which a "
                "checkpoint does not keep: keep it in the state of each weight"
            )

    optimizer.register_step_post_hook(check)
    return optimizer


def _numbers(optimizer: torch.optim.Optimizer) -> list[set[tuple[str, Any]]]:
    """Return the numeric options of each parameter group, except the learning rate, which every step sets."""
    return [
        {(name, value) for name, value in group.items() if isinstance(value, (int, float)) and name != "lr"}
        for group in optimizer.param_groups
    ]


def set_adamw(optimizer: torch.optim.Optimizer, options: AdamWOptions) -> None:
    """Set AdamW's options for its next updates. Vectors have no weight decay."""
    groups = optimizer.param_groups if isinstance(optimizer, ByWeight) else []
    if not groups or not all(isinstance(group["rule"], AdamW) for group in groups):
        raise OptimizerError("betas, epsilon and weight decay of an update can be set only with optimizer.type: adamw")
    for group in groups:
        rule = replace(group["rule"], options=options)
        group["rule"] = rule if any(weight.ndim >= 2 for weight in group["params"]) else rule.without_decay()
    forget_prepared(optimizer)


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Do the host's work for the next update while the device still runs the last backward pass."""
    if isinstance(optimizer, ByWeight):
        optimizer.prepare()


def forget_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Drop the preparation of an update that will not happen."""
    if isinstance(optimizer, ByWeight):
        optimizer.forget_prepared()


def update(optimizer: torch.optim.Optimizer, weights: Weights, learning_rate: float, scale: float = 1.0) -> None:
    """Update the master weights by their gradients times `scale`, and round them into the weights that the model
    computes with. Gradients may be overwritten."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if isinstance(optimizer, ByWeight):
        optimizer.step(scale=scale)
    else:
        if scale != 1 and weights.gradients:
            torch._foreach_mul_(list(weights.gradients.values()), scale)
        optimizer.step()
        weights.publish()
    marks.mark("updates", weights.device)


# The optimizer's state for this rank's part of a weight in a checkpoint, by kind: tensors in the shape of the part, and
# numbers.
State = dict[str, torch.Tensor]
_PYTHON = ":number"  # suffix of Python numbers; tensors without dimensions have none


def _kept_states(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, State]:
    """Return the optimizer's state of this rank's part of each weight; raise if a checkpoint cannot keep it."""
    kept: dict[str, State] = {}
    for name, master in weights.master.items():
        for kind, value in optimizer.state.get(master, {}).items():
            state = kept.setdefault(name, {})
            if isinstance(value, torch.Tensor) and (not value.ndim or _fits(optimizer, value, master)):
                state[kind] = value.detach()
            elif isinstance(value, (int, float)):
                dtype = torch.float64 if isinstance(value, float) else None
                state[f"{kind}{_PYTHON}"] = torch.tensor(value, dtype=dtype)
            elif value is not None:
                what = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise OptimizerError(
                    f"optimizer.function: the state {kind} of {name} is {what}; a checkpoint keeps numbers, and "
                    f"tensors of the shape of the rank's part of the weight, {list(master.shape)}"
                )
    return kept


def _fits(optimizer: torch.optim.Optimizer, value: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether a tensor is sharded like its weight. In built-in optimizers the last dimension may differ."""
    if value.shape == master.shape:
        return True
    return isinstance(optimizer, ByWeight) and value.ndim > 1 and value.shape[:-1] == master.shape[:-1]


def optimizer_parts(optimizer: torch.optim.Optimizer, weights: Weights) -> Iterator[TensorPart]:
    """Yield the parts of the optimizer's state that this rank writes to a checkpoint, named `NAME.KIND`."""
    kept = _kept_states(optimizer, weights)
    for name in written_here(weights):
        shape = weights.pieces[name].shape
        own = own_box(weights, name, shape)
        for kind, value in kept.get(name, {}).items() if own.numbers else ():
            if not value.ndim and shape:
                yield TensorPart(f"{STATE}{name}.{kind}", (), (), value)
                continue
            whole = list(shape)
            if value.shape != own.shape:
                whole[-1] = value.shape[-1] * whole[-1] // own.shape[-1]
            box = own_box(weights, name, whole)
            assert box.shape == value.shape
            yield TensorPart(f"{STATE}{name}.{kind}", tuple(whole), box.start, value)


def restore_optimizer(optimizer: torch.optim.Optimizer, weights: Weights, tensors: Tensors) -> None:
    """Load this rank's part of the state that `optimizer_parts` wrote, under this or another layout."""
    restored: dict[str, dict[str, Any]] = {}
    for key in tensors.keys():  # noqa: SIM118 - not a dictionary
        name, _, kind = key.removeprefix(STATE).rpartition(".")
        if not key.startswith(STATE) or name not in weights.master:
            continue
        state, master, shape = restored.setdefault(name, {}), weights.master[name], tensors.shape(key)
        if kind.endswith(_PYTHON):
            state[kind.removesuffix(_PYTHON)] = tensors.read(key, NUMBER).item()
        elif shape or not weights.pieces[name].shape:
            part = tensors.read(key, own_box(weights, name, shape))
            state[kind] = part if isinstance(optimizer, ByWeight) else part.to(master.device)
        else:  # a number: fused optimizers keep it on the weights' device, others on the host
            number = tensors.read(key, NUMBER)
            state[kind] = number.to(master.device if optimizer.defaults.get("fused") else "cpu")
    for name, state in restored.items():
        master = weights.master[name]
        if isinstance(optimizer, ByWeight):
            _check_kinds(optimizer.kinds(master), state, name)
            optimizer.restore(master, state)
        else:
            optimizer.state[master] = state
    states = [(f"{name}.{kind}", value) for name in restored for kind, value in restored[name].items()]
    if odd := named_by_all(weights.ranks, not_finite(pair for pair in states if isinstance(pair[1], torch.Tensor))):
        raise StateError(f"the optimizer's state has {some(odd)} with values that are not finite")


def _check_kinds(wanted: Mapping[str, tuple[torch.dtype, torch.Size]], state: Mapping[str, Any], name: str) -> None:
    """Raise if the state belongs to another kind of optimizer."""
    found = {kind: (value.dtype, value.shape) for kind, value in state.items() if isinstance(value, torch.Tensor)}
    found.pop(STEP, None)
    if found != dict(wanted):
        raise OptimizerError(
            f"the checkpoint holds another optimizer's state: {name} has {', '.join(sorted(found)) or 'none'} where "
            f"this optimizer keeps {', '.join(sorted(wanted))}: set the optimizer.type that the run began with (if "
            "it is set, an earlier version wrote the state), or begin another run with the checkpoint's directory as "
            "model.path"
        )
