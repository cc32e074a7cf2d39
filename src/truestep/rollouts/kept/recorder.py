"""The observer that keeps some rollouts of each step. Each kind of failure is reported once, and training goes on."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from truestep.metrics.observers import Observer
from truestep.rollouts.kept import files
from truestep.rollouts.kept.reader import Reader
from truestep.rollouts.kept.rows import choose, rejected_row, row_of
from truestep.text import printable
from truestep.types import DocumentScore, Rejected, StepPlan

_MOST_STEPS = 64  # largest range of steps in a file
_SECONDS = 30.0  # time after which a file is written even with fewer steps


class RolloutRecorder(Observer):
    """Collects rows of each step and writes them every few steps, before each checkpoint and at the end."""

    def __init__(
        self,
        run: Path,
        *,
        documents: int,  # kept per step; 0: none
        with_tokens: int,  # kept documents per step that get per-token values
        longest_text: int,
        gigabytes: float,
        decode: Callable[[Sequence[int], bool], str] | None,
        say: Callable[[str], None],
        writes: bool,  # True on the first rank only
        owned: Callable[[], bool] = lambda: True,  # False if another process writes the run
    ):
        self.folder = run / files.FOLDER
        self._documents, self._with_tokens, self._longest = documents, with_tokens, longest_text
        self._most_bytes = gigabytes * 1e9
        self._reader = None if decode is None else Reader(decode, longest_text)
        self._say, self._writes, self._owned = say, writes and documents > 0, owned
        self._said: set[str] = set()
        self.latest: Sequence[dict[str, Any]] = ()  # rows of the last step
        self._rows: list[dict[str, Any]] = []  # rows that are not written yet
        self._rejected: list[Rejected] = []  # records rejected in the current step
        self._unsynced: list[Path] = []
        self._flushed = time.monotonic()
        self._bytes: int | None = None  # total size of all files; None: unknown

    def wanted(self, plan: StepPlan) -> Collection[int]:
        if not self._documents or plan.repeated:  # kept at the first update on these documents
            return ()
        return frozenset(choose(plan.documents, self._documents))

    def rejected(self, records: Sequence[Rejected]) -> None:
        room = self._documents - len(self._rejected)
        if self._writes and room > 0:
            self._rejected += [record for record in records if record.completion is not None][:room]

    def trained(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        """Keep rollouts of a step. `scores` include at least those of the documents that `wanted` returned."""
        self.latest = ()
        if not self._writes:
            return
        with self._harmless():
            self.latest = rows = self._rows_of(step, plan, scores)
            self._rows += rows
            held = step - self._rows[0]["step"] + 1 if self._rows else 0
            if held >= _MOST_STEPS or (held and time.monotonic() - self._flushed > _SECONDS):
                self._flush()
        self._rejected = []

    def _rows_of(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> list[dict[str, Any]]:
        rows = [rejected_row(record, step, self._longest) for record in self._rejected]
        known = {score.id: score for score in scores}
        chosen = sorted(self.wanted(plan))
        for number, place in enumerate(chosen):
            document = plan.documents[place]
            tokens = number < self._with_tokens
            rows.append(row_of(document, known.get(document.id), self._reader, step, plan.documents_seen, tokens))
        return rows

    def saving(self) -> Sequence[Callable[[], None]]:
        if self._writes:
            with self._harmless():
                self._flush()
        written, self._unsynced = self._unsynced, []

        def sync() -> None:
            with self._harmless():
                files.sync(self.folder, written)

        return (sync,)

    def close(self) -> None:
        if self._writes:
            with self._harmless():
                self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._flushed = time.monotonic()
        if not rows or not self._owned():
            return
        file = files.write_rows(self.folder, rows)
        self._unsynced.append(file)
        if self._bytes is None:
            self._bytes = sum(other.stat().st_size for other in files.list_files(self.folder))
        else:
            self._bytes += file.stat().st_size
        if self._bytes > self._most_bytes:
            files.thin(self.folder, self._most_bytes)
            self._bytes = None

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Report an error of the block instead of raising it, each kind once."""
        try:
            yield
        except Exception as error:  # such as a full disk, or an error in a model's own tokenizer code
            problem = printable(f"{type(error).__name__}: {error}")
            kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
            if kind not in self._said:
                self._said.add(kind)
                self._say(f"warning: some rollouts are not kept in {self.folder}: {problem}; training goes on")
