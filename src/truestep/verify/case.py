"""The case that every layout of `verify` computes: the user's model and rollouts, reduced or whole, as files."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from truestep.assemble.sources import advantage_rule, read_documents
from truestep.assemble.step import FROM_RECORDS, make_objective
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files import write_json_lines
from truestep.policy.cuts.tensor import tensor_plan
from truestep.policy.errors import ModelError, no_model
from truestep.policy.loading.load import load_policy
from truestep.policy.model.context import check_heads
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks
from truestep.verify.layouts import Layout
from truestep.verify.oracle.records import Record
from truestep.verify.reduced import (
    draw_adapter,
    record_of,
    redraw_logprobs,
    reduce_model,
    reduce_record,
    still_matching,
    with_difference,
)

STEPS = 2
HALF = "half_precision.jsonl"  # the rollouts of layouts in half precision
_MOST_TOKENS = 40  # a reduced document has no more


class VerifyError(TruestepError):
    pass


@dataclass(frozen=True)
class Case:
    directory: Path
    model: Path
    options: dict[str, Any]
    records: list[Record]
    budget: int
    reference: Path | None = None  # the model that the policy is held near to, where the loss has one
    # Those of layouts in half precision, whose rounding decides nothing either; None: the same as of the others.
    half_records: list[Record] | None = None
    adapter: Path | None = None  # that every layout begins with

    def steps(self, records: Sequence[Record]) -> list[list[Record]]:
        """Cut records into the batches of the steps; a batch comes once for each update on it."""
        size, updates = self.options["schedule"]["docs_per_step"], self.options["schedule"]["updates_per_batch"]
        batches = [list(records[start : start + size]) for start in range(0, len(records), size)]
        return [batch for batch in batches[:STEPS] for _ in range(updates)]

    @property
    def longest(self) -> int:
        return max(len(record["input_ids"]) for record in self.records)


def make_case(config: Config, scratch: Path, documents: int, full: bool) -> Case:
    seed = config.seed
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        raise VerifyError(no_model(model))
    if not full:
        model = reduce_model(model, scratch / "model", seed, config.model.trust_remote_code)
    adapter = None if config.adapter is None else _adapter(config, model, scratch, full)
    over_step = not config.loss.supervised and advantage_rule(config).scale == "step"
    records = _invented(documents, seed, over_step) if config.data.path is None else _of_user(config, documents)
    if not full:
        records = [reduce_record(record, _MOST_TOKENS) for record in records]
    half = None
    if not config.loss.supervised and not full:
        objective, remote = make_objective(config), config.model.trust_remote_code
        if config.model.dtype == "bfloat16":
            half = copy.deepcopy(records)
            redraw_logprobs(model, half, objective, seed, remote, adapter, half_precision=True)
            write_json_lines(scratch / HALF, half)
        redraw_logprobs(model, records, objective, seed, remote, adapter)
    reference, loss = _reference(config, model, scratch, full)
    longest = max(len(record["input_ids"]) for record in records)
    budget = config.data.tokens_per_microbatch if full else 3 * longest
    write_json_lines(scratch / "rollouts.jsonl", records)
    freeze = config.model.freeze
    if freeze and not full:
        freeze = still_matching(model, freeze, config.model.trust_remote_code)
    options = {
        "model": config.model.model_dump() | {"path": str(model), "dtype": "float32", "freeze": freeze},
        "adapter": None if adapter is None else {"path": str(adapter)},
        "loss": loss | {"metrics": "full"},
        "data": {
            "path": str(scratch / "rollouts.jsonl"),
            **_advantages(config, over_step),
            "tokens_per_microbatch": budget,
            "on_bad_record": "stop",
            "zero_advantage": "skip" if config.data.zero_advantage == "skip" else "keep",
        },
        "schedule": {
            "docs_per_step": math.ceil(len(records) / STEPS),
            "updates_per_batch": config.schedule.updates_per_batch,
            "steps": STEPS * config.schedule.updates_per_batch,
            "stall_timeout": min(60.0, config.schedule.stall_timeout),
        },
        "optimizer": _optimizer(config),
        "checkpoint": {"every": 0, "keep": 1},
        "logging": {"console": False, "rollouts": None, "custom_metrics": config.logging.custom_metrics},
        "seed": seed,
    }
    return Case(scratch, model, options, records, budget, reference, half, adapter)


def _reference(config: Config, model: Path, scratch: Path, full: bool) -> tuple[Path | None, dict[str, Any]]:
    """Find or make the model of loss.kl_reference, and give the options of the loss with it."""
    loss = config.loss.model_dump()
    options = loss.get("kl_reference")
    if options is None or options["path"] == FROM_RECORDS:
        return None, loss
    if options["path"] is None:
        return model, loss
    reference = Path(options["path"])
    if not (reference / "config.json").is_file():
        raise VerifyError(f"loss.kl_reference.path: {reference} is not a Hugging Face model directory")
    if not full:
        reference = reduce_model(reference, scratch / "reference", config.seed + 1, config.model.trust_remote_code)
    return reference, loss | {"kl_reference": options | {"path": str(reference)}}


def _adapter(config: Config, model: Path, scratch: Path, full: bool) -> Path:
    """Find the adapter that the layouts begin with, or draw one: of a new one, B is zero, and A has no gradient."""
    assert config.adapter is not None
    if full and config.adapter.path is not None:
        return Path(config.adapter.path)
    return draw_adapter(config.adapter, model, scratch / "adapter", config.seed, config.model.trust_remote_code)


def _optimizer(config: Config) -> dict[str, Any]:
    """Make the options of the optimizer: it is compared with float64, so Muon's products are float32."""
    options = config.optimizer.model_dump() | {"schedule": "constant", "warmup_steps": 0, "minimum_learning_rate": 0.0}
    return options | ({"ns_dtype": "float32"} if "ns_dtype" in options else {})


def _advantages(config: Config, over_step: bool) -> dict[str, Any]:
    """Make the options of advantages: records carry their own, or what the step's scale makes them of."""
    if not over_step:
        return {"advantages": "none"}
    return {
        "advantages": "truestep.verify.reduced:given_differences",
        "advantage_scale": "step",
        "advantage_std_floor": config.data.advantage_std_floor,
    }


def permits(case: Case, layout: Layout) -> bool:
    """Tell whether the model can be trained under this layout: its heads shared, its layers cut, enough stages made."""
    parallel = layout.options.get("parallel", {})
    cut = {name: parallel.get(name, 1) for name in ("tensor", "context", "pipeline", "stages_per_rank")}
    return _can_be_cut(case.model, case.options["model"]["trust_remote_code"], **cut)


@cache
def _can_be_cut(
    model: Path, trust_remote_code: bool, tensor: int, context: int, pipeline: int, stages_per_rank: int
) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust_remote_code)
    try:
        check_heads(getattr(config.get_text_config(), "num_attention_heads", 0), context, tensor)
        if tensor > 1:
            tensor_plan(config, tensor)
        if pipeline > 1:
            ranks = Ranks(0, RankLayout(data_shard=1, pipeline=pipeline))
            load_policy(
                model, device="cpu", trust_remote_code=trust_remote_code, ranks=ranks, stages_per_rank=stages_per_rank
            )
    except ModelError:
        return False
    return True


def _of_user(config: Config, documents: int) -> list[Record]:
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    rollouts = read_documents(config, vocabulary or 2**31).rollouts[:documents]
    if not rollouts:
        raise VerifyError(f"data.path: no record of {config.data.path} can be trained on")
    return [record_of(rollout) for rollout in rollouts]


def _invented(documents: int, seed: int, over_step: bool) -> list[Record]:
    """Invent documents for a configuration whose documents a sampler is to make."""
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
    if over_step:
        return [with_difference(record, record["advantage"]) for record in records]
    return records


def in_parts(layout: Layout, case: Case, folder: Path) -> list[Record]:
    """Give rank 0 no document, rank 1 one, rank 2 three and the last rank the rest; list them as steps take them."""
    cuts = [*(0, 0, 1, 4)[: layout.ranks], len(case.records)]
    parts = [case.records[cuts[rank] : cuts[rank + 1]] for rank in range(layout.ranks)]
    for rank, part in enumerate(parts):
        write_json_lines(folder / f"part-{rank}.jsonl", part)
    return [record for row in zip_longest(*parts) for record in row if record is not None]
