"""The observer that keeps complete records of each step's documents. Its failures never stop the run."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from truestep.metrics.observers import Observer
from truestep.rollouts.kept import records
from truestep.text import printable
from truestep.types import DocumentScore, Rollout, StepPlan


class RecordKeeper(Observer):
    """Appends the documents of each step to files. A thread compresses them while a GPU computes the gradient, and
    writes them when the step is done."""

    def __init__(
        self,
        run: Path,
        gigabytes: float,
        say: Callable[[str], None],
        writes: bool,
        owned: Callable[[], bool] = lambda: True,
    ):
        """`writes`: True on the first rank only. `owned`: False if another process writes the run."""
        self._files = records.RecordFiles(run / records.FOLDER, gigabytes * 1e9, self._removed)
        self._say, self._writes, self._owned = say, writes, owned
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="records") if writes else None
        self._last: Future[None] | None = None
        self._encoded: Future[bytes] | None = None  # the step that is computed
        self._told = False  # True after the warning that records were removed
        self._said: set[str] = set()  # kinds of failures

    def computing(self, step: int, plan: StepPlan) -> None:
        if self._worker is None or plan.repeated:  # kept at the first update on these documents
            return
        self._wait()
        self._encoded = self._worker.submit(encode, step, plan.documents)

    def trained(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        encoded, self._encoded = self._encoded, None
        if self._worker is not None and encoded is not None:
            self._last = self._worker.submit(self._append, step, encoded)

    def _append(self, step: int, encoded: Future[bytes]) -> None:
        if self._owned():
            self._files.append(step, encoded.result())

    def saving(self) -> Sequence[Callable[[], None]]:
        last = self._last

        def sync() -> None:
            try:
                if last is not None:
                    last.result()
                self._files.sync()
            except Exception as error:
                self._failed(error)

        return (sync,) if self._writes else ()

    def close(self) -> None:
        self._wait()
        if self._worker is not None:
            self._worker.shutdown()

    def _wait(self) -> None:
        last, self._last = self._last, None
        try:
            if last is not None:
                last.result()
        except Exception as error:  # such as a full disk
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        problem = printable(f"{type(error).__name__}: {error}")
        if (kind := f"{type(error).__name__} {getattr(error, 'errno', '')}") not in self._said:
            self._said.add(kind)
            self._say(f"warning: some records are not kept in {self._files.folder}: {problem}; training goes on")

    def _removed(self, step: int) -> None:
        if not self._told:
            self._told = True
            self._say(
                f"warning: the records of steps up to {step} are removed, and those of further steps will be: "
                "logging.rollouts.gigabytes is reached. These steps cannot be made again"
            )


def encode(step: int, documents: Sequence[Rollout]) -> bytes:
    return records.encode(step, [as_kept(document) for document in documents])


def as_kept(document: Rollout) -> Rollout:
    """Return a document without the fields that the trainer computes again at every update."""
    return replace(document, chosen=None, recomputed_logprobs=None)
