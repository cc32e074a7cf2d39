"""The optimizer of the float32 weights, AdamW or a user's own, its state in checkpoints, and the learning rate."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from truestep.custom import check_options, load_custom
from truestep.errors import TruestepError
from truestep.policy.weights.protocol import Weights
from truestep.ranks import marks

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


def make_adamw(
    weights: Weights, *, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> torch.optim.AdamW:
    """Make AdamW, which never decays norms and biases: they are vectors.

    It is torch's fused one, which needs no memory beside its two moments.
    """
    decays = {"matrices": weight_decay, "vectors": 0.0}
    groups = [
        {"params": list(group.values()), "weight_decay": decays[kind]}
        for kind, group in grouped(weights.master).items()
        if group
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=epsilon, fused=True)


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


# What a checkpoint keeps of a weight, by name: numbers, as tensors, and the types of tensors that have its shape.
State = dict[str, torch.dtype | torch.Tensor]
_PYTHON = ":number"  # marks the name of a number that is Python's own, not a tensor without dimensions


def _describe_state(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, State]:
    """Describe the state of this rank's part of each weight, or refuse it."""
    described: dict[str, State] = {}
    for name, master in weights.master.items():
        for kind, value in optimizer.state.get(master, {}).items():
            state = described.setdefault(name, {})
            if isinstance(value, torch.Tensor) and value.shape == master.shape:
                state[kind] = value.dtype
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


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, torch.Tensor]:
    """Gather the optimizer's whole state on the first rank, as `NAME.KIND`, for a checkpoint. Every rank calls this."""
    everywhere: dict[str, State] = {}
    for described in reversed(weights.ranks.gather(_describe_state(optimizer, weights))):
        for name, state in described.items():
            everywhere.setdefault(name, {}).update(state)
    trained = [name for name, piece in weights.pieces.items() if piece.trained and name in everywhere]
    kept: dict[str, torch.Tensor] = {}
    tensors = {(k, v): None for name in trained for k, v in everywhere[name].items() if isinstance(v, torch.dtype)}
    for kind, dtype in tensors:
        parts: dict[str, torch.Tensor | None] = {}
        for name in (name for name in trained if everywhere[name].get(kind) is dtype):
            master = weights.master.get(name)
            found = None if master is None else optimizer.state.get(master, {}).get(kind)
            # An optimizer may keep nothing of an empty part.
            parts[name] = torch.zeros_like(master, dtype=dtype) if found is None and master is not None else found
        kept |= {f"{name}.{kind}": whole for name, whole in weights.on_first(parts, dtype).items()}
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
        elif value.shape == weights.pieces[name].shape:
            state[kind] = weights.part_of(name, value).to(master.device, copy=True)
        else:  # a number: a fused optimizer keeps it beside the weights, and others on the host
            state[kind] = value.clone().to(master.device if optimizer.defaults.get("fused") else "cpu")
    for name, state in restored.items():
        optimizer.state[weights.master[name]] = state
