"""Rewards: found by name, one clear message for each way not to be found, and what rating one completion gives."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from truestep.environments.rewards import Rating, RewardError, call, load_reward

PROMPT, FIELDS = "sort 2 1 =", {"answer": "1 2", "level": 3}


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The working directory is a new one, and what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_rewards_a.py").write_text(
        "def score(prompt, completion, *, answer, **_): return completion == answer"
    )
    reward = load_reward("my_rewards_a:score")
    assert call(reward, PROMPT, "1 2", FIELDS) == 1.0
    assert call(reward, PROMPT, "2 1", FIELDS) == 0.0


def test_a_package_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_package_b").mkdir()
    (tmp_path / "my_package_b" / "inner.py").write_text(
        "class Rate:\n  def __call__(self, p, c, **_): return 2\nscore = Rate()"
    )
    assert call(load_reward("my_package_b.inner:score"), PROMPT, "", FIELDS) == 2.0


@pytest.mark.parametrize("name", ["score", "module.score", ":score", "module:", "", ":"])
def test_a_name_of_another_form(name: str) -> None:
    with pytest.raises(RewardError, match="package.module:function") as caught:
        load_reward(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module_c:score", "No module named 'no_such_module_c'"),
        ("json:no_such_function", "json has no function no_such_function"),
        ("json:__name__", "json has no function __name__"),
        ("json.nothing:score", "nothing"),
        (".relative:score", "relative"),
        ("with space:score", "with space"),
        ("broken_d:score", "SyntaxError"),
        ("raising_e:score", "RuntimeError: no licence"),
        ("exiting_f:score", "SystemExit"),
        ("needing_g:score", "no_such_dependency"),
        ("typo_h:scroe", "typo_h has no function scroe"),
        ("module_i.py:score", "; write module_i:score"),
    ],
)
def test_what_cannot_be_loaded_is_one_message(name: str, said: str, tmp_path: Path) -> None:
    sources = {
        "broken_d": "def score(:",
        "raising_e": "raise RuntimeError('no licence')",
        "exiting_f": "import sys; sys.exit(3)",
        "needing_g": "import no_such_dependency",
        "typo_h": "def score(*_, **__): return 0",
        "module_i": "def score(*_, **__): return 0",
    }
    for module, source in sources.items():
        (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(RewardError) as caught:
        load_reward(name)
    assert repr(name) in str(caught.value)
    assert said in str(caught.value)


def test_prompt_completion_and_fields_are_passed() -> None:
    seen = []

    def reward(prompt: Any, completion: str, **fields: Any) -> float:
        seen.append((prompt, completion, fields))
        return 0.25

    assert call(reward, PROMPT, "1 2", FIELDS) == 0.25
    assert seen == [("sort 2 1 =", "1 2", {"answer": "1 2", "level": 3})]


@pytest.mark.parametrize("given", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)])
def test_every_kind_of_number_is_one(given: Any) -> None:
    value = call(lambda *_, **__: given, PROMPT, "", FIELDS)
    assert type(value) is Rating
    assert value == 1.0


@pytest.mark.parametrize(
    ("given", "value", "parts"),
    [
        ({"right": 1, "short": 0.5}, 1.5, {"right": 1.0, "short": 0.5}),
        ({"right": np.float32(1), "style": None}, 1.0, {"right": 1.0}),
        ({"reward": 0.25, "right": True, "steps": 7}, 0.25, {"right": 1.0, "steps": 7.0}),
        ({"reward": 0.25}, 0.25, {}),
        ({"reward": 1, "score": 2}, 1.0, {"score": 2.0}),
        ({"only": 2.0}, 2.0, {"only": 2.0}),
    ],
)
def test_a_dict_is_a_reward_in_parts(given: Any, value: float, parts: dict[str, float]) -> None:
    rating = call(lambda *_, **__: given, PROMPT, "", FIELDS)
    assert rating == value and rating.parts == parts
    again = pickle.loads(pickle.dumps(rating))  # as one rank gives it to the others
    assert again == value and again.parts == parts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "a dict of 0 parts: give 1 to 64"),
        ({str(n): 1 for n in range(65)}, "a dict of 65 parts: give 1 to 64"),
        ({"a": None}, r"a dict \(a\) without a number in it"),
        ({"a": "1.0"}, "the reward's part 'a' is '1.0', which is not a finite number"),
        ({"a": float("nan")}, "the reward's part 'a' is nan"),
        ({1: 1.0}, "a dict with the name 1: a name is a short text"),
        ({"a\nb": 1.0}, "a name is a short text"),
        (
            {"score": 1.0, "acc": 1.0},
            r"a dict \(score, acc\), as for verl.*: name it reward, or return the number alone",
        ),
    ],
)
def test_a_dict_of_other_things_is_refused(given: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        call(lambda *_, **__: given, PROMPT, "", FIELDS)


def test_a_traceback_begins_in_the_users_function() -> None:
    def inner() -> float:
        raise ValueError("no\x1b[31m such\nanswer")

    with pytest.raises(RewardError) as caught:
        call(lambda *_, **__: inner(), PROMPT, "", FIELDS)
    lines = (caught.value.traceback or "").splitlines()
    assert lines[0] == "Traceback (most recent call last):" and "test_rewards.py" in lines[1] and "lambda" in lines[1]
    assert any("in inner" in line for line in lines) and lines[-1] == "answer"
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("given", [None, "1.0", b"1.0", [1.0], {}, 1j, 10**400, torch.ones(2)])
def test_whatever_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(RewardError, match="the reward returned"):
        call(lambda *_, **__: given, PROMPT, "", FIELDS)


def test_a_field_that_the_reward_does_not_take_is_said() -> None:
    def reward(prompt: str, completion: str) -> float:
        return 1.0

    with pytest.raises(RewardError, match="raised TypeError: .*'answer'"):
        call(reward, PROMPT, "", FIELDS)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Unshowable:
    def __float__(self) -> float:
        raise SystemExit

    def __repr__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), r"raised KeyboardInterrupt \(at "),
        (SystemExit(3), r"raised SystemExit: 3 \(at "),
        (UnreadableError(), "raised UnreadableError: .*cannot be shown"),
        (ValueError("\x1b[2J\x07 red"), r"raised ValueError: \\x1b\[2J\\x07 red \(at "),
    ],
)
def test_whatever_is_raised_is_a_reason_in_words(error: BaseException, said: str) -> None:
    def reward(*_: Any, **__: Any) -> float:
        raise error

    with pytest.raises(RewardError, match=said):
        call(reward, PROMPT, "", FIELDS)


def test_what_cannot_even_be_looked_at_is_named() -> None:
    with pytest.raises(RewardError, match="returned .an object that cannot be shown., which is not a number"):
        call(lambda *_, **__: Unshowable(), PROMPT, "", FIELDS)
