"""Weights that are not read: what is done to them is done to their values, and only to those that are asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import save
from documents import same_bits
from selection import long_except
from tiny import KINDS, make_model
from truestep.model.loading.load import load_policy
from truestep.model.save import save_policy
from truestep.run.checkpoint.store import CheckpointStore, Progress
from truestep.tools.export import export
from truestep.weights.errors import ModelError
from truestep.weights.lazy import Unread, read_into, unread_files

Made = Callable[[str], Path]


def unread(values: torch.Tensor) -> Unread:
    return Unread.of(values.to("meta"), lambda: values)


WHAT_IS_DONE: dict[str, Callable[[Any], Any]] = {
    "a type": lambda t: t.to(device="cpu", dtype=torch.float64),
    "two types": lambda t: t.to(torch.float16).to(torch.float32),
    "a part": lambda t: t.to(torch.float64)[1:3].narrow(1, 2, 3),
    "a part of a rounded one": lambda t: t.to(torch.bfloat16)[..., 1:].to(torch.float32),
    "joined": lambda t: torch.cat([t, 2 * t[:1]], dim=0).transpose(0, 1).contiguous(),
    "stacked": lambda t: torch.stack([t, t.to("cpu")], dim=0).reshape(-1),
    "split": lambda t: torch.chunk(t, 2, dim=1)[1].contiguous(),
    "with one that is read": lambda t: torch.cat([t, torch.ones(1, 6)]),
    "a parameter": lambda t: torch.nn.Parameter(t).detach().clone(),
}


@pytest.mark.parametrize("what", WHAT_IS_DONE)
def test_what_is_done_to_one_is_done_to_its_values(what: str) -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    expected, found = WHAT_IS_DONE[what](values), WHAT_IS_DONE[what](unread(values))
    assert isinstance(found, Unread)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert same_bits(found.read(), expected)
    place = torch.empty(expected.shape, dtype=expected.dtype)
    read_into(place, found)
    assert same_bits(place, expected)


def test_a_part_is_taken_before_anything_is_converted() -> None:
    """A tensor that no machine has room for: of it, two rows are."""
    huge = torch.zeros((), dtype=torch.bfloat16).expand(2**30, 2**20)
    weight = torch.nn.Parameter(unread(huge).to(device="cpu", dtype=torch.float32))
    assert weight[2**20 : 2**20 + 2].narrow(1, 5, 3).read().shape == (2, 3)


def test_stored_types_that_differ_are_converted_before_they_meet() -> None:
    fine, coarse = torch.tensor([1 / 3]), torch.tensor([0.5], dtype=torch.bfloat16)
    found = torch.cat([unread(fine).to(torch.bfloat16), unread(coarse)]).to(torch.float32)
    assert same_bits(found.read(), torch.cat([fine.to(torch.bfloat16), coarse]).float())
    found = torch.cat([unread(fine).to(torch.bfloat16), unread(fine)])
    assert same_bits(found.read(), torch.cat([fine.to(torch.bfloat16).float(), fine]))
    found = torch.stack([unread(coarse).to(torch.float32), unread(fine)])[1]
    assert same_bits(found.read(), fine)


def test_its_values_are_compared_and_never_changed() -> None:
    values = torch.arange(3.0)
    assert torch.equal(unread(values), unread(values.clone()))
    assert not torch.equal(unread(values), unread(values + 1))
    with pytest.raises(RuntimeError, match="add_ of a weight that is not read yet"):
        unread(values).add_(1)
    with pytest.raises(RuntimeError, match="__setitem__"):
        unread(values)[0] = 1
    with pytest.raises(RuntimeError, match="__set__"):
        unread(values).data = values


# ---- models

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "pad_token_id": None,
}


def experts(directory: Path) -> Path:
    """Its files have each expert's matrices apart, and transformers joins them."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        **SIZES,
        num_experts=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def check_against_transformers(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    policy = load_policy(path, device="cpu")
    expected, found = dict(model.named_parameters()), dict(policy.model.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert type(parameter) is torch.nn.Parameter and parameter.is_contiguous() and parameter.requires_grad
        assert same_bits(parameter.detach(), expected[name].detach()), name
    ours, theirs = dict(policy.model.named_buffers()), dict(model.named_buffers())
    assert list(ours) == list(theirs)
    assert all(type(buffer) is torch.Tensor and same_bits(buffer, theirs[name]) for name, buffer in ours.items())
    assert policy.model.generation_config.to_dict() == model.generation_config.to_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", long_except(["float32", "bfloat16", "float16"], "bfloat16"))
def test_every_bit_is_what_transformers_loads(kind: str, dtype: str, tmp_path: Path) -> None:
    check_against_transformers(make_model(tmp_path, kind, dtype=dtype))


def test_tensors_that_transformers_joins(tmp_path: Path) -> None:
    path = experts(tmp_path / "experts")
    assert any("experts.3.gate_proj" in name for name in load_file(path / "model.safetensors"))
    check_against_transformers(path)
    save_policy(load_policy(path, device="cpu"), tmp_path / "saved", torch.bfloat16)
    saved, came = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", path))
    assert set(saved) == set(came)
    assert all(same_bits(saved[name], value) for name, value in came.items())
    # The same by a checkpoint in parts, which has them joined.
    policy = load_policy(path, device="cpu")
    checkpoint = save(CheckpointStore(tmp_path / "checkpoints", 1), policy, Progress(1, {}, [], 0))
    again = load_policy(checkpoint, device="cpu")
    assert all(same_bits(again.weights.master[name], value) for name, value in policy.weights.master.items())
    export(checkpoint, tmp_path / "exported", "bfloat16")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert set(exported) == set(came) and all(same_bits(exported[name], value) for name, value in came.items())


def test_buffers_that_a_file_has(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "glm4_moe",
        **SIZES,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    corrections = [buffer for name, buffer in model.named_buffers() if "correction" in name]
    assert corrections
    for correction in corrections:
        correction.copy_(torch.linspace(-1, 1, 4) / 3)
    model.save_pretrained(tmp_path)
    check_against_transformers(tmp_path)


def rewritten(source: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: value.clone() for name, value in (change(tensors) or tensors).items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_names_that_transformers_completes(tiny_model: Made, tmp_path: Path) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("model."): value for name, value in tensors.items()}

    check_against_transformers(rewritten(tiny_model("llama"), tmp_path / "short", shorten))


@pytest.mark.parametrize("other", [0.0, 0.25])
def test_a_tied_head_that_is_in_the_file_too(other: float, tiny_model: Made, tmp_path: Path) -> None:
    """Tied if it is the embedding's equal, and a head of its own if not: of values that nobody has read."""

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + other

    path = rewritten(tiny_model("qwen3_tied"), tmp_path / "both", add_head)
    check_against_transformers(path)
    assert load_policy(path, device="cpu").facts.tied is (other == 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.mlp.up_proj.weight", "has model.layers.0.mlp.up_proj.weight with values that are not finite"),
        ("model.layers.1.mlp.up_proj.weight", "has model.layers.1.mlp.up_proj.weight with values that are not finite"),
    ],
)
def test_values_that_are_no_numbers_are_refused(
    name: str, reason: str, value: float, tiny_model: Made, tmp_path: Path
) -> None:
    """Also of a layer that runs on another's weights while the model is probed."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3] = value

    with pytest.raises(ModelError, match=reason):
        load_policy(rewritten(tiny_model("llama"), tmp_path / "spoilt", spoil), device="cpu")


def test_transformers_is_given_tensors_that_are_not_read(tiny_model: Made) -> None:
    with unread_files():
        model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    read = [name for name, parameter in model.named_parameters() if not isinstance(parameter.data, Unread)]
    assert not read, "transformers asks no `modeling_utils.safe_open` for tensors: each rank would load a whole model"


def test_nothing_is_left_of_how_files_are_read(tiny_model: Made) -> None:
    from transformers import modeling_utils

    honest = modeling_utils.safe_open
    with pytest.raises(KeyError), unread_files():
        assert modeling_utils.safe_open is not honest
        raise KeyError
    assert modeling_utils.safe_open is honest
