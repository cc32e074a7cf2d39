"""`truestep verify`: make the case, run it under every layout, compare, and say what is out of bounds."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from truestep.assemble.step import make_objective
from truestep.config.schema import Config
from truestep.ranks.axes import RankError
from truestep.ranks.group import world_size
from truestep.ranks.launch import run_ranks
from truestep.verify.case import Case, VerifyError, in_parts, make_case, permits
from truestep.verify.compare import Comparer, Difference
from truestep.verify.custom import CustomOracle
from truestep.verify.layouts import Layout, in_half_precision, layouts_for
from truestep.verify.oracle.records import Record
from truestep.verify.worker import DONE, Task, run_layouts

BOUND = 1e-5
UPDATE_BOUND = 1e-6  # of weights, relative to themselves: float32 has seven digits
HALF_PRECISION_FACTOR = 1.5
KINDS = ("loss", "metric", "gradient", "log-prob", "update", "documents")


@dataclass(frozen=True)
class Verdict:
    """Of one layout: the worst difference of each kind, and what was wrong where it did not even run."""

    layout: Layout
    worst: dict[str, Difference]
    failure: str | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> list[Difference]:
        return [found for found in self.worst.values() if not found.value <= bound_of(found.kind)]

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.wrong


def bound_of(kind: str) -> float:
    return {"update": UPDATE_BOUND, "half precision": HALF_PRECISION_FACTOR}.get(kind, BOUND)


def verify(
    config: Config,
    output: Path,
    *,
    most_ranks: int = 4,
    documents: int = 14,
    full: bool = False,
    only: Callable[[Layout], bool] = lambda layout: True,
    plant: Callable[[], None] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Verdict]:
    """`only` and `plant` are for the tests of this check itself."""
    if world_size() > 1:
        raise VerifyError("verify starts its own ranks: start it without torchrun")
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        most_ranks = min(most_ranks, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="truestep-verify-") as scratch:
        case = make_case(config, Path(scratch), documents, full)
        layouts = [
            layout
            for layout in layouts_for(case.budget, case.longest, most_ranks, not on_gpu and _kernels())
            if only(layout)
        ]
        if config.model.dtype == "bfloat16" and plant is None:
            layouts += in_half_precision(case.longest, most_ranks)
        layouts = [layout for layout in layouts if permits(case, layout)]
        comparer = Comparer(
            case.model,
            case.steps(case.records),
            oracle_loss(config),
            case.options["optimizer"],
            config.model.trust_remote_code,
            custom_metrics=bool(config.logging.custom_metrics),
        )
        judge = _Judge(case, comparer, plant)
        verdicts: list[Verdict] = []
        for batch in _batches(layouts, alone=full):
            progress(batch[0].name if len(batch) == 1 else f"{len(batch)} layouts of {batch[0].ranks} ranks")
            verdicts += judge.judge(batch)
    output.mkdir(parents=True, exist_ok=True)
    return sorted(verdicts, key=lambda verdict: layouts.index(verdict.layout))


def oracle_loss(config: Config) -> dict[str, Any]:
    """The options of the loss as the oracle takes them: a user's own loss comes as itself."""
    loss = config.loss.model_dump()
    if (function := loss.pop("function", None)) is None:
        return loss
    del loss["options"]
    return loss | {"type": function, "custom": CustomOracle(make_objective(config).label_loss)}


def _batches(layouts: Sequence[Layout], alone: bool) -> list[list[Layout]]:
    """Layouts that the same processes can run, one after another: starting some is what takes the time. `alone`: a full
    model's gradients of many layouts would fill a disk."""
    if alone:
        return [[layout] for layout in layouts]

    def kind(layout: Layout) -> tuple[int, str]:
        return layout.ranks, json.dumps(layout.environment)

    return [list(batch) for _, batch in groupby(sorted(layouts, key=kind), key=kind)]


def _kernels() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class _Judge:
    case: Case
    comparer: Comparer
    plant: Callable[[], None] | None
    halves: dict[str, float] = field(default_factory=dict)  # gradient errors of half-precision layouts, by name

    def judge(self, layouts: list[Layout]) -> Iterator[Verdict]:
        """Where one fails, those behind it get processes of their own."""
        waiting = [(layout, *self._task(layout)) for layout in layouts]
        while waiting:
            failure = None
            timeout = (300 if len(self.case.records) < 100 else 3600) + 10 * len(waiting)
            try:
                tasks = [task for _, task, _ in waiting]
                run_ranks(
                    layouts[0].ranks,
                    run_layouts,
                    (tasks, self.plant),
                    environment=layouts[0].environment,
                    timeout=timeout,
                )
            except RankError as error:
                failure = str(error)
            while waiting and (waiting[0][1].output / DONE).is_file():
                layout, task, records = waiting.pop(0)
                yield self._verdict(layout, task, records)
            if failure is None:
                break
            if waiting:
                yield Verdict(waiting.pop(0)[0], {}, failure)
        if waiting:
            raise AssertionError(f"ranks ended without a word about {[layout.name for layout, _, _ in waiting]}")

    def _task(self, layout: Layout) -> tuple[Task, list[Record]]:
        case = self.case
        folder = case.directory / "layouts" / layout.name.replace(" ", "-").replace(":", "").replace(",", "")
        folder.mkdir(parents=True)
        options = _merge(case.options, layout.options)
        options["checkpoint"] = case.options["checkpoint"] | {"directory": str(folder / "run")}
        records = case.records
        if layout.parts:
            records = in_parts(layout, case, folder)
            options["data"] = options["data"] | {"path": str(folder / "part-{rank}.jsonl")}
        return Task(options, folder, layout.reverse), records

    def _verdict(self, layout: Layout, task: Task, records: Sequence[Record]) -> Verdict:
        worst: dict[str, Difference] = {}
        for found in self._differences(layout, task, records):
            known = worst.get(found.kind)
            if known is None or not found.value <= known.value:
                worst[found.kind] = found
        seconds = float((task.output / DONE).read_text(encoding="utf-8"))
        if self.plant is None:
            shutil.rmtree(task.output)
        return Verdict(layout, worst, None, seconds)

    def _differences(self, layout: Layout, task: Task, records: Sequence[Record]) -> Iterator[Difference]:
        if not layout.half:
            yield from self.comparer.differences(task.output, self.case.steps(records))
            return
        # In half precision a layout's error against float64 may be 1.5 times the one process's, which came first.
        error = self.halves[layout.name] = self.comparer.total_gradient_error(task.output)
        ratio = error / max(next(iter(self.halves.values())), 1e-30)
        yield Difference(1, "half precision", f"gradient {error:.1e} off, over the one process's", ratio)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for name, value in over.items():
        inner = both.get(name)
        both[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both
