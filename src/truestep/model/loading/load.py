"""Loads a Hugging Face directory as a policy."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from truestep.errors import TruestepError
from truestep.files.bounded import MIB, TooLargeError, read_settings, too_long
from truestep.files.disks import no_file
from truestep.files.tensors import tensor_sizes
from truestep.files.whole import LineError, exact_object
from truestep.gpu import marks
from truestep.head.logits import HeadSettings
from truestep.model.adapter import Adapter, AdapterSource
from truestep.model.cuts.stages import Stages, check_layers, keep_own
from truestep.model.cuts.tensor import cut_model, tensor_plan
from truestep.model.fast import rms_norm as norms
from truestep.model.fast.activation_checkpointing import ELEMENTWISE, FULL, checkpoint_options, recompute_activations
from truestep.model.fast.activation_offload import ActivationOffload
from truestep.model.fast.compiled import compile_layers
from truestep.model.fast.embedding import accumulate_in_float32, add_rows, every_token_counts
from truestep.model.fast.fused_attention import RECORD
from truestep.model.fast.fused_layers import fuse_layers, head_norms_of, settle_layers
from truestep.model.fast.gradient_accumulation import add_in_products, called
from truestep.model.freezing import freeze_weights
from truestep.model.loading.adapter_source import attach_adapter
from truestep.model.loading.from_parts import model_of_parts
from truestep.model.loading.probe import (
    Probe,
    probe_context,
    probe_cut,
    probe_float32,
    probe_half_precision,
    probe_stages,
)
from truestep.model.loading.probe_weights import borrowed_weights
from truestep.model.mixers import attention
from truestep.model.mixers.context_parallel import Context, check_heads
from truestep.model.no_dropout import no_noise
from truestep.model.policy import ModelFacts, Policy
from truestep.model.save import read_companions, saved_buffers
from truestep.process import progress
from truestep.ranks.exchange import TokenExchange
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.pipeline import Pipeline
from truestep.text import printable
from truestep.weights.errors import ModelError, no_model
from truestep.weights.finite import named_by_all, not_finite, some
from truestep.weights.layers import layers_of
from truestep.weights.lazy import place_buffers, read_parameters, unread_files
from truestep.weights.pieces import WeightSlice, pieces_of
from truestep.weights.protocol import Weights
from truestep.weights.sharded import ShardedWeights
from truestep.weights.tensor_parts import StoredTensors
from truestep.weights.whole import WholeWeights

log = logging.getLogger(__name__)

_MOST_LAYERS = 10_000
_LARGEST_SIZE = 2**40
_HARMLESS = 2**24  # elements of a matrix that is allowed whatever the size of the weight files
_LARGEST_FILE = 256 * MIB  # limit for tokenizer files; Gemma 3's has 32 MiB


def load_policy(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    head: HeadSettings | None = None,
    activation_checkpointing: bool | str = False,
    compiled: bool = False,
    attending: str = "auto",
    trust_remote_code: bool = False,
    longest_document: int = 512,
    ranks: Ranks = ALONE,
    reshard_after_forward: bool = True,
    reduce_each: bool = False,
    stages_per_rank: int = 1,
    frozen: bool = False,
    freeze: Sequence[str] = (),
    masters_on_host: bool = False,
    adapter: AdapterSource | None = None,
    offload_activations: bool = False,
) -> Policy:
    """Load, probe and cut a model. `longest_document`: length thresholds, such as a sliding window, are probed up to
    it. `frozen`: no weight has a gradient or a float32 master; `freeze`: the same for names that match a pattern.
    `masters_on_host`: masters lie on the host, the weights that the model computes with on the device.
    `activation_checkpointing`: full (or True), selective or elementwise. `offload_activations`: inputs of recomputed
    layers are kept on the host. `attending`: auto, flash or torch. `adapter`: only the adapter is trained."""
    directory, pipeline = Path(path), Pipeline(ranks.pipeline, stages_per_rank)
    model, tokenizer = _read(directory, trust_remote_code, ranks, pipeline)
    freeze_weights(model, freeze)
    adapted = None if adapter is None else attach_adapter(model, adapter)
    place = _place(device)
    place_buffers(model, place)
    no_noise(model)
    every_token_counts(model)
    settings = _head_settings(model, head or HeadSettings())
    how = str(FULL if activation_checkpointing is True else activation_checkpointing or "")
    if how and not (compiled and how == ELEMENTWISE):
        recompute_activations(model, how)
    compute = getattr(torch, dtype)
    with progress.working("checking what it computes", "layers"), borrowed_weights(model, place):
        _refuse(directory, not_finite(model.named_parameters()))
        probe, stages, choice = _probe(model, settings, place, compute, longest_document, ranks, pipeline, attending)
    if compiled:
        _compile(model, how)
    facts = ModelFacts.of(model, place)
    rounds, alone = dtype != "float32" and place.type == "cpu", ranks.tensor == ranks.shards == 1
    if rounds and not alone:
        accumulate_in_float32(model)
    buffers = {} if stages is None else saved_buffers(model)  # before other stages' layers are removed
    if frozen:
        model.requires_grad_(False)
    pieces, exchange = _cut(model, probe, stages, place, ranks)
    weights = _weights_of(model, compute, ranks, pieces, place, masters_on_host, reshard_after_forward, reduce_each)
    _refuse(directory, named_by_all(ranks, not_finite([*weights.frozen.items(), *weights.master.items()])))
    _finish_layers(model, weights, compiled, how)
    _finish_embedding(model, weights, rounds and alone)
    model.set_attn_implementation(choice.name)
    parts = (tokenizer, read_companions(directory), stages, buffers, choice, adapted)
    on_host = ActivationOffload(place) if offload_activations else None
    return Policy(model, directory, settings, weights, facts, *parts, activations_on_host=on_host, exchange=exchange)


def _finish_embedding(model: Any, weights: Weights, rounds: bool) -> None:
    """Accumulate the embedding's gradient in float32. `rounds`: torch would accumulate it in half precision."""
    adds = isinstance(weights, WholeWeights) and add_rows(model, weights, weights.rounded)
    if rounds and not adds:
        accumulate_in_float32(model)


def _finish_layers(model: Any, weights: Weights, compiled: bool, how: str) -> None:
    """Register the progress hooks of layers. With whole weights, let norms and the linear layers of compiled layers
    accumulate their gradients in float32 buffers. `how`: the activation checkpointing mode."""
    layers = layers_of(model)[1]
    for layer in layers:
        layer.register_forward_hook(marks.layer_done)
    if isinstance(weights, WholeWeights):
        if compiled:
            add_in_products(layers, weights, weights.rounded)
        # With elementwise recomputation the compiler fuses recomputing a norm with its gradient, so layers' norms are
        # left, but those of heads: their kernel's inputs are kept.
        inside = {module for layer in layers for module in layer.modules()} - head_norms_of(model)
        left = inside if compiled and how == ELEMENTWISE else set()
        norms.add_in_norms((module for module in called(model) if module not in left), weights, weights.rounded)
    settle_layers(model)


def _compile(model: Any, how: str) -> None:
    layers = layers_of(model)[1]
    if not layers:
        raise ModelError(f"model.compile: {type(model).__name__} has no list of layers to compile")
    compile_layers(layers, checkpoint_options(how or FULL), remakes=how == ELEMENTWISE)


def read_model(
    path: str | Path, trust_remote_code: bool = False, adapter: AdapterSource | None = None
) -> tuple[Any, Adapter | None]:
    """Make the model of a directory or a checkpoint with unread weights, and attach an adapter."""
    model = _read(Path(path), trust_remote_code, ALONE, Pipeline())[0]
    return model, None if adapter is None else attach_adapter(model, adapter)


def _place(device: str) -> torch.device:
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device: cuda was asked for and there is no CUDA device")
    return torch.empty(0, device=place).device  # has the GPU's index


def _probe(
    model: Any,
    head: HeadSettings,
    place: torch.device,
    compute: torch.dtype,
    longest: int,
    ranks: Ranks,
    pipeline: Pipeline,
    attending: str,
) -> tuple[Probe, Stages | None, attention.AttentionKernel]:
    """Put fused modules in a float32 model with all of its layers, probe it, and choose its attention. A model that
    fails a probe is refused."""
    with attention.using(model, RECORD):
        fuse_layers(model)
    with attention.shapes_seen() as shapes:
        probe = probe_float32(model, head, place, longest)
        context = Context.of(ranks)
        if context is not None:
            probe_context(model, probe, place, context)
    stages = probe_stages(model, pipeline, probe, place) if pipeline.ranks > 1 else None
    choice = attention.choose(attending, shapes, compute, place)
    if compute != torch.float32:
        choice = _probe_rounded(model, probe, place, compute, choice, attending)
    return probe, stages, choice


def _probe_rounded(
    model: Any,
    probe: Probe,
    place: torch.device,
    compute: torch.dtype,
    choice: attention.AttentionKernel,
    attending: str,
) -> attention.AttentionKernel:
    """Probe the model in half precision with the chosen attention. With `attending` auto, fall back to torch's."""
    try:
        with attention.using(model, choice.name):
            probe_half_precision(model, probe, place, compute)
    except ModelError as error:
        if attending != "auto" or choice.name == attention.NAME:
            raise
        probe_half_precision(model, probe, place, compute)
        return attention.AttentionKernel(attention.NAME, str(error))
    return choice


def _cut(
    model: Any, probe: Probe, stages: Stages | None, place: torch.device, ranks: Ranks
) -> tuple[dict[str, WeightSlice], TokenExchange | None]:
    """Cut the model to this rank's part, in place. Return the pieces of all weights and the tensor ranks' exchange."""
    pieces, group = pieces_of(model), ranks.group("tensor")
    exchange = None if group is None else TokenExchange(group)
    if exchange is not None:
        pieces = cut_model(model, tensor_plan(model.config, ranks.tensor), ranks, exchange, pieces, place)
        with borrowed_weights(model, place):
            probe_cut(model, probe, place, ranks)
    return pieces if stages is None else keep_own(model, stages, ranks.stage, pieces), exchange


def _weights_of(
    model: Any,
    dtype: torch.dtype,
    ranks: Ranks,
    pieces: dict[str, WeightSlice],
    place: torch.device,
    masters_on_host: bool,
    reshard: bool,
    reduce_each: bool,
) -> Weights:
    """Read this rank's part of the weights, whole or sharded."""
    size = 4 * sum(parameter.numel() for parameter in model.parameters())  # they are read in float32
    with progress.working("reading weights", "bytes read", size if ranks.shards == 1 else None):
        if ranks.shards > 1:
            options = {"reshard": reshard, "reduce_each": reduce_each, "masters_on_host": masters_on_host}
            return ShardedWeights(model, dtype, ranks, pieces, device=place, **options)
        read_parameters(model, place, frozen_dtype=dtype)
        return WholeWeights(model, dtype, ranks, pieces, masters_on_host=masters_on_host)


def _refuse(directory: Path, odd: Sequence[str]) -> None:
    """Refuse a model if tensors (named in `odd`) are not finite."""
    if odd:
        raise ModelError(f"model.path: {directory} has {some(odd)} with values that are not finite")


def _read(directory: Path, trust_remote_code: bool, ranks: Ranks, pipeline: Pipeline) -> tuple[Any, Any]:
    """Make the model with its buffers and unread weights, and read its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not (directory / "config.json").is_file():
        raise ModelError(no_model(directory))
    stored = StoredTensors(directory) if StoredTensors.has_weights(directory) else None
    if stored is None and not list(directory.glob("*.safetensors")):
        raise ModelError(f"model.path: {directory} has no .safetensors file; other weight formats are not loaded")
    for file in directory.iterdir():
        if (kind := no_file(file)) is not None:
            raise ModelError(f"model.path: {file} is {kind}, not a file")
    _check_config(directory)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(directory, **options)
        check_heads(getattr(config.get_text_config(), "num_attention_heads", 0), ranks.context, ranks.tensor)
        if ranks.tensor > 1:  # refused before anything is read
            tensor_plan(config, ranks.tensor)
        check_layers(config.get_text_config().num_hidden_layers, pipeline)
        if stored is not None:
            model = model_of_parts(directory, config, stored, trust_remote_code)
            return model.eval(), _read_tokenizer(directory, options)
        loader: Any = AutoModelForCausalLM  # its type annotations lack output_loading_info
        with unread_files():
            model, loading = loader.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **options,
            )
    except TruestepError:
        raise
    except Exception as error:  # an odd config.json makes transformers raise any type, KeyError and TypeError too
        raise ModelError(
            f"model.path: {directory} could not be loaded: {type(error).__name__}: {printable(error, 2000)}"
        ) from error
    _check_loading(directory, model, loading)
    return model.eval(), _read_tokenizer(directory, options)


def _check_config(directory: Path) -> None:
    """Refuse an invalid config.json, or one with absurd sizes: making that many layers would take hours."""
    try:
        config = exact_object(read_settings(directory / "config.json"), lenient=True)
    except (OSError, LineError, TooLargeError) as error:
        raise ModelError(f"model.path: {directory}: config.json cannot be used: {error}") from error
    for file in (*directory.glob("*.json"), *directory.glob("*.jinja"), *directory.glob("*.model")):
        if file.stat().st_size > _LARGEST_FILE:
            raise ModelError(f"model.path: {file} cannot be used: {too_long(_LARGEST_FILE)}")
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for name, value in (item for part in parts for item in part.items()):
        most = _MOST_LAYERS if name.endswith(("layers", "n_layer")) else _LARGEST_SIZE
        if isinstance(value, int) and abs(value) > most:
            raise ModelError(f"model.path: {directory}: config.json has {printable(name, 60)} beyond {most:,}")
    _check_sizes(directory, parts)


def _check_sizes(directory: Path, parts: Sequence[dict[str, Any]]) -> None:
    """Refuse a config.json that asks for a matrix larger than all weight files: transformers would allocate it before
    it notices that the files lack it."""
    files = [*directory.glob("*.safetensors"), *directory.glob("truestep/*.safetensors")]
    try:
        stored = sum(sum(tensor_sizes(file).values()) for file in files)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return  # a damaged header, which the loader names
    for part in parts:
        width = part.get("hidden_size")
        for name in ("vocab_size", "intermediate_size"):
            height = part.get(name)
            if isinstance(width, int) and isinstance(height, int) and height * width > max(stored, _HARMLESS):
                raise ModelError(
                    f"model.path: {directory}: config.json asks for weights of {name} {height:,} x hidden_size "
                    f"{width:,}, and the weights in its files have {stored:,} bytes"
                )


def _check_loading(directory: Path, model: Any, loading: dict[str, Any]) -> None:
    """Refuse files that lack weights of the model, and warn of weights that the model does not use."""
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:5])
        raise ModelError(f"model.path: {directory} lacks weights that its config.json asks for: {missing}")
    if loading["mismatched_keys"]:
        name, theirs, ours = min(loading["mismatched_keys"])
        raise ModelError(
            f"model.path: {directory} has {name} of shape {list(theirs)} where its config.json asks for {list(ours)}"
        )
    if loading["unexpected_keys"]:
        extra = sorted(loading["unexpected_keys"])
        log.warning(
            "model.path: %s holds %d weights that %s has no use for (%s …): they are neither trained nor saved",
            directory,
            len(extra),
            type(model).__name__,
            printable(", ".join(extra[:3])),
        )


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load a model's tokenizer without the model; None if the directory has none."""
    return _read_tokenizer(Path(path), {"local_files_only": True, "trust_remote_code": trust_remote_code})


def _read_tokenizer(directory: Path, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, **options)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(f"model.path: the tokenizer of {directory} could not be loaded: {printable(error)}") from error


def _head_settings(model: Any, settings: HeadSettings) -> HeadSettings:
    config, output = model.config, model.get_output_embeddings()
    if output is None or getattr(output, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__} has no plain linear LM head without a bias")
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = config.logit_scale
    softcap = getattr(config, "final_logit_softcapping", None)
    return dataclasses.replace(settings, softcap=softcap, scale=scale)
