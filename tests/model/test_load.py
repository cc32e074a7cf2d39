"""What is loaded, and what is refused with a reason instead of being trained wrongly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from documents import make_documents, pack_all, same_bits
from selection import long_except
from tiny import KINDS, expert_model, make_model
from truestep.model.loading import load
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.model.no_dropout import no_noise
from truestep.model.policy import Policy
from truestep.weights.errors import ModelError

Made = Callable[[str], Path]
DOCUMENTS = make_documents([9, 1, 30, 4], seed=2)


@pytest.fixture
def llama(tiny_model: Made, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def set_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def other_model(directory: Path, kind: str, **options: Any) -> Path:
    """An architecture that is not in tests/tiny.py."""
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(kind, **(small | tokens | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_policy(directory, device="cpu", **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_passes_the_probe(kind: str, dtype: str, tiny_model: Made) -> None:
    policy = load_policy(tiny_model(kind), dtype=dtype, device="cpu")
    assert policy.model.dtype == getattr(torch, dtype)
    assert not policy.model.training
    assert policy.vocabulary_size == 61
    assert policy.hidden(pack_all(DOCUMENTS).tokens).dtype == getattr(torch, dtype)


def test_positions_begin_anew_in_each_document(tmp_path: Path) -> None:
    """Rotary embeddings hide where counting begins; GPT-2's learned positions do not, nor where they run out."""
    policy = load_policy(other_model(tmp_path, "gpt2", n_positions=40, tie_word_embeddings=True), device="cpu")
    documents = make_documents([40, 3, 40, 1, 17])
    with torch.no_grad():
        batch = pack_all(documents, 64).tokens
        batch.position_ids[101:] = 10**6
        batch.input_ids[101:] = -100
        packed = policy.hidden(batch)
        start = 0
        for document in documents:
            alone = policy.hidden(pack_all([document]).tokens)
            torch.testing.assert_close(packed[start : start + len(alone)], alone, rtol=1e-5, atol=1e-5)
            start += len(alone)


# ---- directories that are not a model


def test_no_config(llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "no config.json" in refusal(llama)
    assert "no config.json" in refusal(llama / "absent")


def test_pickled_weights_are_never_loaded(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    torch.save(weights, llama / "pytorch_model.bin")
    assert "no .safetensors file; other weight formats are not loaded" in refusal(llama)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_weights_are_named(llama: Path, name: str) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights[name]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    assert name in refusal(llama)


def test_weights_of_another_shape(llama: Path) -> None:
    set_config(llama, intermediate_size=47)
    assert "layers.0.mlp.down_proj.weight of shape [32, 48] where its config.json asks for [32, 47]" in refusal(llama)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_corrupt_weight_file(llama: Path, content: bytes | None) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    assert "could not be loaded" in refusal(llama)


def test_a_corrupt_config(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    assert "config.json cannot be used: not JSON" in refusal(llama)
    (llama / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "could not be loaded" in refusal(llama)


def test_a_corrupt_tokenizer(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    assert "tokenizer" in refusal(llama)


# ---- models that would be trained wrongly


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    assert "bias" in refusal(other_model(tmp_path, "phi", intermediate_size=48))


def test_attention_that_ignores_where_documents_end(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = attention._rows

    def one_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, *options: Any) -> torch.Tensor:
        whole = attention.make_layout(layout.segments[[0, -1]], q.device)
        return rows(q, k, v, whole, *options)

    monkeypatch.setattr(attention, "_rows", one_document)
    assert "packed documents give other values" in refusal(llama)
    assert "packed documents give other values" in refusal(llama, dtype="bfloat16")


def test_attention_that_forgets_the_window(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = attention._dense
    monkeypatch.setattr(attention, "_dense", lambda q, k, v, scale, window, *rest: dense(q, k, v, scale, None, *rest))
    assert "packed documents give other values" in refusal(tiny_model("mistral"))


def test_a_layout_that_a_model_drops_is_handed_on(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = pack_all(DOCUMENTS).tokens
    expected = load_policy(llama, device="cpu").hidden(tokens)

    def forgetful(*arguments: Any, packed_layout: Any = None, **options: Any) -> Any:
        return attention.packed_attention(*arguments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, forgetful)
    assert same_bits(load_policy(llama, device="cpu").hidden(tokens), expected)


@pytest.mark.parametrize("setting", [{"logit_scale": 0.5}, {"logits_scaling": 4.0}, {"final_logit_softcapping": 2.0}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_setting_that_the_model_does_not_have(llama: Path, setting: dict[str, float], dtype: str) -> None:
    set_config(llama, **setting)
    assert "the plain LM head gives other values" in refusal(llama, dtype=dtype)


def test_a_head_setting_that_this_trainer_does_not_know(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("granite", "gemma2"):
        with monkeypatch.context() as patch:
            patch.setattr(load, "_head_settings", lambda model, settings: settings)
            assert "the plain LM head gives other values" in refusal(tiny_model(kind))


def test_code_in_a_model_directory_is_not_run(llama: Path) -> None:
    mark = llama / "was_run"
    (llama / "mine.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nraise SystemExit\n")
    automatic = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    set_config(llama, model_type="mine", auto_map=automatic)
    assert "could not be loaded" in refusal(llama)
    set_config(llama, model_type="llama")  # a known name, and code of its own beside it
    load_policy(llama, device="cpu")
    assert not mark.exists()


# ---- what is loaded


def hidden_and_gradients(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.weights.zero_gradients()
    hidden = policy.hidden(pack_all(DOCUMENTS).tokens)
    (hidden * torch.linspace(-1, 1, hidden.shape[1])).sum().backward()
    return hidden.detach(), {name: gradient.clone() for name, gradient in policy.weights.gradients.items()}


DROPOUTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt_neox", {"intermediate_size": 48, "hidden_dropout": 0.5, "attention_dropout": 0.5}),
    ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5, "attention_dropout": 0.5}),
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("kind", "options"), DROPOUTS)
def test_dropout_is_zero(kind: str, options: dict[str, Any], recompute: bool, tmp_path: Path) -> None:
    """A score is a function of the weights, though recomputation needs the training mode."""
    policy = load_policy(other_model(tmp_path, kind, **options), device="cpu", activation_checkpointing=recompute)
    first, gradients = hidden_and_gradients(policy)
    second, again = hidden_and_gradients(policy)
    assert same_bits(first, second)
    assert all(same_bits(gradients[name], again[name]) for name in gradients)
    assert float(first.norm()) > 0


def test_attention_dropout_of_the_config_is_zero(llama: Path) -> None:
    plain, _ = hidden_and_gradients(load_policy(llama, device="cpu"))
    set_config(llama, attention_dropout=0.5)
    dropped, _ = hidden_and_gradients(load_policy(llama, device="cpu", activation_checkpointing=True))
    assert same_bits(plain, dropped)


@pytest.mark.parametrize("kind", long_except(["gemma2", "qwen3_tied"], "qwen3_tied"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_checkpointing_recomputes_and_changes_no_bit(kind: str, dtype: str, tiny_model: Made) -> None:
    runs = {}
    for recompute in (False, True):
        policy = load_policy(tiny_model(kind), dtype=dtype, device="cpu", activation_checkpointing=recompute)
        calls: list[int] = []
        saved: list[int] = []

        def keep(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        # Before, not after: recomputation stops as soon as it has what the backward pass needs.
        layer = policy.model.base_model.layers[1].mlp
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = policy.hidden(pack_all(DOCUMENTS).tokens)
        held = sum(saved)
        hidden.float().square().sum().backward()
        runs[recompute] = (hidden.detach(), policy.weights.gradients, len(calls), held)
    plain, recomputed = runs[False], runs[True]
    assert (plain[2], recomputed[2]) == (1, 2), "each layer ran once more for the backward pass"
    assert recomputed[3] < plain[3] / 3, "and what it would have kept was not kept"
    assert same_bits(plain[0], recomputed[0])
    for name, gradient in plain[1].items():
        assert gradient.norm() > 0 or name == "lm_head.weight"
        assert same_bits(gradient, recomputed[1][name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embeddings_stay_one_tensor(dtype: str, tiny_model: Made) -> None:
    for kind, tied in (("qwen3_tied", True), ("gemma2", True), ("qwen3", False)):
        policy = load_policy(tiny_model(kind), dtype=dtype, device="cpu")
        embedding = policy.model.get_input_embeddings().weight
        assert (policy.head_weight is embedding) is tied
        assert (policy.head_weight.data_ptr() == embedding.data_ptr()) is tied
        assert ("lm_head.weight" in policy.weights.master) is not tied
        assert "model.embed_tokens.weight" in policy.weights.master
        same_buffer = policy.weights.gradient_of(policy.head_weight) is policy.weights.gradient_of(embedding)
        assert same_buffer is tied


def test_plain_attention_is_put_back(llama: Path) -> None:
    policy = load_policy(llama, device="cpu", activation_checkpointing=True)
    before = policy.hidden(pack_all(DOCUMENTS).tokens).detach()
    with pytest.raises(KeyError), policy.plain_attention():
        assert not any(layer.training for layer in policy.model.base_model.layers)
        raise KeyError
    assert all(layer.training for layer in policy.model.base_model.layers)
    assert same_bits(policy.hidden(pack_all(DOCUMENTS).tokens).detach(), before)


def test_a_model_of_one_seed_is_itself(tmp_path: Path) -> None:
    """The probe draws nothing from the global generator."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_policy(make_model(tmp_path, "llama"), device="cpu")
    assert same_bits(torch.rand(3), expected)


def test_weights_that_no_layer_uses_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_model(tmp_path / "model", "llama")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"adapter.down.weight": torch.zeros(2, 2)}, directory / "model.safetensors", {"format": "pt"})
    load_policy(directory, device="cpu")
    assert "1 weights that LlamaForCausalLM has no use for (adapter.down.weight" in caplog.text


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 20,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embeddings_that_look_at_the_longest_document_are_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama", rope_parameters=rope, max_position_embeddings=20)
    with pytest.raises(ModelError, match="packed documents give other values"):
        load_policy(directory, device="cpu")


def test_a_probe_reaches_past_a_long_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that forgets to pass its window on is found out, however long the window is."""
    directory = make_model(tmp_path / "model", "mistral", sliding_window=600, max_position_embeddings=2048)
    load_policy(directory, device="cpu", longest_document=2000)
    dense = attention._dense
    monkeypatch.setattr(attention, "_dense", lambda q, k, v, scale, window, *rest: dense(q, k, v, scale, None, *rest))
    with pytest.raises(ModelError, match="packed documents give other values"):
        load_policy(directory, device="cpu", longest_document=2000)


def test_jitter_is_off_with_activation_checkpointing_and_a_router_that_reads_it_keeps_it(tmp_path: Path) -> None:
    directory = expert_model(tmp_path / "model")
    policy = load_policy(directory, device="cpu", activation_checkpointing=True)
    batch = pack_all(make_documents((9, 4), seed=1)).tokens
    expected = policy.hidden(batch)
    for layer in policy.model.model.layers:
        assert layer.training  # else transformers does not recompute it
        assert not layer.mlp.training
        layer.mlp.router_jitter_noise = layer.mlp.gate.jitter = 0.3
    no_noise(policy.model)
    assert policy.model.model.layers[0].mlp.router_jitter_noise == 0.3  # Phi-3.5-MoE's router masks by it
    assert torch.equal(policy.hidden(batch), expected)
