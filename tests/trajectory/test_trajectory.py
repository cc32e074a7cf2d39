"""Short runs of the demo's task have the numbers that are kept, and a fault of any size that people make moves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trajectory import pinned
from truestep.generate import play
from truestep.losses.objective import Denominator
from truestep.rollouts import advantages
from truestep.step.compute import runner
from truestep.step.plan.plan import totals_of
from truestep.step.update.optimizer import LearningRate


@pytest.mark.parametrize("seed", pinned.SEEDS)
def test_a_run_has_the_numbers_that_are_kept(seed: int) -> None:
    wrong = list(pinned.differences(pinned.run(seed), pinned.read()[str(seed)]))
    assert not wrong, "if this change is meant, `make trajectory` writes the numbers anew:\n" + "\n".join(wrong)


def _rate(patch: pytest.MonkeyPatch) -> None:
    right = LearningRate.at
    patch.setattr(LearningRate, "at", lambda self, step: 1.01 * right(self, step))


def _denominator(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch divides by its own labels."""
    right: Any = runner.StepRunner._pack

    def pack(self: Any, plan: Any, members: tuple[int, ...], *rest: Any) -> Any:
        own = totals_of([plan.documents[index] for index in members])
        return right(self, replace(plan, totals=own), members, *rest)

    patch.setattr(runner.StepRunner, "_pack", pack)


def _mask(patch: pytest.MonkeyPatch) -> None:
    """The first token of a completion is no label."""
    right = play.rollout_of

    def rollout_of(*arguments: Any, **options: Any) -> Any:
        rollout = right(*arguments, **options)
        mask = rollout.loss_mask.copy()
        mask[int(mask.argmax())] = mask.sum() == 1
        return replace(rollout, loss_mask=mask)

    patch.setattr("truestep.generate.play.rollout_of", rollout_of)


def _baseline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(advantages, "_differences", lambda rewards, *_: np.asarray(rewards, dtype=np.float64))


def _entropy_denominator(patch: pytest.MonkeyPatch) -> None:
    """Documents are counted where labels are meant."""
    right = Denominator.label_weights

    def label_weights(self: Denominator, num_labels: torch.Tensor, totals: Any) -> torch.Tensor:
        return right(replace(self, normalize_by="documents"), num_labels, totals)

    patch.setattr(Denominator, "label_weights", label_weights)


@pytest.mark.parametrize("plant", [_rate, _denominator, _mask, _baseline, _entropy_denominator])
def test_a_planted_fault_moves_them(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    moved = list(pinned.differences(pinned.run(0), pinned.read()["0"]))
    assert len(moved) >= 10 and any("learning_rate" not in line for line in moved), moved


def test_a_difference_is_named() -> None:
    kept = pinned.read()["0"]
    assert len(kept) == pinned.STEPS and set(kept[0]) == set(pinned.NAMES)
    other = [dict(line) for line in kept]
    assert not list(pinned.differences(other, kept))
    other[2]["grad_norm"] *= 1.01
    other[3]["reward"] += 1e-6
    assert [line.split(" is ")[0] for line in pinned.differences(other, kept)] == [
        "step 3: grad_norm",
        "step 4: reward",
    ]
    other[1]["loss"] = float("nan")
    assert any("step 2: loss" in line for line in pinned.differences(other, kept))
    assert next(iter(pinned.differences(other[:-1], kept))) == f"{pinned.STEPS - 1} steps, not {pinned.STEPS}"
