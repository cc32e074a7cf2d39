"""The table of other people's environments, packages that are not there, and computing that can be killed."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any, get_args

import pytest

from truestep.config.sections import EnvironmentConfig
from truestep.environments.adapters import ADAPTERS
from truestep.environments.adapters.apart import within
from truestep.environments.descendants import children_of
from truestep.environments.episodes.service import check_environment
from truestep.environments.process import WorkerOptions
from truestep.environments.rater import check_reward
from truestep.environments.rewards import RewardError


def test_each_adapter_is_a_type_of_the_configuration() -> None:
    types = get_args(EnvironmentConfig.model_fields["type"].annotation)
    assert set(ADAPTERS) < set(types)
    for path in ADAPTERS.values():
        assert importlib.util.find_spec(path.partition(":")[0]) is not None


@pytest.mark.parametrize(
    ("name", "extra", "options"),
    [("reasoning_gym", "reasoning-gym", {"tasks": ["leg_counting"]}), ("verifiers", "verifiers", {"env": "gsm8k"})],
)
def test_a_package_that_is_missing_is_named_with_its_extra(name: str, extra: str, options: dict[str, Any]) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip("the package is installed here")
    needed = rf"^sampler\.environment\.type: {name} needs `pip install 'truestep\[{extra}\]'`: No module"
    with pytest.raises(RewardError, match=needed):
        check_environment(WorkerOptions(ADAPTERS[name], 60.0, 2**29), options, [False])


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="the package is installed here")
def test_a_reward_whose_package_is_missing_is_named_with_its_extra() -> None:
    needed = r"^sampler\.reward: math_verify needs `pip install 'truestep\[math-verify\]'`: No module"
    with pytest.raises(RewardError, match=needed):
        check_reward(WorkerOptions("truestep.environments.adapters.math_verify:reward", 60.0, 2**29))


def test_what_computes_too_long_is_killed_and_leaves_nothing() -> None:
    """A single operation on huge numbers heeds no signal that Python handles."""
    parent = os.getpid()
    before, before_children = len(os.listdir("/proc/self/fd")), set(children_of(os.getpid()))
    assert within(30.0, lambda: os.getpid() != parent) is True
    assert within(30.0, lambda: os.getpid() == parent) is False
    assert within(0.2, lambda: 3 ** (3**20) == 0) is None
    assert within(0.1, lambda: time.sleep(60) is None) is None
    assert within(30.0, lambda: os._exit(3)) is None
    assert within(30.0, lambda: bool(1 / 0)) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(children_of(os.getpid())) == before_children
