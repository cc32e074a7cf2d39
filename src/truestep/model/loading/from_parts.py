"""Makes a model from its configuration, with unread weights that are read later from the files of a checkpoint."""

from pathlib import Path
from typing import Any

import torch

from truestep.model import towers
from truestep.model.mixers import attention
from truestep.weights.errors import ModelError
from truestep.weights.lazy import replace_parameters, weights_without_values
from truestep.weights.tensor_parts import BUFFER, WEIGHT, StoredTensors, unread_weight


def model_of_parts(directory: Path, config: Any, stored: StoredTensors, trust_remote_code: bool) -> Any:
    """Make the model of a checkpoint. Buffers are read now, weights later."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    loader: Any = AutoModelForCausalLM
    how = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    whole = towers.whole_class(config)
    with weights_without_values():
        if whole is None:
            model = loader.from_config(config, trust_remote_code=trust_remote_code, **how)
        else:
            model = whole._from_config(config, **how)
    if whole is not None:
        model = towers.take_text(model, directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    weights, buffers = stored.named(WEIGHT), stored.named(BUFFER)
    names = {parameter: name for name, parameter in model.named_parameters()}
    _check(directory, model, weights, {name: parameter.shape for parameter, name in names.items()}, stored)

    def unread(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(unread_weight(stored, weights[names[parameter]], parameter.detach()))

    replace_parameters(model, unread)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(stored.read_whole(buffers[name]))
    return model


def _check(
    directory: Path, model: Any, weights: dict[str, str], shapes: dict[str, torch.Size], stored: StoredTensors
) -> None:
    missing = sorted(set(shapes) - set(weights))
    if missing:
        raise ModelError(
            f"model.path: {directory} lacks {len(missing)} of the {len(shapes)} weights of {type(model).__name__}, "
            f"such as {', '.join(missing[:5])}: name a directory that has them all, or copy their files into this one"
        )
    for name, shape in shapes.items():
        if stored.shape(weights[name]) != shape:
            raise ModelError(
                f"model.path: {directory} has {name} of shape {list(stored.shape(weights[name]))} where its "
                f"config.json asks for {list(shape)}"
            )
