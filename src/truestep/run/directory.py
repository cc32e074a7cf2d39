"""The files of a run: metrics, ledger, evaluations, rejected records, configuration, checkpoints.

Each step appends lines. A restart rolls every file back to its checkpoint, so that no step is in a file twice.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from truestep.errors import MachineError, TruestepError
from truestep.files.disks import writing
from truestep.files.whole import (
    Line,
    append_json_line,
    cut_file,
    lines_by_step,
    lines_from_the_end,
    sync_files,
    write_json,
    write_text_whole,
    write_whole,
)
from truestep.process import progress
from truestep.rollouts.kept import files as kept_files
from truestep.rollouts.kept import records
from truestep.rollouts.rejects import write_rejected
from truestep.text import printable
from truestep.types import PutAside, Rejected, StepPlan

_REPLACED = "config-until-"  # config-until-00000012.yaml has the options of the steps up to 12
_END = 1 << 20  # bytes at a file's beginning and at its end that are hashed
_UNSURE = 10.0  # seconds in which a network disk may fail to say who has the lock
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # the errors of flock when another process holds the lock


class RunError(TruestepError):
    """The run's directory cannot be used."""


class LockedError(RunError, MachineError):
    """Another process writes the run."""


class RunDirectory:
    """The files of a run. Only the first rank writes them; `writes` is False on the other ranks."""

    def __init__(self, path: Path, writes: bool = True, locks: bool = True, patience: float = 0.0):
        self.path = path
        self.writes = writes
        self._locks = locks
        self._patience = patience  # seconds to wait for a lock of a process that is ending
        self.ledger = path / "ledger.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluation.jsonl"
        self.rejected = path / "rejected.jsonl"
        self.warnings = path / "warnings.jsonl"
        self.weights = path / "weights.jsonl"  # digests and norms of the weights after each step
        self.printed = path / "rewards.log"
        self.config = path / "config.yaml"
        self.rollouts = path / kept_files.FOLDER
        self.records = path / records.FOLDER
        self.checkpoints = path / "checkpoints"
        self._first_weights = path / "first_weights.json"
        self._lock: TextIO | None = None
        # In the file of the lock: another process that locks the run writes its own.
        self.token = secrets.token_hex(8)
        self._coming: str | None = None  # the options of this start, written to config.yaml at its first step

    def check(self) -> None:
        """Raise if the directory cannot be made or written to. Directories made for this check are removed."""
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            where = next(path for path in (self.path, *self.path.parents) if path.exists())
            why = f"{where} is a file" if where.is_file() else error.strerror
            raise RunError(
                f"checkpoint.directory: {self.path} cannot be written to: {why}; name a directory that you may write to"
            ) from None
        finally:
            for path in missing:
                with contextlib.suppress(OSError):
                    path.rmdir()

    def lock(self) -> None:
        """Lock the run against other writers. The lock is released when the process ends, even if it is killed."""
        if self._lock is not None or not self.writes or not self._locks:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        handle = (self.path / ".lock").open("a+", encoding="utf-8", errors="replace")
        deadline = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _HELD and time.monotonic() < deadline:
                    progress.made("waits for the lock")  # so that the watch does not end the ranks
                    time.sleep(0.2)
                    continue
                kind = LockedError if error.errno in _HELD else RunError
                with handle:
                    raise kind(self._why_not_locked(handle, error)) from error
        self._lock = handle
        with writing(self.path / ".lock"):
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}\n{self.token}\n")
            handle.flush()
            os.fsync(handle)

    def check_owner(self) -> None:
        """Raise if another process has locked the run since. A network disk takes the lock from a machine that does not
        respond; a process that hung on this machine may go on later, and must not write."""
        if self._lock is None:
            return
        content = self._read_lock(self._lock)
        if content is not None and self.token not in content.splitlines():
            raise LockedError(f"the lock of {self.path} was lost, and another process writes it ({_owner(content)})")

    def _read_lock(self, handle: TextIO) -> str | None:
        """Return the content of the lock's file; None if the file was removed, and this process holds the lock."""
        deadline = time.monotonic() + _UNSURE
        while True:
            try:
                return (self.path / ".lock").read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise self._lost(error) from error
                return None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise self._lost(error) from error
            time.sleep(0.1)

    def _lost(self, error: OSError) -> LockedError:
        return LockedError(f"the lock of {self.path} is lost: {error.strerror or error}")

    def owned(self) -> bool:
        """Tell whether no other process has locked the run since."""
        try:
            self.check_owner()
        except LockedError:
            return False
        return True

    def _why_not_locked(self, handle: TextIO, error: OSError) -> str:
        if error.errno not in _HELD:
            why = error.strerror or error
            return (
                f"{self.path} cannot be locked: its file system has no locks ({why}). Two processes that write one run "
                "damage it. If you make sure that only one process writes it, set checkpoint.lock: false"
            )
        handle.seek(0)
        owner = _owner(handle.read(200))
        return (
            f"{self.path} is being written by another process ({owner}): wait until it ends, or name another directory"
        )

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def roll_back(self, step: int, rejected_bytes: int, ledger_bytes: int | None = None) -> list[str]:
        """Remove the lines written after `step`; 0 is the beginning of the run. Return a sentence for each fault found.

        `ledger_bytes`, if known, is the size of the ledger when the checkpoint was written. A line of documents that
        were put aside can follow the line of `step`, before or after the checkpoint: the size tells which.
        """
        if not self.writes:
            return []
        faults = []
        for file in (self.ledger, self.metrics, self.evaluations, self.warnings, self.weights):
            if file.is_file():
                # At step 0 evaluations are removed too: the run evaluates its first weights again.
                kept_bytes = ledger_bytes if file == self.ledger else None
                size, last, damaged = _end_of(file, step) if step or kept_bytes else (0, 0, [])
                if kept_bytes is not None:
                    size = _without_later_put_aside(file, size, kept_bytes)
                cut_file(file, size)
                faults += [f"{line}; the run goes on, as its checkpoint needs no line of this file" for line in damaged]
                if file == self.ledger and last + len(damaged) < step:
                    named = f"ends with step {last}" if last else "names no step"
                    faults.append(
                        f"{file} {named}, and the run goes on after step {step}: the file lacks the documents of the "
                        "steps between them. The checkpoint knows these documents, so none is trained on again"
                    )
        if self.rejected.is_file() and self.rejected.stat().st_size > rejected_bytes:
            cut_file(self.rejected, rejected_bytes)
        return faults + kept_files.roll_back(self.rollouts, step) + records.roll_back(self.records, step)

    def has_no_step(self) -> bool:
        """Tell whether the run is at its beginning."""
        return not self.ledger.is_file() or self.ledger.stat().st_size == 0

    def _append(self, file: Path, line: dict[str, Any]) -> None:
        if self.writes:
            self.check_owner()
            append_json_line(file, line)

    def first_weights(self, model: str) -> str:
        """Return the directory of the weights that the run began with: `model`, unless the run noted another path."""
        if not self._first_weights.is_file():
            return model
        noted = json.loads(self._first_weights.read_text(encoding="utf-8"))
        for path in (noted["path"], model):  # the weights may have been moved to `model`
            if _describe_weights(Path(path)) == noted["files"]:
                return str(path)
        raise RunError(
            f"the run began with the weights of {noted['path']}, which have changed or are gone. Put them back, or "
            "name a directory that has them: as model.path with an adapter, else as loss.kl_reference.path"
        )

    def note_first_weights(self, model: str) -> None:
        """Write the path of the run's first weights, and their files' sizes and digests."""
        path = Path(model).resolve()
        write_json(self._first_weights, {"path": str(path), "files": _describe_weights(path)})

    def options_of(self, step: int) -> Path:
        """Return the file of the options that made a step: config.yaml, or the copy kept when options changed."""
        return min((file for file in self._replaced() if _until(file) >= step), key=_until, default=self.config)

    def _replaced(self) -> list[Path]:
        return [file for file in self.path.glob(f"{_REPLACED}*.yaml") if file.stem.removeprefix(_REPLACED).isdecimal()]

    def begin_under(self, options: str, step: int) -> None:
        """Set the options of this start, as YAML. `step` is the step that the run resumes after. Until the first new
        step, config.yaml holds the options of that step; then it holds `options`. At step 0 it does at once."""
        before = self.options_of(step)
        there = before.read_text(encoding="utf-8") if step and before.is_file() else options
        if not self.config.is_file() or self.config.read_text(encoding="utf-8") != there:
            write_text_whole(self.config, there)
        for file in self._replaced():
            if not step or _until(file) >= step:
                file.unlink()
        self._coming = options if there != options else None

    def _note_options(self, step: int) -> None:
        """Write the options of this start to config.yaml, and keep the options of the steps before in a copy."""
        if self._coming is not None:
            kept = self.path / f"{_REPLACED}{step - 1:08d}.yaml"
            write_whole(kept, self.config.read_bytes())
            write_text_whole(self.config, self._coming)
            self._coming = None

    def record_step(
        self, step: int, plan: StepPlan, put_aside: Sequence[PutAside] = (), digests: Sequence[str] | None = None
    ) -> None:
        """Append the step's line to the ledger. `digests`: of the plan's documents, if the run keeps them."""
        if not self.writes:
            return
        self.check_owner()
        self._note_options(step)
        line: dict[str, Any] = {
            "step": step,
            "documents": [document.id for document in plan.documents],
            "num_documents": plan.totals.num_documents,
            "num_labels": plan.totals.num_labels,
            "documents_seen": plan.documents_seen_after,
        }
        if digests is not None:
            line["digests"] = list(digests)
        records = {document.id: list(document.record_ids) for document in plan.documents if document.record_ids}
        self._append(self.ledger, line | ({"records": records} if records else {}) | _named(put_aside))

    def record_put_aside(self, step: int, documents_seen: int, put_aside: Sequence[PutAside]) -> None:
        """Append a line without trained documents, which names the documents put aside after the last step."""
        if put_aside:
            line = {"step": step, "documents": [], "num_documents": 0, "num_labels": 0}
            self._append(self.ledger, line | {"documents_seen": documents_seen} | _named(put_aside))

    def read_steps(self) -> dict[int, dict[str, Any]]:
        """Read the ledger's lines of steps, by step. Damaged ones are left out."""
        return lines_by_step(self.ledger, _names_documents)

    def not_in_ledger(self, put_aside: Sequence[PutAside]) -> list[PutAside]:
        """Select the documents that the ledger does not name. A restart reads the rollout files again, and puts
        documents aside that the ledger names already."""
        lines = [line.value or {} for line in lines_from_the_end(self.ledger)] if put_aside else []
        known = {document["id"] for line in lines for document in line.get("put_aside", ())}
        return [document for document in put_aside if document.id not in known]

    def sync(self) -> None:
        """Sync the files to the disk, before a checkpoint of their steps is complete."""
        if self.writes:
            sync_files((self.ledger, self.metrics, self.evaluations, self.rejected, self.warnings, self.weights))

    def record_evaluation(self, line: dict[str, Any]) -> None:
        self._append(self.evaluations, line)

    def record_weights(self, line: dict[str, Any]) -> None:
        self._append(self.weights, line)

    def record_warning(self, line: dict[str, Any]) -> None:
        self._append(self.warnings, line)

    def last_evaluated(self) -> int | None:
        return next(
            (step for line in lines_from_the_end(self.evaluations) if (step := _step_of(line)) is not None), None
        )

    def record_rejected(self, rejected: Sequence[Rejected]) -> None:
        if rejected and self.writes:
            self.check_owner()
            write_rejected(self.path, rejected, append=True)

    def rejected_bytes(self) -> int:
        """Return the size of rejected.jsonl, which `roll_back` needs."""
        return self.rejected.stat().st_size if self.rejected.is_file() else 0

    def ledger_bytes(self) -> int:
        """Return the size of ledger.jsonl, which `roll_back` needs."""
        return self.ledger.stat().st_size if self.ledger.is_file() else 0


def _owner(content: str) -> str:
    return printable(content.partition("\n")[0].strip()) or "one that has not written its name yet"


def _until(file: Path) -> int:
    return int(file.stem.removeprefix(_REPLACED))


def _named(put_aside: Sequence[PutAside]) -> dict[str, Any]:
    named = [{"id": document.id, "reason": document.reason} for document in put_aside]
    return {"put_aside": named} if named else {}


def _step_of(line: Line) -> int | None:
    """Read the step of a line; None if the line is damaged."""
    step = None if line.value is None else line.value.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _end_of(file: Path, step: int) -> tuple[int, int, list[Line]]:
    """Return where the lines up to `step` end in the file, the last step found, and the damaged lines after it to keep.

    The file is read backwards, only as far as needed. Steps increase from line to line, so a line with a smaller step
    than the line before it is damaged too.
    """
    newest: list[tuple[Line, int | None]] = []
    chosen: int | None = None
    for line in lines_from_the_end(file):
        found = _step_of(line)
        if chosen is not None and found is not None:
            candidate, named = newest[chosen]
            if named is not None and found <= named:
                break
            newest[chosen] = (replace(candidate, value=None, damage=f"its step {named} is out of order"), None)
            chosen = None
        newest.append((line, found))
        if chosen is None and found is not None and found <= step:
            chosen = len(newest) - 1
    end, last = 0, 0
    if chosen is not None:
        end, last = newest[chosen][0].end, newest[chosen][1] or 0
        newest = newest[:chosen]
    stay: list[Line] = []
    for line, found in reversed(newest):  # every step has a line: keep at most one damaged line for each missing step
        if found is not None or not line.whole or len(stay) == step - last:
            break
        stay.append(line)
    return (stay[-1].end if stay else end), last, stay


def _without_later_put_aside(ledger: Path, size: int, kept_bytes: int) -> int:
    """Return the size of the ledger's first `size` bytes without the lines after `kept_bytes` that name no trained
    document."""
    for line in lines_from_the_end(ledger):
        if line.start >= size:
            continue
        if line.start < kept_bytes or line.value is None or line.value.get("documents") != []:
            break
        size = line.start
    return size


def _describe_weights(directory: Path) -> dict[str, list[Any]]:
    """Return the size of each file of weights, and a digest of its first and last bytes."""
    found: dict[str, list[Any]] = {}
    for file in sorted([*directory.glob("*.safetensors"), *directory.glob("truestep/part-*.safetensors")]):
        size = file.stat().st_size
        with file.open("rb") as handle:
            digest = hashlib.sha256(handle.read(_END))
            handle.seek(max(0, size - _END))
            digest.update(handle.read(_END))
        found[file.name] = [size, digest.hexdigest()]
    return found


def _names_documents(line: dict[str, Any]) -> bool:
    """Return whether a line of the ledger names a step's documents. Documents that were put aside after the last step
    have a line with its number, and without documents."""
    names = line.get("documents")
    if not isinstance(names, list) or not names:
        return False
    digests = line.get("digests", names)
    return (
        isinstance(digests, list)
        and len(digests) == len(names)
        and all(isinstance(one, str) for one in (*names, *digests))
    )
