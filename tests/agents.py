"""Agents of torch's elastic launcher on loopback, each in a process of its own, with workers that train.

The agents are torch's own (`elastic_launch`), forked from a process that has imported all; their workers are functions
that they fork, in place of commands that would import everything again. Everything that was started ends with the
context, by its process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import truestep.run.elastic as running
import truestep.run.train as training
from hosts import Host
from small_runs import read_lines
from truestep.commands.cli import main
from truestep.ranks import elastic, keeper_client, processes
from truestep.ranks.forks import fork_context
from truestep.run.checkpoint import memory as memories
from truestep.run.elastic import GENERATIONS
from truestep.run.trainer import Trainer

LEAST, MOST = 2, 5
# How torch's agents end that gave up. A network error: the agent with the store ended while this one waited for it.
_GAVE_UP = [
    f"ends: {name}"
    for name in ("DistStoreError", "DistNetworkError", "RendezvousClosedError", "RendezvousConnectionError")
]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
STEP_TAKES = 0.05  # seconds more than it would: so that steps are there to be interrupted
# Of the rendezvous: as `truestep elastic-command` has them, but for shorter waits. An agent is silent for ten seconds
# before it has left: on a busy machine all may stand still for five, and torch's agents then give up.
SETTINGS = {"join_timeout": 600, "last_call_timeout": 8, "keep_alive_interval": 2, "keep_alive_max_attempt": 5}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class _Start:
    """What an agent and its workers are started with."""

    folder: str
    run: str
    number: int
    meeting: str  # the rendezvous, as address:port
    words: list[str]
    nodes: tuple[int, int]
    present: tuple[int, int]
    own_machine: bool
    settings: dict[str, int]
    environment: dict[str, str]
    host: Host | None
    lacks_device: bool
    step_takes: float


def _worker(given: _Start) -> None:
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # those of the agent that forked it
        signal.signal(kind, signal.SIG_DFL)
    agent, number, words = os.getppid(), given.number, given.words
    training.find_agent = lambda: elastic.agent_of(agent, *given.nodes, given.meeting)
    with (Path(given.folder) / f"agent-{number}.workers").open("a", encoding="utf-8") as file:
        print(os.getpid(), file=file, flush=True)
    _log_writes(given)
    if given.own_machine:  # what keepers of states go by
        memories.machine_key = keeper_client.machine_key = lambda: f"machine {number}"  # type: ignore[assignment]
    if given.host is not None:  # processes of another host are not seen
        here = f"{processes.machine()} host {given.host.number}"
        processes.machine = running.machine = lambda: here  # type: ignore[assignment, attr-defined]
    made = Trainer._train

    def slowly(self: Trainer, *arguments: Any) -> None:
        time.sleep(given.step_takes)
        made(self, *arguments)

    Trainer._train = slowly  # type: ignore[method-assign]
    if words[0] != "train":  # a function of a test, by its import path
        module, _, name = words[0].partition(":")
        getattr(importlib.import_module(module), name)(*words[1:])
    else:
        main(words, prog_name="truestep", standalone_mode=False)


def _log_writes(given: _Start) -> None:
    """Write down when this process changes a file of the run, and for which generation."""
    log = os.open(f"{given.folder}/agent-{given.number}.writes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    own, rank = elastic.generation_id(), int(os.environ["RANK"])
    changes = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in changes and not (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if path.startswith(f"{given.run}/"):
            line = json.dumps([time.monotonic(), own, rank, event, path[len(given.run) + 1 :]])
            os.write(log, f"{line}\n".encode())

    sys.addaudithook(hook)


def _may_be_late(rank: int, event: str, name: str) -> bool:
    """True for files that no other generation takes for its own: notes of why one ended, and parts of a checkpoint,
    whose names are those of a start."""
    if name.startswith((".generation-ended-", ".lock")) or (event, name) == ("os.mkdir", "checkpoints"):
        return True
    return rank > 0 and name.startswith("checkpoints/.step-")


def _agent(given: _Start) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(given.environment)
    if given.lacks_device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    log = os.open(f"{given.folder}/agent-{given.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if given.host is not None:
        given.host.enter()
    config = LaunchConfig(
        *given.present,
        nproc_per_node=1,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=given.meeting,
        rdzv_configs={"is_host": given.number == 0, **given.settings},
        max_restarts=100,
        start_method="fork",
        local_addr="127.0.0.1" if given.host is None else given.host.address,
    )
    try:
        elastic_launch(config, _worker)(given)
    except BaseException as error:  # also what a signal raises
        print(f"agent {given.number} ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


@dataclass
class Agents:
    """Agents that train as a configuration says; agent 0 has the store of the rendezvous."""

    folder: Path
    config: Path
    run: Path
    nodes: tuple[int, int] = (LEAST, MOST)
    waits_for_all: bool = False  # a generation has the most agents, so that the layout never changes
    own_machines: bool = False  # each agent is on a machine of its own, as far as states in memory go
    environment: dict[str, str] = field(default_factory=lambda: {elastic.OWN_STORE: "1"})
    port: int = field(default_factory=free_port)
    program: str = "train"  # the command of truestep, or a function of the configuration's path
    settings: dict[str, int] = field(default_factory=lambda: dict(SETTINGS))  # of the rendezvous
    hosts: Mapping[int, Host] = field(default_factory=dict)  # of agents; without, all are on this machine
    step_takes: float = STEP_TAKES
    # True where an agent may have been lost while they found one another: torch's agents then end, and docs/machines.md
    # promises that the same commands go on. Anywhere else that they end so is a fault.
    may_give_up: bool = False
    agents: dict[int, BaseProcess] = field(default_factory=dict)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, agent in self.agents.items():
            agent.kill()
            agent.join()
            for worker in self.workers(number):
                _end(worker)

    def start(self, *numbers: int, options: tuple[str, ...] = (), lacks_device: bool = False) -> None:
        """Start agents. They may have further options of the command, or no GPU for their ranks."""
        options += ("--model.device", "cuda") if lacks_device else ()
        for number in numbers:
            given = _Start(
                folder=str(self.folder),
                run=str(self.run),
                number=number,
                meeting=f"{self.hosts[0].address if self.hosts else '127.0.0.1'}:{self.port}",
                words=[self.program, str(self.config), *options],
                nodes=self.nodes,
                present=(self.nodes[self.waits_for_all], self.nodes[1]),
                own_machine=self.own_machines,
                settings=self.settings,
                environment=self.environment,
                host=self.hosts.get(number),
                lacks_device=lacks_device,
                step_takes=self.step_takes,
            )
            self.agents[number] = fork_context().Process(target=_agent, args=(given,))
            self.agents[number].start()

    def workers(self, number: int) -> list[int]:
        """The ids of the processes that an agent has started, the present one last."""
        file = self.folder / f"agent-{number}.workers"
        return [int(line) for line in file.read_text(encoding="utf-8").split()] if file.is_file() else []

    def signal(self, number: int, kind: signal.Signals) -> int:
        """Send a signal to the worker of an agent; return its process id."""
        self.until(lambda: bool(self.workers(number)))
        process = self.workers(number)[-1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, kind)
        return process

    def log(self) -> str:
        return "".join(file.read_text(encoding="utf-8") for file in sorted(self.folder.glob("agent-*.log")))

    @property
    def steps(self) -> int:
        return len(self.lines("ledger.jsonl"))

    @property
    def generations(self) -> list[dict[str, Any]]:
        return self.lines("generations.jsonl")

    def lines(self, name: str) -> list[dict[str, Any]]:
        file = self.run / name
        return read_lines(file) if file.is_file() else []

    def late_writes(self) -> list[str]:
        """The changes to files of the run that a generation made after a later one had begun to write. Notes why a
        generation ended have its name, and may come late."""
        read = [json.loads(line) for file in self.folder.glob("agent-*.writes") for line in file.open(encoding="utf-8")]
        writes = sorted(entry for entry in read if not _may_be_late(*entry[2:]))
        order = {line["id"]: line["generation"] for line in self.generations}
        began: dict[str, float] = {}
        for at, own, _, _, name in writes:
            if name == GENERATIONS:
                began.setdefault(own, at)
        assert began.keys() >= order.keys()
        return [
            f"{event} {name} by rank {rank} of generation {order.get(own, own)}"
            for at, own, rank, event, name in writes
            if own not in order or any(began[other] < at and order[other] > order[own] for other in order)
        ]

    def until(self, what: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.log()[-6000:]
            self._start_again()
            time.sleep(0.02)

    def _start_again(self) -> None:
        """Start the same agents again where all have ended, and none well, because torch's agents gave up."""
        if self.agents and all(agent.exitcode not in (None, 0) for agent in self.agents.values()):
            logs = {number: self.folder / f"agent-{number}.log" for number in self.agents}
            gave_up = [
                number
                for number, log in logs.items()
                if log.is_file() and any(end in log.read_text() for end in _GAVE_UP)
            ]
            assert not gave_up or self.may_give_up, f"agents {gave_up} gave up: {self.log()[-6000:]}"
            for number in gave_up:
                logs[number].rename(logs[number].with_suffix(f".{time.monotonic_ns()}.log"))
            self.start(*gave_up)

    def wait(self, *numbers: int, seconds: float = 300) -> list[int | None]:
        """The exit codes of these agents, when they have ended."""
        for number in numbers:
            self.agents[number].join(seconds)
        return [self.agents[number].exitcode for number in numbers]

    def end(self) -> None:
        """End the agents by a signal where they do not end by themselves."""
        for agent in self.agents.values():
            agent.join(10)
            agent.terminate()
            agent.join(60)

    def alive(self) -> list[int]:
        """The processes that these agents started and that are still there."""
        return [worker for number in self.agents for worker in self.workers(number) if lives(worker)]


def _end(process: int) -> None:
    """End a worker whose agent was killed; it was started here, and its id is known from it."""
    with contextlib.suppress(OSError):
        if b"forkserver" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)


def nothing_left(agents: Agents) -> None:
    assert agents.alive() == []
    assert not [path.name for path in agents.run.iterdir() if path.name.startswith(".generation")]
    assert not list((agents.run / "checkpoints").glob(".*"))


def descendants(process: int) -> set[int]:
    """The processes that another one has started, and those that they have, without what has ended."""
    found: set[int] = set()
    listed = Path(f"/proc/{process}/task/{process}/children")
    try:
        numbers = [int(word) for word in listed.read_text().split()]
    except OSError:
        return found
    for number in numbers:
        found |= ({number} if lives(number) else set()) | descendants(number)
    return found


def lives(process: int) -> bool:
    """False also for one that has ended and whose parent has not asked: a worker whose agent was killed may stay so."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def leaves_nothing(agents: Agents) -> Iterator[None]:
    """Check that of a run nothing is left: processes, which alone hold its shared memory, files of the run, temporary
    files."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)  # so that a process whose parent was killed is still found
    started = fork_context().Process(target=int)  # the process that others are forked from stays
    started.start()
    started.join()
    before = descendants(os.getpid())
    temporary = agents.folder / "temporary"
    temporary.mkdir()
    agents.environment["TMPDIR"] = str(temporary)
    try:
        yield
        nothing_left(agents)
        deadline = time.monotonic() + 20
        while (left := descendants(os.getpid()) - before) and time.monotonic() < deadline:
            time.sleep(0.1)
        said = [Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ") for number in left]
        assert not left, said
        assert not list(temporary.iterdir())
    finally:
        libc.prctl(_SUBREAPER, 0)
