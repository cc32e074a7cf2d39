"""Loads a Hugging Face directory as a policy, by a table of passes over the model."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from truestep.gpu import marks
from truestep.head.logits import HeadSettings
from truestep.model.adapter import Adapter, AdapterSource
from truestep.model.cuts.experts import check_division, divide_experts
from truestep.model.cuts.stages import Stages, keep_own
from truestep.model.cuts.tensor import cut_model, tensor_plan
from truestep.model.experts.grouped import group_experts, settle_experts
from truestep.model.experts.routers import RoutedLayers, check_settings, count_routes, freeze_routers, make_routing
from truestep.model.experts.routing import ExpertSettings, Routing
from truestep.model.fast import rms_norm as norms
from truestep.model.fast.activation_checkpointing import ELEMENTWISE, FULL, checkpoint_options, recompute_activations
from truestep.model.fast.activation_offload import ActivationOffload
from truestep.model.fast.compiled import compile_layers
from truestep.model.fast.embedding import accumulate_in_float32, add_rows, every_token_counts
from truestep.model.fast.fused_attention import RECORD
from truestep.model.fast.fused_layers import fuse_layers, head_norms_of, settle_layers
from truestep.model.fast.gradient_accumulation import add_in_products, called
from truestep.model.freezing import freeze_weights
from truestep.model.loading.adapter_source import adapters_called, attach_adapter
from truestep.model.loading.probe import (
    Probe,
    probe_context,
    probe_cut,
    probe_float32,
    probe_half_precision,
    probe_stages,
)
from truestep.model.loading.probe_weights import borrowed_weights
from truestep.model.loading.read import plain_head, read_directory
from truestep.model.mixers import attention, linear_kernels
from truestep.model.mixers.context_parallel import Context
from truestep.model.mixers.recurrence import calls_seen, use_kernels
from truestep.model.mixers.registered import put_in
from truestep.model.no_dropout import no_noise
from truestep.model.policy import ModelFacts, Policy
from truestep.model.save import read_companions, saved_buffers
from truestep.process import progress
from truestep.ranks.exchange import TokenExchange
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.pipeline import Pipeline
from truestep.types import RouteShape
from truestep.weights.errors import ModelError, RuinedError
from truestep.weights.finite import named_by_all, not_finite, some
from truestep.weights.layers import layers_of
from truestep.weights.lazy import place_buffers, read_parameters
from truestep.weights.pieces import WeightSlice, pieces_of
from truestep.weights.protocol import Weights
from truestep.weights.sharded import ShardedWeights
from truestep.weights.whole import WholeWeights


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded. Example: `LoadOptions(dtype="bfloat16", compiled=True)`."""

    dtype: str = "float32"  # the type in which the model computes
    device: str = "auto"
    head: HeadSettings | None = None
    activation_checkpointing: bool | str = False  # full (or True), selective or elementwise
    compiled: bool = False
    attending: str = "auto"  # auto, flash or torch
    trust_remote_code: bool = False
    longest_document: int = 512  # probe documents longer than thresholds, such as a sliding window, up to this length
    ranks: Ranks = ALONE
    reshard_after_forward: bool = True
    reduce_each: bool = False  # reduce sharded gradients after each micro-batch, not once per step
    stages_per_rank: int = 1
    frozen: bool = False  # weights have no gradients and no float32 masters
    freeze: Sequence[str] = ()  # freeze the weights whose names match a pattern
    masters_on_host: bool = False  # float32 masters are in host memory; compute weights are on the device
    adapter: AdapterSource | None = None  # if set, only the adapter is trained
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    offload_activations: bool = False  # inputs of recomputed layers are kept on the host
    base: Policy | None = None  # a policy of the same directory; its frozen weights are shared, not read again

    @property
    def compute(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def recomputes(self) -> str:
        """The activation checkpointing mode; empty: none."""
        return str(FULL if self.activation_checkpointing is True else self.activation_checkpointing or "")

    @property
    def checkpointing(self) -> dict[str, Any]:
        """The options of torch's checkpoint."""
        return checkpoint_options(self.recomputes or FULL, choices_kept=self.ranks.expert > 1)

    @property
    def compiler_recomputes(self) -> bool:
        return self.compiled and self.recomputes == ELEMENTWISE

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.ranks.pipeline, self.stages_per_rank)

    @cached_property
    def place(self) -> torch.device:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device)
        if place.type == "cuda" and not torch.cuda.is_available():
            raise ModelError("model.device: cuda was asked for and there is no CUDA device")
        return torch.empty(0, device=place).device  # a device with the GPU's index

    @property
    def rounds(self) -> bool:
        """True if embedding gradients would be summed in half precision, as torch does on a CPU."""
        return self.dtype != "float32" and self.place.type == "cpu"

    @property
    def whole(self) -> bool:
        """True if this rank has its layers' whole weights, not slices or shards."""
        return self.ranks.tensor == self.ranks.shards == 1


@dataclass
class Loading:
    """A model while it is loaded. Each pass sets what later passes read."""

    directory: Path
    options: LoadOptions
    model: Any = field(init=False)
    tokenizer: Any = field(init=False)
    adapter: Adapter | None = None
    head: HeadSettings = field(init=False)
    probe: Probe = field(init=False)
    stages: Stages | None = None
    attends: attention.AttentionKernel = attention.BY_TORCH
    recurs: linear_kernels.Kernels = linear_kernels.BY_TORCH
    facts: ModelFacts = field(init=False)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pieces: dict[str, WeightSlice] = field(init=False)
    exchange: TokenExchange | None = None
    weights: Weights = field(init=False)
    routed: RoutedLayers = field(init=False)
    routing: Routing | None = None

    def refuse(self, odd: Sequence[str]) -> None:
        """Refuse the model if tensors (named in `odd`) are not finite."""
        if odd:
            raise RuinedError(f"model.path: {self.directory} has {some(odd)} with values that are not finite")


def load_policy(path: str | Path, options: LoadOptions | None = None, **named: Any) -> Policy:
    """Load, probe and cut a model. `named`: fields of the options."""
    loading = Loading(Path(path), dataclasses.replace(options or LoadOptions(), **named))
    for each in PASSES:
        if each.when(loading.options):
            each.run(loading)
    options, kind = loading.options, type(loading.model).__name__
    return Policy(
        loading.model,
        loading.directory,
        loading.head,
        loading.weights,
        loading.facts,
        loading.tokenizer,
        companions=read_companions(loading.directory),
        stages=loading.stages,
        buffers=loading.buffers,
        attends=loading.attends,
        recurs=loading.recurs,
        adapter=loading.adapter,
        activations_on_host=ActivationOffload(options.place) if options.offload_activations else None,
        exchange=loading.exchange,
        routing=loading.routing,
        route_shape=loading.routed.shape if loading.routing is not None else RouteShape((), 0, name=kind),
    )


def _read(loading: Loading) -> None:
    """Make the model with its buffers and unread weights, and read its tokenizer."""
    options = loading.options
    given = loading.directory, options.trust_remote_code, options.ranks, options.pipeline
    loading.model, loading.tokenizer = read_directory(*given)


def _check_experts(loading: Loading) -> None:
    check_division(loading.model, loading.options.ranks.expert)


def _freeze(loading: Loading) -> None:
    freeze_weights(loading.model, loading.options.freeze)


def _freeze_routers(loading: Loading) -> None:
    freeze_routers(loading.model)


def _attach(loading: Loading) -> None:
    """Freeze the model's weights, and add an adapter."""
    assert loading.options.adapter is not None
    loading.adapter = attach_adapter(loading.model, loading.options.adapter)


def _prepare(loading: Loading) -> None:
    """Make the model's outputs depend only on weights and tokens, and read the head's settings."""
    put_in(loading.model)
    place_buffers(loading.model, loading.options.place)
    no_noise(loading.model)
    every_token_counts(loading.model)
    loading.head = _head_settings(loading.model, loading.options.head or HeadSettings())


def _recompute(loading: Loading) -> None:
    recompute_activations(loading.model, loading.options.checkpointing)


def _try(loading: Loading) -> None:
    """Refuse weights that are not finite, put fused modules in, and probe the model with all layers. Layers of one kind
    share the weights of the first."""
    model = loading.model
    with progress.working("checking what it computes", "layers"), borrowed_weights(model, loading.options.place):
        loading.refuse(not_finite(model.named_parameters()))
        with attention.using(model, RECORD):
            fuse_layers(model)
        group_experts(model)
        count_routes(model)
        check_settings(model, loading.options.experts)
        with adapters_called(model):
            _probe(loading)


def _compile(loading: Loading) -> None:
    layers = layers_of(loading.model)[1]
    if not layers:
        raise ModelError(f"model.compile: {type(loading.model).__name__} has no list of layers to compile")
    options = loading.options
    compile_layers(layers, options.checkpointing, remakes=options.compiler_recomputes)


def _measure(loading: Loading) -> None:
    """Read the sizes of the whole model, and its buffers, before other ranks' layers and slices are removed."""
    loading.facts = ModelFacts.of(loading.model, loading.options.place)
    loading.routed = RoutedLayers.of(loading.model)
    if loading.stages is not None:
        loading.buffers = saved_buffers(loading.model)


def _accumulate_rows(loading: Loading) -> None:
    accumulate_in_float32(loading.model)


def _freeze_all(loading: Loading) -> None:
    loading.model.requires_grad_(False)


def _cut(loading: Loading) -> None:
    """Reduce the model to this rank's part: its experts, slices and stages."""
    model, ranks, place = loading.model, loading.options.ranks, loading.options.place
    pieces, group = pieces_of(model), ranks.group("tensor")
    if group is not None:
        loading.exchange = TokenExchange(group)
        plan = tensor_plan(model.config, ranks.tensor, divided=ranks.expert > 1)
        pieces = cut_model(model, plan, ranks, loading.exchange, pieces, place)
    if ranks.expert > 1:
        pieces = divide_experts(model, ranks, pieces)
    if group is not None or ranks.expert > 1:
        with borrowed_weights(model, place):
            probe_cut(model, loading.probe, place, ranks)
    loading.pieces = pieces if loading.stages is None else keep_own(model, loading.stages, ranks.stage, pieces)


def _read_weights(loading: Loading) -> None:
    """Read this rank's part of the weights, whole or sharded."""
    model, options, pieces = loading.model, loading.options, loading.pieces
    ranks, place = options.ranks, options.place
    size = 4 * sum(parameter.numel() for parameter in model.parameters())  # bytes, since they are read in float32
    on_host = {"masters_on_host": options.masters_on_host}
    with progress.working("reading weights", "bytes read", size if ranks.shards == 1 else None):
        if ranks.shards > 1:
            if options.base is not None:
                raise ModelError(
                    "parallel.data_shard: adapters share the weights of a base only where each rank has them whole"
                )
            how = {"reshard": options.reshard_after_forward, "reduce_each": options.reduce_each, **on_host}
            loading.weights = ShardedWeights(model, options.compute, ranks, pieces, device=place, **how)
        else:
            base = None if options.base is None else options.base.weights
            held = None if base is None else base.frozen
            read_parameters(model, place, frozen_dtype=options.compute, held=held)
            loading.weights = WholeWeights(model, options.compute, ranks, pieces, **on_host)
            if base is not None:
                base.shared = loading.weights.shared = True
    every = [*loading.weights.frozen.items(), *loading.weights.master.items()]
    loading.refuse(named_by_all(ranks, not_finite(every)))


def _report_layers(loading: Loading) -> None:
    for layer in layers_of(loading.model)[1]:
        layer.register_forward_hook(marks.layer_done)


def _add_gradients(loading: Loading) -> None:
    """Let the embedding, norms, and linear layers (if compiled) add their gradients to float32 buffers, if this rank
    has whole weights. Then give the fused modules the keys of these buffers."""
    model, weights, options = loading.model, loading.weights, loading.options
    layers = layers_of(model)[1]
    adds = False
    if isinstance(weights, WholeWeights):
        if options.compiled:
            add_in_products(layers, weights, weights.rounded)
        norms.add_in_norms(_norms_that_add(loading, layers), weights, weights.rounded)
        adds = add_rows(model, weights, weights.rounded)
    if options.rounds and options.whole and not adds:
        accumulate_in_float32(model)
    settle_layers(model)
    settle_experts(model, weights)


def _norms_that_add(loading: Loading, layers: Sequence[torch.nn.Module]) -> Iterable[torch.nn.Module]:
    """List the modules that may get the fused backward pass of norms. If the compiler recomputes activations, norms in
    layers do not get it, because the compiler fuses a norm's recomputation with its gradient. Head norms do, because
    their kernel's inputs are saved."""
    left: set[torch.nn.Module] = set()
    if loading.options.compiler_recomputes:
        left = {module for layer in layers for module in layer.modules()} - head_norms_of(loading.model)
    return (module for module in called(loading.model) if module not in left)


def _count_routes(loading: Loading) -> None:
    given = loading.routed, loading.options.experts, loading.buffers, loading.options.place
    loading.routing = make_routing(loading.model, *given)


def _attend(loading: Loading) -> None:
    loading.model.set_attn_implementation(loading.attends.name)


class Pass(NamedTuple):
    run: Callable[[Loading], None]
    when: Callable[[LoadOptions], bool] = lambda _: True


# The order matters: each pass relies on what earlier passes did.
PASSES: tuple[Pass, ...] = (
    Pass(_read),
    Pass(_check_experts, lambda options: options.ranks.expert > 1),
    Pass(_freeze, lambda options: bool(options.freeze)),
    Pass(_freeze_routers, lambda options: options.experts.router == "frozen"),
    Pass(_attach, lambda options: options.adapter is not None),
    Pass(_prepare),
    Pass(_recompute, lambda options: bool(options.recomputes) and not options.compiler_recomputes),
    Pass(_try),
    Pass(_compile, lambda options: options.compiled),
    Pass(_measure),
    Pass(_accumulate_rows, lambda options: options.rounds and not options.whole),
    Pass(_freeze_all, lambda options: options.frozen),
    Pass(_cut),
    Pass(_read_weights),
    Pass(_report_layers),
    Pass(_add_gradients),
    Pass(_count_routes),
    Pass(_attend),
)


def _probe(loading: Loading) -> None:
    """Probe a float32 model with all of its layers, and choose its attention. A model that fails a probe is refused."""
    model, options, place = loading.model, loading.options, loading.options.place
    with attention.shapes_seen() as shapes, calls_seen() as calls:
        try:
            loading.probe = probe_float32(model, loading.head, place, options.longest_document)
        except ModelError as error:
            if shapes or calls or "give other values" not in str(error):
                raise
            raise ModelError(f"{error}. {type(model).__name__} {attention.ITS_OWN}") from error
        context = Context.of(options.ranks)
        if context is not None:
            probe_context(model, loading.probe, place, context)
    if options.pipeline.ranks > 1:
        loading.stages = probe_stages(model, options.pipeline, loading.probe, place)
    loading.attends = attention.choose(options.attending, shapes, options.compute, place)
    loading.recurs = linear_kernels.choose(options.attending, calls, options.compute, place)
    use_kernels(model, loading.recurs.names)
    if options.compute != torch.float32:
        _probe_rounded(loading)


def _probe_rounded(loading: Loading) -> None:
    """Probe the model in half precision with the chosen kernels. If that fails with `attending` auto, use torch's
    kernels."""
    model, options = loading.model, loading.options
    given = model, loading.probe, options.place, options.compute
    try:
        with attention.using(model, loading.attends.name):
            probe_half_precision(*given)
    except ModelError as error:
        if options.attending != "auto" or (loading.attends.name == attention.NAME and not loading.recurs.names):
            raise
        use_kernels(model, ())
        probe_half_precision(*given)
        if loading.attends.name != attention.NAME:
            loading.attends = attention.AttentionKernel(attention.NAME, str(error))
        loading.recurs = linear_kernels.Kernels(instead=dict.fromkeys(loading.recurs.names, str(error)))


def _head_settings(model: Any, settings: HeadSettings) -> HeadSettings:
    config = model.config
    plain_head(model)
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides logits
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies logits
        scale = config.logit_scale
    softcap = getattr(config, "final_logit_softcapping", None)
    return dataclasses.replace(settings, softcap=softcap, scale=scale)
