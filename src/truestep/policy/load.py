"""A Hugging Face directory into a policy, and the probe that refuses a model this trainer would train wrongly."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from truestep.errors import TruestepError
from truestep.head.logits import HeadSettings, scaled_logits
from truestep.policy import attention
from truestep.policy.policy import Policy
from truestep.policy.save import read_companions
from truestep.policy.weights import Weights
from truestep.types import PackedBatch

log = logging.getLogger(__name__)


class ModelError(TruestepError):
    """A model that cannot be trained, with the reason."""


def load_policy(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    head: HeadSettings | None = None,
    activation_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> Policy:
    directory = Path(path)
    model, tokenizer = _read(directory, trust_remote_code)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device: cuda was asked for and there is no CUDA device")
    model.to(place)
    _no_dropout(model)
    settings = _head_settings(model, head or HeadSettings())
    policy = Policy(
        model, directory, settings, Weights(model, getattr(torch, dtype)), tokenizer, read_companions(directory)
    )
    probe(policy)
    if activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(f"{type(model).__name__} does not support model.activation_checkpointing")
        _enable_activation_checkpointing(model)
    return policy


def _enable_activation_checkpointing(model: Any) -> None:
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20 or so
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
    model.train()  # transformers recomputes in training mode only; there is no dropout left to switch on


def _read(directory: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not (directory / "config.json").is_file():
        raise ModelError(f"model.path: {directory} is not a Hugging Face model directory: it has no config.json")
    if not list(directory.glob("*.safetensors")):
        raise ModelError(f"model.path: {directory} has no .safetensors file; other weight formats are not loaded")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(directory, **options)
        loader: Any = AutoModelForCausalLM  # its types do not know output_loading_info
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
    except (ValueError, OSError, ImportError, RuntimeError, SafetensorError) as error:  # JSON's error is a ValueError
        raise ModelError(f"model.path: {directory} could not be loaded: {error}") from error
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
            ", ".join(extra[:3]),
        )
    return model.eval(), _read_tokenizer(directory, options)


def _read_tokenizer(directory: Path, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    has_tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not has_tokenizer:
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, **options)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(f"model.path: the tokenizer of {directory} could not be loaded: {error}") from error


def _no_dropout(model: Any) -> None:
    """Dropout is 0: a score is a function of the weights."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # `attention_dropout`, `dropout`, `layerdrop`: numbers that a forward pass in training mode would use.
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


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


@torch.no_grad()
def probe(policy: Policy) -> None:
    """Packed equals separate, and the head's logits are the model's own; otherwise the model is refused."""
    vocabulary = policy.vocabulary_size
    window = getattr(policy.model.config, "sliding_window", None) or 0
    lengths = [5, 2, min(window, 512) + 9, 1]
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    name = type(policy.model).__name__
    try:
        packed = policy.hidden(_probe_batch(documents)).split(lengths)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{name} cannot run packed documents: {error}") from error
    low_precision = policy.model.dtype in (torch.float16, torch.bfloat16)
    tolerance = 5e-2 if low_precision else 1e-4
    exact_head = dataclasses.replace(policy.head, fp32=True)
    for document, hidden in zip(documents, packed, strict=True):
        output = _plain_output(policy, document)
        _refuse_unless_close(hidden, output.hidden_states[-1][0], tolerance, f"{name}: packed documents give other")
        ones = torch.ones(len(document), device=policy.device)
        logits = scaled_logits(output.hidden_states[-1][0], policy.head_weight, ones, exact_head)
        _refuse_unless_close(logits, output.logits[0], tolerance, f"{name}: the plain LM head gives other")


def _plain_output(policy: Policy, document: torch.Tensor) -> Any:
    """What transformers' own attention gives for one document."""
    try:
        with policy.plain_attention():
            return policy.model(input_ids=document[None].to(policy.device), output_hidden_states=True, use_cache=False)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{type(policy.model).__name__} cannot be compared with plain attention: {error}") from error


def _probe_batch(documents: list[torch.Tensor]) -> PackedBatch:
    lengths = torch.tensor([len(document) for document in documents])
    count, none = len(documents), torch.zeros(0)
    integers, flags = none.long(), torch.zeros(count, dtype=torch.bool)
    return PackedBatch(
        input_ids=torch.cat(documents),
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        segments=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        label_rows=integers,
        label_ids=integers,
        label_document=integers,
        temperature=none,
        old_logprobs=none,
        advantages=none,
        model_version=integers,
        plan_index=torch.arange(count),
        num_labels=torch.zeros(count, dtype=torch.int64),
        reward=torch.zeros(count),
        has_logprobs=flags,
        has_advantages=flags,
        has_version=flags,
        has_reward=flags,
    )


def _refuse_unless_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, complaint: str) -> None:
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12)
    if not difference <= tolerance:
        raise ModelError(
            f"{complaint} values than transformers does on the same document (relative difference "
            f"{float(difference):.1e}, at most {tolerance:.0e}): training it would be wrong, so it is refused"
        )
