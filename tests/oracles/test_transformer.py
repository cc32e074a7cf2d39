"""The oracle's forward pass and gradients against Hugging Face's eager ones, in float32, for every kind of model."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from oracles.transformer import Transformer
from tiny import KINDS, VOCABULARY, make_model

INPUT_IDS = random.Random(1).choices(range(VOCABULARY), k=17)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_match_hugging_face(kind: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, kind, seed=3)
    oracle = Transformer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)

    expected = model(torch.tensor([INPUT_IDS])).logits[0]
    actual = oracle.logits(INPUT_IDS)
    assert expected.std() > 0.3, "logits without spread would test nothing"
    torch.testing.assert_close(actual.float(), expected, rtol=1e-5, atol=1e-5)

    # Any fixed direction through the logits will do.
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * direction).sum().backward()
    (actual * direction.double()).sum().backward()
    named = dict(model.named_parameters())
    assert set(named) == set(oracle.parameters)
    for name, parameter in oracle.parameters.items():
        assert parameter.grad.norm() > 1e-3, f"{name}: a trivial gradient would test nothing"
        error = (parameter.grad - named[name].grad.double()).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"


def test_settings_have_an_effect(tmp_path: Path) -> None:
    """A window that is wider than the documents, or a cap that never bites, would test nothing."""
    for kind, change in [
        ("mistral", {"sliding_window": 100}),
        ("gemma2", {"sliding_window": 100}),
        ("gemma2", {"attn_logit_softcapping": 1000.0}),
        ("gemma2", {"final_logit_softcapping": 1000.0}),
    ]:
        usual = Transformer(make_model(tmp_path / "usual", kind)).logits(INPUT_IDS)
        changed = Transformer(make_model(tmp_path / "changed", kind, **change)).logits(INPUT_IDS)
        assert (usual - changed).abs().max() > 1e-2, (kind, change)


def test_temperature_divides_the_final_logits(tmp_path: Path) -> None:
    oracle = Transformer(make_model(tmp_path, "gemma2"))
    # After the softcap: 3.0 is the cap, so hot logits exceed it.
    torch.testing.assert_close(oracle.logits(INPUT_IDS, 0.5), 2.0 * oracle.logits(INPUT_IDS))
    assert oracle.logits(INPUT_IDS, 0.5).abs().max() > 3.0


def test_bfloat16_weights_are_read_exactly(tmp_path: Path) -> None:
    oracle = Transformer(make_model(tmp_path, "llama", dtype="bfloat16"))
    for name, parameter in oracle.parameters.items():
        assert torch.equal(parameter.detach(), parameter.detach().to(torch.bfloat16).double()), name
