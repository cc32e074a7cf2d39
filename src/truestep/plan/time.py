"""The time of a step, by part: arithmetic on the model's shape and a card's sustained rates.

The few constants here were read off runs on one H200 (benchmarks/RESULTS.md); `tests/plan/test_time.py` holds every run
that is written there against what is planned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig, AdamWConfig, CustomOptimizer, MuonConfig
from truestep.plan.cards import Card
from truestep.plan.memory import (
    ACTIVATIONS,
    MOVING,
    host_bytes,
    offloaded,
    plan_memory,
    recomputes,
    reduces_each,
    remakes,
)
from truestep.plan.shape import ModelShape
from truestep.ranks.axes import RankLayout

LENGTH, LABELS = 1000, 0.5  # of documents, where nothing says how long they are; labels among their tokens
RANKS_OF_A_HOST = 8
# Elementwise work goes over the numbers of a token in a layer so many times, forward and backward together: over its
# hidden state, queries, keys, values and neurons.
_PASSES_EAGER, _PASSES_COMPILED, _PASSES_FLASH = 100.0, 20.0, 12.0
_PASSES_ADAPTER = 6.0  # an adapter's own, over the inputs and outputs of its layer
_FORWARD = 0.35  # the part of elementwise work that a forward pass has
_BACKWARD_ATTENTION = 2.5  # the operations of attention's backward pass, of its forward's
_HALF_RATE_LENGTH = 1100  # tokens of a document at which attention has half of its rate
_BYTES_SCORE = 170.0  # of each score that is computed by itself, forward and backward
_WAIT = 0.025  # seconds a micro-batch in which a GPU waits for its host
# Seconds in which a host launches a layer's work for a micro-batch, forward and backward: it bounds small ones.
_LAUNCH_EAGER, _LAUNCH_COMPILED, _LAUNCH_EXCHANGE = 0.008, 0.003, 1.6
_REMADE = 0.15  # the part of it that compiled layers make again beside what reads the same
_SELECTIVE_PRODUCTS = 0.55  # the part of a layer's products that selective recomputation makes again
_SMALL = 0.5  # of the copy rate, which kernels over many weights have
_HIDDEN_EXCHANGE = 0.8  # of the computation beside it, behind which an exchange of weights can hide
_BYTES_8BIT = 90.0  # a weight: at the copy rate they take as long as adamw_8bit does, its host's launches included
_BACKWARD = 0.67  # the part of a micro-batch's computation that its backward pass has
_FLOAT32_PRODUCTS = 0.07  # of the bfloat16 rate, which Muon's float32 products have


@dataclass(frozen=True)
class Work:
    """The documents of a step, over all ranks."""

    tokens: float
    labels: float
    length: float  # of the document in which a token is, on average over tokens

    @staticmethod
    def of(config: Config, data_ranks: int, length: float | None = None) -> "Work":
        """Take the size of a step from the options, with documents of so many tokens."""
        longest = config.data.tokens_per_microbatch
        if length is None:
            new = getattr(config.sampler, "max_new_tokens", None)
            length = LENGTH if new is None else 1.25 * new
        length = min(length, longest)
        schedule = config.schedule
        if schedule.docs_per_step:
            tokens = schedule.docs_per_step * length
        else:
            each = schedule.depth_first_micro_batches * schedule.breadth_first_micro_batches
            tokens = float(each * longest * data_ranks)
        return Work(tokens, LABELS * tokens, length)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by part, of the rank that takes longest."""

    parts: Mapping[str, float]
    tokens: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total


@dataclass(frozen=True)
class _Rank:
    """What a rank has of the work and of the model."""

    micro_batches: int
    tokens: float  # of a step, that its layers compute
    labels: float  # that its head computes, or that its layers stand for
    layers: float
    sizes: Mapping[str, int]
    shards: int
    weights: float  # active ones of its layers, cut as tensor ranks cut them
    own: float  # all trained ones that it updates
    trained: float  # of its weights before they are sharded
    untrained: float  # the part of its layers' products that has no weight gradient


def plan_time(config: Config, shape: ModelShape, layout: RankLayout, card: Card, work: Work | None = None) -> StepTime:
    """Compute the time of a step by part, without sampling and waiting for documents."""
    sizes = layout.by_name
    work = work or Work.of(config, sizes["data_shard"] * sizes["data_replicate"])
    rank = _rank(config, shape, sizes, work)
    parts = _computation(config, shape, card, work, rank)
    busy = sum(parts.values())
    launched = _launches(config, rank)
    parts["waiting for the host"] = _WAIT * rank.micro_batches + max(0.0, launched - busy)
    beside = busy + parts["waiting for the host"]
    parts["exchange between ranks"] = _exchange(config, shape, card, rank, beside)
    stages = sizes["pipeline"]
    if stages > 1:
        each = config.parallel.stages_per_rank
        parts["pipeline that fills and empties"] = beside * (stages - 1) / (rank.micro_batches * each)
    parts |= _update(config, shape, card, rank)
    if offloaded(config):
        room = max(
            stage.kinds[ACTIVATIONS] + stage.kinds.get(MOVING, 0.0) for stage in plan_memory(config, shape, layout)
        )
        parts["optimizer's state over the bus"] = _moves(config, shape, card, rank, room, beside)
    return StepTime({name: seconds for name, seconds in parts.items() if seconds > 0}, work.tokens)


def _rank(config: Config, shape: ModelShape, sizes: Mapping[str, int], work: Work) -> _Rank:
    data = sizes["data_shard"] * sizes["data_replicate"]
    micro_batches = max(1, math.ceil(work.tokens / data / config.data.tokens_per_microbatch - 0.05))
    stages, tensor = sizes["pipeline"], sizes["tensor"]
    place = (0, stages, config.parallel.stages_per_rank, tensor)
    trained = shape.part(*place, trained=True)
    part = shape.part(*place)
    active = sum(shape.layer_costs) / stages
    mine, all_of_mine = sum(trained.layers), sum(part.layers)
    shards = sizes["data_shard"] * sizes["context"]
    return _Rank(
        micro_batches,
        work.tokens / data / sizes["context"],
        work.labels / data / sizes["context"] / stages,  # stages are cut so that the head's has fewer layers
        len(shape.layer_names) / stages,
        sizes,
        shards,
        active / tensor,
        trained.all / shards,
        float(trained.all),
        1 - mine / max(1, all_of_mine),
    )


def _computation(config: Config, shape: ModelShape, card: Card, work: Work, rank: _Rank) -> dict[str, float]:
    rate = card.products * (1.0 if config.model.dtype == "bfloat16" else _FLOAT32_PRODUCTS)
    again = recomputes(config)
    flash = config.model.attention == "flash" and card.flash > 0
    forward = 2 * rank.weights * rank.tokens / rate
    backward = forward * (2 - rank.untrained)
    attend, elementwise = (
        _attention_forward(shape, card, work, rank, rate, flash),
        _elementwise(config, shape, card, rank, flash),
    )
    head_weights = math.prod(shape.weights[shape.head]) / rank.sizes["tensor"]
    head = 2 * head_weights * rank.labels / rate * (2 if shape.head in shape.frozen else 3)
    parts = {
        "products of the layers": forward + backward,
        "head": head,
        "attention": attend * (1 + _BACKWARD_ATTENTION),
        "elementwise work": elementwise,
    }
    if again == "full":
        parts["recomputation"] = forward + attend + _FORWARD * elementwise
    elif remakes(config):
        parts["recomputation"] = _REMADE * elementwise
    elif again == "elementwise":
        parts["recomputation"] = _FORWARD * elementwise
    elif again == "selective":
        products = 1.0 if config.model.compile else _SELECTIVE_PRODUCTS  # compiled code is made again whole
        parts["recomputation"] = products * forward + _FORWARD * elementwise + (attend if flash else 0.0)
    reference = getattr(config.loss, "kl_reference", None)
    if reference is not None and reference.path != "records":
        parts["reference"] = forward + attend + _FORWARD * elementwise + head / 3
    parts["adding up gradients"] = 10 * rank.trained * rank.micro_batches / (_SMALL * card.copy)
    return parts


def _attention_forward(shape: ModelShape, card: Card, work: Work, rank: _Rank, rate: float, flash: bool) -> float:
    """Compute the time of attention's forward pass over causal documents."""
    text = shape.config.get_text_config()
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    reach = min(work.length, getattr(text, "sliding_window", None) or math.inf)
    pairs = rank.tokens * reach / 2
    operations = 4 * width * pairs * rank.layers / rank.sizes["tensor"]
    if getattr(text, "attn_logit_softcapping", None) and not flash:  # all scores of a document, one by one
        scores = rank.tokens * work.length * heads * rank.layers / rank.sizes["tensor"]
        return _BYTES_SCORE * scores / card.copy / (1 + _BACKWARD_ATTENTION)
    sustained = rate * (card.flash if flash else card.attention) * work.length / (work.length + _HALF_RATE_LENGTH)
    return operations / sustained


def _elementwise(config: Config, shape: ModelShape, card: Card, rank: _Rank, flash: bool) -> float:
    text = shape.config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) * head_size
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 4 * text.hidden_size)
    neurons = inner * (getattr(text, "num_experts_per_tok", None) or 1)
    numbers = text.hidden_size + heads * head_size + 2 * keys + neurons
    passes = (_PASSES_FLASH if flash else _PASSES_COMPILED) if config.model.compile else _PASSES_EAGER
    size = 2 if config.model.dtype == "bfloat16" else 4
    if shape.adapter is not None:
        passes += _PASSES_ADAPTER
    return passes * numbers * size * rank.tokens * rank.layers / rank.sizes["tensor"] / card.copy


def _launches(config: Config, rank: _Rank) -> float:
    each = _LAUNCH_COMPILED if config.model.compile else _LAUNCH_EAGER
    exchanging = rank.sizes["context"] * rank.sizes["tensor"] > 1
    again = 1.0 if recomputes(config) == "none" or remakes(config) else 1.4
    return each * again * (_LAUNCH_EXCHANGE if exchanging else 1.0) * rank.layers * rank.micro_batches


def _exchange(config: Config, shape: ModelShape, card: Card, rank: _Rank, beside: float) -> float:
    """Compute what exchanges between ranks add: those within a layer wait, those of weights run beside it."""
    sizes, size = rank.sizes, 2 if config.model.dtype == "bfloat16" else 4
    ranks = math.prod(sizes.values())
    link = card.link if ranks <= RANKS_OF_A_HOST else card.network
    text = shape.config.get_text_config()
    again = 1.0 if recomputes(config) == "none" or remakes(config) else 1.5
    tensor, context = sizes["tensor"], sizes["context"]
    state = size * shape.hidden * rank.tokens * rank.layers  # the hidden states of this rank's tokens, once a layer
    heads = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    within = again * (8 * state * (tensor - 1) / tensor + 8 * state * heads / shape.hidden * (context - 1) / context**2)
    seconds = within / card.link
    if sizes["pipeline"] > 1:
        seconds += 2 * size * shape.hidden * rank.tokens / link
    whole = rank.trained / max(1e-9, 1 - rank.untrained) if rank.untrained < 1 else rank.weights
    weights = 0.0
    if rank.shards > 1:
        gathers = (2 if config.parallel.reshard_after_forward else 1) * rank.micro_batches
        reductions = rank.micro_batches if reduces_each(config) else 1
        weights += (size * whole * gathers + 4 * rank.trained * reductions) * (rank.shards - 1) / rank.shards
    if sizes["data_replicate"] > 1:
        replicas = sizes["data_replicate"]
        seconds += 2 * 4 * rank.own * (replicas - 1) / replicas / link
    return seconds + max(0.0, weights / link - _HIDDEN_EXCHANGE * beside)


def _update(config: Config, shape: ModelShape, card: Card, rank: _Rank) -> dict[str, float]:
    """Compute the time of the gradient's norm and of the optimizer."""
    optimizer, own = config.optimizer, rank.own
    norm, clip = 4 * own / (_SMALL * card.copy), 8 * own / (_SMALL * card.copy)
    seconds = norm
    if isinstance(optimizer, AdamW8BitConfig):
        seconds += _BYTES_8BIT * own / card.copy
    elif isinstance(optimizer, AdamWConfig):  # which clips too
        seconds += 30 * own / card.copy
    elif isinstance(optimizer, MuonConfig | CustomOptimizer):
        seconds += clip + 30 * own / (_SMALL * card.copy)
    if isinstance(optimizer, MuonConfig):
        rate = card.products * (_FLOAT32_PRODUCTS if optimizer.ns_dtype == "float32" else 1.0)
        sharing = math.prod(rank.sizes.values())
        seconds += optimizer.ns_steps * _iteration(shape) / sharing / rate
    return {"optimizer": seconds}


def _moves(config: Config, shape: ModelShape, card: Card, rank: _Rank, room: float, computation: float) -> float:
    """Compute what the optimizer's state adds, which goes to the device and back, both ways at once. It comes during
    the last backward pass as far as it has room: its own, and the memory that activations have given up."""
    trained = shape.part(0, 1, 1, 1, trained=True)
    moved = host_bytes(config, shape, trained) / max(1, trained.all) * rank.own
    covered = min(room / card.bus, _BACKWARD * computation / rank.micro_batches)
    return max(0.0, moved / card.bus - covered)


def _iteration(shape: ModelShape) -> float:
    """Count the operations of one of Muon's iterations over all matrices between embedding and head."""
    total = 0.0
    for name, size in shape.weights.items():
        if len(size) >= 2 and name not in (shape.embedding, shape.head) and name not in shape.frozen:
            small, large = sorted(size[-2:])
            total += math.prod(size[:-2]) * (4 * small**2 * large + 2 * small**3)
    return total
