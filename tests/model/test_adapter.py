"""Adapters and peft: its files, its first values, its numbers; and what of its files is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import write_adapter, write_merged
from tiny import make_model
from truestep.model.adapter import AdapterSettings, AdapterSource
from truestep.model.adapter_files import read_adapter
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.save import save_adapter, save_policy, stream_policy
from truestep.rollouts.packing import pack_tokens
from truestep.step.gpu_use import training_operations
from truestep.types import Rollout, StepPlan, StepTotals
from truestep.weights.errors import ModelError

IDS = torch.tensor([5, 1, 7, 60, 33, 2, 19])


def adapted(model: Path, adapter: Path | None = None, dtype: str = "float32", **settings: Any) -> Policy:
    source = AdapterSource(path=adapter) if adapter is not None else AdapterSource(AdapterSettings(**settings))
    return load_policy(model, device="cpu", dtype=dtype, adapter=source)


def logprobs_of(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        hidden = policy.hidden(pack_tokens([IDS.numpy()], 1))
        logits = hidden @ policy.head_weight.T * policy.head.scale
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_values_are_those_of_the_merged_weights(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind)
    write_adapter(tmp_path / "adapter", model)
    policy = adapted(model, tmp_path / "adapter")
    merged = load_policy(write_merged(model, tmp_path / "adapter", tmp_path / "merged"), device="cpu")
    base = load_policy(model, device="cpu")
    assert (logprobs_of(policy) - logprobs_of(merged)).abs().max() < 1e-5
    assert (logprobs_of(base) - logprobs_of(merged)).abs().max() > 1e-2
    without = policy.without_adapter()
    assert torch.equal(logprobs_of(without), logprobs_of(base))
    assert (logprobs_of(policy) - logprobs_of(merged)).abs().max() < 1e-5  # the switch is back where it was


def test_first_values_are_as_pefts_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    policy, again = (adapted(model, rank=4, alpha=8.0, seed=3) for _ in range(2))
    other = adapted(model, rank=4, alpha=8.0, seed=4)
    for name, value in policy.weights.master.items():
        assert torch.equal(value, again.weights.master[name])
        if "lora_B" in name:
            assert not value.any()
            continue
        bound = 1 / math.sqrt(value.shape[1])  # kaiming_uniform_(a=sqrt(5)), as of torch's own linear layers
        assert value.shape[0] == 4 and 0.8 * bound < value.abs().max() <= bound
        assert not torch.equal(value, other.weights.master[name])
    assert len({value.flatten()[0].item() for name, value in policy.weights.master.items() if "lora_A" in name}) == 14


def test_peft_loads_what_is_saved_and_gives_the_same_logprobs(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = make_model(tmp_path / "model", "qwen3_tied")
    policy = adapted(model, rank=4, alpha=6.0, targets=["q_proj", "model.layers.1.mlp.*_proj"])
    with torch.no_grad():
        for master in policy.weights.master.values():
            master += 0.1 * torch.randn(master.shape, generator=torch.Generator().manual_seed(master.numel()))
    policy.weights.publish()
    assert policy.adapter is not None
    save_adapter(policy, policy.adapter, tmp_path / "saved")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "saved").eval()
    with torch.no_grad():
        expected = theirs(input_ids=IDS[None]).logits[0].log_softmax(-1)
    assert (logprobs_of(policy) - expected).abs().max() < 1e-4
    assert (logprobs_of(policy.without_adapter()) - expected).abs().max() > 1e-2
    found = {name for name, parameter in theirs.named_parameters() if "lora_" in name}
    assert len(found) == len(policy.weights.master)


def test_an_adapter_of_peft_is_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = make_model(tmp_path / "model", "llama")
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        expected = theirs(input_ids=IDS[None]).logits[0].log_softmax(-1)
    theirs.save_pretrained(tmp_path / "theirs")
    policy = adapted(model, tmp_path / "theirs")
    assert policy.adapter is not None and len(policy.adapter.modules) == 14
    assert (logprobs_of(policy) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_for_servers_is_merged_once(dtype: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_tied")
    write_adapter(tmp_path / "adapter", model)
    kept = getattr(torch, dtype)
    expected = load_file(write_merged(model, tmp_path / "adapter", tmp_path / "by-hand") / "model.safetensors")
    policy = adapted(model, tmp_path / "adapter")
    stream_policy(policy, tmp_path / "streamed", kept)
    save_policy(policy, tmp_path / "saved", kept)
    index = json.loads((tmp_path / "streamed/model.safetensors.index.json").read_text())["weight_map"]
    streamed = {name: load_file(tmp_path / "streamed" / file)[name] for name, file in index.items()}
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert set(saved) == set(expected) == set(streamed) - {"lm_head.weight"}
    for name, value in expected.items():
        assert saved[name].dtype == kept and torch.equal(saved[name], streamed[name])
        assert (saved[name].double() - value).norm() <= (1e-6 if dtype == "float32" else 4e-3) * value.norm(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "is of peft_type IA3; only LORA is supported"),
        ({"use_dora": True}, "has use_dora: True, which is not supported"),
        ({"use_rslora": True}, "has use_rslora: True, which is not supported"),
        ({"bias": "all"}, "has bias: all, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save: ['lm_head'], which is not supported"),
        ({"rank_pattern": {"q_proj": 1}}, "has rank_pattern: {'q_proj': 1}, which is not supported"),
        ({"r": 0}, "has r: 0 and lora_alpha: 5.0"),
        ({"r": 4}, "has model.layers.0.self_attn.q_proj.lora_A.weight of shape [3, 32] where [4, 32] is needed"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama")
    write_adapter(tmp_path / "adapter", model)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=re.escape(message)):
        adapted(model, tmp_path / "adapter")


@pytest.mark.parametrize("alpha", ["1e999", "Infinity", "NaN", "true", "-1", '"16"'])
def test_a_scale_that_is_no_number_is_refused(alpha: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    write_adapter(tmp_path / "adapter", model)
    file = tmp_path / "adapter/adapter_config.json"
    settings = json.dumps(json.loads(file.read_text()) | {"lora_alpha": "here"})
    file.write_text(settings.replace('"here"', alpha))
    with pytest.raises(ModelError, match=r"lora_alpha: |has no adapter_config\.json that can be used"):
        read_adapter(tmp_path / "adapter")


def test_tensors_of_other_modules_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    tensors = write_adapter(tmp_path / "adapter", model)
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ModelError, match=r"has base_model\.model\.lm_head\.weight in adapter_model\.safetensors"):
        read_adapter(tmp_path / "adapter")
    up = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({name: value for name, value in tensors.items() if name != up}, file)
    with pytest.raises(ModelError, match=r"has no model\.layers\.1\.mlp\.up_proj\.lora_B\.weight"):
        adapted(model, tmp_path / "adapter")
    file.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors that can be read"):
        read_adapter(tmp_path / "adapter")


def test_experts_that_are_no_linear_layers_are_named(tmp_path: Path) -> None:
    model = make_model(
        tmp_path, "llama", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    with pytest.raises(ModelError, match="would leave out weights of Qwen3MoeForCausalLM that are not linear layers"):
        adapted(model, rank=2, alpha=2.0)
    policy = adapted(model, rank=2, alpha=2.0, targets=["q_proj", "o_proj"])
    assert len(policy.weights.master) == 8


def test_operations_of_weights_without_a_gradient_are_not_counted(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    plain, policy = load_policy(model, device="cpu"), adapted(model, rank=2, alpha=2.0)
    vectors = 5 * 32  # norms, which multiply too
    layers = 2 * (4 * 32 * 32 // 4 * 3 + 3 * 32 * 48)  # keys and values have half of the heads
    assert plain.facts.weights == layers + vectors and plain.facts.untrained == 0 and plain.facts.head_trained
    assert policy.facts.untrained == layers + vectors and not policy.facts.head_trained
    adapters = sum(master.numel() for master in policy.weights.master.values())
    assert policy.facts.weights == layers + vectors + adapters
    document = Rollout("a", np.arange(5), np.array([False, False, True, True, True]))
    plan = StepPlan((document,), ((0,),), StepTotals(1, 3, 5), 0)
    squares, head = plain.facts.attention * 5**2, 61 * 32
    assert training_operations(plain.facts, plan) == 6 * (5 * (layers + vectors) + squares + 3 * head)
    assert training_operations(policy.facts, plan) == (
        4 * (5 * (layers + vectors) + 3 * head) + 6 * (5 * adapters + squares)
    )
