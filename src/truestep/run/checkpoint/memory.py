"""Checkpoints in host memory, for ranks that are started again.

Such a checkpoint, here called a set, has the same files as a checkpoint on the disk. Each rank sends its part to two
keepers: one on its machine and one on the next machine, or both keepers of the only machine, which then share the
memory. When the keepers have all parts, the first rank sends the other files and tells all keepers that the set is
complete. They forget the set before it when the next set arrives. If a rank is lost, the restarted ranks read the set
from the remaining keepers.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from truestep.files.tensors import bytes_of
from truestep.files.whole import LineError
from truestep.process import progress as process_progress
from truestep.ranks.elastic import Agent
from truestep.ranks.group import Ranks
from truestep.ranks.keeper import Key
from truestep.ranks.keeper_client import Keeper, KeeperError, LocalKeeper, RemoteKeeper, default_limit, machine_key
from truestep.run.checkpoint.checksums import MANIFEST, entry_of, manifest_of, names_in
from truestep.run.checkpoint.comparison import Comparison
from truestep.run.checkpoint.staging import SharedStaging, Staged
from truestep.run.checkpoint.store import ModelFiles, Progress, Written, is_random, progress_files, random_name
from truestep.text import printable
from truestep.weights.remote_parts import RemotePart, forget_remote, note_remote
from truestep.weights.tensor_parts import FOLDER, INDEX, describe_parts, index_of, part_name

_SILENT = "a keeper did not answer, and is left out from then on"


class MemoryStore:
    """Writes checkpoints to keepers, as a store of `Saves`. Each checkpoint replaces the one before."""

    def __init__(self, memory: "Memory", staging: SharedStaging, last: Callable[[], Path | None]):
        self._memory, self._staging = memory, staging
        self.latest = last  # the last checkpoint on the disk, for messages
        self._said: set[str] = set()

    def final(self, step: int) -> Path:
        return Path(f"step-{step:08d}")

    def complete(self) -> list[Path]:
        return []

    def prepare(self, step: int) -> None: ...

    def write_part(self, step: int, rank: int, staged: Staged, random: dict[str, Any]) -> Written:
        """Send a rank's part and its random state to two keepers."""
        name, content = f"{FOLDER}/{part_name(rank)}", bytes_of(staged.image)
        others = {f"{FOLDER}/{random_name(rank)}": json.dumps(random).encode()}
        entries = {name: entry_of(content)}
        entries |= {other: entry_of(memoryview(small)) for other, small in others.items()}
        problems = self._memory.hand_over(step, others, {name: (content, self._staging.handle)})
        described = describe_parts(Path(f"/proc/self/fd/{self._staging.handle}"), staged.parts, part_name(rank))
        missing = len(problems) == len(self._memory.own)
        return Written(entries, described, problems[0] if problems else None, missing)

    def written(self, parts: Sequence[Written]) -> bool:
        problems = [part.problem for part in parts if part.problem]
        lost = any(part.missing for part in parts)
        for problem in dict.fromkeys(problems):
            self._say(f"{problem}{': the state of this step is not kept' if lost else ''}")
        return not lost

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            self._memory.say(f"warning: a copy in memory is missing: {problem}")

    def write_rest(self, progress: Progress, model: ModelFiles, parts: Sequence[Written]) -> Path | None:
        """Send the other files, and tell the keepers that the set is complete."""
        try:
            return self._write_rest(progress, model, parts)
        except (OSError, MemoryError) as error:
            self._say(f"{type(error).__name__}: {printable(error)}: the state of this step is not kept")
            return None

    def _write_rest(self, progress: Progress, model: ModelFiles, parts: Sequence[Written]) -> Path | None:
        files = {f"{FOLDER}/{INDEX}": index_of([part.tensors for part in parts]), **model.others}
        files |= {f"{FOLDER}/{name}": content for name, content in progress_files(progress).items()}
        known = {name: entry for part in parts for name, entry in part.files.items()}
        files[MANIFEST] = manifest_of(files, known)
        problems = self._memory.hand_over(progress.step, files, {})
        counts = len(problems) < len(self._memory.own)
        if counts:
            uncommitted = self._memory.commit(progress.step)
            counts, problems = len(uncommitted) < len(self._memory.everyone), problems + uncommitted
        for problem in dict.fromkeys(problems):
            self._say(f"{problem}{'' if counts else ': the state of this step is not kept'}")
        return self.final(progress.step) if counts else None

    def stands(self, step: int) -> None:
        self._memory.stands(step)

    def not_written(self, error: Exception) -> Written:
        """Describe why a copy is missing. The run goes on without it."""
        problem = f"{type(error).__name__}: {printable(error)}"
        return Written({}, b"", problem, missing=True)


@dataclass
class Recalled:
    """A checkpoint in memory, as a directory of links to files that this process holds open."""

    path: Path
    step: int
    handles: list[int] = field(default_factory=list)

    def close(self) -> None:
        forget_remote(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        while self.handles:
            os.close(self.handles.pop())


@dataclass(frozen=True)
class _Answer:
    """The addresses of the keepers on a rank's machine, and the sets that they hold."""

    place: str
    host: str
    ports: Mapping[int, int]  # by the number of the keeper
    sets: Mapping[int, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class _Held:
    """The places of a set's files: the machines that hold each file, and on this machine the number of the keeper."""

    key: Key
    places: Mapping[str, Sequence[str]]
    here: Mapping[str, int]


@dataclass
class Memory:
    """Access of one rank to the keepers of a generation."""

    ranks: Ranks
    run: Path
    agent: Agent
    limit: int
    generation: int
    secret: bytes
    say: Callable[[str], None] = lambda sentence: None
    own: Sequence[Keeper] = ()  # the keepers that get this rank's part
    everyone: Sequence[Keeper] = ()
    _answers: Sequence[_Answer] = ()
    _began: float = 0.0
    _silent: set[Keeper] = field(default_factory=set)
    _ports: dict[int, int] = field(default_factory=dict)
    _address: str = ""
    _several: bool = False  # True: the run has several machines
    _standing: Key | None = None  # the last complete set

    @staticmethod
    def open(ranks: Ranks, run: Path, agent: Agent, limit: int | None, generation: int) -> "Memory":
        """Start the keepers of this machine that are not running, and ask all keepers which sets they hold. Every rank
        calls this."""
        secret = ranks.share(lambda: secrets.token_bytes(32))
        memory = Memory(ranks, run, agent, limit or default_limit(), generation, secret)
        places = ranks.gather(machine_key())
        distinct = list(dict.fromkeys(places))
        several = len(distinct) > 1
        memory._address = memory._own_address(places[0]) if several else ""
        ports, sets = {}, {}
        for number in (0, 1):
            with contextlib.suppress(KeeperError):
                reply = memory._hello(number, start=number == 0 or not several)
                ports[number], sets[number] = reply["port"], reply["sets"]
        memory._ports = ports
        memory._several = several
        memory._answers = ranks.gather(_Answer(machine_key(), memory._address, ports, sets))
        firsts = {answer.place: answer for answer in reversed(memory._answers)}
        memory.everyone = [
            memory._keeper(firsts[name], number) for name in distinct for number in ((0,) if several else (0, 1))
        ]
        partner = distinct[(distinct.index(machine_key()) + 1) % len(distinct)]
        memory.own = [memory._keeper(firsts[name], number) for name, number in memory._pair(machine_key(), partner)]
        return memory

    def _own_address(self, first: str) -> str:
        """Return the address at which other machines reach this one, "" if there is none. If the first machine knows
        itself only as localhost, it takes the address that the others use."""
        own, meeting = _addresses()
        others = [there for where, there in self.ranks.gather((machine_key(), meeting)) if where != first]
        if machine_key() == first and _only_here(own):
            return next((address for address in others if not _only_here(address)), own)
        return own

    @staticmethod
    def _pair(here: str, partner: str) -> list[tuple[str, int]]:
        """Return the keepers for a part: one on this machine and one on its partner, or both on the only machine."""
        return [(here, 0), (partner, int(partner == here))]

    def _keeper(self, answer: _Answer, number: int) -> Keeper:
        if answer.place == machine_key():
            return LocalKeeper.of(self.run, number)
        return RemoteKeeper(answer.host, answer.ports.get(number, 0), self.secret)

    def _hello(self, number: int, start: bool = True) -> dict[str, Any]:
        """Introduce this rank to a keeper of this machine. With `start`, start the keeper if it is not running."""
        here = LocalKeeper.of(self.run, number)
        processes = [os.getpid(), self.agent.number]
        fields: dict[str, Any] = {"generation": self.generation, "processes": processes, "address": self._address}
        fields |= {"port": self._ports.get(number, 0), "secret": self.secret.hex()}
        for attempt in (1, 2):
            try:
                with here.connected() as connection:
                    return connection.ask("hello", **fields)
            except KeeperError as error:
                if attempt == 2 or not start or not isinstance(error.__cause__, ConnectionRefusedError):
                    raise
                here.start(self.limit, processes)
        raise AssertionError

    def _end(self, number: int) -> None:
        with contextlib.suppress(KeeperError), LocalKeeper.of(self.run, number).connected() as connection:
            connection.ask("end", generation=self.generation)

    def end(self) -> None:
        """End the keepers of this machine, at the end of the run."""
        for number in (0, 1):
            self._end(number)

    def begin(self, began: float) -> None:
        """Begin to keep sets of this generation, which began at the time `began`. If the generation does not go on from
        a state in memory, all older sets are forgotten, so that no later generation goes on from one."""
        self._began = began
        if self._standing is None:
            self.forget()

    def forget(self, everywhere: bool = False) -> None:
        """Make the keepers of this machine, or of all machines, forget their sets."""
        own = [LocalKeeper.of(self.run, number) for number in (0, 1)]
        for keeper in dict.fromkeys([*own, *(self.everyone if everywhere else ())]):
            with contextlib.suppress(KeeperError), keeper.connected() as connection:
                connection.ask("forget", generation=self.generation)

    def stands(self, step: int) -> None:
        """Record that a set is complete. Called on every rank."""
        if self._several and (self._standing is None or self._standing[:2] != self._key(step)[:2]):
            self._end(1)  # the second keeper, which was started when this machine was the only one
        self._standing = self._key(step)

    def _key(self, step: int) -> Key:
        return self.generation, self._began, step

    def hand_over(
        self, step: int, small: Mapping[str, bytes], large: Mapping[str, tuple[memoryview, int]]
    ) -> list[str]:
        """Send files to the keepers of this rank. `large`: files in memory that a keeper on this machine can share.
        Return a sentence for each keeper that does not have all files."""

        def put(keeper: Keeper) -> None:
            if isinstance(keeper, LocalKeeper):  # start it again if it was lost
                self._hello(int(keeper.name.rpartition("-")[2]))
            with keeper.connected() as connection:
                for name, content in small.items():
                    connection.put(self._key(step), name, content, standing=self._standing)
                for name, (view, handle) in large.items():
                    connection.put(self._key(step), name, view, handle, standing=self._standing)

        return self._each(self.own, put)

    def commit(self, step: int) -> list[str]:
        def commit(keeper: Keeper) -> None:
            with keeper.connected() as connection:
                connection.ask("commit", set=list(self._key(step)))

        return self._each(self.everyone, commit)

    def _each(self, keepers: Sequence[Keeper], do: Callable[[Keeper], None]) -> list[str]:
        problems = []
        for keeper in keepers:
            try:
                if keeper in self._silent:
                    raise KeeperError(_SILENT)
                process_progress.made("parts handed over to keepers")
                do(keeper)
            except KeeperError as error:
                if isinstance(error.__cause__, TimeoutError):  # waiting for it again would delay each step
                    self._silent.add(keeper)
                problems.append(str(error))
        return problems

    def recall(self, valid: Callable[[Key], bool], least: int, folder: Path) -> tuple[Recalled | None, list[str]]:
        """Find the newest complete set of at least this step, and compare it with its checksums. Return it, and a
        sentence for each set that cannot be used. Every rank calls this."""
        notes: list[str] = []
        for key in self._complete(valid, least):
            held = self._where(key)
            recalled: Recalled | str = self._try(partial(_new_directory, folder, key[2]))
            if isinstance(recalled, str):
                return None, [*notes, f"the state of step {key[2]} in memory cannot be used: {recalled}"]
            try:
                problem = self._read(held, recalled)
            except BaseException:
                recalled.close()
                raise
            if problem is None:
                self._standing = key
                return recalled, notes
            recalled.close()
            notes.append(f"the state of step {key[2]} in memory cannot be used: {problem}")
        return None, notes

    def _complete(self, valid: Callable[[Key], bool], least: int) -> list[Key]:
        told = [one for answer in self._answers for sets in answer.sets.values() for one in sets]
        keys = {_key_of(one) for one in told if one["complete"]}
        fit = [key for key in keys if key[2] >= least and valid(key)]
        return sorted(fit, key=lambda key: (key[2], key[0]), reverse=True)

    def _where(self, key: Key) -> _Held:
        places: dict[str, list[str]] = {}
        here: dict[str, int] = {}
        for answer in self._answers:
            for number, sets in sorted(answer.sets.items()):
                for name in [name for one in sets if _key_of(one) == key for name in one["files"]]:
                    if answer.place not in places.setdefault(name, []):
                        places[name].append(answer.place)
                    if answer.place == machine_key():
                        here.setdefault(name, number)
        return _Held(key, places, here)

    def _read(self, held: _Held, recalled: Recalled) -> str | None:
        """Make the directory of a set on every rank; return what is wrong with the set."""
        if MANIFEST not in held.places:
            return "its manifest is lost"
        manifest = self._try(lambda: self._whole(held, MANIFEST))
        names = self._try(lambda: names_in(manifest)) if isinstance(manifest, bytes) else manifest
        if isinstance(names, str):
            return names
        lost = [name for name in names if name not in held.places]
        if lost:
            return f"{lost[0]} is lost"
        (recalled.path / MANIFEST).write_bytes(manifest)  # before anything is compared with it
        bad = self._bad([name for name in names if name in held.here], held, recalled)
        unread = next((damage for (_, name), damage in bad.items() if name == MANIFEST), None)
        if unread is not None:
            return unread
        good = {name: [where for where in held.places[name] if (where, name) not in bad] for name in names}
        for name, places in good.items():
            if not places:
                return bad[held.places[name][0], name]
        remote = {name: places[0] for name, places in good.items() if machine_key() not in places}
        problem = self._try(lambda: self._note_remote(held.key, remote, recalled.path))
        return problem if isinstance(problem, str) else None

    def _try(self, do: Callable[[], Any]) -> Any:
        """Call `do` and return its result. If it failed on any rank, return that rank's error as a sentence on all
        ranks."""
        try:
            result, problem = do(), None
        except (KeeperError, LineError, OSError, KeyError, TypeError, AttributeError) as error:
            result, problem = None, printable(error)
        problems = [each for each in self.ranks.gather(problem) if each is not None]
        return problems[0] if problems else result

    def _whole(self, held: _Held, name: str) -> bytes:
        """Read a small file of a set."""
        if name in held.here:
            with self._at(held.here[name]).connected() as connection:
                handle = connection.open(held.key, name)
            with os.fdopen(handle, "rb") as file:
                return os.pread(file.fileno(), os.fstat(handle).st_size, 0)
        keeper, size = self._holder(held.key, name, held.places[name][0])
        return bytes(RemotePart(keeper, held.key, name).read(0, size))

    def _at(self, number: int) -> LocalKeeper:
        return LocalKeeper.of(self.run, number)

    def _holder(self, key: Key, name: str, where: str) -> tuple[RemoteKeeper, int]:
        """Return the keeper of another machine that holds a file, and the file's size."""
        answer = next(answer for answer in self._answers if answer.place == where)
        for number, sets in answer.sets.items():
            for one in sets:
                if _key_of(one) == key and name in one["files"]:
                    return RemoteKeeper(answer.host, answer.ports[number], self.secret), one["files"][name]
        raise KeeperError(f"no keeper of that machine has {name}")

    def _bad(self, names: Sequence[str], held: _Held, recalled: Recalled) -> dict[tuple[str, str], str]:
        """Link the files that this machine's keepers hold, and compare them with their checksums: each rank of the
        machine reads a part. Return a sentence for each damaged file, by machine and name."""
        lacking = self._link(names, held, recalled)
        comparison = Comparison(recalled.path, set(names))
        beside = [rank for rank, answer in enumerate(self._answers) if answer.place == machine_key()]
        told = comparison.read([(beside.index(self.ranks.rank), len(beside))])
        told = replace(told, problems={**told.problems, **lacking})
        here = [each for where, each in self.ranks.gather((machine_key(), told)) if where == machine_key()]
        found = self.ranks.gather((machine_key(), comparison.damages(here)))
        return {(where, name): damage for where, damages in found for name, damage in damages.items()}

    def _link(self, names: Sequence[str], held: _Held, recalled: Recalled) -> dict[str, str]:
        """Link files that this machine's keepers hold. Return a sentence for each file that cannot be linked."""
        lacking: dict[str, str] = {}
        for name in names:
            try:
                with self._at(held.here[name]).connected() as connection:
                    handle = connection.open(held.key, name)
            except KeeperError as error:
                lacking[name] = str(error)
                continue
            recalled.handles.append(handle)
            (recalled.path / name).symlink_to(f"/proc/self/fd/{handle}")
        return lacking

    def _note_remote(self, key: Key, remote: Mapping[str, str], folder: Path) -> None:
        """Record the places of parts that only other machines hold, and copy the small files that this rank reads."""
        parts = {}
        needed = {random_name(0), random_name(self.ranks.rank)}
        for name, where in remote.items():
            if is_random(Path(name).name) and Path(name).name not in needed:
                continue
            keeper, size = self._holder(key, name, where)
            part = RemotePart(keeper, key, name)
            if Path(name).suffix == ".safetensors":
                parts[Path(name).name] = part
            else:
                (folder / name).unlink(missing_ok=True)
                (folder / name).write_bytes(part.read(0, size))
        for name in parts:
            (folder / FOLDER / name).unlink(missing_ok=True)
        note_remote(folder, parts)


def _key_of(one: Mapping[str, Any]) -> Key:
    generation, began, step = one["set"]
    return generation, began, step


def _new_directory(folder: Path, step: int) -> Recalled:
    """Make a directory for the links to a state's files. If a kill leaves it there, a later save removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".step-{step:08d}-", suffix=".partial", dir=folder))
    (made / FOLDER).mkdir()
    return Recalled(made, step)


def _addresses() -> tuple[str, str]:
    """Return this machine's address as the ranks' rendezvous (MASTER_ADDR) sees it, and the rendezvous's address."""
    with contextlib.suppress(OSError):
        meeting = os.environ.get("MASTER_ADDR", "localhost")
        family, _, _, _, there = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0]), str(there[0])
    return "", ""


def _only_here(address: str) -> bool:
    return not address or address.startswith("127.") or address == "::1"
