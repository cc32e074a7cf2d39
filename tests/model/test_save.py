"""What is saved is what came in, with the float32 weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from documents import make_documents, pack_all, same_bits
from small_runs import word_model
from tiny import KINDS
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.save import save_policy

Made = Callable[[str], Path]


def trained(path: Path, dtype: str = "float32") -> Policy:
    """With weights that no file has, and that bfloat16 cannot hold."""
    policy = load_policy(path, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.weights.master.values():
            master += 0.01 * torch.randn(master.shape, generator=generator)
    policy.weights.publish()
    return policy


@pytest.mark.parametrize("kind", ["qwen3_tied", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_keep_every_bit(kind: str, dtype: str, tiny_model: Made, tmp_path: Path) -> None:
    policy = trained(tiny_model(kind), dtype)
    save_policy(policy, tmp_path / "saved")
    again = load_policy(tmp_path / "saved", dtype=dtype, device="cpu")
    assert set(again.weights.master) == set(policy.weights.master)
    for name, master in policy.weights.master.items():
        assert same_bits(again.weights.master[name], master), name
    batch = pack_all(make_documents([9, 3, 20])).tokens
    assert same_bits(again.hidden(batch), policy.hidden(batch))
    assert again.head == policy.head


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it_and_computes_the_same(kind: str, tiny_model: Made, tmp_path: Path) -> None:
    policy = trained(tiny_model(kind))
    save_policy(policy, tmp_path / "saved")
    input_ids = torch.from_numpy(make_documents([25])[0].input_ids)[None]
    with torch.no_grad():
        with policy.plain_attention():
            expected = policy.model(input_ids=input_ids).logits
            implementation = policy.model.config._attn_implementation
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation=implementation)
        assert model.dtype == torch.float32
        assert same_bits(model(input_ids=input_ids).logits, expected)
    default = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert default.config._attn_implementation != "truestep_packed", "this trainer's attention is not in the config"


@pytest.mark.parametrize("kind", ["qwen3_tied", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_file_and_its_config(kind: str, dtype: torch.dtype, tiny_model: Made, tmp_path: Path) -> None:
    source = tiny_model(kind)
    policy = trained(source, "bfloat16")
    save_policy(policy, tmp_path / "saved", dtype)
    tensors = load_file(tmp_path / "saved/model.safetensors")
    assert set(tensors) == set(load_file(source / "model.safetensors")), "a tied tensor is there once"
    assert set(tensors) == set(policy.weights.master)
    for name, tensor in tensors.items():
        assert same_bits(tensor, policy.weights.master[name].detach().to(dtype)), f"{name} is rounded once"
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "saved"))
    assert after.pop("dtype") == str(dtype).removeprefix("torch.")
    before.pop("dtype")
    assert after == before
    with safe_open(tmp_path / "saved/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"


def test_tokenizer_and_other_files_come_along(tmp_path: Path) -> None:
    source = word_model(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("free")
    (source / "README.md").write_bytes(b"\xff not UTF-8")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (source / "model-00001-of-00002.safetensors.tmp").write_bytes(b"old weights")
    (source / "truestep").mkdir()
    (source / "truestep/state.json").write_text("{}")
    policy = load_policy(source, device="cpu")
    save_policy(policy, tmp_path / "saved")
    saved = {file.name for file in (tmp_path / "saved").iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "README.md"):
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes(), name
    assert not saved & {"pytorch_model.bin", "model.safetensors.index.json", "truestep"}
    assert [name for name in saved if "safetensors" in name] == ["model.safetensors"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()


def test_a_sharded_model_leaves_no_stale_index(tiny_model: Made, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(tiny_model("llama")).save_pretrained(source, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    policy = trained(source)
    save_policy(policy, tmp_path / "saved")
    assert [file.name for file in (tmp_path / "saved").glob("*safetensors*")] == ["model.safetensors"]
    again = load_policy(tmp_path / "saved", device="cpu")
    assert all(same_bits(again.weights.master[name], master) for name, master in policy.weights.master.items())


def test_the_source_may_be_gone(tiny_model: Made, tmp_path: Path) -> None:
    """A resumed run was read from a checkpoint that is removed when newer ones are written."""
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    policy = load_policy(source, device="cpu")
    shutil.rmtree(source)
    save_policy(policy, tmp_path / "saved")
    assert (tmp_path / "saved/chat_template.jinja").read_text() == "{{ messages }}"
    load_policy(tmp_path / "saved", device="cpu")


def test_saving_changes_nothing(tiny_model: Made, tmp_path: Path) -> None:
    policy = trained(tiny_model("gemma2"), "bfloat16")
    batch = pack_all(make_documents([9, 3, 20])).tokens
    before = policy.hidden(batch).detach()
    save_policy(policy, tmp_path / "saved", torch.float16)
    assert same_bits(policy.hidden(batch), before)
    assert policy.model.dtype == torch.bfloat16
    assert policy.model.config._attn_implementation == "truestep_packed"


def test_buffers_that_belong_to_the_weights_are_saved(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A router's correction, say: without it the checkpoint would lack what its own architecture asks for."""
    policy = load_policy(tiny_model("qwen3_tied"), device="cpu")
    policy.model.model.layers[0].mlp.register_buffer("correction", torch.tensor([1.5, -2.0]))
    save_policy(policy, tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors["model.layers.0.mlp.correction"].tolist() == [1.5, -2.0]
    assert "lm_head.weight" not in tensors
