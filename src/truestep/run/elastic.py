"""Runs whose ranks come and go, under torch's elastic launcher.

A generation is the run between two changes of its ranks. When a rank is lost, all others end too; the agents of the
launcher then start the next generation with the ranks that are there, and it goes on from the last checkpoint. The file
generations.jsonl of the run has a line for each generation: its ranks, why the one before ended, and what was lost.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.errors import TruestepError
from truestep.files.whole import append_json_line, lines_from_the_end, read_json_lines, scan_lines
from truestep.ranks.axes import RankError, RankLayout
from truestep.ranks.elastic import MAX_RESTARTS, OWN_STORE, SHARES_STORE, Agent, RankLostError, generation_id
from truestep.ranks.group import NoDeviceError, Ranks
from truestep.ranks.keeper import Key
from truestep.ranks.processes import machine
from truestep.ranks.watch import ENDED_BY_ANOTHER, Watch, ends_run, raised_between_ranks
from truestep.run.assemble.policy import layout_of
from truestep.run.assemble.sources import own_part
from truestep.run.checkpoint.memory import Memory, Recalled
from truestep.run.checkpoint.store import CheckpointStore, step_of
from truestep.run.directory import LockedError, RunDirectory
from truestep.text import printable

GENERATIONS = "generations.jsonl"
MARKS = ("generation", "ranks", "lost_seconds")  # metrics
# A file that says why a generation ended. The first rank that knows writes it; the next generation removes it.
_NOTE = ".generation-ended-"
_MOST_FAILURES = 2  # failures of an agent's ranks after the same checkpoint, at which the agent leaves
_LEAST_RESTARTS = 10
_FROM = {"memory": "memory", "disk": "the disk"}
# Seconds between checks for a note while ranks connect. They are long because torch's agents need time to find one
# another: if an agent leaves a rendezvous round before the others have read it, the run ends.
_LOOKS = 15.0
_NOTE_TAKES = 10.0  # most seconds to wait for a note's write: it may hang on a network disk without a network
JOIN_PATIENCE = 180.0  # seconds in which all ranks must be connected
_LOCK_PATIENCE = 120.0  # seconds to wait until an ending rank releases the run's lock: a lease of NFS lasts 90
_MOST_TO_FAIL = 20.0  # a rank lost more seconds than this after a stop signal was killed by its agent, and did not fail
_SIGNALS_TOGETHER = 5.0  # stop signals within so many seconds count as one: a launcher and SLURM may both send one


class ElasticError(TruestepError):
    """The configuration does not allow the number of ranks to change."""


def check_elastic(config: Config, agent: Agent) -> None:
    """Raise if the results of the run would depend on how many ranks there are."""
    for problem in (*_depends_on_ranks(config), *_of_launcher(config, agent)):
        raise ElasticError(f"{problem} (the launcher was started with --nnodes {agent.least}:{agent.most})")


def _depends_on_ranks(config: Config) -> Iterator[str]:
    schedule, sampler = config.schedule, config.sampler
    changes = "the number of ranks may change"
    if schedule.docs_per_step == 0:
        yield f"{changes}, and schedule.docs_per_step: 0 would change steps with it: set schedule.docs_per_step"
    if schedule.overshoot == "keep":
        yield f"{changes}, and schedule.overshoot: keep would change steps with it: set schedule.overshoot: carry"
    if own_part(config):
        yield f"{changes}, and data.path with {{rank}} gives each rank its own files: name files that all ranks see"
    if isinstance(sampler, ServerSampler) and sampler.start is not None:
        yield "sampler.start starts servers beside the first rank, which may change: start them, and set sampler.urls"


def _of_launcher(config: Config, agent: Agent) -> Iterator[str]:
    if config.parallel.data_shard != -1:
        given = config.parallel.data_shard
        yield f"the number of ranks may change, and parallel.data_shard: {given} fixes it: set parallel.data_shard: -1"
    if not config.checkpoint.lock:
        yield "checkpoint.lock: false would let two generations write the run's directory: it needs a disk with locks"
    if os.environ.get(SHARES_STORE) == str(True):
        yield (
            f"set {OWN_STORE}=1 for torchrun, on every machine: otherwise its agents do not find each other after the "
            "first agent has left"
        )
    if agent.restarts < _LEAST_RESTARTS:
        yield (
            f"--max-restarts {agent.restarts} is too few, since every loss or joining of a rank is a restart: "
            f"set --max-restarts {MAX_RESTARTS}"
        )
    layout: RankLayout = layout_of(config)
    for agents in range(agent.least, agent.most + 1):
        try:
            layout.over(agents * agent.processes)
        except RankError as error:
            yield f"with {agents} agents of {agent.processes} process{'es' * (agent.processes > 1)}: {error}"


@dataclass
class Elastic:
    """What one rank does in a run whose ranks come and go."""

    agent: Agent
    path: Path  # the run's directory
    ranks: Ranks = field(default_factory=Ranks)
    agents: Sequence[str] = ()  # the agent of each rank of this generation
    watch: Watch | None = None
    directory: RunDirectory | None = None  # locked by the first rank
    asked_at: Callable[[], float] = lambda: math.inf  # `time.monotonic` when this rank was first asked to stop
    keeps: bool = False  # True: the last state is kept in memory
    limit: int | None = None  # the most bytes that a keeper holds
    memory: Memory | None = None
    recalled: Recalled | None = None  # the state that the generation goes on from, if it was in memory
    _earlier: int = field(init=False)  # generations that had begun when this process started

    def __post_init__(self) -> None:
        self._earlier = 0
        with contextlib.suppress(OSError):
            self._earlier = len(_ids(self.path / GENERATIONS))

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """End this process if another rank ends before all are connected. Only a note of that rank tells of it."""
        note, connected = self.path / f"{_NOTE}{generation_id()}", threading.Event()

        def look() -> None:
            while not connected.wait(_LOOKS):
                if note.exists():
                    reason = _read(note).get("reason", "it did not say why")
                    reason = f"another rank has ended before all were connected: {reason}"
                    print(f"error: rank {_own_rank()} ends: {reason}", file=sys.stderr, flush=True)
                    self.give_up(reason)
                    os._exit(ENDED_BY_ANOTHER)

        looking = threading.Thread(target=look, daemon=True, name="connecting")
        looking.start()
        try:
            yield
        finally:
            connected.set()
            looking.join()

    def give_up(self, reason: str) -> None:
        """Write why this rank ends before all are connected, and end its agent if this was its last start."""
        self._before_exit(reason, False)

    def count_beside(self, ranks: Ranks) -> None:
        """Set LOCAL_WORLD_SIZE to the number of ranks on this machine, which share its memory and cores. The launcher
        sets it to the ranks of one agent. Every rank calls this."""
        machines = ranks.gather(machine())
        os.environ["LOCAL_WORLD_SIZE"] = str(machines.count(machine()))

    def joined(self, ranks: Ranks, watch: Watch) -> tuple[dict[str, float], str]:
        """Begin a generation with these ranks. Return metrics for its steps, and a message about it. Raise on all ranks
        if the ranks of an agent have failed too often."""
        self.ranks, self.watch = ranks, watch
        watch.before_exit = self._before_exit
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, self._told_to_end)
        self.agents = ranks.gather(self.agent.name)
        if ranks.size < self.agent.least * self.agent.processes:  # agents left while the launcher counted them
            raise RankLostError(
                f"{ranks.size} ranks are too few, since {self.agent.least} agents are needed: all wait for more"
            )
        self.directory = RunDirectory(self.path, writes=ranks.first, patience=_LOCK_PATIENCE)
        lines, on_disk = ranks.share(self._before)
        notes = self._recall(lines, on_disk) if self.keeps else []
        step = on_disk if self.recalled is None else self.recalled.step
        line = ranks.share(lambda: self._begin(lines, step))
        if self.memory is not None:
            self.memory.begin(line["time"])
        if line["unfit"]:
            if self.agent.name in line["unfit"]:
                self.agent.leave()
            names = ", ".join(line["unfit"])
            raise RankLostError(f"{names} failed {_MOST_FAILURES} times without a checkpoint in between, and leaves")
        marks: dict[str, float] = {name: float(line[name]) for name in MARKS if name in line}
        return marks, "; ".join([_sentence(line, lines[-1] if lines else None), *notes])

    def _before(self) -> tuple[list[dict[str, Any]], int]:
        """Lock the run, since a rank of the generation before may still write it. Return the lines of earlier
        generations, and the step of the last checkpoint on the disk. Called on the first rank."""
        directory = self.directory or RunDirectory(self.path)
        directory.check()
        try:
            directory.lock()
        except LockedError as error:
            raise RankLostError(f"{error}; all try again") from error
        file = self.path / GENERATIONS
        latest = CheckpointStore(directory.checkpoints, 1).latest()
        return read_json_lines(file) if file.is_file() else [], 0 if latest is None else step_of(latest)

    def _recall(self, lines: Sequence[dict[str, Any]], on_disk: int) -> list[str]:
        """Look for a state in memory that is not older than the last checkpoint on the disk. Return a sentence for each
        state that cannot be used. Every rank calls this."""
        number = lines[-1]["generation"] + 1 if lines else 1
        self.memory = Memory.open(self.ranks, self.path, self.agent, self.limit, number)
        assert self.directory is not None
        stands = partial(still_stands, lines=lines)
        self.recalled, notes = self.memory.recall(stands, max(1, on_disk), self.directory.checkpoints)
        return notes

    def _begin(self, lines: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
        """Write and return the line of this generation, which goes on after `step`. Called on the first rank."""
        note = self._read_note([line.get("id", "") for line in lines])
        agents, before = list(dict.fromkeys(self.agents)), set(lines[-1]["agents"]) if lines else set()
        failed = note.get("failed", [])
        failures = [name for line in lines if line["step"] == step for name in line["failed"]] + failed
        line: dict[str, Any] = {
            "generation": lines[-1]["generation"] + 1 if lines else 1,
            "id": generation_id(),
            "time": time.time(),
            "step": step,
            "ranks": self.ranks.size,
            "agents": agents,
            "left": sorted(before - set(agents)),
            "joined": sorted(set(agents) - before) if lines else [],
            "failed": failed,
            "reason": note.get("reason"),
            "unfit": [name for name in agents if failures.count(name) >= _MOST_FAILURES],
        }
        if self.keeps and step:
            line["from"] = "disk" if self.recalled is None else "memory"
        if before & set(agents):  # otherwise all launchers were started anew
            line |= _lost(RunDirectory(self.path), step, lines[-1]["time"])
        append_json_line(self.path / GENERATIONS, line)
        self._remove_notes()
        return line

    def unreadable(self, error: Exception) -> RankLostError:
        """Make all keepers forget the state that this generation went on from, because it cannot be read. Return the
        error that begins another generation."""
        assert self.memory is not None and self.recalled is not None
        self.memory.forget(everywhere=True)
        return RankLostError(
            f"the state of step {self.recalled.step} in memory cannot be read: {error}. Keepers forget it, and the run "
            "goes on from the disk"
        )

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Write why this generation ends, if the block raises. End the agent too if its rank leaves or the run is
        over."""
        before = signal.getsignal(signal.SIGTERM)
        try:
            yield
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, before)
        except BaseException as error:
            own = isinstance(error, Exception) and not isinstance(error, RankLostError)
            own = own and not raised_between_ranks(error)
            failure = f"rank {_own_rank()} failed: {type(error).__name__}: {error}"
            cause = error.cause if isinstance(error, RankLostError) else str(error)
            self.agent.leave_if_cut_off()  # before the note
            self.note(failure if own else cause, own)
            over = self.watch is not None and self.watch.over  # another rank's error ends the run
            if ends_run(error) or isinstance(error, NoDeviceError) or over or self.agent.last_start:
                self.agent.leave()
            raise
        finally:
            if self.recalled is not None:
                self.recalled.close()

    def ended(self, stopped: bool, notice: Path | None) -> None:
        """End a generation in which no rank failed. `notice`: a file that exists if this machine will be shut down."""
        leaves = stopped and notice is not None and notice.exists()
        if leaves:
            self.note(f"rank {self.ranks.rank} leaves: {notice} announces the end of its machine", own=False)
        if stopped and (leaves or self.agent.last_start):
            self.agent.leave()
        if not stopped and self.ranks.first:
            self._remove_notes()
        if not stopped and self.memory is not None:
            self.memory.end()

    def _told_to_end(self, number: int, frame: object) -> None:
        """Handle SIGTERM from the agent before the first step, or a second one: end all ranks at once."""
        if time.monotonic() < self.asked_at() + _SIGNALS_TOGETHER:
            return
        reason = f"rank {self.ranks.rank} was told to end by its launcher"
        if self.watch is not None:
            self.watch.end_all(reason)
        self.note(reason, own=False)
        os._exit(128 + number)

    def _before_exit(self, reason: str, over: bool) -> None:
        self.agent.leave_if_cut_off()  # before the note
        self.note(reason, False)
        if over or self.agent.last_start:
            self.agent.end()

    def note(self, reason: str, own: bool) -> None:
        """Write the note of this generation, which says why it ends. Write none if another rank has, or if a later
        generation has begun, since that would not read or remove it. `own`: this rank failed. Return after
        `_NOTE_TAKES` at the latest."""
        gone = self.watch.lost if self.watch is not None and not own else ()
        if time.monotonic() > self.asked_at() + _MOST_TO_FAIL:
            gone = ()  # an agent kills ranks that have not ended 30 s after a stop signal
        failed = [self.agent.name] if own else [self.agents[rank] for rank in gone if rank < len(self.agents)]
        file = self.path / f"{_NOTE}{generation_id()}"

        def write() -> None:
            with contextlib.suppress(OSError):
                self.path.mkdir(parents=True, exist_ok=True)  # a run that is starting may not have made it yet
                if generation_id() in _ids(self.path / GENERATIONS)[self._earlier : -1]:  # a later generation has begun
                    return
                with file.open("x", encoding="utf-8") as opened:
                    json.dump({"reason": printable(reason, 500), "failed": failed}, opened)

        writing = threading.Thread(target=write, daemon=True, name="note")
        writing.start()
        writing.join(_NOTE_TAKES)

    def _read_note(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the note of the last of these generations, or of a later one that never began; {} if there is none.
        Notes of earlier generations are not read: a suspended rank of one may have written its note late."""
        notes = {file.name.removeprefix(_NOTE): file for file in self.path.glob(f"{_NOTE}*")}
        last = ids[-1] if ids else None
        later = [name for name in notes if name not in ids]
        for file in (notes[name] for name in [last, *later] if name in notes):
            if content := _read(file):
                return content
        return {}

    def _remove_notes(self) -> None:
        for file in self.path.glob(f"{_NOTE}*"):
            file.unlink(missing_ok=True)


def _ids(generations: Path) -> list[Any]:
    """Return the ids of all generations that have begun. Two may have the same id, since it is a port."""
    return [line.value.get("id") for line in scan_lines(generations) if line.value is not None]


def _read(note: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):  # a rank was killed while it wrote
        return dict(json.loads(note.read_text(encoding="utf-8")))
    return {}


def _own_rank() -> int:
    """Return this process's rank. It is known before the process has connected."""
    return int(os.environ.get("RANK", "0"))


def still_stands(key: Key, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a generation of this run made this state, and no later generation went on from an earlier step."""
    generation, began, step = key
    its_own = any(line["generation"] == generation and line["time"] == began for line in lines)
    return its_own and all(line["step"] >= step for line in lines if line["generation"] > generation)


def _lost(directory: RunDirectory, step: int, began: float) -> dict[str, Any]:
    """Count the steps that are rolled back, and the seconds since the step that the run goes on from. `began`: when the
    generation before began. If it wrote no step, earlier losses are not counted again."""
    if not directory.ledger.is_file():
        return {}
    # documents seen after the last step, and after each earlier one back to the one that the run goes on from
    seen: list[int] = []
    written = directory.ledger.stat().st_mtime
    steps, seconds = 0, max(0.0, time.time() - max(written, began))
    if written < began:
        return {"lost_steps": 0, "lost_documents": 0, "lost_seconds": round(seconds, 3)}
    for line in lines_from_the_end(directory.ledger):
        if line.value is None or not line.value.get("documents"):
            continue
        seen.append(line.value["documents_seen"])
        if line.value["step"] <= step:
            break
        steps += 1
    else:
        seen.append(0)
    for line in lines_from_the_end(directory.metrics):
        if line.value is None or line.value["step"] <= step:
            break
        seconds += line.value["step_time"]
    return {"lost_steps": steps, "lost_documents": seen[0] - seen[-1], "lost_seconds": round(seconds, 3)}


def _sentence(line: dict[str, Any], before: dict[str, Any] | None) -> str:
    many = f"{line['ranks']} rank{'s' * (line['ranks'] > 1)}"
    said = [f"generation {line['generation']}: {many}" + (f", {before['ranks']} before" if before else "")]
    for what in ("left", "joined"):
        if line[what]:
            said.append(f"{what}: {', '.join(line[what])}")
    if line["reason"]:
        said.append(f"the one before ended because {line['reason']}")
    if "from" in line:
        said.append(f"it goes on after step {line['step']} from {_FROM[line['from']]}")
    if line.get("lost_steps"):
        made = f"{line['lost_steps']} step{'s' * (line['lost_steps'] > 1)} ({line['lost_documents']} documents)"
        said.append(f"{made} {'are' if line['lost_steps'] > 1 else 'is'} made again")
    if "lost_seconds" in line:
        said.append(f"{line['lost_seconds']:.0f} s lost")
    return "; ".join(said)
