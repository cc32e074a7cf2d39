"""What `compare` says of runs on two machines, which round otherwise, when something else happens in one of them."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from small_runs import file_config, quiet_trainer, read_lines, write_lines, write_rollouts
from truestep.run.directory import _REPLACED
from truestep.tools.replay.compare import compare

Model = Callable[[str], Path]
Twin = Callable[..., Path]
OPTIONS: dict[str, Any] = {"logging": {"rollouts": {"documents": "all"}}, "deterministic": True}
ROUNDING = 1e-7


@pytest.fixture
def run(tiny_model: Model, tmp_path: Path) -> Path:
    write_rollouts(tmp_path / "r.jsonl", 20)
    quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", **OPTIONS)).run()
    return tmp_path / "run"


@pytest.fixture
def twin(run: Path, tmp_path: Path) -> Twin:
    """A copy of the run, some steps of which another machine made; its numbers and weights differ by rounding."""

    def make(elsewhere: Sequence[int], differs: Sequence[int] = (1, 2, 3, 4), **at_the_last: float) -> Path:
        copy = shutil.copytree(run, tmp_path / "twin")
        lines = read_lines(copy / "metrics.jsonl")
        for line in lines:
            if line["step"] in differs:
                line["entropy"] *= 1 + ROUNDING
        for name, more in at_the_last.items():
            lines[-1][name] += more
        write_lines(copy / "metrics.jsonl", lines)
        lines = read_lines(copy / "weights.jsonl")
        for line in lines:
            if line["step"] in differs:
                content = base64.b64decode(line["weights"])
                line["weights"] = base64.b64encode(bytes([content[0] ^ 1, *content[1:]])).decode()
            if line["step"] in elsewhere:
                line["made_by"]["device"] = "another"
        write_lines(copy / "weights.jsonl", lines)
        return copy

    return make


@pytest.mark.parametrize("elsewhere", [(1, 2, 3), (1,)])
def test_rounding_that_is_carried_over_is_no_fault(run: Path, twin: Twin, elsewhere: Sequence[int]) -> None:
    """The last steps have the machine of the other run, and weights that differ."""
    found = compare(run, twin(elsewhere))
    assert (found.step, found.cause) == (1, "numerics")
    assert "layout or machine round otherwise (device " in found.text and "faulty" not in found.text


def test_a_difference_from_weights_that_are_the_same_is_not_carried_over(run: Path, twin: Twin) -> None:
    """The weights after step 2 are the same again, as after a start from one checkpoint."""
    found = compare(run, twin((1,), differs=(1, 3, 4)))
    assert (found.step, found.cause) == (3, "numerics")
    assert "step 3 is the first that differs for another reason too: 1 metrics" in found.text
    assert "Something else made the difference" in found.text
    assert "before it, step 1 differs by at most 1.0e-07: layout or machine round otherwise" in found.text


def test_an_option_is_no_faulty_machine(run: Path, twin: Twin) -> None:
    """Its own line stays, and nothing is said of the size."""
    copy = twin((1, 2, 3, 4))
    config = copy / "config.yaml"
    (copy / f"{_REPLACED}{3:08d}.yaml").write_bytes(config.read_bytes())
    text = config.read_text()
    assert "learning_rate: 0.01\n" in text
    config.write_text(text.replace("learning_rate: 0.01\n", "learning_rate: 0.02\n"))
    found = compare(run, copy)
    assert (found.step, found.cause, found.stage) == (4, "option", None)
    assert "options differ: optimizer.learning_rate is 0.01 and 0.02" in found.text
    assert "before it, 3 steps from 1 to 3 differ by at most 1.0e-07: layout or machine" in found.text
    assert "faulty" not in found.text and "more than rounding" not in found.text


STILL_ROUNDING = [{"clipped_fraction": 1 / 4000}, {"num_labels": 1}, {"entropy": 2e-5}]
TOO_FAR = [{"entropy": 1e-3}, {"grad_norm": 1e-3}]


@pytest.mark.parametrize("change", [*STILL_ROUNDING, *TOO_FAR], ids=str)
def test_one_label_past_a_threshold_is_no_fault(run: Path, twin: Twin, change: dict[str, float]) -> None:
    """Nor is what the law allows; what is more than both is a fault."""
    found = compare(run, twin((1, 2, 3, 4), **change))
    far = change in TOO_FAR
    assert (found.step, "faulty machine" in found.text) == ((4, True) if far else (1, False)), found.text
    assert ("differs by more than rounding" in found.text) == far


def test_rounding_has_no_stage(run: Path, twin: Twin) -> None:
    found = compare(run, twin((1, 2, 3, 4)))
    assert (found.step, found.cause, found.stage) == (1, "numerics", None)
    assert "where: " not in found.text


def test_data_of_a_file_that_changed_are_seen_behind_rounding(run: Path, twin: Twin) -> None:
    copy = twin((1, 2, 3, 4))
    lines = read_lines(copy / "ledger.jsonl")
    lines[3]["digests"][2] = "0" * 16
    write_lines(copy / "ledger.jsonl", lines)
    found = compare(run, copy)
    assert (found.step, found.cause) == (4, "data")
    assert f"1 of 5 documents are not the same: {lines[3]['documents'][2]} has other " in found.text
    assert "before it, 3 steps from 1 to 3 differ by at most 1.0e-07: layout or machine" in found.text
