"""The files of a run: metrics, ledger, evaluations, rejected records, configuration, checkpoints.

Lines are appended as steps are made. A restart rolls every file back to the checkpoint that it starts from, so that no
step stands in them twice.
"""

import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from truestep.errors import TruestepError
from truestep.files import append_json_line, read_json_lines, write_json_lines
from truestep.rollouts.rejects import write_rejected
from truestep.types import PutAside, Rejected, StepPlan


class RunError(TruestepError):
    """The error of a run's directory that cannot be used."""


class RunDirectory:
    """The paths of a run's files, and the one process that writes them; `writes` is False on the other ranks."""

    def __init__(self, path: Path, writes: bool = True):
        self.path = path
        self.writes = writes
        self.ledger = path / "ledger.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluation.jsonl"
        self.rejected = path / "rejected.jsonl"
        self.config = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self._lock: TextIO | None = None

    def lock(self) -> None:
        """Keep other processes from writing this run. The lock goes with the process, however that ends."""
        if self._lock is not None or not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        handle = (self.path / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.seek(0)
            raise RunError(f"{self.path} is being written by another process ({handle.read().strip()})") from error
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def roll_back(self, step: int, rejected_lines: int) -> None:
        """Remove the lines written after the end of `step`; 0 is a run's beginning."""
        if not self.writes:
            return
        for file in (self.ledger, self.metrics, self.evaluations):
            if file.is_file():
                # A run that starts over evaluates its first weights anew.
                lines = read_json_lines(file)
                write_json_lines(file, [line for line in lines if line["step"] <= step and (step or line["step"])])
        if self.rejected.is_file():
            write_json_lines(self.rejected, read_json_lines(self.rejected)[:rejected_lines])

    def _append(self, file: Path, line: dict[str, Any]) -> None:
        if self.writes:
            append_json_line(file, line)

    def record_step(self, step: int, plan: StepPlan, put_aside: Sequence[PutAside] = ()) -> None:
        line: dict[str, Any] = {
            "step": step,
            "documents": [document.id for document in plan.documents],
            "num_documents": plan.totals.num_documents,
            "num_labels": plan.totals.num_labels,
            "documents_seen": plan.documents_seen_after,
        }
        self._append(self.ledger, line | _named(put_aside))

    def record_put_aside(self, step: int, documents_seen: int, put_aside: Sequence[PutAside]) -> None:
        """Write down what was put aside behind the last step, in a line without documents."""
        if put_aside:
            line = {"step": step, "documents": [], "num_documents": 0, "num_labels": 0}
            self._append(self.ledger, line | {"documents_seen": documents_seen} | _named(put_aside))

    def not_in_ledger(self, put_aside: Sequence[PutAside]) -> list[PutAside]:
        """Select those that no line has: a restart reads files anew, and finds what it had put aside before."""
        lines = read_json_lines(self.ledger) if put_aside else []
        known = {document["id"] for line in lines for document in line.get("put_aside", ())}
        return [document for document in put_aside if document.id not in known]

    def sync(self) -> None:
        """Put the lines of all steps on the disk, before a checkpoint of them counts."""
        for file in (self.ledger, self.metrics, self.evaluations) if self.writes else ():
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())

    def record_evaluation(self, line: dict[str, Any]) -> None:
        self._append(self.evaluations, line)

    def last_evaluated(self) -> int | None:
        lines = read_json_lines(self.evaluations)
        return lines[-1]["step"] if lines else None

    def record_rejected(self, rejected: Sequence[Rejected]) -> None:
        if rejected and self.writes:
            write_rejected(self.path, rejected, append=True)

    def rejected_lines(self) -> int:
        return len(read_json_lines(self.rejected))


def _named(put_aside: Sequence[PutAside]) -> dict[str, Any]:
    named = [{"id": document.id, "reason": document.reason} for document in put_aside]
    return {"put_aside": named} if named else {}
