"""Adapters on disk in peft's format: adapter_config.json and adapter_model.safetensors."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from truestep.files.bounded import TooLargeError, read_settings
from truestep.files.disks import writing
from truestep.files.tensors import write_tensors
from truestep.files.whole import LineError, exact_object
from truestep.model.adapter import Adapter, Values, is_adapters
from truestep.text import printable
from truestep.weights.errors import ModelError
from truestep.weights.lazy import Unread

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # begins every tensor name in peft's files

# Options of peft that change an adapter's formula, W x + (alpha / rank) · B (A x), with the values that leave the
# formula unchanged.
_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
}


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def write_adapter(directory: Path, adapter: Adapter, tensors: dict[str, torch.Tensor], base: Path) -> None:
    """Write an adapter directory that peft can load. `tensors` maps weight names to values."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    named = {_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items() if is_adapters(name)}
    write_tensors(named, directory / TENSORS, {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(adapter.modules),
    }
    with writing(directory / CONFIG):
        (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_adapter(directory: Path) -> tuple[Adapter, Values]:
    """Read an adapter's settings. Return the adapter and a function that makes lazily read weights."""
    settings = _settings(directory)
    shapes = _shapes(directory)
    modules = tuple(dict.fromkeys(name.rpartition(".lora_")[0] for name in shapes))
    adapter = Adapter(settings["r"], float(settings["lora_alpha"]), modules)

    def values(name: str, shape: torch.Size) -> torch.Tensor:
        if name not in shapes:
            raise _refusal(directory, f"has no {name}")
        if shapes[name] != shape:
            raise _refusal(directory, f"has {name} of shape {list(shapes[name])} where {list(shape)} is needed")
        return Unread.of(torch.empty(shape, device="meta"), partial(_stored, directory / TENSORS, name))

    return adapter, values


def base_of(directory: Path) -> Path:
    """Return the directory of the model that an adapter was trained on."""
    return Path(str(_settings(directory).get("base_model_name_or_path") or ""))


def _settings(directory: Path) -> dict[str, Any]:
    try:
        settings = exact_object(read_settings(directory / CONFIG))
    except (OSError, LineError, TooLargeError) as error:
        raise _refusal(directory, f"has no {CONFIG} that can be used: {error}") from error
    kind, rank, alpha = (settings.get(name) for name in ("peft_type", "r", "lora_alpha"))
    if kind != "LORA":
        raise _refusal(directory, f"is of peft_type {printable(kind)}; only LORA is supported")
    wrong_rank = isinstance(rank, bool) or not isinstance(rank, int) or rank < 1
    if wrong_rank or isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise _refusal(
            directory,
            f"has r: {printable(rank)} and lora_alpha: {printable(alpha)}: expected numbers above 0, r a whole one",
        )
    for name, plain in _OTHERWISE.items():
        if settings.get(name) not in plain:
            raise _refusal(directory, f"has {name}: {printable(settings[name])}, which is not supported")
    return settings


def _shapes(directory: Path) -> dict[str, torch.Size]:
    """Return the shapes of an adapter's weights, by names without peft's prefix."""
    try:
        with safe_open(directory / TENSORS, "pt") as file:
            names = list(file.keys())
            shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in names}
    except Exception as error:  # safetensors raises its own error class, which is not an OSError
        raise _refusal(directory, f"has no {TENSORS} that can be read: {printable(error)}") from error
    odd = [name for name in names if not (name.startswith(_PREFIX) and is_adapters(name))]
    if odd or not names:
        raise _refusal(directory, f"has {printable(odd[0]) if odd else 'no weight'} in {TENSORS}")
    return {name.removeprefix(_PREFIX): shape for name, shape in shapes.items()}


def _stored(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(_PREFIX + name)
    return tensor


def _refusal(directory: Path, reason: str) -> ModelError:
    return ModelError(f"the adapter {directory} {reason}")
