"""Runs a case under every layout, and judges the results by their differences from the float64 reference."""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from truestep.config.schema import Config
from truestep.process import progress
from truestep.ranks.axes import RankError
from truestep.ranks.group import world_size
from truestep.ranks.launch import run_ranks
from truestep.run.assemble.step import make_objective
from truestep.tools.verify.case import HALF, Case, VerifyError, in_parts, make_case, permits
from truestep.tools.verify.compare import Comparer
from truestep.tools.verify.custom import CustomOracle
from truestep.tools.verify.difference import Difference, worst_of_each_kind
from truestep.tools.verify.layouts import Layout, in_half_precision, layouts_for
from truestep.tools.verify.oracle.records import Record
from truestep.tools.verify.worker import DONE, Task, run_layouts

HALF_PRECISION_FACTOR = 1.5
# Sampler log-probs are drawn so far from the loss's clipping bounds that bfloat16 rounding does not cross them. With a
# larger learning rate, the update itself could cross them.
_HALF_PRECISION_RATE = 1e-6


@dataclass(frozen=True)
class LayoutResult:
    """The worst difference of each kind under one layout, or the reason why it could not run."""

    layout: Layout
    worst: dict[str, Difference]
    failure: str | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> list[Difference]:
        return [difference for difference in self.worst.values() if difference.wrong]

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.wrong


def verify(
    config: Config,
    output: Path,
    *,
    most_ranks: int = 4,
    documents: int = 14,
    full: bool = False,
    only: Callable[[Layout], bool] = lambda layout: True,
    plant: Callable[[], None] | None = None,
) -> list[LayoutResult]:
    """Judge the configuration under every layout. Tests of verify itself choose layouts by `only`, and introduce a
    fault by `plant`."""
    if world_size() > 1:
        raise VerifyError("verify starts its own ranks: start it without torchrun")
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        most_ranks = min(most_ranks, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="truestep-verify-") as scratch:
        progress.phase("making the case")
        judge = make_judge(config, Path(scratch), documents, full)
        judge.plant = plant
        case = judge.case
        interpreted_kernels = not on_gpu and find_spec("triton") is not None
        layouts = list(filter(only, layouts_for(case.budget, case.longest, most_ranks, interpreted_kernels)))
        if config.model.dtype == "bfloat16" and plant is None:
            layouts += in_half_precision(case.longest, most_ranks)
        layouts = [layout for layout in layouts if permits(case, layout)]
        results: list[LayoutResult] = []
        with progress.working("judged", "layouts", len(layouts)):
            for batch in _batches(layouts, alone=full):
                size = "one rank" if batch[0].ranks == 1 else f"{batch[0].ranks} ranks"
                batch_name = batch[0].name if len(batch) == 1 else f"{len(batch)} layouts of {size}"
                progress.phase(f"running {batch_name}")
                for result in judge.judge(batch):
                    results.append(result)
                    progress.made("layouts")
    output.mkdir(parents=True, exist_ok=True)
    return sorted(results, key=lambda result: layouts.index(result.layout))


def make_judge(config: Config, scratch: Path, documents: int, full: bool) -> "Judge":
    case = make_case(config, scratch, documents, full)
    comparer = Comparer(case, oracle_loss(config))
    if not full:
        _clip_some_steps(case, comparer)
    return Judge(case, comparer)


def _clip_some_steps(case: Case, comparer: Comparer) -> None:
    """Set the threshold of gradient clipping for the small model, so that some or all steps are clipped: between its
    gradient norms, or below all of them."""
    optimizer = case.options["optimizer"]
    norms = comparer.gradient_norms() if optimizer["gradient_clip"] is not None else []
    if not any(norms):
        return
    least, most = min(norms), max(norms)
    optimizer["gradient_clip"] = math.sqrt(least * most) if most > 1.05 * least > 0 else 0.9 * most


def oracle_loss(config: Config) -> dict[str, Any]:
    """Return the options of the loss for the oracle. A user's own loss is passed as an object, `custom`."""
    loss = config.loss.model_dump()
    if (function := loss.pop("function", None)) is None:
        return loss
    del loss["options"]
    return loss | {"type": function, "custom": CustomOracle(make_objective(config).label_loss)}


def _batches(layouts: Sequence[Layout], alone: bool) -> list[list[Layout]]:
    """Group layouts that can run in the same processes one after another, since most of the time is spent starting
    processes. `alone`: one layout in each group, because the gradients of a full model under many layouts would fill a
    disk.
    """
    if alone:
        return [[layout] for layout in layouts]

    def kind(layout: Layout) -> tuple[int, str]:
        return layout.ranks, json.dumps(layout.environment)

    return [list(batch) for _, batch in groupby(sorted(layouts, key=kind), key=kind)]


@dataclass
class Judge:
    """Runs layouts of a case and judges their results. The reference is computed once for all of them."""

    case: Case
    comparer: Comparer
    plant: Callable[[], None] | None = None
    half_precision_error: float | None = None  # error of the gradients under the first layout in half precision

    def judge(self, layouts: list[Layout]) -> Iterator[LayoutResult]:
        """Run layouts in the same processes. If one fails, new processes run the rest."""
        ranks, environment = layouts[0].ranks, layouts[0].environment
        waiting = [(layout, *self._task(layout)) for layout in layouts]
        while waiting:
            failure = None
            timeout = (300 if len(self.case.records) < 100 else 3600) + 10 * len(waiting)
            try:
                arguments = ([task for _, task, _ in waiting], self.plant)
                run_ranks(ranks, run_layouts, arguments, environment=environment, timeout=timeout)
            except RankError as error:
                failure = str(error)
            while waiting and (waiting[0][1].output / DONE).is_file():
                layout, task, records = waiting.pop(0)
                yield self._result(layout, task, records)
            if failure is None:
                break
            if waiting:
                layout, task, _ = waiting.pop(0)
                shutil.rmtree(task.output)
                yield LayoutResult(layout, {}, failure)
        if waiting:
            raise AssertionError(f"ranks ended without a result for {[layout.name for layout, _, _ in waiting]}")

    def _task(self, layout: Layout) -> tuple[Task, list[Record]]:
        case = self.case
        folder = case.directory / "layouts" / layout.name.replace(" ", "-").replace(":", "").replace(",", "")
        folder.mkdir(parents=True)
        options = _merge(case.options, layout.options)
        options["checkpoint"] = case.options["checkpoint"] | {"directory": str(folder / "run")}
        records = case.records
        if layout.half:
            rates = ("learning_rate", "minimum_learning_rate")
            small = {name: min(options["optimizer"][name], _HALF_PRECISION_RATE) for name in rates}
            options["optimizer"] = options["optimizer"] | small
        if layout.half and case.half_records is not None:
            records = case.half_records
            options["data"] = options["data"] | {"path": str(case.directory / HALF)}
        if layout.parts:
            records = in_parts(layout, case, folder)
            options["data"] = options["data"] | {"path": str(folder / "part-{rank}.jsonl"), "group_size": None}
        return Task(options, folder, case.positions, self._some_steps(), layout.reverse), records

    def _some_steps(self) -> list[int]:
        """Return the steps whose learning rates are compared: the first 50, those near the end of warm-up and the end
        of the run, and about 100 in between."""
        last = self.case.options["schedule"]["steps"] or 100
        warm = self.case.options["optimizer"]["warmup_steps"]
        around = {*range(1, 51), *range(warm - 2, warm + 4), *range(last - 2, last + 1)}
        around |= {round(last * part / 100) for part in range(101)}
        return sorted(step for step in around if 1 <= step <= max(last, warm + 3))

    def _result(self, layout: Layout, task: Task, records: Sequence[Record]) -> LayoutResult:
        worst = worst_of_each_kind(self._differences(layout, task, records))
        seconds = float((task.output / DONE).read_text(encoding="utf-8"))
        shutil.rmtree(task.output)
        return LayoutResult(layout, worst, None, seconds)

    def _differences(self, layout: Layout, task: Task, records: Sequence[Record]) -> Iterator[Difference]:
        if not layout.half:
            yield from self.comparer.differences(task.output, task.options, records)
            return
        off, size = 0.0, 0.0
        for found in self.comparer.half_differences(task.output, task.options, records):
            if isinstance(found, Difference):
                yield found
            else:
                off, size = off + found[0] ** 2, size + found[1] ** 2
        # In half precision, the error of a layout may be 1.5 times the error of one process, which is the first layout.
        error = math.sqrt(off / max(size, 1e-60))
        if self.half_precision_error is None:
            self.half_precision_error = error
        ratio = error / max(self.half_precision_error, 1e-30)
        name = f"gradient {error:.1e} off, over the one process's"
        yield Difference(1, "half precision", name, ratio, HALF_PRECISION_FACTOR)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        inner = merged.get(name)
        merged[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
