"""Updates of a real policy's weights by gradients that are made up, over ranks: the part of tests that ranks run."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from checkpoints import Held, optimizer_tensors
from truestep.config.schema import Config
from truestep.model.loading.load import load_policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join
from truestep.run.assemble.step import make_optimizer
from truestep.step.update.optimizer import restore_optimizer, update
from truestep.weights.protocol import Weights

Tensors = dict[str, torch.Tensor]
RATES = [1e-3 * (1 + step % 3) for step in range(20)]


def gradient_of(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """Make a gradient that is the same under every layout; its size changes with the step, and from row to row."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    gradient = torch.randn(shape, generator=generator) * 10 ** (step % 3 - 2)
    rows = torch.randn(shape[0], *(1 for _ in shape[1:]), generator=generator)
    return gradient * rows.exp()


def options_of(model: Path, optimizer: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": "none"},
        "optimizer": optimizer,
        **sections,
    }


def set_gradients(weights: Weights, step: int) -> None:
    weights.zero_gradients()
    weights.reduce()
    for name, gradient in weights.gradients.items():
        gradient.copy_(weights.part_of(name, gradient_of(name, weights.pieces[name].shape, step)))


def update_all(runs: list[tuple[dict[str, Any], dict[str, int], int, int, str]]) -> None:
    """Make each run's steps, from a file that another run left to a file of its own, on a layout."""
    for given, parallel, first, last, folder in runs:
        config = Config.model_validate(given)
        ranks = join(RankLayout(**parallel), device="cpu", stall_timeout=60)
        on_host = getattr(config.optimizer, "offload", "none") == "all"
        policy = load_policy(
            config.model.path, dtype=config.model.dtype, device="cpu", ranks=ranks, masters_on_host=on_host
        )
        weights = policy.weights
        optimizer = make_optimizer(config, weights)
        if first:
            kept: dict[str, Tensors] = torch.load(Path(folder) / f"{first}.pt", weights_only=True)
            with torch.no_grad():
                for name, master in weights.master.items():
                    master.copy_(weights.part_of(name, kept["weights"][name]))
            weights.publish()
            restore_optimizer(optimizer, weights, Held(kept["state"]))
        for step in range(first, last):
            set_gradients(weights, step)
            update(optimizer, weights, RATES[step])
        state, collected = optimizer_tensors(optimizer, weights), weights.collect()
        if ranks.first:
            copies = {name: value.detach().clone() for name, value in collected.items()}
            torch.save({"weights": copies, "state": state}, Path(folder) / f"{last}.pt")
