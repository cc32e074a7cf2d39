"""What the client's definitions say, in plain float64: log-probs of an adapted model, losses and AdamW's updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from oracles.transformer import Transformer

ALPHA = 32.0


class Adapted:
    """A model with an adapter, whose matrices are leaves."""

    def __init__(self, directory: Path, matrices: Mapping[str, torch.Tensor]):
        self._model = Transformer(directory)
        self._base = {name: weight.detach() for name, weight in self._model.parameters.items()}
        self.matrices = {name: values.double().requires_grad_() for name, values in matrices.items()}
        self._moments = {name: [torch.zeros_like(one), torch.zeros_like(one)] for name, one in self.matrices.items()}
        self._updates = 0

    def logprobs(self, ids: Sequence[int], targets: Sequence[Any]) -> list[Any]:
        """Of each position, the log-prob of its target, or of each of its targets."""
        for name, weight in self._base.items():
            layer = name.removesuffix(".weight")
            down, up = (self.matrices.get(f"{layer}.lora_{part}.weight") for part in "AB")
            if down is not None and up is not None:
                weight = weight + ALPHA / down.shape[0] * (up @ down)
            self._model.parameters[name] = weight
        z = self._model.logits(list(ids))
        found: list[Any] = []
        for row, target in zip(z, targets, strict=True):
            logprobs = row - torch.logsumexp(row, 0)
            found.append([logprobs[t] for t in target] if isinstance(target, list) else logprobs[target])
        return found

    def update(self, loss: torch.Tensor, options: Mapping[str, float]) -> float:
        """Update by AdamW as torch defines it; return the gradient's norm."""
        gradients = torch.autograd.grad(loss, list(self.matrices.values()))
        norm = math.sqrt(sum(float(one.square().sum()) for one in gradients))
        clip = options.get("grad_clip_norm", 0.0)
        scale = clip / norm if clip and norm > clip else 1.0
        self._updates += 1
        for (name, own), gradient in zip(self.matrices.items(), gradients, strict=True):
            first, second = self._moments[name]
            first.mul_(options["beta1"]).add_(gradient * scale, alpha=1 - options["beta1"])
            second.mul_(options["beta2"]).add_((gradient * scale).square(), alpha=1 - options["beta2"])
            mean = first / (1 - options["beta1"] ** self._updates)
            spread = (second / (1 - options["beta2"] ** self._updates)).sqrt()
            with torch.no_grad():
                own.mul_(1 - options["learning_rate"] * options["weight_decay"])
                own.sub_(options["learning_rate"] * mean / (spread + options["eps"]))
        return norm


def loss_of(
    name: str, own: Sequence[torch.Tensor], given: Mapping[str, Sequence[float]], **numbers: float
) -> torch.Tensor:
    """The loss of a datum, a token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    if name == "gspo":
        marked = [t for t, mark in enumerate(given["sequence_ratio_mask"]) if mark]
        mean = sum(float(own[t].detach()) - given["logprobs"][t] for t in marked) / max(1, len(marked))
    for t, logprob in enumerate(own):
        if name == "cross_entropy":
            total = total - given["weights"][t] * logprob
            continue
        q, advantage = given["logprobs"][t], given["advantages"][t]
        ratio = (logprob - q).exp()
        if name == "gspo":
            ratio = torch.exp(mean + logprob - logprob.detach())
        held = ratio.clamp(numbers.get("clip_low_threshold", 0.0), numbers.get("clip_high_threshold", math.inf))
        if name == "importance_sampling":
            total = total - ratio * advantage
        elif name in ("ppo", "gspo"):
            total = total - torch.minimum(ratio * advantage, held * advantage)
        elif name == "cispo":
            total = total - held.detach() * logprob * advantage
        else:
            total = total - (logprob * advantage - 0.5 * numbers["beta"] * (logprob - q) ** 2)
    return total
