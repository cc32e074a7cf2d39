"""The memory of each rank, by what it is for. Everything is arithmetic on the model's shape and the options."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig, CustomOptimizer, MuonConfig
from truestep.plan.activations import Activations, measure_activations
from truestep.plan.shape import ModelShape, Part
from truestep.ranks.axes import RankLayout
from truestep.weights.blocks import Blocks

GIB = 2**30
_FLOAT32 = 4
# Rows of logits take at most so many bytes for each word of the vocabulary: see `head.logits`.
_MOST_ROW_BYTES, _BYTES_PER_LOGIT = 32768, 2
LABELS = 0.5  # the share of a micro-batch's tokens that the plan takes for labels

WEIGHTS, MASTERS, GRADIENTS = "weights as they compute", "float32 weights", "gradients"
UNREDUCED, STATES, REFERENCE = "gradients until they are reduced", "optimizer's state", "reference model"
ACTIVATIONS, AT_ONCE = "activations that are kept", "head's logits, or one layer's recomputation"
MOVING = "what moves between host and device"


@dataclass(frozen=True)
class RankMemory:
    """What the ranks of one pipeline stage need, in bytes, by what it is for."""

    stage: int
    kinds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def plan_memory(config: Config, shape: ModelShape, layout: RankLayout) -> list[RankMemory]:
    """Compute the memory of a rank of each stage, at the peak of a step."""
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
    """Compute each kind's bytes on a rank of a stage."""
    sizes = layout.by_name
    size = computed_size(config)
    shards = sizes["data_shard"] * sizes["context"]
    part = shape.part(stage, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"])
    tokens = config.data.tokens_per_microbatch / (sizes["context"] * sizes["tensor"])
    largest = max(part.layers, default=0)
    trained = shape.part(stage, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"], trained=True)
    own = trained.all / shards
    kinds = {
        MASTERS: 0.0 if masters_offloaded(config) else _FLOAT32 * own,
        WEIGHTS: _computed(config, part, trained.all, shards, size, largest),
        GRADIENTS: _FLOAT32 * own,
        STATES: 0.0 if offloaded(config) else state_bytes(config, shape, trained) / shards,
    }
    if shards > 1:
        several = _several(config) and not reduces_each(config)
        kinds[UNREDUCED] = _FLOAT32 * (trained.all if several else max(trained.layers, default=0))
    if moving := min(_room(config, shape, trained), host_bytes(config, shape, trained) / shards):
        kinds[MOVING] = moving
    last = stage == sizes["pipeline"] - 1
    # One forward, one backward: a stage keeps the activations of as many micro-batches as stages come behind it.
    under_way = sizes["pipeline"] - stage
    kept, recomputed = _kept(config, activations, len(part.layers))
    kinds[ACTIVATIONS] = under_way * (kept + size * shape.hidden) * tokens
    logits = _logits(config, shape, layout) if last else 0.0
    kinds[AT_ONCE] = max(logits, recomputed * tokens)
    if has_reference(config):
        whole = size * part.all / shards
        # An offloaded one is gone when the step's own passes begin: what counts is what its pass needs beyond theirs.
        during = whole + activations.layer * tokens + logits
        step = sum(kinds.get(kind, 0.0) for kind in (UNREDUCED, ACTIVATIONS, AT_ONCE))
        kinds[REFERENCE] = max(0.0, during - step) if offloads_reference(config) else whole
    return kinds


def _kept(config: Config, activations: Activations, layers: int) -> tuple[float, float]:
    """Compute the bytes of a token that layers keep, and those of the layer that is being recomputed."""
    how = recomputes(config)
    if how == "none":
        return activations.layer * layers, 0.0
    beside = 0.0 if how == "full" else activations.selected * layers
    # On the host, but for the one that goes or is used and the one that comes.
    inputs = activations.boundary * (min(2, layers) if config.model.activation_offload is True else layers)
    return inputs + beside, 0.0 if remakes(config) else activations.layer


def recomputes(config: Config) -> str:
    """Tell what is recomputed: none, elementwise, selective or full. What `auto` would choose is not known here."""
    how = config.model.activation_checkpointing
    return how if how in ("elementwise", "selective", "full") else "none"


def remakes(config: Config) -> bool:
    """Tell whether compiled layers make elementwise work again where it is needed: none runs once more as a whole."""
    return config.model.compile and recomputes(config) == "elementwise"


def reduces_each(config: Config) -> bool:
    """Tell whether gradients are reduced after each micro-batch."""
    return config.parallel.reduce_each_micro_batch is True


def _computed(config: Config, part: Part, trained: int, shards: int, size: int, largest: int) -> float:
    apart = masters_offloaded(config)  # then what the model computes with is here, and beside it what is gathered
    kept = part.all if apart else part.all - trained  # frozen weights are here in the compute type alone
    if shards == 1:  # rounded copies of all weights; float32 computes with the masters themselves
        return size * (part.all if size < _FLOAT32 else kept)
    ends = max(part.embedding, part.head)
    gathered = 2 * largest if config.parallel.reshard_after_forward else sum(part.layers)
    return size * (gathered + ends + kept / shards)


def _several(config: Config) -> bool:
    """Tell whether a step may have several micro-batches a rank: it has unless it is one of a fixed number."""
    schedule = config.schedule
    return bool(schedule.docs_per_step) or schedule.depth_first_micro_batches * schedule.breadth_first_micro_batches > 1


def offloaded(config: Config) -> bool:
    """Tell whether the optimizer's state lies in host memory."""
    return getattr(config.optimizer, "offload", "none") != "none"


def masters_offloaded(config: Config) -> bool:
    """Tell whether the float32 weights lie in host memory."""
    return getattr(config.optimizer, "offload", "none") == "all"


def host_bytes(config: Config, shape: ModelShape, trained: Part) -> float:
    """Count the bytes of a part's trained weights and of their states that lie in host memory."""
    states = state_bytes(config, shape, trained) if offloaded(config) else 0.0
    return states + (_FLOAT32 * trained.all if masters_offloaded(config) else 0.0)


def _room(config: Config, shape: ModelShape, trained: Part) -> float:
    """Give the bytes by which `optimizer.offload_room` raises a stage's peak. What comes behind a backward pass's last
    layer has some of it: the gradient of the stage's largest weight, and its sum over ranks."""
    ends = {shape.embedding: trained.embedding, shape.head: trained.head}
    here = (size for name, size in shape.weights.items() if name not in shape.frozen and ends.get(name, 1))
    largest = max(map(math.prod, here), default=0)
    return max(0.0, float(getattr(config.optimizer, "offload_room", 0.0)) * GIB - 2 * _FLOAT32 * largest)


def staged_bytes(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    """Count the bytes of host memory to which a rank copies its part of a checkpoint, of the rank that has most."""
    sizes = layout.by_name
    size = torch.empty((), dtype=getattr(torch, config.model.dtype)).element_size()
    sharing = sizes["data_shard"] * sizes["context"] * sizes["data_replicate"]

    def of_stage(stage: int) -> float:
        place = (stage, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"])
        part, trained = shape.part(*place), shape.part(*place, trained=True)
        frozen = 0 if config.adapter is not None else part.all - trained.all  # what an adapter is put on is not saved
        weights = _FLOAT32 * trained.all + size * frozen
        return (weights + state_bytes(config, shape, trained)) / sharing

    return max(of_stage(stage) for stage in range(sizes["pipeline"]))


def state_bytes(config: Config, shape: ModelShape, part: Part) -> float:
    """Count the bytes of the optimizer's state of a part's trained weights: a user's own is taken for one moment."""
    ends = (shape.embedding, shape.head)
    inner = {name: size for name, size in shape.weights.items() if name not in ends and name not in shape.frozen}
    of_inner = _mean_bytes(config, inner, at_end=False)
    of_ends = _mean_bytes(config, {name: shape.weights[name] for name in ends}, at_end=True)
    return of_inner * (sum(part.layers) + part.others) + of_ends * (part.embedding + part.head)


def _mean_bytes(config: Config, weights: Mapping[str, tuple[int, ...]], *, at_end: bool) -> float:
    """Compute the mean over weights of the bytes that each number's state takes."""
    total = sum(math.prod(shape) * _number_bytes(config, shape, at_end) for shape in weights.values())
    return total / max(1, sum(map(math.prod, weights.values())))


def _number_bytes(config: Config, shape: tuple[int, ...], at_end: bool) -> float:
    optimizer = config.optimizer
    if isinstance(optimizer, CustomOptimizer):
        return _FLOAT32
    if isinstance(optimizer, MuonConfig) and len(shape) >= 2 and not at_end:
        return _FLOAT32
    if isinstance(optimizer, AdamW8BitConfig) and len(shape) >= 2:
        return 2 * (1 + _FLOAT32 * Blocks.of(shape[-1]).of_row(shape[-1]) / shape[-1])
    return 2 * _FLOAT32


def computed_size(config: Config) -> int:
    """Count the bytes of a number of the type that the model computes in."""
    return torch.empty((), dtype=getattr(torch, config.model.dtype)).element_size()


def offloads_reference(config: Config) -> bool:
    return bool(getattr(getattr(config.loss, "kl_reference", None), "offload", False))


def has_reference(config: Config) -> bool:
    reference = getattr(config.loss, "kl_reference", None)
    if reference is None or reference.path == "records":
        return False
    # An adapter's first weights are here already: those that it was put on.
    return config.adapter is None or reference.path is not None


def _logits(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    """Compute the memory of a chunk of logits, and of the hidden states and their gradients behind the labels."""
    sizes = layout.by_name
    labels = LABELS * config.data.tokens_per_microbatch / sizes["context"]
    wanted = config.model.head.logits_chunk_size
    most = _MOST_ROW_BYTES // _BYTES_PER_LOGIT
    rows, each = (min(labels, most), _BYTES_PER_LOGIT) if wanted == "auto" else (min(labels, wanted), 6)
    return rows * each * shape.vocabulary / sizes["tensor"] + labels * shape.hidden * (2 + _FLOAT32)
