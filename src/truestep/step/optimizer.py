"""The optimizer of the float32 weights, built in or a user's own, its state in checkpoints, and the learning rate."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from truestep.custom import check_options, load_custom
from truestep.errors import TruestepError
from truestep.policy.weights.protocol import Weights
from truestep.ranks import marks
from truestep.step.optimizers.adamw import AdamW, AdamWOptions
from truestep.step.optimizers.by_weight import STEP, ByWeight
from truestep.step.optimizers.eight_bits import AdamW8Bit, check_blocks
from truestep.step.optimizers.muon import Muon, MuonOptions

# The float32 weights by name, under `matrices` and `vectors`. A rank that has a part of a weight has that part here.
Groups = dict[str, dict[str, torch.nn.Parameter]]


class OptimizerError(TruestepError):
    """The reason why a user's optimizer cannot be used."""


@dataclass(frozen=True)
class LearningRate:
    """The learning rate, a function of the step alone: a resumed run needs no state for it."""

    peak: float
    schedule: str
    warmup_steps: int
    minimum: float
    steps: int | None

    def at(self, step: int) -> float:
        """Compute the rate of update number `step`, from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.peak
        # 0 at the first step after warm-up, which has the peak; 1 just behind the last step: no update is for nothing.
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        remaining = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.minimum + (self.peak - self.minimum) * remaining


def grouped(weights: Mapping[str, torch.nn.Parameter]) -> Groups:
    """Sort weights into matrices, which may be decayed, and vectors (norms and biases), which are not."""
    matrices = {name: weight for name, weight in weights.items() if weight.ndim >= 2}
    return {"matrices": matrices, "vectors": {name: weight for name, weight in weights.items() if weight.ndim < 2}}


def make_adamw(weights: Weights, options: AdamWOptions, home: str = "device") -> ByWeight:
    """Make AdamW, which never decays norms and biases: they are vectors."""
    matrices, vectors = grouped(weights.master).values()
    return ByWeight(weights, [(AdamW(options), matrices), (AdamW(replace(options, weight_decay=0.0)), vectors)], home)


def make_adamw_8bit(weights: Weights, options: AdamWOptions, home: str = "device") -> ByWeight:
    """Make AdamW with moments in 8 bits; those of vectors, which ranks cut anywhere, stay float32."""
    matrices, vectors = grouped(weights.master).values()
    check_blocks(weights, [name for name, piece in weights.pieces.items() if len(piece.shape) >= 2])
    plain = AdamW(replace(options, weight_decay=0.0))
    return ByWeight(weights, [(AdamW8Bit(weights, options), matrices), (plain, vectors)], home)


def make_muon(weights: Weights, muon: MuonOptions, adamw: AdamWOptions, home: str = "device") -> ByWeight:
    """Make Muon for the matrices between the embedding and the head, and AdamW for all else."""
    matrices, vectors = grouped(weights.master).values()
    ends = {name: weight for name, weight in matrices.items() if weights.pieces[name].at_end}
    inner = {name: weight for name, weight in matrices.items() if name not in ends}
    plain = AdamW(replace(adamw, weight_decay=0.0))
    return ByWeight(weights, [(Muon(weights, muon), inner), (AdamW(adamw), ends), (plain, vectors)], home)


def load_optimizer(function: str, options: Mapping[str, Any] | None) -> Callable[[Groups], torch.optim.Optimizer]:
    """Find a user's function and check its options. What is returned makes the optimizer of some weights."""
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
    """Make a user's optimizer, and check after each of its updates that a checkpoint can keep all of its state."""
    optimizer = make(grouped(weights.master))
    options = _numbers(optimizer)

    def check(*_: object) -> None:
        _describe_state(optimizer, weights)
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
    """The numbers among each parameter group's options, but the learning rate, which every step sets."""
    return [
        {(name, value) for name, value in group.items() if isinstance(value, (int, float)) and name != "lr"}
        for group in optimizer.param_groups
    ]


def update(optimizer: torch.optim.Optimizer, weights: Weights, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    weights.publish()
    marks.mark("updates", weights.device)


class Kept(NamedTuple):
    """A tensor of a weight's state in checkpoints: the weight's shape, but for the size of its last dimension."""

    dtype: torch.dtype
    width: int


# What a checkpoint keeps of a weight, by name: numbers, as tensors, and tensors with its dimensions.
State = dict[str, Kept | torch.Tensor]
_PYTHON = ":number"  # marks the name of a number that is Python's own, not a tensor without dimensions


def _describe_state(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, State]:
    """Describe the state of this rank's part of each weight, or refuse it."""
    described: dict[str, State] = {}
    for name, master in weights.master.items():
        for kind, value in optimizer.state.get(master, {}).items():
            state = described.setdefault(name, {})
            if isinstance(value, torch.Tensor) and _fits(optimizer, value, master):
                whole, own = weights.pieces[name].shape, master.shape
                state[kind] = Kept(value.dtype, value.shape[-1] * whole[-1] // own[-1] if own != value.shape else -1)
            elif isinstance(value, torch.Tensor) and not value.ndim:
                state[kind] = value.detach().cpu().clone()
            elif isinstance(value, (int, float)):
                dtype = torch.float64 if isinstance(value, float) else None
                state[f"{kind}{_PYTHON}"] = torch.tensor(value, dtype=dtype)
            elif value is not None:
                what = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise OptimizerError(
                    f"optimizer.function: the state {kind} of {name} is {what}; a checkpoint keeps numbers, and "
                    f"tensors of the shape of the rank's part of the weight, {list(master.shape)}"
                )
    return described


def _fits(optimizer: torch.optim.Optimizer, value: torch.Tensor, master: torch.Tensor) -> bool:
    """Tell whether a checkpoint can join a tensor from the parts of ranks. Only built-in optimizers may divide rows."""
    if value.shape == master.shape:
        return True
    return isinstance(optimizer, ByWeight) and value.ndim > 1 and value.shape[:-1] == master.shape[:-1]


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, torch.Tensor]:
    """Gather the optimizer's whole state on the first rank, as `NAME.KIND`, for a checkpoint. Every rank calls this."""
    if isinstance(optimizer, ByWeight):
        optimizer.settle()
    everywhere: dict[str, State] = {}
    for described in reversed(weights.ranks.gather(_describe_state(optimizer, weights))):
        for name, state in described.items():
            everywhere.setdefault(name, {}).update(state)
    trained = [name for name, piece in weights.pieces.items() if piece.trained and name in everywhere]
    kept: dict[str, torch.Tensor] = {}
    tensors = {(k, v.dtype): None for name in trained for k, v in everywhere[name].items() if isinstance(v, Kept)}
    for kind, dtype in tensors:
        parts: dict[str, torch.Tensor | None] = {}
        widths: dict[str, int] = {}
        for name in trained:
            described_as = everywhere[name].get(kind)
            if not isinstance(described_as, Kept) or described_as.dtype is not dtype:
                continue
            if described_as.width >= 0:
                widths[name] = described_as.width
            master = weights.master.get(name)
            found = None if master is None else optimizer.state.get(master, {}).get(kind)
            # An optimizer may keep nothing of an empty part.
            parts[name] = torch.zeros_like(master, dtype=dtype) if found is None and master is not None else found
        kept |= {f"{name}.{kind}": whole for name, whole in weights.on_first(parts, dtype, widths).items()}
    if weights.ranks.first:
        numbers = [(n, k, v) for n in trained for k, v in everywhere[n].items() if isinstance(v, torch.Tensor)]
        kept |= {f"{name}.{kind}": value for name, kind, value in numbers}
    return kept


def restore_optimizer(optimizer: torch.optim.Optimizer, weights: Weights, tensors: dict[str, torch.Tensor]) -> None:
    """Give the optimizer this rank's part of the state that `optimizer_tensors` made, on any layout."""
    restored: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, kind = key.rpartition(".")
        if name not in weights.master:
            continue
        state, master = restored.setdefault(name, {}), weights.master[name]
        if kind.endswith(_PYTHON):
            state[kind.removesuffix(_PYTHON)] = value.item()
        elif value.shape == weights.pieces[name].shape or value.ndim:
            part = weights.part_of(name, value)
            state[kind] = part.clone() if isinstance(optimizer, ByWeight) else part.to(master.device, copy=True)
        else:  # a number: a fused optimizer keeps it beside the weights, and others on the host
            state[kind] = value.clone().to(master.device if optimizer.defaults.get("fused") else "cpu")
    for name, state in restored.items():
        master = weights.master[name]
        if isinstance(optimizer, ByWeight):
            _check_kinds(optimizer.kinds(master), state, name)
            state = {kind: optimizer.place(value) for kind, value in state.items()}
        optimizer.state[master] = state


def _check_kinds(wanted: Mapping[str, tuple[torch.dtype, torch.Size]], state: Mapping[str, Any], name: str) -> None:
    """Refuse the state of another optimizer."""
    found = {kind: (value.dtype, value.shape) for kind, value in state.items() if isinstance(value, torch.Tensor)}
    found.pop(STEP, None)
    if found != dict(wanted):
        raise OptimizerError(
            f"the checkpoint holds another optimizer's state: {name} has {', '.join(sorted(found)) or 'none'} where "
            f"this optimizer keeps {', '.join(sorted(wanted))}: set the optimizer.type that the run began with, or "
            "begin another run with the checkpoint's directory as model.path"
        )
