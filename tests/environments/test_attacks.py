"""Rewards that attack the run, through whole runs: sampled in process, by servers, and in evaluations.

All three rate by the same workers (test_rater.py has each attack on these alone); each attack meets some of them here.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hostile_reward
from doors.own_server import Process, serve
from processes import mentioning
from selection import in_tiers
from small_runs import merged, quiet_trainer, read_lines, sampled_config, sort_prompts, word_model, write_lines

KINDS = ("in_process", "server", "evaluation")
PATIENCE = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("attacked") / "model")


def prompts(file: Path, attacks: list[str], place: Path, times: int) -> str:
    """One good prompt for each attack, in any order: groups in a row that all fail would be hopeless."""
    place.mkdir(exist_ok=True)
    place.chmod(0o777)  # isolated rewards of root's write as nobody
    fields = [{"attack": attack, "place": str(place), "times": times} for attack in attacks]
    lines = [
        {**prompt, **field}
        for prompt, field in zip(sort_prompts(2 * len(fields)), [*fields, *[{}] * len(fields)], strict=True)
    ]
    return str(write_lines(file, lines))


@contextlib.contextmanager
def configured(
    kind: str, model: Path, folder: Path, attacks: list[str], times: int = 1, **sections: Any
) -> Iterator[Any]:
    """A run that meets each attack at least once, and good completions beside."""
    hostile = prompts(folder / "hostile.jsonl", attacks, folder / "place", times)
    good = prompts(folder / "good.jsonl", [""], folder / "place", 0)
    count = 2 * len(attacks)
    base = {
        "data": {"group_size": 2},
        "schedule": {"docs_per_step": 2 * count, "steps": 1},
        "sampler": {
            "reward": "hostile_reward:reward",
            "prompts": good if kind == "evaluation" else hostile,
            "reward_writable": [str(folder / "place")],
        },
    }
    if kind == "evaluation":
        base["evaluation"] = {"prompts": hostile, "every": 1}
    base = merged(base, sections)
    with contextlib.ExitStack() as stack:
        if kind == "server":
            process = Process(model, "mine", longest=200)
            server = {"type": "server", "protocol": "doors.own_server:OwnServer", "model": "mine"}
            base = merged(base, {"sampler": {**server, "urls": [stack.enter_context(serve(process))]}})
            base = merged(base, {"data": {"tokens_per_microbatch": 512}})
        yield sampled_config(model, Path(base["sampler"]["prompts"]), folder / "run", **base)


def reasons(folder: Path) -> list[str]:
    """Why completions had no reward, wherever the run says it."""
    run = folder / "run"
    found = [line["reason"] for line in read_lines(run / "rejected.jsonl")] if (run / "rejected.jsonl").exists() else []
    evaluations = read_lines(run / "evaluation.jsonl") if (run / "evaluation.jsonl").exists() else []
    return found + [example["problem"] for line in evaluations for example in line["examples"] if "problem" in example]


def rewards(folder: Path) -> list[float]:
    run = folder / "run"
    evaluations = read_lines(run / "evaluation.jsonl") if (run / "evaluation.jsonl").exists() else []
    evaluated = [example["reward"] for line in evaluations for example in line["examples"]]
    return evaluated + [line["max_reward"] for line in read_lines(run / "metrics.jsonl")]


@pytest.mark.parametrize("kind", ["in_process", "evaluation"])
def test_code_of_a_completion_does_not_run_in_the_trainer(kind: str, model: Path, tmp_path: Path) -> None:
    """A pickle on every descriptor is a command where it is unpickled, and forges a reward there."""
    with configured(kind, model, tmp_path, ["pickles"]) as config:
        assert quiet_trainer(config).run() == "all 1 steps are done"
    assert (tmp_path / "place" / "pickles").stat().st_size > 0, "the attack was made"
    assert not (tmp_path / "place" / "pwned").exists()
    assert hostile_reward.FORGED not in rewards(tmp_path)


@pytest.mark.parametrize("kind", ["server"])
def test_a_reward_sees_no_secret_of_the_run(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESTEP_TEST_SECRET", "hunter2")
    with configured(kind, model, tmp_path, ["looks_for_secrets"], times=1000) as config:
        quiet_trainer(config).run()
    assert hostile_reward.FORGED not in rewards(tmp_path)


@pytest.mark.parametrize("kind", ["evaluation"])
def test_a_child_of_a_reward_does_not_outlive_the_run(kind: str, model: Path, tmp_path: Path) -> None:
    with configured(kind, model, tmp_path, ["leaves_a_session_behind"]) as config:
        quiet_trainer(config).run()
    left = mentioning(tmp_path / "place" / "orphan")
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left and (tmp_path / "place" / "orphan").read_text() != ""


@pytest.mark.parametrize(
    ("attack", "kind"),
    [("exits", "evaluation"), ("interrupts", "in_process"), ("raises_a_base_exception", "server")],
)
def test_a_reward_that_ends_its_process_ends_no_run(attack: str, kind: str, model: Path, tmp_path: Path) -> None:
    with configured(kind, model, tmp_path, [attack], times=2) as config:
        try:
            ended = quiet_trainer(config).run()
        except BaseException as error:  # what pytest itself would take as a wish to end
            pytest.fail(f"the run ended: {error!r}")
    assert ended == "all 1 steps are done"
    assert any("the reward raised" in reason for reason in reasons(tmp_path))


@pytest.mark.parametrize("kind", ["in_process", "evaluation"])
def test_escapes_and_megabytes_of_a_reason_reach_no_file_and_no_console(kind: str, model: Path, tmp_path: Path) -> None:
    with configured(kind, model, tmp_path, ["raises_escapes"], times=2) as config:
        quiet_trainer(config).run()
    found = reasons(tmp_path)
    assert found and all(reason.isprintable() and len(reason) < 500 for reason in found)


# Words of a reason, as patterns. All of memory is met by one of three guards, and which is first depends on how busy
# the machine is.
LATE = "took longer than"
MANY = {
    "exits_at_once": r"ended its process \(exit code 7\)",
    "garbage": "wrote to the connection",
    "guessed_frames": "wrote to the connection",
    "closes_every_descriptor": "ended its process",
    "moves_the_connection": "ended its process",
    "sleeps": LATE,
    "catches_everything": LATE,
    "loops": LATE,
    "takes_all_memory": rf"raised MemoryError|took more than .* of memory|{LATE}",
    "returns_an_evil_object": "which is not a number",
    "raises_what_cannot_be_shown": "cannot be shown",
    "recurses": "RecursionError",
}


@pytest.mark.parametrize("kind", in_tiers(KINDS, (), ("in_process",)))
def test_many_attacks_in_one_run_are_named_and_the_run_goes_on(kind: str, model: Path, tmp_path: Path) -> None:
    """A completion that loses a worker which had rated others gets a second chance, so two of a group can make two
    attacks of an attack's kind unnamed, and not three."""
    limits = {"sampler": {"reward_timeout": 8.0, "reward_memory": 1.0, "reward_workers": 4}}
    with configured(kind, model, tmp_path, list(MANY), times=3, **limits) as config:
        assert quiet_trainer(config).run() == "all 1 steps are done"
    made = {attack: (tmp_path / "place" / attack).stat().st_size for attack in MANY}
    assert all(made.values())
    if kind == "evaluation":
        (first, *_) = read_lines(tmp_path / "run" / "evaluation.jsonl")
        assert 0 < first["num_unrated"] <= 2 * len(MANY)
        return
    rejected = read_lines(tmp_path / "run" / "rejected.jsonl")
    for number, (attack, words) in enumerate(MANY.items()):
        found = [line["reason"] for line in rejected if line["file"] == f"prompt-{number}"]
        assert any(re.search(words, reason) for reason in found), (attack, found)


RUN = """
import io, sys
from pathlib import Path
from rich.console import Console
from truestep.config.load import load_config
from truestep.run.train import train
train(load_config(Path(sys.argv[1])), Console(file=io.StringIO()))
"""


@pytest.mark.parametrize("kind", in_tiers(KINDS, [], ["in_process", "server"]))
def test_a_run_whose_rewards_never_end_stops_when_it_is_asked_and_goes_on(
    kind: str, model: Path, tmp_path: Path
) -> None:
    """The reward would take its hour: a run that waited for it would be killed by this test's patience."""
    limits = {"sampler": {"reward_timeout": 3600.0, "reward_workers": 1}}
    with configured(kind, model, tmp_path, ["catches_everything"], times=1, **limits) as config:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        command = [sys.executable, "-c", RUN, str(file)]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: (tmp_path / "place" / "catches_everything").exists() or run.poll() is not None)
            assert run.poll() is None, run.stderr.read() if run.stderr else ""
            time.sleep(0.5)
            run.send_signal(signal.SIGTERM)
            assert run.wait(PATIENCE) == 0, run.stderr.read() if run.stderr else ""
        finally:
            run.kill()
            run.wait()
        assert not (tmp_path / "run" / "metrics.jsonl").exists() or not read_lines(tmp_path / "run" / "metrics.jsonl")
        assert quiet_trainer(config).run() == "all 1 steps are done"
    if kind == "evaluation":
        assert [line["step"] for line in read_lines(tmp_path / "run" / "evaluation.jsonl")] == [0, 1]


def until(true: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
