"""Loads the language model of multimodal directories, such as `Qwen3_5ForConditionalGeneration`. Towers are the parts
for images or sound.

Only the text model is loaded, trained, sampled from and cut over ranks. Its weights have other names than in the whole
model. The whole model is kept without values, to map names to those in files. The towers' tensors are never loaded; an
export copies them unchanged from the directory's files.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from truestep.files.tensors import tensor_sizes, transformers_write_tensors, write_tensors
from truestep.model.adapter import Adapter, Values
from truestep.weights.errors import ModelError
from truestep.weights.lazy import weights_without_values

RECORD = "truestep-towers.json"  # a file in a checkpoint that names the directory with the towers
_WHOLE = "_truestep_whole"  # an attribute of the text model
_MOST = 2**31  # most bytes in one file of tower tensors


@dataclass(frozen=True)
class Whole:
    """The whole model that a text model was taken from."""

    model: Any  # without weight values
    body: tuple[str, str]  # the name of the body in the text model, and its name in the whole model
    head: tuple[str, str]
    source: Path  # a Hugging Face directory with the towers
    config: str  # the content of its config.json
    text: frozenset[str]  # the names of the text model's tensors in files

    def name(self, name: str) -> str:
        """Return the whole model's name for a weight or module of the text model."""
        return _renamed(name, [self.body, self.head])

    def text_name(self, name: str) -> str:
        return _renamed(name, [(theirs, ours) for ours, theirs in (self.body, self.head)])

    def others(self) -> dict[str, Path]:
        """Return the names of tensors in the source's files that are not the text model's, with their files."""
        found = {name: file for file in sorted(self.source.glob("*.safetensors")) for name in tensor_sizes(file)}
        if not found:
            raise ModelError(f"the towers of this model are read from {self.source}, which has no weights any more")
        return {name: file for name, file in found.items() if name not in self.text and name != self.head_in_files}

    @property
    def head_in_files(self) -> str:
        """The head's name in files. A tied head may be in them or not."""
        return f"{self.head[1]}.weight"

    def check(self) -> None:
        """Refuse files with names that transformers would not write: the text model's tensors could not be recognised
        in them."""
        stored = {name for file in self.source.glob("*.safetensors") for name in tensor_sizes(file)}
        odd = sorted(self.text - stored - {self.head_in_files})
        if odd:
            raise ModelError(
                f"model.path: {self.source} names its weights in another way than transformers does ({odd[0]} is not "
                "there): load it in transformers and save it again"
            )


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def _in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        transformers_write_tensors(lambda named, *_, **__: found.update(named)),
    ):
        model.save_pretrained(scratch, state_dict=dict(tensors), max_shard_size=2**60)
    return found


def text_config(config: Any) -> Any:
    """Return the configuration of the trained model: the text model's, if the directory has towers."""
    return config.get_text_config() if whole_class(config) is not None else config


def whole_class(config: Any) -> Any:
    """Return the class of the whole model, if a configuration is of a text model with towers; else None."""
    import transformers

    name = next(iter(config.architectures or ()), "")
    if config.get_text_config() is config or not name.endswith("ForConditionalGeneration"):
        return None
    return getattr(transformers, name, None)


def take_text(model: Any, directory: Path) -> Any:
    """Return the text model of a whole model that was made from a directory or a checkpoint. Weights are unread."""
    from transformers import AutoModelForCausalLM

    kind, body, head = type(model).__name__, model.get_decoder(), model.get_output_embeddings()
    loader: Any = AutoModelForCausalLM
    try:
        with weights_without_values():
            text = loader.from_config(body.config, dtype=torch.float32)
    except ValueError as error:
        raise ModelError(f"{kind}: transformers has no class for its text model: {error}") from error
    if type(text.base_model) is not type(body):
        raise ModelError(f"{kind}: its text model is a {type(body).__name__}, not a {type(text.base_model).__name__}")
    names = {module: name for name, module in model.named_modules()}
    inside = (f"{names[body]}.", f"{names[head]}.")
    shapes = {name: value.shape for name, value in model.state_dict().items() if name.startswith(inside)}
    whole = Whole(
        model,
        (text.base_model_prefix, names[body]),
        (next(name for name, module in text.named_modules() if module is text.get_output_embeddings()), names[head]),
        _source_of(directory),
        (directory / "config.json").read_text(encoding="utf-8"),
        frozenset(_in_files(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})),
    )
    setattr(text, text.base_model_prefix, body)
    text.set_output_embeddings(head)
    text.config, text.generation_config = body.config, model.generation_config
    vars(text)[_WHOLE] = whole
    return text


def whole_of(model: Any) -> Whole | None:
    """Return the whole model that a text model was taken from; None: it was not taken from one."""
    whole: Whole | None = vars(model).get(_WHOLE)
    return whole


def save_pretrained(model: Any, directory: Path | str, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Save tensors as transformers does, with the whole model's names and configuration."""
    whole = whole_of(model)
    if whole is None:
        model.save_pretrained(directory, state_dict=dict(tensors), **options)
        return
    named = {whole.name(name): tensor for name, tensor in tensors.items()}
    whole.model.save_pretrained(directory, state_dict=named, **options)
    (Path(directory) / "config.json").write_text(whole.config, encoding="utf-8")


def tower_files(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the towers' tensors, about `_MOST` bytes at a time."""
    whole = whole_of(model)
    if whole is None:
        return
    tensors: dict[str, torch.Tensor] = {}
    for name, file in whole.others().items():
        with safe_open(file, "pt") as opened:
            tensor = opened.get_tensor(name).clone()
        if tensors and sum(each.nbytes for each in (*tensors.values(), tensor)) > _MOST:
            yield tensors
            tensors = {}
        tensors[name] = tensor
    if tensors:
        yield tensors


def write_towers(model: Any, directory: Path) -> None:
    """Write the towers' tensors to files."""
    for number, tensors in enumerate(tower_files(model)):
        write_tensors(tensors, directory / f"model-towers-{number:05d}.safetensors", {"format": "pt"})


def whole_adapter(
    model: Any, adapter: Adapter, tensors: Mapping[str, torch.Tensor]
) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Return an adapter and its tensors, renamed to the whole model's names."""
    whole = whole_of(model)
    if whole is None:
        return adapter, dict(tensors)
    modules = tuple(map(whole.name, adapter.modules))
    return replace(adapter, modules=modules), {whole.name(name): tensor for name, tensor in tensors.items()}


def text_adapter(model: Any, adapter: Adapter, values: Values) -> tuple[Adapter, Values]:
    """Return an adapter that was stored with the whole model's names, renamed to the text model's."""
    whole = whole_of(model)
    if whole is None:
        return adapter, values
    modules = tuple(map(whole.text_name, adapter.modules))
    return replace(adapter, modules=modules), lambda name, shape: values(whole.name(name), shape)


def record(model: Any) -> dict[str, bytes]:
    """Return the file of a checkpoint that names the directory with the towers."""
    whole = whole_of(model)
    return {} if whole is None else {RECORD: json.dumps({"source": str(whole.source.absolute())}).encode()}


def _source_of(directory: Path) -> Path:
    """Return the directory with the towers, for a model directory or a checkpoint."""
    file = directory / RECORD
    return Path(json.loads(file.read_bytes())["source"]) if file.is_file() else directory
