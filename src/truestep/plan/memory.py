"""The planned memory of each rank by kind, computed from the model's shape and the options."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig, CustomOptimizer, MuonConfig
from truestep.plan.activations import Activations, measure_activations
from truestep.plan.shape import ModelShape, WeightGroup
from truestep.ranks.axes import RankLayout
from truestep.weights.blocks import ScaleBlocks

GIB = 2**30
_FLOAT32 = 4
# A chunk of logits has at most this many bytes per word of the vocabulary: see `head.logits`.
_MOST_ROW_BYTES, _BYTES_PER_LOGIT = 32768, 2
LABELS = 0.5  # the assumed fraction of tokens that are labels

WEIGHTS, MASTERS, GRADIENTS = "weights as they compute", "float32 weights", "gradients"
UNREDUCED, STATES, REFERENCE = "gradients until they are reduced", "optimizer's state", "reference model"
ACTIVATIONS, AT_ONCE = "activations that are kept", "head's logits, or one layer's recomputation"
MOVING = "what moves between host and device"


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank of one pipeline stage, in bytes by kind."""

    stage: int
    kinds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def plan_memory(config: Config, shape: ModelShape, layout: RankLayout) -> list[RankMemory]:
    """Compute the peak memory of a step, for a rank of each stage."""
    dtype = getattr(torch, config.model.dtype)
    activations = measure_activations(
        shape.config,
        dtype,
        compiled=config.model.compile,
        products=recomputes(config) == "elementwise",
        apart=config.model.attention != "flash",
        adapter=shape.adapter,
    )
    stages = range(layout.by_name["pipeline"])
    return [RankMemory(stage, _kinds(config, shape, layout, stage, activations)) for stage in stages]


def _kinds(
    config: Config, shape: ModelShape, layout: RankLayout, stage: int, activations: Activations
) -> dict[str, float]:
    """Compute the bytes of each kind on a rank of a stage."""
    sizes = layout.every
    size = computed_size(config)
    shards = sizes["data_shard"] * sizes["context"]
    place = (stage, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"])
    # A rank stores its share of all experts, and gathers those of its expert rank.
    resting = sizes["tensor"] if sizes["expert"] > 1 else 1
    part, gathered = shape.part(*place, resting), shape.part(*place, sizes["expert"])
    tokens = config.data.tokens_per_microbatch / (sizes["context"] * sizes["tensor"])
    trained = shape.part(*place, resting, trained=True)
    own = trained.all / shards
    kinds = {
        MASTERS: 0.0 if masters_offloaded(config) else _FLOAT32 * own,
        WEIGHTS: _computed(config, part, gathered, trained.all, shards, size),
        GRADIENTS: _FLOAT32 * own,
        STATES: 0.0 if offloaded(config) else state_bytes(config, shape, trained) / shards,
    }
    if shards > 1:
        several = _several(config) and not reduces_each(config)
        unreduced = shape.part(*place, sizes["expert"], trained=True)
        kinds[UNREDUCED] = _FLOAT32 * (unreduced.all if several else max(unreduced.layers, default=0))
    if moving := min(_room(config, shape, trained), host_bytes(config, shape, trained) / shards):
        kinds[MOVING] = moving
    last = stage == sizes["pipeline"] - 1
    # 1F1B schedule: a stage holds the activations of one micro-batch for itself and of one for each later stage.
    under_way = sizes["pipeline"] - stage
    # Copies of tokens for expert parallelism. Received copies are kept; copies that are sent or come back exist for a
    # while.
    copies = size * shape.hidden * copies_of_a_token(shape.config, sizes["expert"])
    activations = replace(activations, layer=activations.layer + copies)
    kept, recomputed = _kept(config, activations, len(part.layers))
    kinds[ACTIVATIONS] = under_way * (kept + size * shape.hidden) * tokens
    logits = _logits(config, shape, layout) if last else 0.0
    kinds[AT_ONCE] = max(logits, (recomputed + 3 * copies) * tokens)
    if has_reference(config):
        whole = size * part.all / shards
        # An offloaded reference is freed before the step's passes. It counts only as far as it exceeds their memory.
        during = whole + activations.layer * tokens + logits
        step = sum(kinds.get(kind, 0.0) for kind in (UNREDUCED, ACTIVATIONS, AT_ONCE))
        kinds[REFERENCE] = max(0.0, during - step) if offloads_reference(config) else whole
    return kinds


def copies_of_a_token(config: Any, ranks: int) -> float:
    """Return the mean number of expert ranks that a token is sent to, if experts are chosen evenly; 0 without expert
    parallelism."""
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1
    return 0.0 if ranks == 1 else float(ranks * (1 - (1 - 1 / ranks) ** chosen))


def _kept(config: Config, activations: Activations, layers: int) -> tuple[float, float]:
    """Compute bytes per token: kept by all layers, and used by the layer that is being recomputed."""
    how = recomputes(config)
    if how == "none":
        return activations.layer * layers, 0.0
    beside = 0.0 if how == "full" else activations.selected * layers
    # With inputs on the host, the device holds two: the input in use and the one in transfer.
    inputs = activations.boundary * (min(2, layers) if config.model.activation_offload is True else layers)
    return inputs + beside, 0.0 if remakes(config) else activations.layer


def recomputes(config: Config) -> str:
    """Return the kind of recomputation: `none`, `elementwise`, `selective` or `full`; `auto` counts as `none`."""
    how = config.model.activation_checkpointing
    return how if how in ("elementwise", "selective", "full") else "none"


def remakes(config: Config) -> bool:
    """Tell whether compiled kernels recompute elementwise work themselves, so that no whole layer runs again."""
    return config.model.compile and recomputes(config) == "elementwise"


def reduces_each(config: Config) -> bool:
    """Tell whether gradients are reduced after each micro-batch."""
    return config.parallel.reduce_each_micro_batch is True


def _computed(config: Config, part: WeightGroup, gathered: WeightGroup, trained: int, shards: int, size: int) -> float:
    apart = masters_offloaded(config)  # if so, the device stores weights in the compute dtype besides the gathered ones
    kept = part.all if apart else part.all - trained  # frozen weights exist only in the compute dtype
    if shards == 1:  # bfloat16 needs copies of all weights; float32 computes with the master weights
        return size * (part.all if size < _FLOAT32 else kept)
    ends = max(part.embedding, part.head)
    layers = gathered.layers
    at_once = 2 * max(layers, default=0) if config.parallel.reshard_after_forward else sum(layers)
    return size * (at_once + ends + kept / shards)


def _several(config: Config) -> bool:
    """Tell whether a step may have several micro-batches per rank: False only for a fixed number of one."""
    schedule = config.schedule
    return bool(schedule.docs_per_step) or schedule.depth_first_micro_batches * schedule.breadth_first_micro_batches > 1


def offloaded(config: Config) -> bool:
    """Tell whether the optimizer's state is in host memory."""
    return getattr(config.optimizer, "offload", "none") != "none"


def masters_offloaded(config: Config) -> bool:
    """Tell whether the float32 weights are in host memory."""
    return getattr(config.optimizer, "offload", "none") == "all"


def host_bytes(config: Config, shape: ModelShape, trained: WeightGroup) -> float:
    """Count the bytes of a part's optimizer state and float32 weights in host memory."""
    states = state_bytes(config, shape, trained) if offloaded(config) else 0.0
    return states + (_FLOAT32 * trained.all if masters_offloaded(config) else 0.0)


def _room(config: Config, shape: ModelShape, trained: WeightGroup) -> float:
    """Return the bytes by which `optimizer.offload_room` raises a stage's peak. After the last layer of the backward
    pass, some memory is free anyway: the size of the largest weight's gradient and of its all-reduce."""
    ends = {shape.embedding: trained.embedding, shape.head: trained.head}
    here = (size for name, size in shape.weights.items() if name not in shape.frozen and ends.get(name, 1))
    largest = max(map(math.prod, here), default=0)
    return max(0.0, float(getattr(config.optimizer, "offload_room", 0.0)) * GIB - 2 * _FLOAT32 * largest)


def staged_bytes(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    """Count the bytes of the staging buffer for a checkpoint, on the rank with the largest."""
    sizes = layout.every
    size = torch.empty((), dtype=getattr(torch, config.model.dtype)).element_size()
    experts = sizes["tensor"] if sizes["expert"] > 1 else 1
    sharing = sizes["data_shard"] * sizes["context"] * sizes["data_replicate"]

    def of_stage(stage: int) -> float:
        place = (stage, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"], experts)
        part, trained = shape.part(*place), shape.part(*place, trained=True)
        frozen = 0 if config.adapter is not None else part.all - trained.all  # an adapter's base weights are not saved
        weights = _FLOAT32 * trained.all + size * frozen
        return (weights + state_bytes(config, shape, trained)) / sharing

    return max(of_stage(stage) for stage in range(sizes["pipeline"]))


def kept_bytes(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    """Count the bytes of host memory that hold a rank's last state and the one that is copied, on one machine. Its
    partner on another machine has as many."""
    return 0.0 if config.checkpoint.in_memory_every is None else 2 * staged_bytes(config, shape, layout)


def state_bytes(config: Config, shape: ModelShape, part: WeightGroup) -> float:
    """Count the bytes of the optimizer's state of a part's trained weights. A user's own optimizer is assumed to have
    one float32 moment."""
    ends = (shape.embedding, shape.head)
    inner = {name: size for name, size in shape.weights.items() if name not in ends and name not in shape.frozen}
    of_inner = _mean_bytes(config, inner, at_end=False)
    of_ends = _mean_bytes(config, {name: shape.weights[name] for name in ends}, at_end=True)
    return of_inner * (sum(part.layers) + part.others) + of_ends * (part.embedding + part.head)


def _mean_bytes(config: Config, weights: Mapping[str, tuple[int, ...]], *, at_end: bool) -> float:
    """Compute the optimizer's mean bytes of state per element of these weights."""
    total = sum(math.prod(shape) * _number_bytes(config, shape, at_end) for shape in weights.values())
    return total / max(1, sum(map(math.prod, weights.values())))


def _number_bytes(config: Config, shape: tuple[int, ...], at_end: bool) -> float:
    optimizer = config.optimizer
    if isinstance(optimizer, CustomOptimizer):
        return _FLOAT32
    if isinstance(optimizer, MuonConfig) and len(shape) >= 2 and not at_end:
        return _FLOAT32
    if isinstance(optimizer, AdamW8BitConfig) and len(shape) >= 2:
        return 2 * (1 + _FLOAT32 * ScaleBlocks.of(shape[-1]).of_row(shape[-1]) / shape[-1])
    return 2 * _FLOAT32


def computed_size(config: Config) -> int:
    """Return the bytes per number in the compute dtype."""
    return torch.empty((), dtype=getattr(torch, config.model.dtype)).element_size()


def offloads_reference(config: Config) -> bool:
    return bool(getattr(getattr(config.loss, "kl_reference", None), "offload", False))


def has_reference(config: Config) -> bool:
    reference = getattr(config.loss, "kl_reference", None)
    if reference is None or reference.path == "records":
        return False
    # With an adapter, the base weights are the reference, and are loaded already.
    return config.adapter is None or reference.path is not None


def _logits(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    """Compute the memory of a chunk of logits, and of the labels' hidden states and their gradients."""
    sizes = layout.by_name
    labels = LABELS * config.data.tokens_per_microbatch / sizes["context"]
    wanted = config.model.head.logits_chunk_size
    most = _MOST_ROW_BYTES // _BYTES_PER_LOGIT
    rows, each = (min(labels, most), _BYTES_PER_LOGIT) if wanted == "auto" else (min(labels, wanted), 6)
    return rows * each * shape.vocabulary / sizes["tensor"] + labels * shape.hidden * (2 + _FLOAT32)
