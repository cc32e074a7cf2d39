"""A directory with a tower is trained as the text model in it, and leaves as what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from documents import make_documents, pack_all
from families.tiny_families import tiny_whole
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.save import save_policy, stream_policy
from truestep.model.tensor_stream import TensorStream

FAMILIES = ("gemma3", "gemma4", "qwen3_5", "mistral3")
DOCUMENTS = make_documents([9, 1, 30, 4], seed=2)


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whole(tmp_path_factory.mktemp("towers") / request.param, request.param)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
    return found


def whole(directory: Path, **how: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager", **how)


def trained(directory: Path) -> Policy:
    policy = load_policy(directory, device="cpu")
    with torch.no_grad():
        for weight in policy.weights.master.values():
            weight += 0.01
    return policy


def test_the_text_computes_what_the_whole_model_computes(directory: Path) -> None:
    policy, model = load_policy(directory, device="cpu"), whole(directory)
    ids = [torch.from_numpy(document.input_ids)[None] for document in DOCUMENTS]
    with torch.no_grad():
        hidden = policy.hidden(pack_all(DOCUMENTS).tokens)
        expected = torch.cat([model(input_ids=one, output_hidden_states=True).hidden_states[-1][0] for one in ids])
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)
    assert not any("vis" in name for name in policy.weights.pieces)


def test_what_leaves_has_the_towers_as_they_came_and_the_names_of_the_whole(directory: Path, tmp_path: Path) -> None:
    policy, before = trained(directory), tensors(directory)
    save_policy(policy, tmp_path / "saved")
    stream_policy(policy, tmp_path / "streamed", torch.float32)
    for made in (tmp_path / "saved", tmp_path / "streamed"):
        after = tensors(made)
        assert before.keys() <= after.keys() | {"lm_head.weight"}
        text = {name for name in before if not torch.equal(before[name], after.get(name, before[name]))}
        towers = [name for name in before if "vis" in name or "multi_modal" in name or "audio" in name]
        assert towers and not text & set(towers)
        assert len(text) >= len(policy.weights.pieces) - 1
        old, new = (json.loads((place / "config.json").read_text()) for place in (directory, made))
        assert {**old, "dtype": new["dtype"]} == new
        model, ids = whole(made), torch.from_numpy(DOCUMENTS[0].input_ids)[None]
        with torch.no_grad():
            right = policy.hidden(pack_all(DOCUMENTS[:1]).tokens)
            found = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


def test_tensors_are_published_under_the_names_that_they_came_with(directory: Path) -> None:
    stream = TensorStream(trained(directory), torch.float32)
    names = {entry.name for entry in stream.entries} - {"lm_head.weight"}
    assert names <= tensors(directory).keys()
    assert len(names) >= 10
