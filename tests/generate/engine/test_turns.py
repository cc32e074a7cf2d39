"""Cosines and sines of positions that compiled code makes while policies sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import VOCABULARY
from truestep.generate.engine.engine import Engine, engine_of
from truestep.generate.engine.forward import _norms_of, _turns_of, compiled_layers, probe
from truestep.model.fast import compiled
from truestep.model.loading.load import load_policy

Model = Callable[[str], Path]
GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 7,
}  # fmt: skip


def given_by(turns: Any, positions: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Give the cosines and sines of each kind of layer."""
    hidden = torch.zeros(1, positions.shape[1], 32, dtype=dtype)
    kinds = [(kind,) for kind in sorted(turns.rope_type)] if isinstance(turns.rope_type, dict) else [()]
    return [part for kind in kinds for part in turns(hidden, positions, *kind)]


def model_of(kind: str, tiny_model: Model) -> Any:
    if kind != "gemma3":
        return load_policy(tiny_model(kind)).model
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**GEMMA3)).eval()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_they_are_those_of_the_models_own_code(kind: str, tiny_model: Model) -> None:
    torch._dynamo.reset()
    model = model_of(kind, tiny_model)
    (turns,) = _turns_of(model)
    own = turns.forward
    batches = [torch.arange(5)[None], torch.tensor([[0, 1, 131_071, 7, 7, 40_000, 3]]), torch.arange(64, 96)[None]]
    keep: dict[Any, Any] = {}
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        with torch.no_grad():
            expected = [given_by(turns, positions, dtype) for positions in batches]
            with compiled_layers(model, keep):
                assert turns.forward is keep[turns] is not own
                found = [given_by(turns, positions, dtype) for positions in batches]
        for mine, right in zip(found, expected, strict=True):
            assert len(mine) == len(right) == (4 if kind == "gemma3" else 2)
            for part, other in zip(mine, right, strict=True):
                assert part.dtype == other.dtype == dtype and part.shape == other.shape
                torch.testing.assert_close(part, other, rtol=0, atol=allowed)
    assert turns.forward == own
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_norms_outside_the_layers_round_as_their_own_code_does(kind: str, tiny_model: Model) -> None:
    torch._dynamo.reset()
    model = load_policy(tiny_model(kind), dtype="bfloat16").model
    (norm,) = _norms_of(model)
    generator = torch.Generator().manual_seed(3)
    keep: dict[Any, Any] = {}
    with torch.no_grad():
        norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator))
        for tokens in (64, 5):
            hidden = torch.randn(1, tokens, len(norm.weight), generator=generator).bfloat16()
            expected = norm(hidden)
            with compiled_layers(model, keep):
                assert norm.forward is keep[norm]
                assert torch.equal(norm(hidden), expected)
    torch._dynamo.reset()


def test_modules_that_are_compiled_otherwise_or_hold_weights_are_left_alone(tiny_model: Model) -> None:
    model = load_policy(tiny_model("llama")).model
    (turns,) = _turns_of(model)
    model.base_model.rotary_emb = torch.nn.Sequential()
    assert not _turns_of(model), "a model without such a module"
    model.base_model.layers[0].own_turns = turns
    assert not _turns_of(model), "it is a part of a layer"
    del model.base_model.layers[0].own_turns
    model.base_model.local, model.base_model.far = turns, type(turns)(model.config)
    assert len(_turns_of(model)) == 2
    turns.scale = torch.nn.Parameter(torch.ones(1))
    assert _turns_of(model) == [model.base_model.far]


def test_the_models_own_code_is_back_when_compiling_fails(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()

    def fail(module: torch.fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("this compiler knows no cosines")

    policy = load_policy(tiny_model("qwen3"))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    (turns,) = _turns_of(policy.model)
    own = turns.forward
    monkeypatch.setattr(compiled, "BACKEND", fail)
    with torch.no_grad():
        with pytest.raises(Exception, match="knows no cosines"), compiled_layers(policy.model, {}):
            probe(policy, found.layers, found.device.page_size)
        assert turns.forward == own
        probe(policy, found.layers, found.device.page_size)
    torch._dynamo.reset()
