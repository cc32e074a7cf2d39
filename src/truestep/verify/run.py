"""`truestep verify`: make the case, run it under every layout, compare, and say what is out of bounds."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep import assemble
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.policy.context import ContextError, check_heads
from truestep.policy.load import load_policy
from truestep.policy.probe import ModelError
from truestep.policy.stages import CutError
from truestep.policy.tensor import tensor_plan
from truestep.ranks.group import RankError, Ranks, world_size
from truestep.ranks.launch import run_ranks
from truestep.verify.compare import Comparer, Difference
from truestep.verify.layouts import Layout, layouts_for
from truestep.verify.oracle import Record
from truestep.verify.reduced import record_of, redraw_logprobs, reduce_model, reduce_record
from truestep.verify.worker import run_layout

BOUND = 1e-5
UPDATE_BOUND = 1e-6  # of weights, relative to themselves: float32 has seven digits
HALF_PRECISION_FACTOR = 1.5
KINDS = ("loss", "metric", "gradient", "log-prob", "update", "documents")
_MOST_TOKENS = 40  # of a reduced document
_STEPS = 2


class VerifyError(TruestepError):
    pass


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


@dataclass(frozen=True)
class Case:
    """What every layout computes."""

    directory: Path
    model: Path
    options: dict[str, Any]
    records: list[Record]
    docs_per_step: int
    repeats: int
    budget: int
    made_up: bool

    def steps(self, records: Sequence[Record]) -> list[list[Record]]:
        taken = [
            list(records[start : start + self.docs_per_step]) for start in range(0, len(records), self.docs_per_step)
        ]
        return [documents for documents in taken[:_STEPS] for _ in range(self.repeats)]

    @property
    def longest(self) -> int:
        return max(len(record["input_ids"]) for record in self.records)


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
            if only(layout) and _permits(case, layout)
        ]
        comparer = Comparer(case.model, case.steps(case.records), case.options["loss"], case.options["optimizer"])
        verdicts = []
        for layout in layouts:
            progress(layout.name)
            verdicts.append(_run(layout, case, comparer, plant))
        if config.model.dtype == "bfloat16" and plant is None:
            progress("bfloat16")
            verdicts += _half_precision(config, case, comparer, most_ranks)
    output.mkdir(parents=True, exist_ok=True)
    return verdicts


def make_case(config: Config, scratch: Path, documents: int, full: bool) -> Case:
    seed = config.seed
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        raise VerifyError(f"model.path: {model} is not a Hugging Face model directory: it has no config.json")
    if not full:
        model = reduce_model(model, scratch / "model", seed, config.model.trust_remote_code)
    made_up = config.data.path is None
    records = _made_up(documents, seed) if made_up else _of_user(config, documents)
    loss = config.loss.model_dump() | {"metrics": "full"}
    if not full:
        records = [reduce_record(record, _MOST_TOKENS) for record in records]
    if loss["type"] != "cross_entropy" and not full:
        redraw_logprobs(model, records, loss, seed)
    longest = max(len(record["input_ids"]) for record in records)
    budget = config.data.tokens_per_microbatch if full else 3 * longest
    per_step = -(-len(records) // _STEPS)
    _write(scratch / "rollouts.jsonl", records)
    options = {
        "model": config.model.model_dump() | {"path": str(model), "dtype": "float32"},
        "loss": loss,
        "data": {
            "path": str(scratch / "rollouts.jsonl"),
            "advantages": "none",
            "tokens_per_microbatch": budget,
            "on_bad_record": "stop",
        },
        "schedule": {
            "docs_per_step": per_step,
            "updates_per_batch": config.schedule.updates_per_batch,
            "steps": _STEPS * config.schedule.updates_per_batch,
            "stall_timeout": min(60.0, config.schedule.stall_timeout),
        },
        "optimizer": config.optimizer.model_dump()
        | {"schedule": "constant", "warmup_steps": 0}
        | {"minimum_learning_rate": 0.0},
        "checkpoint": {"every": 0, "keep": 1},
        "logging": {"console": False},
        "seed": seed,
    }
    repeats = config.schedule.updates_per_batch
    return Case(scratch, model, options, records, per_step, repeats, budget, made_up)


def _permits(case: Case, layout: Layout) -> bool:
    """A model whose heads so many ranks cannot share, whose layers cannot be cut (experts, for example) or that has too
    few of them is trained under the other layouts."""
    from transformers import AutoConfig

    parallel, model = layout.options.get("parallel", {}), case.options["model"]
    tensor, context, pipeline = (parallel.get(name, 1) for name in ("tensor", "context", "pipeline"))
    trusted = model["trust_remote_code"]
    config = AutoConfig.from_pretrained(case.model, local_files_only=True, trust_remote_code=trusted)
    try:
        check_heads(getattr(config.get_text_config(), "num_attention_heads", 0), context, tensor)
        if tensor > 1:
            tensor_plan(config, tensor)
        if pipeline > 1:
            load_policy(
                case.model,
                device="cpu",
                trust_remote_code=trusted,
                ranks=Ranks(0, pipeline, pipeline=pipeline),
                stages_per_rank=parallel.get("stages_per_rank", 1),
            )
    except (ContextError, CutError, ModelError):
        return False
    return True


def _of_user(config: Config, documents: int) -> list[Record]:
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    rollouts = assemble.read_documents(config, vocabulary or 2**31).rollouts[:documents]
    if not rollouts:
        raise VerifyError(f"data.path: no record of {config.data.path} can be trained on")
    return [record_of(rollout) for rollout in rollouts]


def _made_up(documents: int, seed: int) -> list[Record]:
    """Where a sampler is to make the documents."""
    draw = np.random.default_rng([seed, 7])
    records = []
    for number in range(documents):
        length = int(draw.integers(4, _MOST_TOKENS))
        prompt = int(draw.integers(1, length))
        records.append(
            {
                "id": f"made-up-{number}",
                "input_ids": draw.integers(0, 97, length).tolist(),
                "loss_mask": [0] * prompt + [1] * (length - prompt),
                "logprobs": [0.0] * length,
                "advantage": float(draw.normal()),
                "temperature": 1.0,
            }
        )
    return records


def _write(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _kernels() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _run(layout: Layout, case: Case, comparer: Comparer, plant: Callable[[], None] | None) -> Verdict:
    started = time.perf_counter()
    folder = case.directory / "layouts" / layout.name.replace(" ", "-").replace(":", "").replace(",", "")
    options = _merge(case.options, layout.options)
    options["checkpoint"] = case.options["checkpoint"] | {"directory": str(folder / "run")}
    records = case.records
    if layout.parts:
        records = _in_parts(layout, case, folder)
        options["data"] = options["data"] | {"path": str(folder / "part-{rank}.jsonl")}
    try:
        run_ranks(
            layout.ranks,
            run_layout,
            (options, str(folder), layout.reverse, plant),
            environment=layout.environment,
            timeout=300 if len(case.records) < 100 else 3600,
        )
    except RankError as error:
        return Verdict(layout, {}, str(error), time.perf_counter() - started)
    worst: dict[str, Difference] = {}
    for found in comparer.differences(folder, case.steps(records)):
        known = worst.get(found.kind)
        if known is None or not found.value <= known.value:
            worst[found.kind] = found
    if plant is None and layout.name != "one process":
        shutil.rmtree(folder)  # a full model's gradients of many layouts would fill a disk
    return Verdict(layout, worst, None, time.perf_counter() - started)


def _in_parts(layout: Layout, case: Case, folder: Path) -> list[Record]:
    """Rank 0 has none, rank 1 one, rank 2 three, and the last one all the rest; in the order that steps take them."""
    cuts = [*(0, 0, 1, 4)[: layout.ranks], len(case.records)]
    parts = [case.records[cuts[rank] : cuts[rank + 1]] for rank in range(layout.ranks)]
    folder.mkdir(parents=True)
    for rank, part in enumerate(parts):
        _write(folder / f"part-{rank}.jsonl", part)
    order = []
    for place in range(len(case.records)):
        for part in parts:
            if place < len(part):
                order.append(part[place])
    return order


def _half_precision(config: Config, case: Case, comparer: Comparer, most_ranks: int) -> Iterator[Verdict]:
    """In bfloat16 a layout's error against float64 may be 1.5 times the one process's."""
    layouts = [
        Layout("bfloat16: one process"),
        Layout("bfloat16: small micro-batches", options={"data": {"tokens_per_microbatch": case.longest}}),
        Layout("bfloat16: FSDP 2", 2),
        Layout("bfloat16: tensor 2", 2, {"parallel": {"tensor": 2}}),
    ]
    errors: dict[str, float] = {}
    for layout in layouts:
        if layout.ranks > most_ranks or not _permits(case, layout):
            continue
        started = time.perf_counter()
        options = _merge(_merge(case.options, layout.options), {"model": {"dtype": "bfloat16"}})
        folder = case.directory / "bfloat16" / str(len(errors))
        options["checkpoint"] = {"every": 0, "keep": 1, "directory": str(folder / "run")}
        try:
            run_ranks(layout.ranks, run_layout, (options, str(folder)))
        except RankError as error:
            yield Verdict(layout, {}, str(error), time.perf_counter() - started)
            continue
        gradient = comparer.total_gradient_error(folder)
        errors[layout.name] = gradient
        ratio = gradient / max(errors[layouts[0].name], 1e-30)
        found = Difference(1, "half precision", f"gradient {gradient:.1e} off, over the one process's", ratio)
        yield Verdict(layout, {found.kind: found}, None, time.perf_counter() - started)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for name, value in over.items():
        inner = both.get(name)
        both[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both
