"""The planned seconds of a step: FLOPs and bytes divided by the machine's rates, plus the host's time to launch
kernels.

The constants below count this program's passes over memory and launched operations. They were derived from runs
(benchmarks/RESULTS.md). The rates of a machine are measured (`plan.rates`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig, AdamWConfig, MuonConfig
from truestep.errors import TruestepError
from truestep.model.heads import HeadSizes, attending_layers
from truestep.plan.memory import LABELS, computed_size, host_bytes, recomputes, remakes
from truestep.plan.rates import Rates
from truestep.plan.shape import ModelShape
from truestep.plan.volumes import Gathered, RankShare, Volume, volumes
from truestep.ranks.axes import RankLayout

BUBBLES = "pipeline that fills and empties"  # the name of a part
_LENGTH = 1000  # tokens per document, if no option gives a length
# How often a layer's elementwise work reads or writes its activations, forward and backward together.
_PASSES_EAGER, _PASSES_COMPILED, _PASSES_FLASH, _PASSES_ADAPTER = 100, 20, 12, 6
_PASSES_COPIES = 5  # how often a copied key or value is read or written: forward, again backward, and its gradient
_FORWARD = 0.35  # the forward pass's fraction of elementwise work
_BACKWARD_ATTENTION = 2.5  # attention's FLOPs in the backward pass, as a multiple of the forward pass
_BYTES_SCORE = 170  # bytes per score of attention with a softcap outside a fused kernel, forward and backward
_OPERATIONS_EAGER, _OPERATIONS_COMPILED = 800, 300  # launched operations per layer and micro-batch
_OPERATIONS_WAIT = 2500  # a GPU's wait for its host per micro-batch, as a number of launches
# Bytes per weight of clipping and update. More than the bytes that are moved, because kernels over many small tensors
# do not reach the copy rate.
_BYTES_ADAMW, _BYTES_8BIT, _BYTES_OTHER, _BYTES_ADDED = 38, 98, 84, 20
_HIDDEN = 0.8  # communication of weights overlaps with this share of the computation
_BACKWARD = 0.67  # the backward pass's fraction of a micro-batch's computation


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt that the documents of a group begin with."""

    tokens: float
    group: float  # the number of documents that share it


@dataclass(frozen=True)
class Work:
    """The size of a step's documents, over all ranks."""

    tokens: float
    labels: float
    length: float  # document length, averaged over tokens
    prompt: SharedPrompt | None = None  # None: no document shares tokens with another

    @staticmethod
    def of(config: Config, data_ranks: int, length: float | None = None, prompt: SharedPrompt | None = None) -> "Work":
        """Compute the size of a step from the options, with documents of `length` tokens."""
        longest = config.data.tokens_per_microbatch
        if length is None:
            new = getattr(config.sampler, "max_new_tokens", None)
            if prompt is not None:
                length = prompt.tokens + (_LENGTH / 2 if new is None else new)
            else:
                length = _LENGTH if new is None else 1.25 * new
        length = min(length, longest)
        if prompt is not None and prompt.tokens >= length:
            raise TruestepError(
                f"--prompt {prompt.tokens:g}: a document of {length:g} tokens has none left for an answer (--length, "
                "data.tokens_per_microbatch)"
            )
        schedule = config.schedule
        each = schedule.depth_first_micro_batches * schedule.breadth_first_micro_batches
        tokens = schedule.docs_per_step * length or float(each * longest * data_ranks)
        labels = LABELS if prompt is None else 1 - prompt.tokens / length
        return Work(tokens, labels * tokens, length, None if config.data.share_prefixes == "off" else prompt)

    @property
    def apart(self) -> "Work":
        """The same documents, without a shared prompt."""
        return replace(self, prompt=None)

    @property
    def computed(self) -> float:
        """How many tokens are computed: a shared prompt counts once."""
        if self.prompt is None:
            return self.tokens
        return self.tokens * (1 - self.prompt.tokens * (1 - 1 / self.prompt.group) / self.length)

    @property
    def reach(self) -> float:
        """Twice the number of keys that a computed token attends to, on average: a document's length, if nothing is
        shared."""
        if self.prompt is None:
            return self.length
        ahead = self.prompt.tokens
        pairs = self.length**2 - ahead**2 * (1 - 1 / self.prompt.group)  # twice those of a document
        return pairs * self.tokens / self.length / self.computed

    @property
    def copied(self) -> float:
        """How many keys are copied to the paths of segments (`model.mixers.paths`)."""
        if self.prompt is None:
            return 0.0
        return self.tokens * (1 + self.prompt.tokens / self.prompt.group / self.length)


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run: their GPUs, and the bytes a second that a rank sends to ranks of other hosts."""

    count: int
    gpus: int  # GPUs of each host
    network: float | None  # None: not known
    measured: bool = False  # the rate of the network; else it was given

    @property
    def network_from(self) -> str:
        return "a run on as many" if self.measured else "--network"


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the slowest rank."""

    parts: Mapping[str, float]
    tokens: float
    computed: float  # tokens; less than `tokens` where a shared prompt is computed once

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total


@dataclass(frozen=True)
class _Rank:
    """A rank's share of the work and of the model."""

    sizes: Mapping[str, int]  # sizes of the layout's axes
    micro_batches: int
    tokens: float  # tokens per step that its layers compute
    copied: float  # keys per step that are copied to the paths of segments
    labels: float  # labels per step, divided evenly among stages: stages without the head have more layers instead
    layers: float
    attending: float  # number of its attention layers
    weights: float  # weights of its layers that each token is multiplied with
    trained: float  # number of trained weights, before sharding
    untrained: float  # share of its layers' products without a weight gradient
    heads: HeadSizes

    @property
    def shards(self) -> int:
        return self.sizes["data_shard"] * self.sizes["context"]


def plan_time(
    config: Config,
    shape: ModelShape,
    layout: RankLayout,
    rates: Rates,
    work: Work | None = None,
    hosts: Hosts | None = None,
) -> StepTime:
    """Compute the time of a step by part, without sampling and without waiting for documents. `hosts`: None: one. With
    `data.share_prefixes: auto`, a prompt is shared if that takes less time."""
    sizes = layout.every
    work = work or Work.of(config, sizes["data_shard"] * sizes["data_replicate"])
    together = _plan_time(config, shape, layout, rates, work, hosts)
    if work.prompt is None or config.data.share_prefixes == "always":
        return together
    return min(together, _plan_time(config, shape, layout, rates, work.apart, hosts), key=lambda step: step.total)


def _plan_time(
    config: Config, shape: ModelShape, layout: RankLayout, rates: Rates, work: Work, hosts: Hosts | None
) -> StepTime:
    sizes = layout.every
    rank = _rank(config, shape, sizes, work)
    parts = _computation(config, shape, rates, work, rank)
    busy = sum(parts.values())
    parts["waiting for the host"] = _waiting(config, rates, rank, busy)
    beside = busy + parts["waiting for the host"]
    parts["exchange between ranks"] = _exchange(config, shape, layout, rates, rank, beside, hosts)
    bubbles = (sizes["pipeline"] - 1) / (rank.micro_batches * config.parallel.stages_per_rank)
    parts[BUBBLES] = beside * bubbles
    parts["optimizer"] = _update(config, shape, rates, rank)
    # Offloaded state moves to the device and back, in both directions at once. The transfer overlaps with the last
    # backward pass, up to the size of `optimizer.offload_room`.
    moved = host_bytes(config, shape, shape.part(0, 1, 1, 1, trained=True)) / shape.total * rank.trained / rank.shards
    room = float(getattr(config.optimizer, "offload_room", 0.0)) * 2**30 / rates.bus
    covered = min(room, _BACKWARD * beside / rank.micro_batches)
    parts["optimizer's state over the bus"] = max(0.0, moved / rates.bus - covered)
    return StepTime({name: seconds for name, seconds in parts.items() if seconds > 0}, work.tokens, work.computed)


def _rank(config: Config, shape: ModelShape, sizes: Mapping[str, int], work: Work) -> _Rank:
    data, stages, tensor = sizes["data_shard"] * sizes["data_replicate"], sizes["pipeline"], sizes["tensor"]
    place = (0, stages, config.parallel.stages_per_rank, tensor, tensor if sizes["expert"] > 1 else 1)
    trained, whole = shape.part(*place, trained=True), shape.part(*place)
    return _Rank(
        sizes,
        max(1, math.ceil(work.computed / data / config.data.tokens_per_microbatch - 0.05)),
        work.computed / data / sizes["context"],
        work.copied / data / sizes["context"],
        # equal shares, since the last stage has fewer layers because of the head
        work.labels / data / sizes["context"] / stages,
        len(shape.layer_names) / stages,
        attending_layers(shape.config) / stages,
        sum(shape.layer_costs) / stages / tensor,
        float(trained.all),
        1 - sum(trained.layers) / max(1, sum(whole.layers)),
        HeadSizes.of(shape.config),
    )


def _computation(config: Config, shape: ModelShape, rates: Rates, work: Work, rank: _Rank) -> dict[str, float]:
    rate = rates.products if config.model.dtype == "bfloat16" else rates.products32
    forward = 2 * rank.weights * rank.tokens / rate
    attend = _attention(config, shape, rates, work, rank)
    elementwise = _elementwise(config, shape, rates, rank)
    head = 2 * math.prod(shape.weights[shape.head]) / rank.sizes["tensor"] * rank.labels / rate
    again = recomputes(config)
    parts = {
        "products of the layers": forward * (3 - rank.untrained),
        "head": head * (2 if shape.head in shape.frozen else 3),
        "attention": attend * (1 + _BACKWARD_ATTENTION),
        "elementwise work": elementwise,
        "copies of shared prefixes": _copies(config, rates, rank),
        "adding up gradients": _BYTES_ADDED * rank.trained * rank.micro_batches / rates.copy,
    }
    if again != "none":  # compiled kernels recompute in kernels that read the same tensors anyway
        parts["recomputation"] = _FORWARD * elementwise * (0.4 if remakes(config) else 1.0)
    if again in ("selective", "full"):
        kept = again == "selective" and not rates.uses_flash(config.model.attention)
        parts["recomputation"] += forward + (0.0 if kept else attend)
    reference = getattr(config.loss, "kl_reference", None)
    if reference is not None and reference.path != "records":
        parts["reference"] = forward + attend + _FORWARD * elementwise + head
    return parts


def _attention(config: Config, shape: ModelShape, rates: Rates, work: Work, rank: _Rank) -> float:
    """Compute the time of attention's forward pass over causal documents."""
    text, tensor = shape.config.get_text_config(), rank.sizes["tensor"]
    rate = rates.of_attention(config.model.attention)
    if getattr(text, "attn_logit_softcapping", None) and not rates.uses_flash(
        config.model.attention
    ):  # without a fused kernel the scores are written to memory
        scores = rank.tokens * work.reach * rank.heads.queries * rank.attending / tensor
        return _BYTES_SCORE * scores / rates.copy / (1 + _BACKWARD_ATTENTION)
    reach = min(work.reach, getattr(text, "sliding_window", None) or math.inf)
    return 2 * rank.heads.width * rank.tokens * reach * rank.attending / tensor / rate


def _copies(config: Config, rates: Rates, rank: _Rank) -> float:
    """Compute the time in which keys and values are copied to the paths of segments, and their gradients added up."""
    numbers = 2 * rank.heads.keys * rank.heads.size * rank.attending / rank.sizes["tensor"]
    return _PASSES_COPIES * numbers * computed_size(config) * rank.copied / rates.copy


def _elementwise(config: Config, shape: ModelShape, rates: Rates, rank: _Rank) -> float:
    """Compute the time of elementwise passes over hidden states, queries, keys, values and MLP neurons."""
    text, heads = shape.config.get_text_config(), rank.heads
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 4 * text.hidden_size)
    neurons = inner * (getattr(text, "num_experts_per_tok", None) or 1)
    numbers = text.hidden_size + heads.width + 2 * heads.keys * heads.size + neurons
    flash = rates.uses_flash(config.model.attention)
    passes = (_PASSES_FLASH if flash else _PASSES_COMPILED) if config.model.compile else _PASSES_EAGER
    passes += 0 if shape.adapter is None else _PASSES_ADAPTER
    return passes * numbers * computed_size(config) * rank.tokens * rank.layers / rank.sizes["tensor"] / rates.copy


def _waiting(config: Config, rates: Rates, rank: _Rank, busy: float) -> float:
    """Compute the time in which a GPU waits for its host. It dominates with small micro-batches."""
    each: float = _OPERATIONS_COMPILED if config.model.compile else _OPERATIONS_EAGER
    each *= 1.6 if rank.sizes["context"] * rank.sizes["tensor"] > 1 else 1  # communication is also launched
    each *= 1.4 if recomputes(config) in ("selective", "full") else 1
    launched = rates.launch * each * rank.layers * rank.micro_batches
    return rates.launch * _OPERATIONS_WAIT * rank.micro_batches + max(0.0, launched - busy)


def _share(config: Config, shape: ModelShape, rank: _Rank) -> RankShare:
    sizes, tied = rank.sizes, shape.head == shape.embedding
    place, expert = (0, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"]), sizes["expert"]
    whole, trained = (
        Gathered.of(shape.part(*place, 1, trained=only), shape.part(*place, expert, trained=only), expert, tied=tied)
        for only in (False, True)
    )
    sent = 2 * rank.heads.width + 2 * rank.heads.keys * rank.heads.size
    return RankShare(sizes, rank.micro_batches, rank.tokens, rank.labels, rank.layers, whole, trained, sent)


def exchanges(config: Config, shape: ModelShape, layout: RankLayout, work: Work | None = None) -> list[Volume]:
    """Compute what each rank sends to others in a step."""
    sizes = layout.every
    work = work or Work.of(config, sizes["data_shard"] * sizes["data_replicate"])
    return volumes(config, shape, _share(config, shape, _rank(config, shape, sizes, work)))


def _exchange(
    config: Config, shape: ModelShape, layout: RankLayout, rates: Rates, rank: _Rank, beside: float, hosts: Hosts | None
) -> float:
    """Compute the time of communication. Within a layer it blocks; communication of weights overlaps with
    computation."""
    waits, overlaps = 0.0, 0.0
    for volume in volumes(config, shape, _share(config, shape, rank)):
        rate = rates.link
        if hosts is not None and volume.crosses(layout, hosts.gpus):
            assert hosts.network is not None, "no time is planned without it"
            rate = hosts.network
        overlaps += volume.sent / rate if volume.hidden else 0.0
        waits += 0.0 if volume.hidden else volume.sent / rate
    return waits + max(0.0, overlaps - _HIDDEN * beside)


def _update(config: Config, shape: ModelShape, rates: Rates, rank: _Rank) -> float:
    """Compute the time of gradient clipping and of the optimizer."""
    optimizer = config.optimizer
    each = _BYTES_8BIT if isinstance(optimizer, AdamW8BitConfig) else _BYTES_OTHER
    each = _BYTES_ADAMW if type(optimizer) is AdamWConfig else each
    seconds = each * rank.trained / rank.shards / rates.copy
    if isinstance(optimizer, MuonConfig):
        rate = rates.products32 if optimizer.ns_dtype == "float32" else rates.products
        seconds += optimizer.ns_steps * _iteration(shape) / math.prod(rank.sizes.values()) / rate
    return seconds


def _iteration(shape: ModelShape) -> float:
    """Count the FLOPs of one Newton-Schulz iteration of Muon over all matrices except embedding and head."""
    total = 0.0
    for name, size in shape.weights.items():
        if len(size) >= 2 and name not in (shape.embedding, shape.head) and name not in shape.frozen:
            small, large = sorted(size[-2:])
            total += math.prod(size[:-2]) * (4 * small**2 * large + 2 * small**3)
    return total
