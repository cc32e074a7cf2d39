"""Runs over several hosts whose network fails: a partition, a slow link, a host that is lost or that comes back.

Each host is a namespace of its own on this machine (hosts.py), with an agent of torch's launcher. What each case
expects is what docs/machines.md says. No two generations ever write, and in the end the run is the one that was never
disturbed.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents import SETTINGS, Agents
from checkpoints import latest
from hosts import Hosts, make_hosts
from test_elastic import STEPS, compare, make_config, nothing_left, undisturbed
from truestep.ranks.elastic import SECONDS_TO_LEAVE
from truestep.ranks.watch import longest_silence
from truestep.run.checkpoint.store import step_of
from truestep.run.elastic import GENERATIONS

pytestmark = pytest.mark.timeout(900)
SILENCE = 15  # seconds after which a rank that says nothing is lost; 60 s as a rule
# An agent that does not reach the rendezvous ends by itself after `read_timeout`, and its ranks end it before.
READ_TIMEOUT = math.ceil(longest_silence(3, SILENCE) + SECONDS_TO_LEAVE) + 5
# The agent of the rendezvous is on the last host. Rank 0 is on the first: torch sorts agents by their addresses.
TWO, THREE = {0: 2, 1: 1}, {0: 3, 1: 1, 2: 2}


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "whole", tiny_model("llama"), 3)


@contextlib.contextmanager
def agents_on(
    hosts: Hosts, places: dict[int, int], folder: Path, model: Path, least: int, **more: Any
) -> Iterator[Agents]:
    folder.mkdir(exist_ok=True)
    config = make_config(folder, model, schedule={"docs_per_step": 5, "stall_timeout": SILENCE})
    placed = {agent: hosts[number] for agent, number in places.items()}
    settings = {**SETTINGS, "keep_alive_interval": 1, "read_timeout": READ_TIMEOUT}
    nodes = (least, len(places))
    with Agents(folder, config, folder / "run", nodes, hosts=placed, settings=settings, **more) as agents:
        agents.start(*places)
        agents.until(lambda: bool(agents.generations) and agents.generations[-1]["ranks"] == len(places))
        yield agents


def ended_well(agents: Agents, hosts: Hosts, whole: Path) -> None:
    agents.until(lambda: "the data ended after step" in agents.log(), seconds=500)
    agents.end()
    # A rank that came back looks for the rendezvous for 25 s before it ends; its agent may have ended meanwhile.
    agents.until(lambda: not agents.alive(), seconds=60)
    nothing_left(agents)
    agents.until(lambda: not hosts.left(), seconds=60)
    assert agents.late_writes() == []
    assert [line["step"] for line in agents.lines("metrics.jsonl")] == list(range(1, STEPS + 1))
    compare(agents.run, whole)


def saves(agents: Agents) -> bool:
    """True while a checkpoint is being written."""
    return any((agents.run / "checkpoints").glob(".step-*"))


def computes(agents: Agents) -> bool:
    return agents.steps >= 5


@pytest.mark.parametrize(
    ("rank", "name", "late"),
    [
        (0, "ledger.jsonl", True),
        (1, "checkpoints/step-00000003", True),
        (0, "checkpoints/.step-00000003.partial/checksums.json", True),
        (1, "checkpoints/.step-00000003.partial/part", False),
        (1, ".generation-ended-old", False),
    ],
)
def test_a_late_write_is_seen(rank: int, name: str, late: bool, tmp_path: Path) -> None:
    agents = Agents(tmp_path, tmp_path / "config.yaml", tmp_path / "run")
    agents.run.mkdir()
    began = [{"id": "old", "generation": 1}, {"id": "new", "generation": 2}]
    (agents.run / GENERATIONS).write_text("".join(f"{json.dumps(line)}\n" for line in began))
    writes = [(1.0, "old", 0, "open", GENERATIONS), (2.0, "old", rank, "open", name)]
    writes += [(3.0, "new", 0, "open", GENERATIONS), (4.0, "old", rank, "open", name)]
    (tmp_path / "agent-0.writes").write_text("".join(f"{json.dumps(line)}\n" for line in writes[:3]))
    assert agents.late_writes() == []
    (tmp_path / "agent-1.writes").write_text(json.dumps(writes[3]))
    assert agents.late_writes() == [f"open {name} by rank {rank} of generation 1"] * late


def test_a_worker_that_has_ended_is_not_left(tmp_path: Path) -> None:
    """One whose agent was killed becomes a child of the tests' process, which does not ask for its end."""
    agents = Agents(tmp_path, tmp_path / "config.yaml", tmp_path / "run")
    agents.agents = {0: cast(BaseProcess, SimpleNamespace(exitcode=None))}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as worker:
        (tmp_path / "agent-0.workers").write_text(f"{worker.pid}\n")
        assert agents.alive() == [worker.pid]
        worker.kill()
        agents.until(lambda: agents.alive() == [])
        assert Path(f"/proc/{worker.pid}").exists()


def test_a_machine_that_makes_no_hosts_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is skipped keeps no promise."""
    monkeypatch.setattr("hosts._why_none", lambda: "tc is not installed")
    with pytest.raises(pytest.fail.Exception, match="tc is not installed"):
        make_hosts(1)


@pytest.mark.parametrize("end", ["RendezvousClosedError", "DistStoreError", "RendezvousConnectionError"])
@pytest.mark.parametrize(("allowed", "codes"), [(False, [1, 1]), (True, [1, 1]), (False, [1, 0]), (False, [1, None])])
def test_agents_that_give_up_are_started_again_only_where_they_may(
    allowed: bool, codes: list[int | None], end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(tmp_path, tmp_path / "config.yaml", tmp_path / "run", may_give_up=allowed)
    agents.agents = {number: cast(BaseProcess, SimpleNamespace(exitcode=code)) for number, code in enumerate(codes)}
    (tmp_path / "agent-0.log").write_text(f"agent 0 ends: {end}: closed\n")
    started: list[int] = []
    monkeypatch.setattr(Agents, "start", lambda self, *numbers: started.extend(numbers))
    asked = iter([False, True])
    faulty = codes == [1, 1] and not allowed
    with pytest.raises(AssertionError, match="gave up") if faulty else contextlib.nullcontext():
        agents.until(lambda: next(asked))
    assert started == [0] * allowed


@pytest.mark.release
@pytest.mark.parametrize("when", [computes, saves])
@pytest.mark.parametrize("whom", [1, 2], ids=["first", "another"])
def test_a_host_that_is_cut_off_ends_and_the_others_go_on(
    whom: int, when: Callable[[Agents], bool], tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    """Its agent is killed after the others have begun again: steps are slow, so that it comes back before the end."""
    slow, folder, model = {"step_takes": 1.5}, tmp_path / "run", tiny_model("llama")
    with make_hosts(3) as hosts, agents_on(hosts, THREE, folder, model, 2, **slow) as agents:
        before = len(agents.generations)
        agents.until(lambda: agents.steps >= 3 and when(agents))
        hosts.cut(whom)
        agents.until(lambda: len(agents.generations) == before + 1)
        assert agents.wait(whom) == [-signal.SIGKILL], agents.log()[-6000:]
        assert "does not reach the rendezvous" in agents.log()
        hosts.mend(whom)
        agents.start(whom)
        agents.until(lambda: len(agents.generations) == before + 2)
        assert [line["ranks"] for line in agents.generations][-3:] == [3, 2, 3]
        ended_well(agents, hosts, whole)


@pytest.mark.release
def test_a_host_without_a_network_for_a_moment(tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path) -> None:
    with make_hosts(3) as hosts, agents_on(hosts, THREE, tmp_path / "run", tiny_model("llama"), 2) as agents:
        before = len(agents.generations)
        agents.until(lambda: agents.steps >= 5)
        hosts.cut(1)
        time.sleep(2)
        hosts.mend(1)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
        assert len(agents.generations) == before
        ended_well(agents, hosts, whole)


@pytest.mark.release
@pytest.mark.parametrize("places", [TWO, THREE], ids=["two", "three"])
def test_the_host_of_the_rendezvous_is_lost(
    places: dict[int, int], tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    """All agents end. The same commands go on from the last checkpoint."""
    model, folder, all_there = tiny_model("llama"), tmp_path / "run", {"waits_for_all": True}
    with make_hosts(3) as hosts, agents_on(hosts, places, folder, model, 1, **all_there) as agents:
        agents.until(lambda: agents.steps >= 8)
        hosts.lose(places[0])
        others = [number for number in places if number]
        assert agents.wait(*others) == [-signal.SIGKILL] * len(others), agents.log()[-6000:]
        hosts.mend(places[0])
        before, saved = len(agents.generations), step_of(latest(agents.run))
        agents.start(*places)
        ended_well(agents, hosts, whole)
        assert agents.generations[before]["step"] == saved


@pytest.mark.release
@pytest.mark.parametrize("whom", [1, 2], ids=["first", "another"])
def test_a_host_comes_back_with_an_old_generation(
    whom: int, tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    """It stood still, as a virtual machine may, and the network disk has taken its lock away."""
    with make_hosts(3) as hosts, agents_on(hosts, THREE, tmp_path / "run", tiny_model("llama"), 2) as agents:
        before = len(agents.generations)
        agents.until(lambda: agents.steps >= 5)
        hosts.cut(whom)
        hosts[whom].signal(signal.SIGSTOP)
        (agents.run / ".lock").unlink()
        agents.until(lambda: len(agents.generations) == before + 1 and agents.steps >= 8)
        hosts.mend(whom)
        hosts[whom].signal(signal.SIGCONT)
        ended_well(agents, hosts, whole)


@pytest.mark.release
def test_a_slow_link_changes_nothing(tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path) -> None:
    folder, model, all_there = tmp_path / "run", tiny_model("llama"), {"waits_for_all": True}
    with make_hosts(2) as hosts, agents_on(hosts, TWO, folder, model, 1, **all_there) as agents:
        before = len(agents.generations)
        agents.until(lambda: agents.steps >= 3)
        hosts.slow(1, "4mbit")
        assert agents.wait(0, 1) == [0, 0], agents.log()[-6000:]
        assert len(agents.generations) == before
        ended_well(agents, hosts, whole)


@pytest.mark.release
@pytest.mark.parametrize("whom", [1, 3], ids=["first", "rendezvous"])
def test_a_host_is_cut_off_while_agents_find_one_another(
    whom: int, tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    """The others go on without it, or all end, and the same commands go on."""
    with make_hosts(3) as hosts, agents_on(hosts, THREE, tmp_path / "run", tiny_model("llama"), 2) as agents:
        before = len(agents.generations)
        agents.until(lambda: agents.steps >= 5)
        first = [agents.workers(number)[-1] for number in THREE]
        agents.signal(2, signal.SIGKILL)
        agents.until(lambda: not any(Path(f"/proc/{process}").exists() for process in first))
        agents.may_give_up = True
        hosts.cut(whom)
        cut_off = time.monotonic()
        agents.until(lambda: len(agents.generations) > before or time.monotonic() > cut_off + 4 * READ_TIMEOUT)
        hosts.mend(whom)
        ended_well(agents, hosts, whole)
