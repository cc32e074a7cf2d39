"""The case that all layouts of `verify` compute: the user's model, documents and options, reduced or in full."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files.whole import write_json_lines
from truestep.model.cuts.experts import check_division
from truestep.model.cuts.tensor import tensor_plan
from truestep.model.loading.load import load_policy
from truestep.model.loading.read import read_model
from truestep.model.mixers.context_parallel import check_heads
from truestep.model.mixers.recurrence import cannot_share
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks
from truestep.rollouts.advantages import GroupFunction, GroupSizeError, check_group_sizes
from truestep.rollouts.fields import Field, declare
from truestep.rollouts.record import Checks, Needs, parse_record
from truestep.rollouts.sequences import join
from truestep.run.assemble.sources import advantage_rule, declared_fields, read_documents
from truestep.run.assemble.step import FROM_RECORDS, make_objective
from truestep.tools.verify.layouts import Layout
from truestep.tools.verify.oracle.advantages import Record, documents_of, prepare
from truestep.tools.verify.reduced import (
    draw_adapter,
    draw_routes,
    records_of,
    redraw_logprobs,
    reduce_model,
    reduce_record,
    still_matching,
    without_routes,
)
from truestep.types import Rollout
from truestep.weights.errors import ModelError, no_model

STEPS = 2
HALF = "half_precision.jsonl"  # the file with the rollouts for layouts in half precision
_MOST_TOKENS = 40  # most tokens of a reduced document
_LOOKED_AT = 100  # documents are chosen from the user's first ones, at most this many times the number of documents


class VerifyError(TruestepError):
    pass


@dataclass(frozen=True)
class Case:
    directory: Path
    model: Path
    options: dict[str, Any]
    records: list[Record]  # as in a rollout file
    budget: int  # tokens of a micro-batch
    # the model of loss.kl_reference; None: there is none, or the records have its log-probs
    reference: Path | None = None
    # Records for half precision. Their log-probs keep a larger distance from the loss's clipping bounds. None: use
    # `records`.
    half_records: list[Record] | None = None
    adapter: Path | None = None  # the adapter with which every layout starts
    # the user's own function for the advantages of a group
    function: Callable[[list[list[Record]]], list[Any]] | None = None

    def prepare(self, records: Sequence[Record], data: dict[str, Any]) -> list[Record]:
        """Return the records that steps train on, with the oracle's advantages. `data`: the section `data` of the
        options."""
        return prepare(records, data | {"function": self.function})

    def steps(self, prepared: Sequence[Record]) -> list[list[Record]]:
        """Divide prepared records into the batches of steps. If there are several updates per batch, the batch is
        repeated."""
        size, updates = self.options["schedule"]["docs_per_step"], self.options["schedule"]["updates_per_batch"]
        documents = documents_of(prepared)
        batches = [
            [record for document in documents[start : start + size] for record in document]
            for start in range(0, len(documents), size)
        ]
        return [batch for batch in batches[:STEPS] for _ in range(updates)]

    @property
    def positions(self) -> list[int]:
        """The steps of the user's learning-rate schedule to compute, one for each update."""
        optimizer, schedule = self.options["optimizer"], self.options["schedule"]
        return some_positions(
            optimizer["warmup_steps"],
            schedule["steps"] if optimizer["schedule"] != "constant" else None,
            STEPS * schedule["updates_per_batch"],
        )

    @property
    def longest(self) -> int:
        return max(len(record["input_ids"]) for record in self.records)


def some_positions(warm: int, last: int | None, count: int) -> list[int]:
    """Choose steps of a schedule with different learning rates: within warm-up, within decay, the first step, the first
    after warm-up, and the last. `warm`: steps of warm-up; `last`: None if the rate is constant after warm-up."""
    wanted = [3 * warm // 4] if warm > 1 else []
    if last is not None:
        wanted += [min(last, max(warm + 2, warm + 1 + (last - warm) // 4))]
    wanted += [warm + 1] if last is None and warm else []
    wanted += [1, warm + 1, *([last] if last is not None else [])]
    chosen = list(dict.fromkeys(position for position in wanted if position > 0))[:count]
    return sorted([*chosen, *range(max(chosen) + 1, max(chosen) + 1 + count - len(chosen))])


def make_case(config: Config, scratch: Path, documents: int, full: bool) -> Case:
    seed, remote = config.seed, config.model.trust_remote_code
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        raise VerifyError(no_model(model))
    if not full:
        model = reduce_model(model, scratch / "model", seed, remote)
    adapter = None if config.adapter is None else _adapter(config, model, scratch, full)
    rule = None if config.loss.supervised else advantage_rule(config)
    own = config.data.model_dump()["fields"]
    records = _invented(config, documents) if config.data.path is None else _of_user(config, documents)
    if not full:
        records = [reduce_record(record, _MOST_TOKENS) for record in records]
    half = None
    objective = None if config.loss.supervised or full else make_objective(config)
    routed = _routed(config, model, full)
    if objective is not None and config.model.dtype == "bfloat16":
        # no layout in half precision shares prefixes, so prefixes are made equal only afterwards
        half = routed(copy.deepcopy(records))
        redraw_logprobs(model, half, objective, seed, remote, adapter, half_precision=True, declared=own)
        write_json_lines(scratch / HALF, half)
    records = routed(records if full else share_beginnings(records))
    if objective is not None:
        redraw_logprobs(model, records, objective, seed, remote, adapter, declared=own)
    reference, loss = _reference(config, model, scratch, full)
    longest = max(len(record["input_ids"]) for record in records)
    budget = config.data.tokens_per_microbatch if full else 3 * longest
    write_json_lines(scratch / "rollouts.jsonl", records)
    freeze = config.model.freeze
    if freeze and not full:
        freeze = still_matching(model, freeze, remote)
    function = None if rule is None or rule.function is None else _called_with_records(rule.function, declare(own))
    options: dict[str, Any] = {
        "model": config.model.model_dump() | {"path": str(model), "dtype": "float32", "freeze": freeze},
        "adapter": None if adapter is None else {"path": str(adapter)},
        "loss": loss | {"metrics": "full"},
        "data": {
            "path": str(scratch / "rollouts.jsonl"),
            **({"advantages": "none"} if rule is None else _advantages(config, records, full)),
            "fields": own,
            "tokens_per_microbatch": budget,
            "on_bad_record": "stop",
            "zero_advantage": "skip" if config.data.zero_advantage == "skip" else "keep",
        },
        "schedule": {
            "updates_per_batch": config.schedule.updates_per_batch,
            "steps": config.schedule.steps,
            "stall_timeout": min(60.0, config.schedule.stall_timeout),
        },
        "optimizer": _optimizer(config),
        "checkpoint": {"every": 0, "keep": 1},
        "logging": {"console": False, "rollouts": None, "custom_metrics": config.logging.custom_metrics},
        "seed": seed,
    }
    case = Case(scratch, model, options, records, budget, reference, half, adapter, function)
    left = len(documents_of(case.prepare(records, options["data"])))
    if not left:
        raise VerifyError("data.truncated: drop puts aside every one of the documents that verify chose")
    options["schedule"]["docs_per_step"] = math.ceil(left / STEPS)
    return case


def _routed(config: Config, model: Path, full: bool) -> Callable[[list[Record]], list[Record]]:
    """Return a function that sets the experts in records. Without replay it removes them, with `full` it keeps the
    user's, and for a reduced mixture of experts it draws random ones."""
    how = config.model.experts.replay
    if full:
        return lambda records: [without_routes(record) for record in records] if how == "off" else records
    given = model, config.seed, config.model.trust_remote_code
    return lambda records: draw_routes([without_routes(record) for record in records], how, *given)


def share_beginnings(records: Sequence[Record]) -> list[Record]:
    """Give every second record the same tokens as the record before it, up to the middle of the shorter one. These are
    prefixes that layouts can share."""
    shared = list(records)
    for number in range(1, len(records), 2):
        ids, before = records[number]["input_ids"], records[number - 1]["input_ids"]
        middle = (min(len(ids), len(before)) + 1) // 2
        shared[number] = records[number] | {"input_ids": [*before[:middle], *ids[middle:]]}
    return shared


def _reference(config: Config, model: Path, scratch: Path, full: bool) -> tuple[Path | None, dict[str, Any]]:
    """Return the model of loss.kl_reference, reduced unless `full`, and the options of the loss with its path."""
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
    """Return the adapter with which layouts start. A new adapter is replaced by a random one: its B is zero, so A would
    have no gradient."""
    assert config.adapter is not None
    if full and config.adapter.path is not None:
        return Path(config.adapter.path)
    return draw_adapter(config.adapter, model, scratch / "adapter", config.seed, config.model.trust_remote_code)


def _optimizer(config: Config) -> dict[str, Any]:
    """Return the optimizer's options. Muon's products are float32, because they are compared with float64."""
    options = config.optimizer.model_dump()
    return options | ({"ns_dtype": "float32"} if "ns_dtype" in options else {})


def _advantages(config: Config, records: Sequence[Record], full: bool) -> dict[str, Any]:
    """Return the options of advantages. For reduced documents the overlong penalty begins at shorter lengths."""
    data = config.data.model_dump()
    names = ("advantages", "advantage_scale", "advantage_std_floor", "overlong_penalty", "truncated", "group_size")
    options = {name: data[name] for name in names}
    if options["overlong_penalty"] is not None and not full:
        labels = [sum(record["loss_mask"]) for record in records]
        options["overlong_penalty"] |= {"from": min(labels), "to": max(max(labels) - 1, min(labels) + 1)}
    try:
        check_group_sizes(
            list(Counter(one[0]["group_id"] for one in documents_of(records) if "group_id" in one[0]).values()),
            options["group_size"],
        )
    except GroupSizeError:
        options["group_size"] = None  # the chosen documents have incomplete groups
    return options


def _called_with_records(
    function: GroupFunction, declared: Sequence[Field]
) -> Callable[[list[list[Record]]], list[Any]]:
    """Wrap a user's advantage function so that it takes the oracle's records, one list per document."""
    checks = Checks(Needs(logprobs=False, advantages=False, advantage_rule="none"), fields=tuple(declared))

    def document_of(records: list[Record]) -> Rollout:
        parsed = [parse_record(record, record["id"], checks) for record in records]
        return parsed[0] if parsed[0].document_id is None else join(parsed, declared)

    def called(group: list[list[Record]]) -> list[Any]:
        made = function([document_of(records) for records in group])
        return [np.asarray(value, np.float64).tolist() for value in made]

    return called


def permits(case: Case, layout: Layout) -> bool:
    """Tell whether the model can be trained under a layout: its heads and layers must be divisible, with enough layers
    for the stages. Compiled layers cannot be combined with tensor parallelism."""
    parallel = layout.options.get("parallel", {})
    cut = {name: parallel.get(name, 1) for name in ("tensor", "context", "pipeline", "stages_per_rank", "expert")}
    if cut["tensor"] > 1 and case.options["model"]["compile"]:
        return False
    model = case.model, case.options["model"]["trust_remote_code"]
    shares = layout.options.get("data", {}).get("share_prefixes") == "always"
    return (not shares or _can_share(*model)) and _can_be_cut(*model, **cut)


@cache
def _can_share(model: Path, trust_remote_code: bool) -> bool:
    return not cannot_share(load_policy(model, device="cpu", trust_remote_code=trust_remote_code).model)


@cache
def _can_be_cut(
    model: Path, trust_remote_code: bool, tensor: int, context: int, pipeline: int, stages_per_rank: int, expert: int
) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust_remote_code)
    try:
        check_heads(getattr(config.get_text_config(), "num_attention_heads", 0), context, tensor)
        if tensor > 1:
            tensor_plan(config, tensor, divided=expert > 1)
        if expert > 1:
            check_division(read_model(model, trust_remote_code)[0], expert)
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
    rollouts = read_documents(config, vocabulary or 2**31, as_written=True).rollouts
    some = [rollout for rollout in islice(rollouts, _LOOKED_AT * documents) if _can_be_used(rollout, config)]
    if not some:
        raise VerifyError(f"data.path: no record of {config.data.path} can be trained on")
    declared = declared_fields(config)
    return [record for rollout in _chosen(some, documents) for record in records_of(rollout, declared)]


def _can_be_used(rollout: Rollout, config: Config) -> bool:
    if config.loss.supervised or rollout.advantages is not None or not rollout.num_labels:
        return True
    return advantage_rule(config).from_rewards and rollout.reward is not None and rollout.group_id is not None


def _chosen(rollouts: Sequence[Rollout], documents: int) -> list[Rollout]:
    """Choose whole groups of documents if possible, those with different rewards first, since others have no
    advantages."""
    groups: dict[str, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        groups.setdefault(f"of no group {place}" if rollout.group_id is None else rollout.group_id, []).append(place)
    equal = {
        name: len(places) > 1 and len({rollouts[place].reward for place in places}) == 1
        for name, places in groups.items()
    }
    in_order = [place for name in sorted(groups, key=equal.__getitem__) for place in groups[name]]
    return [rollouts[place] for place in sorted(in_order[:documents])]


def _invented(config: Config, documents: int) -> list[Record]:
    """Make random documents, in groups, for a configuration with a sampler and no rollout file."""
    draw = np.random.default_rng([config.seed, 7])
    size = config.data.group_size or 1
    records = []
    for number in range(documents):
        length = int(draw.integers(4, _MOST_TOKENS))
        prompt = int(draw.integers(1, length))
        records.append(
            {
                "id": f"made-up-{number}",
                "group_id": f"prompt-{number // size}",
                "input_ids": draw.integers(0, 97, length).tolist(),
                "loss_mask": [0] * prompt + [1] * (length - prompt),
                "logprobs": [0.0] * length,
                "reward": float(draw.normal()),
                "temperature": 1.0,
                "truncated": number % 5 == 3,
                **{field.name: _draw_field(field, draw, length) for field in declared_fields(config)},
            }
        )
    return records


def _draw_field(field: Field, draw: np.random.Generator, length: int) -> Any:
    """Draw values from 0 to 2 for a user's own field of a random document."""
    count = length if field.level == "label" else 1
    values = draw.uniform(0, 2, count).astype(field.dtype).tolist()
    return values if field.level == "label" else values[0]


def in_parts(layout: Layout, case: Case, folder: Path) -> list[Record]:
    """Write a file of documents for each rank: rank 0 gets none, rank 1 one, rank 2 three and the last rank the rest.
    Return the records in the order of the steps. A group does not span ranks, since no rank reads the files of
    others."""
    documents = documents_of(case.records)
    cuts = [*(0, 0, 1, 4)[: layout.ranks], len(documents)]
    parts = [
        [record for document in documents[cuts[rank] : cuts[rank + 1]] for record in document]
        for rank in range(layout.ranks)
    ]
    for rank, part in enumerate(parts):
        parts[rank] = [
            record | ({"group_id": f"{record['group_id']} of rank {rank}"} if "group_id" in record else {})
            for record in part
        ]
        write_json_lines(folder / f"part-{rank}.jsonl", parts[rank])
    rows = zip_longest(*(documents_of(part) for part in parts))
    return [record for row in rows for document in row for record in document or ()]
