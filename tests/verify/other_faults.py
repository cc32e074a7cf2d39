"""Faults of advantages, of moments in 8 bits and of Muon, planted in the ranks that `verify` starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from truestep.rollouts import advantages
from truestep.run.assemble import step as assemble
from truestep.step.compute import runner
from truestep.step.update.optimizers import eight_bits, muon

# --- advantages


def rule(change: Callable[..., Any]) -> None:
    honest = advantages.with_group_advantages
    advantages.with_group_advantages = lambda group, rule: change(honest, group, rule)


def advantages_times(factor: float, honest: Any, group: Any, rule: Any) -> Any:
    return [
        rollout
        if rollout.advantages is None
        else dataclasses.replace(
            rollout,
            advantages=rollout.advantages * np.float32(factor),
            difference=None if rollout.difference is None else rollout.difference * factor,
        )
        for rollout in honest(group, rule)
    ]


def with_rule(options: dict[str, Any], honest: Any, group: Any, rule: Any) -> Any:
    return honest(group, dataclasses.replace(rule, **options))


def population_deviation(honest: Any, group: Any, rule: Any) -> Any:
    """n in place of n - 1."""
    made = honest(group, dataclasses.replace(rule, floor=0.0))
    factor = math.sqrt(len(group) / max(1, len(group) - 1))
    return [dataclasses.replace(rollout, advantages=rollout.advantages * np.float32(factor)) for rollout in made]


def without_the_last(honest: Any, group: Any, rule: Any) -> Any:
    """A group ends a member early."""
    return [*honest(group[:-1], rule), *honest(group[-1:], rule)] if len(group) > 1 else honest(group, rule)


def moved_by_one(honest: Any, group: Any, rule: Any) -> Any:
    """Each document gets the advantage of the next."""
    made = honest(group, rule)
    values = [float(rollout.advantages.sum() / max(1, rollout.num_labels)) for rollout in made]
    values = [*values[1:], values[0]]
    return [
        dataclasses.replace(rollout, advantages=advantages._on_labels(rollout, value))
        for rollout, value in zip(made, values, strict=True)
    ]


def signs_lost_in_packing() -> None:
    honest = runner.pack

    def packed(*arguments: Any, **named: Any) -> Any:
        batch = honest(*arguments, **named)
        labels = dataclasses.replace(batch.labels, advantages=batch.labels.advantages.abs())
        return dataclasses.replace(batch, labels=labels)

    runner.pack = packed


# --- 8 bits and Muon


def scales_times(factor: float) -> None:
    honest = eight_bits.quantise

    def quantise(*arguments: Any) -> Any:
        made = honest(*arguments)
        return made._replace(scale=made.scale * factor)

    eight_bits.quantise = quantise


def rounded_down() -> None:
    honest = eight_bits.turns
    eight_bits.turns = lambda *arguments: torch.ones_like(honest(*arguments))


def turns_that_stand_still() -> None:
    honest = eight_bits.turns
    eight_bits.turns = lambda rows, columns, number, count: honest(rows, columns, 1, count)


def codes_beside_their_block() -> None:
    honest = eight_bits.quantise

    def quantise(*arguments: Any) -> Any:
        made = honest(*arguments)
        return made._replace(scale=made.scale.roll(1, -1) if made.scale.shape[-1] > 1 else made.scale.roll(1, 0))

    eight_bits.quantise = quantise


def eight_bits_with(**over: Any) -> None:
    honest = eight_bits.in_passes
    eight_bits.in_passes = lambda matrix, options, rate: honest(matrix, dataclasses.replace(options, **over), rate)


def not_orthogonal() -> None:
    muon.orthogonalise = lambda matrix, steps, dtype: matrix / matrix.norm().clamp(min=1e-7)


def a_step_too_few() -> None:
    honest = muon.orthogonalise
    muon.orthogonalise = lambda matrix, steps, dtype: honest(matrix, steps - 1, dtype)


def muon_with(**over: Any) -> None:
    honest = assemble.MuonOptions
    assemble.MuonOptions = lambda *arguments: dataclasses.replace(honest(*arguments), **over)  # type: ignore[assignment, misc]


def size_of_one() -> None:
    muon.size_factor = lambda shape, adjust: 1.0
