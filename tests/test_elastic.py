"""Ranks that come and go, under agents of torch's elastic launcher: the run is the one that lost nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from agents import LEAST, MOST, Agents, free_port, leaves_nothing, lives, nothing_left
from checkpoints import latest, read_states, read_weights
from small_runs import write_rollouts
from truestep.commands.cli import main

DOCUMENTS, STEPS = 150, 30
# Of random runs, as FIRST:END.
SEEDS = range(*map(int, os.environ.get("TRUESTEP_SEEDS", "0:100").split(":")))


def make_config(folder: Path, model: Path, **options: Any) -> Path:
    write_rollouts(folder / "rollouts.jsonl", DOCUMENTS)
    config = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(folder / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": DOCUMENTS // STEPS, "stall_timeout": 20},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"directory": str(folder / "run"), "every": 3},
        "deterministic": True,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options), encoding="utf-8")
    return folder / "config.yaml"


def agents_of(folder: Path, model: Path, **more: Any) -> Agents:
    folder.mkdir(exist_ok=True)
    return Agents(folder, make_config(folder, model), folder / "run", **more)


def undisturbed(folder: Path, model: Path, ranks: int) -> Path:
    with agents_of(folder, model, nodes=(ranks, ranks)) as agents:
        agents.start(*range(ranks))
        assert agents.wait(*range(ranks)) == [0] * ranks, agents.log()[-6000:]
    return folder / "run"


def compare(run: Path, whole: Path, bitwise: bool = False) -> None:
    """The ledgers are the same, and the weights by the law, or bit for bit."""
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    for read in (read_weights, read_states):
        found, expected = read(latest(run)), read(latest(whole))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if bitwise:
                assert torch.equal(found[name], value), name
            else:
                # By the norm: Adam's update of a weight without a gradient to speak of is rounding.
                assert (found[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.long
def test_a_rank_that_is_killed_comes_back_and_the_run_is_bit_for_bit_the_same(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    with agents_of(tmp_path / "elastic", model, nodes=(2, 3), waits_for_all=True) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 7)
        agents.signal(1, signal.SIGKILL)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
        first, second = agents.generations
        assert first["ranks"] == second["ranks"] == 3
        nothing_left(agents)
    compare(agents.run, undisturbed(tmp_path / "whole", model, 3), bitwise=True)


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "whole", tiny_model("llama"), 3)


@pytest.mark.long
def test_ranks_that_leave_and_join(tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path) -> None:
    """One by a signal to its agent, one by a file, one that comes late."""
    notice = tmp_path / "notice"
    with agents_of(tmp_path / "elastic", tiny_model("llama")) as agents:
        agents.start(0, 1)
        agents.start(2, options=("--schedule.preemption_file", str(notice)))
        agents.until(lambda: agents.steps >= 4)
        agents.agents[1].terminate()
        agents.until(lambda: len(agents.generations) == 2 and agents.steps >= 10)
        agents.start(3)
        agents.until(lambda: len(agents.generations) == 3 and agents.steps >= 14)
        notice.touch()
        assert agents.wait(0, 1, 2, 3) == [0, 1, 1, 0], agents.log()[-6000:]
        assert [line["ranks"] for line in agents.generations] == [3, 2, 3, 2]
        assert [line.get("lost_steps", 0) for line in agents.generations] == [0, 0, 0, 0]
        assert "announces the end of its machine" in agents.generations[-1]["reason"]
        nothing_left(agents)
    compare(agents.run, whole)
    steps = [line["step"] for line in agents.lines("metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_rank_that_stands_still(tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama")) as agents:
        agents.start(0, 1, 2, options=("--schedule.stall_timeout", "4"))
        agents.until(lambda: agents.steps >= 5)
        agents.signal(2, signal.SIGSTOP)
        # Its own agent kills it after 30 s, and joins again if the run still goes on.
        assert agents.wait(0, 1) == [0, 0], agents.log()[-6000:]
        agents.wait(2)
        assert "has made no progress" in agents.generations[1]["reason"]
        nothing_left(agents)
    compare(agents.run, whole)


def number_of(agents: Agents, rank: int) -> int:
    """The agent that has a rank of the last generation."""
    number = int(agents.generations[-1]["agents"][rank].rpartition("/")[2])
    return next(name for name, agent in agents.agents.items() if agent.pid == number)


@pytest.mark.long
def test_the_first_rank_stands_still(tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path) -> None:
    """The store of the others stands still with it, and it still has the lock of the run."""
    with agents_of(tmp_path / "elastic", tiny_model("llama")) as agents:
        agents.start(0, 1, 2, options=("--schedule.stall_timeout", "4"))
        agents.until(lambda: agents.steps >= 5)
        agents.signal(number_of(agents, 0), signal.SIGSTOP)
        agents.until(lambda: "the data ended after step" in agents.log())
        agents.end()
        assert "the store of rank 0 has not answered" in agents.generations[1]["reason"]
        assert agents.generations[1]["failed"] == []
        nothing_left(agents)
    compare(agents.run, whole)


@dataclass
class Disturbed:
    """A run whose ranks are killed, stopped, told to go, refused and added at random instants, one or two at a time.
    The first agent stays, since it has the rendezvous, and no rank is killed twice."""

    agents: Agents
    draw: random.Random

    def __post_init__(self) -> None:
        self.alive, self.unhurt, self.new = [0, 1, 2, 3], [0, 1, 2, 3], 4
        self.agents.start(*self.alive)

    def disturb(self) -> None:
        for step in sorted(self.draw.sample(range(1, STEPS - 4), 3)):
            self.agents.until(lambda step=step: self.agents.steps >= step)
            self.reach(self.draw.choice(("step", "save", "rendezvous")))
            for _ in range(self.draw.choice((1, 1, 2))):
                self.do(self.draw.choice(("kill", "kill", "stop", "go", "lose", "join", "refused")))
                time.sleep(self.draw.choice((0.0, self.draw.uniform(0.0, 4.0))))

    def reach(self, instant: str) -> None:
        """Wait for a random instant in a step, in a save, or while the agents find one another."""
        agents, steps, saves = self.agents, self.agents.steps, self.agents.run / "checkpoints"
        if instant == "step":
            time.sleep(self.draw.uniform(0.0, 0.4))
        elif instant == "save":  # or the run is not where it saves
            agents.until(lambda: any(saves.glob(".step-*")) or agents.steps > steps + 4 or ended(agents))
        elif self.unhurt and len(self.alive) > LEAST:
            process = self.hurt(self.unhurt.pop(self.draw.randrange(len(self.unhurt))), signal.SIGKILL)
            agents.until(lambda: process is None or not lives(process))
            time.sleep(self.draw.uniform(0.0, 6.0))

    def hurt(self, number: int, kind: signal.Signals) -> int | None:
        """Send a signal to the worker of an agent; return its process id. None: the run ended before there was one."""
        agents = self.agents
        agents.until(lambda: bool(agents.workers(number)) or ended(agents))
        return agents.signal(number, kind) if agents.workers(number) else None

    def lose(self, number: int) -> None:
        """Kill an agent, and the rank that it may have started: its machine is gone."""
        agent = self.agents.agents[number].pid
        assert agent is not None
        for process in (agent, *children(agent)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def do(self, what: str) -> None:
        agents, leaving = self.agents, [number for number in self.unhurt if number > 0]
        if what in ("go", "lose", "stop") and leaving and len(self.alive) > LEAST:
            number = self.draw.choice(leaving)
            self.unhurt.remove(number)
            self.alive.remove(number)
            agents.may_give_up |= what in ("go", "lose")
            if what == "stop":
                self.hurt(number, signal.SIGSTOP)
            elif what == "go":
                agents.agents[number].terminate()
            else:
                self.lose(number)
        elif what == "kill" and self.unhurt:
            self.hurt(self.unhurt.pop(self.draw.randrange(len(self.unhurt))), signal.SIGKILL)
        elif what == "refused":
            agents.start(self.new, lacks_device=True)
            self.new += 1
        elif len(self.alive) < MOST:
            agents.start(self.new)
            self.alive.append(self.new)
            self.unhurt.append(self.new)
            self.new += 1


def ended(agents: Agents) -> bool:
    return "the data ended after step" in agents.log()


@pytest.mark.nightly
@pytest.mark.parametrize("joins", [False, True], ids=["at the start", "joins"])
def test_a_machine_without_a_gpu_is_refused(
    joins: bool, tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama")) as agents:
        agents.start(0, 1)
        if joins:
            agents.until(lambda: agents.steps >= 5)
        agents.start(2, lacks_device=True)
        assert agents.wait(2) == [1], agents.log()[-6000:]
        assert agents.wait(0, 1) == [0, 0], agents.log()[-6000:]
        assert all(line["ranks"] == 2 for line in agents.generations)
        assert len(agents.workers(2)) == 1, "its agent has left at once"
        if not joins:
            reason = agents.generations[0]["reason"]
            assert reason is not None and "NoDeviceError: local rank 0 has no GPU" in reason, "the others were told"
        nothing_left(agents)
    compare(agents.run, whole)


def disturb(agents: Agents, seed: int) -> None:
    Disturbed(agents, random.Random(seed)).disturb()


@pytest.fixture(scope="module")
def whole_of_four(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "four", tiny_model("llama"), 4)


@pytest.mark.release  # a rank that is lost while the others connect keeps them waiting for three minutes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_seeded_losses_and_joins(
    seed: int, tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path, whole_of_four: Path
) -> None:
    (tmp_path / "elastic").mkdir()
    with agents_of(tmp_path / "elastic", tiny_model("llama")) as agents, leaves_nothing(agents):
        disturb(agents, seed)
        agents.until(lambda: ended(agents), seconds=900)
        # One that joins when the run ends keeps the others waiting for minutes: torch's agents wait for each other.
        agents.end()
    steps = [line["step"] for line in agents.lines("metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    numbers = [line["generation"] for line in agents.lines("metrics.jsonl")]
    assert numbers == sorted(numbers) and {line["generation"] for line in agents.generations} >= set(numbers)
    assert agents.late_writes() == []
    same = {line["ranks"] for line in agents.generations} == {4}
    compare(agents.run, whole_of_four if same else whole, bitwise=same)


def children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in listed.read_text().split()] if listed.exists() else []


def command_line(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.nightly
def test_the_printed_command_starts_a_run_that_survives(
    tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    """As a user has it: torchrun in a shell, which nothing but its command line tells to be elastic."""
    options = ["--hosts", "127.0.0.1", "--gpus", "2", "--least", "1", "--port", str(free_port())]
    config = make_config(tmp_path, tiny_model("llama"))
    printed = CliRunner().invoke(main, ["elastic-command", str(config), *options]).output.splitlines()[1]
    command = printed.replace(" torchrun ", f" {sys.executable} -m torch.distributed.run ")
    assert command != printed
    run, log = tmp_path / "run", tmp_path / "log"
    ledger = run / "ledger.jsonl"
    with log.open("w", encoding="utf-8") as file:
        shell = subprocess.Popen(["bash", "-c", command], stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while not (ledger.is_file() and len(ledger.read_text().splitlines()) >= 2):
            assert time.monotonic() < deadline and shell.poll() is None, log.read_text()[-6000:]
            time.sleep(0.01)
        (rank,) = [each for each in children(children(shell.pid)[1]) if b"truestep" in command_line(each)]
        os.kill(rank, signal.SIGKILL)
        assert shell.wait(timeout=500) == 0, log.read_text()[-6000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)  # the agents end their workers
            shell.wait(timeout=60)
    said = log.read_text()
    assert "generation 2: 2 ranks, 2 before; " in said, said[-6000:]
    compare(run, whole)
