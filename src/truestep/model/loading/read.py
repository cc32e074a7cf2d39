"""Reads a Hugging Face directory: makes the model with unread weights, and its tokenizer."""

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
from truestep.model import towers
from truestep.model.adapter import Adapter, AdapterSource
from truestep.model.cuts.stages import check_layers
from truestep.model.cuts.tensor import tensor_plan
from truestep.model.heads import HeadSizes
from truestep.model.loading.adapter_source import attach_adapter
from truestep.model.loading.from_parts import model_of_parts
from truestep.model.mixers import attention
from truestep.model.mixers.context_parallel import check_heads
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.pipeline import Pipeline
from truestep.text import printable
from truestep.weights.errors import ModelError, no_model
from truestep.weights.lazy import UnreadError, unread_files
from truestep.weights.tensor_parts import StoredTensors

log = logging.getLogger(__name__)

_MOST_LAYERS = 10_000
_LARGEST_SIZE = 2**40
_HARMLESS = 2**24  # elements of a matrix that is always allowed, however small the weight files are
_LARGEST_FILE = 256 * MIB  # limit for tokenizer files; Gemma 3's has 32 MiB


def read_model(
    path: str | Path, trust_remote_code: bool = False, adapter: AdapterSource | None = None
) -> tuple[Any, Adapter | None]:
    """Make the model of a directory or a checkpoint with unread weights, and attach an adapter."""
    model = read_directory(Path(path), trust_remote_code, ALONE, Pipeline())[0]
    return model, None if adapter is None else attach_adapter(model, adapter)


def read_directory(directory: Path, trust_remote_code: bool, ranks: Ranks, pipeline: Pipeline) -> tuple[Any, Any]:
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
    config = whole = None
    try:
        config = AutoConfig.from_pretrained(directory, **options)
        check_heads(HeadSizes.of(config).queries, ranks.context, ranks.tensor)
        if ranks.tensor > 1:  # refuse before weights are read
            tensor_plan(config, ranks.tensor, divided=ranks.expert > 1)
        check_layers(config.get_text_config().num_hidden_layers, pipeline)
        if stored is not None:
            model = model_of_parts(directory, config, stored, trust_remote_code)
            return model.eval(), _read_tokenizer(directory, options)
        whole = towers.whole_class(config)
        loader: Any = whole or AutoModelForCausalLM  # its type annotations lack output_loading_info
        with unread_files():
            model, loading = loader.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # mismatches are refused below, with the weight's name
                **options,
            )
        _check_loading(directory, model, loading, warn=whole is None)
        if whole is not None:
            model = towers.take_text(model, directory)
            if (taken_from := towers.whole_of(model)) is not None:
                taken_from.check()
    except TruestepError:
        raise
    # with a wrong config.json, transformers raises any type of error, KeyError and TypeError too
    except Exception as error:
        raise ModelError(f"model.path: {directory} could not be loaded: {_reason(error, config)}") from error
    return model.eval(), _read_tokenizer(directory, options)


def _reason(error: Exception, config: Any) -> str:
    """Describe why a model could not be made: an unsupported feature if one is found, else the error."""
    from transformers import AutoModelForCausalLM

    if error.args == (attention.NAME,):  # a KeyError from transformers' table of attention classes
        return f"{config.model_type} {attention.ITS_OWN}"
    try:
        with torch.device("meta"):
            plain_head(AutoModelForCausalLM.from_config(config))
    except ModelError as found:
        return str(found)
    except Exception:
        log.debug("%s cannot be made without its weights either", type(config).__name__)
    if isinstance(error, UnreadError):
        return f"transformers' code for {config.model_type} changes weights while it loads them ({error})"
    return f"{type(error).__name__}: {printable(error, 2000)}"


def plain_head(model: Any) -> None:
    """Refuse a model without a separate body, or whose head is not a plain matrix."""
    output = model.get_output_embeddings()
    if output is None or getattr(output, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__} has no LM head that is only a matrix: it has none, or a bias")
    if model.base_model is model:
        raise ModelError(
            f"{type(model).__name__} has no body without a head: its base_model_prefix is {model.base_model_prefix!r}, "
            "and it has no module of that name"
        )


def _check_config(directory: Path) -> None:
    """Refuse a config.json that is invalid or has absurd sizes: making too many layers would take hours."""
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
        return  # a damaged header; the loader reports it
    for part in parts:
        width = part.get("hidden_size")
        for name in ("vocab_size", "intermediate_size"):
            height = part.get(name)
            if isinstance(width, int) and isinstance(height, int) and height * width > max(stored, _HARMLESS):
                raise ModelError(
                    f"model.path: {directory}: config.json asks for weights of {name} {height:,} x hidden_size "
                    f"{width:,}, and the weights in its files have {stored:,} bytes"
                )


def _check_loading(directory: Path, model: Any, loading: dict[str, Any], warn: bool) -> None:
    """Refuse files that lack weights of the model, and warn of weights that the model does not use."""
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:5])
        raise ModelError(f"model.path: {directory} lacks weights that its config.json asks for: {missing}")
    if loading["mismatched_keys"]:
        name, theirs, ours = min(loading["mismatched_keys"])
        raise ModelError(
            f"model.path: {directory} has {name} of shape {list(theirs)} where its config.json asks for {list(ours)}"
        )
    if warn and loading["unexpected_keys"]:
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
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"model.path: the tokenizer of {directory} could not be loaded: {printable(error)}") from error
