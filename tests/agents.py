"""Agents of torch's elastic launcher on loopback, each in a process of its own, with workers that train.

The agents are torch's own (`elastic_launch`), forked from a process that has imported all; their workers are functions
that they fork, in place of commands that would import everything again. Everything that was started ends with the
context, by its process id.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import truestep.run.train as training
from small_runs import read_lines
from truestep.commands.cli import main
from truestep.ranks import elastic, keeper_client
from truestep.ranks.forks import fork_context
from truestep.run.checkpoint import memory as memories
from truestep.run.trainer import Trainer

LEAST, MOST = 2, 5
_GAVE_UP = "ends: DistStoreError"
STEP_TAKES = 0.05  # seconds more than it would: so that steps are there to be interrupted


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _worker(folder: str, number: int, words: list[str], nodes: tuple[int, int], own_machine: bool) -> None:
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # those of the agent that forked it
        signal.signal(kind, signal.SIG_DFL)
    agent = os.getppid()
    training.find_agent = lambda: elastic.agent_of(agent, *nodes)
    with (Path(folder) / f"agent-{number}.workers").open("a", encoding="utf-8") as file:
        print(os.getpid(), file=file, flush=True)
    if own_machine:  # what keepers of states go by
        memories.machine_key = keeper_client.machine_key = lambda: f"machine {number}"  # type: ignore[assignment]
    made = Trainer._train

    def slowly(self: Trainer, *arguments: Any) -> None:
        time.sleep(STEP_TAKES)
        made(self, *arguments)

    Trainer._train = slowly  # type: ignore[method-assign]
    if words[0] != "train":  # a function of a test, by its import path
        module, _, name = words[0].partition(":")
        getattr(importlib.import_module(module), name)(*words[1:])
    else:
        main(words, prog_name="truestep", standalone_mode=False)


def _agent(
    folder: str,
    number: int,
    port: int,
    words: list[str],
    nodes: tuple[int, int],
    present: tuple[int, int],
    own_machine: bool,
    environment: dict[str, str],
) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(environment)
    log = os.open(f"{folder}/agent-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    config = LaunchConfig(
        *present,
        nproc_per_node=1,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={
            "is_host": number == 0,
            "join_timeout": 600,
            "last_call_timeout": 8,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
        },
        max_restarts=100,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, _worker)(folder, number, words, nodes, own_machine)
    except BaseException as error:  # also what a signal raises
        print(f"agent {number} ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
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
    agents: dict[int, BaseProcess] = field(default_factory=dict)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, agent in self.agents.items():
            agent.kill()
            agent.join()
            for worker in self.workers(number):
                _end(worker)

    def start(self, *numbers: int, options: tuple[str, ...] = ()) -> None:
        """Start agents. They may have further options of the command."""
        for number in numbers:
            words = [self.program, str(self.config), *options]
            least = self.nodes[self.waits_for_all], self.nodes[1]
            given = str(self.folder), number, self.port, words, self.nodes, least, self.own_machines, self.environment
            self.agents[number] = fork_context().Process(target=_agent, args=given)
            self.agents[number].start()

    def workers(self, number: int) -> list[int]:
        """The ids of the processes that an agent has started, the present one last."""
        file = self.folder / f"agent-{number}.workers"
        return [int(line) for line in file.read_text(encoding="utf-8").split()] if file.is_file() else []

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Send a signal to the worker of an agent."""
        self.until(lambda: bool(self.workers(number)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.workers(number)[-1], kind)

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

    def until(self, what: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.log()[-6000:]
            self._start_again()
            time.sleep(0.02)

    def _start_again(self) -> None:
        """Start the same agents again where torch's agents gave up, since one was lost while they found one another.

        docs/machines.md promises no more for that."""
        if self.agents and all(agent.exitcode is not None for agent in self.agents.values()):
            logs = {number: self.folder / f"agent-{number}.log" for number in self.agents}
            gave_up = [number for number, log in logs.items() if log.is_file() and _GAVE_UP in log.read_text()]
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
        return [worker for number in self.agents for worker in self.workers(number) if Path(f"/proc/{worker}").exists()]


def _end(process: int) -> None:
    """End a worker whose agent was killed; it was started here, and its id is known from it."""
    with contextlib.suppress(OSError):
        if b"forkserver" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)
