"""A user's optimizer, for the tests of its door: momentum with decoupled decay, and a rate that falls."""

from __future__ import annotations

from typing import Any

import torch


class Momentum(torch.optim.Optimizer):
    """Keeps a tensor, one of Python's numbers and a tensor of no dimension for each weight."""

    def __init__(self, groups: Any, momentum: float):
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"velocity": torch.zeros_like(weight), "updates": 0, "trust": torch.tensor(1.0)}
                state["updates"] += 1
                state["trust"] = state["trust"] * 0.75
                state["velocity"].mul_(group["momentum"]).add_(weight.grad)
                rate = group["lr"] * float(state["trust"]) * 0.9 ** state["updates"]
                weight.mul_(1 - rate * group["decay"]).sub_(rate * state["velocity"])


def make(groups: Any, *, momentum: float = 0.5, decay: float = 0.0) -> torch.optim.Optimizer:
    matrices, vectors = groups["matrices"], groups["vectors"]
    return Momentum(
        [
            {"params": list(matrices.values()), "decay": decay},
            {"params": list(vectors.values())},
        ],
        momentum,
    )


def make_sgd(groups: Any) -> torch.optim.Optimizer:
    """One of torch's own, which keeps no state."""
    return torch.optim.SGD([weight for group in groups.values() for weight in group.values()])


def make_nothing(groups: Any) -> None:
    """Forgets to return."""


def make_forgetful(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups["matrices"].values())


class Rows(Momentum):
    """Keeps a number a row, which no shard of a weight could have a part of."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["rows"] = torch.zeros(len(weight), 1)


class Counting(Momentum):
    """Keeps what it must remember where no checkpoint looks."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1


def make_rows(groups: Any) -> torch.optim.Optimizer:
    return Rows([*groups["matrices"].values(), *groups["vectors"].values()], 0.0)


def make_counting(groups: Any) -> torch.optim.Optimizer:
    return Counting([*groups["matrices"].values(), *groups["vectors"].values()], 0.0)


class Normed(Momentum):
    """Depends on all of a weight's gradient: a rank that has a part of it makes another update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * weight.grad / weight.grad.norm().clamp(min=1e-12))


def make_normed(groups: Any) -> torch.optim.Optimizer:
    return Normed([*groups["matrices"].values(), *groups["vectors"].values()], 0.0)
