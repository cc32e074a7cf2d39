"""The layouts under which `verify` runs a case."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # options that replace the user's
    reverse: bool = False  # micro-batches, and the documents in each, in reverse order
    parts: bool = False  # each rank has its own file of documents; rank 0's is empty
    environment: dict[str, str] = field(default_factory=dict)
    half: bool = False  # half precision: the error is compared with that of the first such layout


def layouts_for(budget: int, longest: int, most_ranks: int, kernels: bool) -> list[Layout]:
    """Return the layouts with at most `most_ranks` ranks. `budget`: tokens per micro-batch; `longest`: tokens of the
    longest document; `kernels`: whether Triton can interpret kernels."""

    def parallel(**options: Any) -> dict[str, Any]:
        return {"parallel": options}

    shared = {"share_prefixes": "always", "tokens_per_microbatch": 8 * longest}
    layouts = [
        Layout("one process"),
        Layout("smallest micro-batches", options={"data": {"tokens_per_microbatch": longest}}),
        Layout("one large micro-batch", options={"data": {"tokens_per_microbatch": 64 * budget}}),
        Layout("other packing order", options={"data": {"tokens_per_microbatch": 2 * longest}}, reverse=True),
        Layout("padded micro-batches", options={"data": {"tokens_per_microbatch": 8 * longest, "pad_to_multiple": 8}}),
        Layout("shared prefixes", options={"data": shared}),
        Layout("shared prefixes, divided trees", options={"data": shared | {"tokens_per_microbatch": longest}}),
        Layout("head: 1 row a chunk", options=_chunk(1)),
        Layout("head: 7 rows a chunk", options=_chunk(7)),
        Layout("FSDP 2", 2),
        Layout("replicas 2", 2, parallel(data_shard=1, data_replicate=2)),
        Layout("FSDP 2, breadth first 2", 2, {"schedule": {"breadth_first_micro_batches": 2}}),
        Layout("FSDP 2, reduced each time", 2, parallel(reduce_each_micro_batch=True, reshard_after_forward=False)),
        Layout("FSDP 2, shared prefixes", 2, {"data": shared}),
        Layout("FSDP 4", 4),
        Layout("FSDP 4, shared prefixes", 4, {"data": shared}),
        Layout("HSDP 2 x 2", 4, parallel(data_replicate=2)),
        Layout("FSDP 4, ragged ranks", 4, parts=True),
        Layout("context 2", 2, parallel(context=2)),
        Layout("context 2, shared prefixes", 2, parallel(context=2) | {"data": shared}),
        Layout("context 4", 4, parallel(context=4)),
        Layout("data 2 x context 2", 4, parallel(context=2)),
        Layout("tensor 2", 2, parallel(tensor=2)),
        Layout("tensor 2, shared prefixes", 2, parallel(tensor=2) | {"data": shared}),
        Layout("tensor 4", 4, parallel(tensor=4)),
        Layout("data 2 x tensor 2", 4, parallel(tensor=2)),
        Layout("pipeline 2", 2, parallel(pipeline=2)),
        Layout("pipeline 2, shared prefixes", 2, parallel(pipeline=2) | {"data": shared}),
        Layout("pipeline 2, 2 stages a rank", 2, parallel(pipeline=2, stages_per_rank=2)),
        Layout("pipeline 4", 4, parallel(pipeline=4)),
        Layout("data 2 x pipeline 2", 4, parallel(pipeline=2)),
        Layout("expert 2", 2, parallel(expert=2)),
        Layout("expert 4", 4, parallel(expert=4)),
        Layout("data 2 x expert 2, reduced each time", 4, parallel(expert=2, reduce_each_micro_batch=True)),
        Layout("replicas 2 x expert 2", 4, parallel(data_replicate=2, expert=2)),
        Layout("context 2, expert 2", 2, parallel(context=2, expert=2)),
        Layout("data 2 x context 2, expert 4", 4, parallel(context=2, expert=4)),
        Layout("tensor 2, expert 2", 2, parallel(tensor=2, expert=2)),
        Layout("data 2 x tensor 2, expert 4", 4, parallel(tensor=2, expert=4)),
        Layout("expert 2 x pipeline 2", 4, parallel(expert=2, pipeline=2)),
        Layout("context 2 x tensor 2", 4, parallel(context=2, tensor=2)),
        Layout("context 2 x pipeline 2", 4, parallel(context=2, pipeline=2)),
        Layout("tensor 2 x pipeline 2", 4, parallel(tensor=2, pipeline=2)),
        Layout("replicas 2 x context 2 x tensor 2", 8, parallel(data_replicate=2, context=2, tensor=2)),
        Layout("data 2 x tensor 2 x pipeline 2", 8, parallel(tensor=2, pipeline=2)),
        Layout("context 2 x tensor 2 x pipeline 2", 8, parallel(context=2, tensor=2, pipeline=2)),
    ]
    if kernels:
        interpreted = Layout("head: fused kernels", options=_chunk(16), environment={"TRITON_INTERPRET": "1"})
        layouts.insert(sum(layout.ranks == 1 for layout in layouts), interpreted)
    return [layout for layout in layouts if layout.ranks <= most_ranks]


def in_half_precision(longest: int, most_ranks: int) -> list[Layout]:
    """Return the layouts in half precision. The others are compared with the first."""
    half: dict[str, Any] = {"model": {"dtype": "bfloat16"}}
    layouts = [
        Layout("bfloat16: one process", options=half, half=True),
        Layout("bfloat16: small micro-batches", options=half | {"data": {"tokens_per_microbatch": longest}}, half=True),
        Layout("bfloat16: FSDP 2", 2, half, half=True),
        Layout("bfloat16: tensor 2", 2, half | {"parallel": {"tensor": 2}}, half=True),
    ]
    return [layout for layout in layouts if layout.ranks <= most_ranks]


def _chunk(rows: int) -> dict[str, Any]:
    return {"model": {"head": {"logits_chunk_size": rows}}}
