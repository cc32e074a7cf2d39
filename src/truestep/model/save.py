"""Saves a policy as a Hugging Face directory: the trained weights, and the other files of the loaded directory."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from truestep.files.disks import writing
from truestep.files.tensors import tensor_sizes, transformers_write_tensors, write_tensors
from truestep.model import towers
from truestep.model.adapter import Adapter, is_adapters, merged, owner_of
from truestep.model.adapter_files import write_adapter
from truestep.model.policy import Policy
from truestep.weights.layers import layers_of

# Suffixes of a model's files other than weights: tokenizer, templates, code, licences.
_COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")
_SCRATCH = ".group"  # the sub-directory to which transformers writes one group of weights
_METADATA = {"format": "pt"}
# Files that transformers writes again with the weights.
_REPLACED = ("config.json", "generation_config.json", towers.RECORD)


def read_companions(directory: Path) -> dict[str, bytes]:
    """Read a model directory's other files into memory, because the directory may be gone when the model is saved."""
    return {
        file.name: file.read_bytes()
        for file in directory.iterdir()
        if file.is_file()
        and (file.suffix in _COMPANIONS or file.name.startswith(("LICENSE", "NOTICE")))
        and file.name not in _REPLACED
        and not file.name.endswith(".index.json")
    }


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's persistent buffers, such as a router's bias for choosing experts, by their names in the state
    dict."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name not in named}


def stream_policy(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    """Write a new directory as `save_policy` does, but layer by layer: no rank holds more of other ranks' weights than
    the largest layer or embedding. Every rank calls this; an error on the first rank is raised on every rank."""
    for number, tensors in enumerate(_groups_on_first(policy, dtype)):
        policy.weights.ranks.share(partial(_write_group, policy, directory, tensors, number))
    policy.weights.ranks.share(lambda: _complete(policy, directory, dtype))


def _groups_on_first(policy: Policy, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Gather the weights on the first rank, one group at a time. The last group also has the buffers."""
    groups = weight_groups(policy)
    for number, names in enumerate(groups):
        parts = {**policy.weights.frozen, **policy.weights.master}
        joined = policy.weights.on_first({name: parts.get(name) for name in names}, joined_dtype(policy, dtype))
        tensors = plain_weights(policy, joined, dtype)
        yield tensors | ({**policy.buffers, **saved_buffers(policy.model)} if number == len(groups) - 1 else {})


def weight_groups(policy: Policy) -> list[list[str]]:
    """Divide the names of all weights into groups: one per layer, and one per weight outside the layers (with its
    adapter). The groups are the same on every rank."""
    return _groups(policy.model, policy.weights.pieces)


def _groups(model: Any, weights: Iterable[str]) -> list[list[str]]:
    layers = layers_of(model)[0]
    groups: dict[str, list[str]] = {}
    for name in weights:
        inside = name.removeprefix(f"{layers}.") if layers and name.startswith(f"{layers}.") else ""
        group = f"{layers}.{inside.partition('.')[0]}" if inside else owner_of(name)
        groups.setdefault(group, []).append(name)
    return list(groups.values())


def _tied_head(policy: Policy, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an extra entry for the tied head, if `tensors` has the embedding.

    transformers saves a tied tensor once, under the embedding's name. vLLM on a CPU keeps a packed copy of the head,
    and updates the copy only if the files have an entry for the head."""
    if not policy.facts.tied or (embedding := _embedding_name(policy)) not in tensors:
        return {}
    whole = towers.whole_of(policy.model)
    return {"lm_head.weight" if whole is None else f"{whole.head[1]}.weight": tensors[embedding]}


def give_group(
    policy: Policy, tensors: Mapping[str, torch.Tensor], take: Callable[[Mapping[str, torch.Tensor]], None]
) -> None:
    """Call `take` with one group's tensors under their names in files. transformers converts the names."""
    if head := _tied_head(policy, tensors):
        take(head)
    handed = transformers_write_tensors(lambda named, *_, **__: take(named))
    with writing(tempfile.gettempdir()), tempfile.TemporaryDirectory() as scratch, handed:
        towers.save_pretrained(policy.model, scratch, tensors, max_shard_size=2**60)


def _write_group(policy: Policy, directory: Path, tensors: Mapping[str, torch.Tensor], number: int) -> None:
    """Write the files of one group of weights."""
    with writing(directory):
        _write_files_of_group(policy, directory, tensors, number)


def _write_files_of_group(policy: Policy, directory: Path, tensors: Mapping[str, torch.Tensor], number: int) -> None:
    if number == 0:
        directory.mkdir(parents=True)
    if head := _tied_head(policy, tensors):
        write_tensors(head, directory / "model-lm-head.safetensors", _METADATA)
    scratch = directory / _SCRATCH
    with transformers_write_tensors():
        towers.save_pretrained(policy.model, scratch, tensors)
    for place, file in enumerate(sorted(scratch.glob("*.safetensors"))):
        file.rename(directory / f"model-{number:05d}-{place:02d}.safetensors")


def _complete(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    """Write the index of all weight files, and the model's other files."""
    with writing(directory):
        towers.write_towers(policy.model, directory)
        _write_index(directory)
        for file in (directory / _SCRATCH).iterdir():
            if not file.name.endswith(".index.json"):
                file.rename(directory / file.name)
        shutil.rmtree(directory / _SCRATCH)
        _write_companions(policy.companions, directory, dtype)


def _write_index(directory: Path) -> None:
    sizes: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, size in tensor_sizes(file).items():
            weight_map[name], sizes[name] = file.name, size
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_weights(
    model: Any,
    names: Iterable[str],
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]],
    buffers: Mapping[str, torch.Tensor],
    directory: Path,
    most: int = 2**31,
) -> None:
    """Write the weights of a Hugging Face directory in files of about `most` bytes, with one file's tensors in memory
    at a time. `read` takes the names of a layer's weights, or of one weight outside the layers, and returns the
    weights to write by their names in the uncut model."""
    scratch, files = directory / _SCRATCH, 0
    tensors: dict[str, torch.Tensor] = {}
    scratch.mkdir()

    def write() -> None:
        nonlocal files
        with transformers_write_tensors():  # transformers converts to the names and groupings of files
            towers.save_pretrained(model, scratch, tensors, max_shard_size=2**60)
        (scratch / "model.safetensors").rename(directory / f".{files:05d}.safetensors")
        files += 1
        tensors.clear()

    for group in _groups(model, names):
        more = read(group)
        if tensors and sum(tensor.nbytes for tensor in (*tensors.values(), *more.values())) > most:
            write()
        tensors |= more
    tensors |= buffers
    write()
    shutil.rmtree(scratch)
    for others in towers.tower_files(model):
        write_tensors(others, directory / f".{files:05d}.safetensors", _METADATA)
        files += 1
    for number in range(files):
        of_several = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        (directory / f".{number:05d}.safetensors").rename(
            directory / (of_several if files > 1 else "model.safetensors")
        )
    if files > 1:
        _write_index(directory)


def model_files(model: Any, companions: Mapping[str, bytes], dtype: torch.dtype = torch.float32) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory, except the weight files, by name."""
    with writing(tempfile.gettempdir()), tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        name, smallest = min(model.named_parameters(), key=lambda item: item[1].numel())
        with transformers_write_tensors(lambda *_, **__: None):
            towers.save_pretrained(model, directory, {name: torch.zeros(smallest.shape)})
        _write_companions(companions, directory, dtype)
        return {
            file.name: file.read_bytes()
            for file in directory.iterdir()
            if file.is_file() and file.suffix != ".safetensors"
        }


def _embedding_name(policy: Policy) -> str:
    embedding = policy.model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in policy.model.named_modules() if module is embedding)


def save_policy(policy: Policy, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a new directory on the first rank; every rank calls this. Float32 weights are rounded once, after an
    adapter's are merged."""
    tensors = policy.weights.collect(joined_dtype(policy, dtype))
    if not policy.weights.ranks.first:
        return
    tensors = plain_weights(policy, tensors, dtype)
    tensors |= {**policy.buffers, **saved_buffers(policy.model)}
    # transformers converts to the names and groupings of this architecture's files, and writes tied tensors once.
    with transformers_write_tensors():
        towers.save_pretrained(policy.model, directory, tensors)
    if towers.whole_of(policy.model) is not None:
        single = directory / "model.safetensors"  # transformers would read only this file
        if single.is_file():
            single.rename(directory / "model-text.safetensors")
        towers.write_towers(policy.model, directory)
        _write_index(directory)
    _write_companions(policy.companions, directory, dtype)


def save_adapter(policy: Policy, adapter: Adapter, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the adapter without the model, in peft's format, on the first rank. Every rank calls this."""
    weights = policy.weights
    parts = {name: weights.master.get(name) for name in weights.pieces if is_adapters(name)}
    tensors = weights.on_first(parts, dtype)
    named = towers.whole_adapter(policy.model, adapter, tensors)
    weights.ranks.share(lambda: write_adapter(directory, *named, policy.path))


def joined_dtype(policy: Policy, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which weights are gathered for saving in `dtype`: float32 if an adapter is still to be
    merged."""
    return dtype if policy.adapter is None else torch.float32


def plain_weights(policy: Policy, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights in `dtype`, with the adapter merged into them if there is one."""
    return tensors if policy.adapter is None else merged(tensors, policy.adapter, dtype)


def _write_companions(companions: Mapping[str, bytes], directory: Path, dtype: torch.dtype) -> None:
    for name, content in companions.items():
        (directory / name).write_bytes(content)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)  # the key in older versions
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
