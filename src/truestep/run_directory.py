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
from truestep.types import Rejected, StepPlan


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

    def roll_back(self, step: int, rejected_bytes: int) -> None:
        """Remove the lines written after the end of `step`; 0 is a run's beginning."""
        if not self.writes:
            return
        for file in (self.ledger, self.metrics, self.evaluations):
            if file.is_file():
                # A run that starts over evaluates its first weights anew.
                lines = read_json_lines(file)
                write_json_lines(file, [line for line in lines if line["step"] <= step and (step or line["step"])])
        if self.rejected.is_file() and self.rejected.stat().st_size > rejected_bytes:
            with self.rejected.open("r+b") as stream:
                stream.truncate(rejected_bytes)
                os.fsync(stream.fileno())

    def _append(self, file: Path, line: dict[str, Any]) -> None:
        if self.writes:
            append_json_line(file, line)

    def record_step(self, step: int, plan: StepPlan) -> None:
        line = {
            "step": step,
            "documents": [document.id for document in plan.documents],
            "num_documents": plan.totals.num_documents,
            "num_labels": plan.totals.num_labels,
            "documents_seen": plan.documents_seen_after,
        }
        self._append(self.ledger, line)

    def sync(self) -> None:
        """Put the lines of all steps on the disk, before a checkpoint of them counts."""
        for file in (self.ledger, self.metrics, self.evaluations, self.rejected) if self.writes else ():
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

    def rejected_bytes(self) -> int:
        """Give the place in rejected.jsonl that a restart from now on rolls it back to."""
        return self.rejected.stat().st_size if self.rejected.is_file() else 0
