"""The oracle of schedules and updates, by numbers worked out by hand and against torch's float32."""

from __future__ import annotations

import pytest
import torch

from truestep.tools.verify.case import some_positions
from truestep.tools.verify.oracle.advantages import prepare
from truestep.tools.verify.oracle.schedule import clip_scale, learning_rate
from truestep.tools.verify.oracle.updates import UpdateOracle, beyond, updated

LINEAR = {"learning_rate": 1.0, "schedule": "linear", "warmup_steps": 4, "minimum_learning_rate": 0.1}
ADAMW = {"type": "adamw", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}


def test_rates_by_hand() -> None:
    by_hand = {1: 0.25, 3: 0.75, 4: 1.0, 5: 1.0, 6: 1 - 0.9 / 6, 8: 0.55, 10: 0.25, 11: 0.1, 12: 0.1}
    for step, rate in by_hand.items():
        assert learning_rate(LINEAR, 10, step) == pytest.approx(rate)
    cosine = LINEAR | {"schedule": "cosine"}
    assert learning_rate(cosine, 10, 8) == pytest.approx(0.55)
    assert learning_rate(cosine, 10, 6) == pytest.approx(0.1 + 0.9 * (1 + 3**0.5 / 2) / 2)
    assert learning_rate(LINEAR, None, 99) == learning_rate(LINEAR | {"schedule": "constant"}, 10, 99) == 1.0
    assert [clip_scale(2.0, threshold) for threshold in (None, 3.0, 2.0, 0.5)] == [1.0, 1.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("warm", "last", "count", "positions"),
    [
        (0, None, 2, [1, 2]),
        (20, None, 2, [15, 21]),
        (20, 200, 2, [15, 66]),
        (20, 200, 4, [1, 15, 21, 66]),
        (0, 40, 2, [1, 11]),
        (1, 40, 2, [1, 11]),
        (0, 1, 4, [1, 2, 3, 4]),
    ],
)
def test_steps_are_made_within_warm_up_and_decay(warm: int, last: int | None, count: int, positions: list[int]) -> None:
    assert some_positions(warm, last, count) == positions


def test_groups_end_with_their_last_member_and_begin_anew() -> None:
    rewards = (0.0, 1.0, 4.0, 6.0)
    records = [
        {"input_ids": [1, 2], "prompt_length": 1, "reward": reward, "group_id": "g"} for reward in (*rewards, 9.0)
    ]
    made = [record.get("advantage") for record in prepare(records, {"advantages": "group_mean", "group_size": 2})]
    assert made == [-0.5, 0.5, -1.0, 1.0, 0.0]
    penalty = {"from": 0, "to": 2, "weight": 1.0}
    less = prepare(records[:1], {"advantages": "group_mean", "overlong_penalty": penalty})
    assert (less[0]["reward"], less[0]["rewards"]) == (-0.5, {"overlong_penalty": -0.5})


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("rate", [1e-9, 1e-7, 1e-6, 1e-5, 1e-3, 1e-1])
def test_float32_is_within_the_bounds_and_what_is_a_little_off_is_not(rate: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    size = (200, 64)
    weight = 0.2 * torch.randn(size, generator=generator)
    oracle = UpdateOracle(ADAMW | {"weight_decay": decay})
    first, second = torch.zeros(size), torch.zeros(size)
    for number in (1, 2, 3):
        gradient = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-9, 1, size, generator=generator)
        gradient[::7] = 0.0
        before, old = {"exp_avg": first.clone(), "exp_avg_sq": second.clone()}, weight.double()
        torch._fused_adamw_(
            [weight], [gradient], [first], [second], [], [torch.tensor(float(number))],
            lr=rate, beta1=0.9, beta2=0.999, weight_decay=decay, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        after, exact = {"exp_avg": first, "exp_avg_sq": second}, gradient.double()
        moments = oracle.moments("w", old, exact, before, after, number)
        assert all(beyond(moment) < 3e-7 for moment in moments.values())
        change = oracle.change("w", old, exact, before, after, number, rate)
        bounds = updated(old, rate, decay, change)
        assert bool(((weight.double() >= bounds.low) & (weight.double() <= bounds.high)).all())
        wrong = oracle.change("w", old, exact, before, after, number, rate * (1.0001 if rate > 1e-8 else 1.1))
        other = updated(old, rate, decay, wrong)
        assert not bool(((weight.double() >= other.low) & (weight.double() <= other.high)).all())
