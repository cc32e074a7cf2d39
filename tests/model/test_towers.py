"""A directory with a tower is trained as the text model in it, and leaves as what it was."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from documents import make_documents, pack_all
from families.tiny_families import tiny_whole
from small_runs import file_config, write_rollouts
from truestep.config.schema import Config
from truestep.model import towers as towers_code
from truestep.model.adapter import AdapterSource
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.save import save_policy, stream_policy
from truestep.model.tensor_stream import TensorStream
from truestep.run.train import train
from truestep.tools.export import export
from truestep.weights.errors import ModelError

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


def options(directory: Path, run: Path, steps: int, **sections: Any) -> Config:
    rollouts = directory.parent / "rollouts.jsonl"
    if not rollouts.exists():
        write_rollouts(rollouts, 24)
    return file_config(directory, rollouts, run, schedule={"steps": steps, "docs_per_step": 4}, **sections)


def run(config: Config) -> None:
    train(config, Console(file=io.StringIO()))


@pytest.mark.parametrize("directory", ["qwen3_5"], indirect=True)
def test_a_run_that_is_resumed_exports_the_whole(directory: Path, tmp_path: Path) -> None:
    run(options(directory, tmp_path / "run", 2))
    run(options(directory, tmp_path / "run", 4))  # goes on from its checkpoint, which has no towers
    run(options(directory, tmp_path / "straight", 4))
    made = [export(tmp_path / name, tmp_path / f"{name}-out", "float32") for name in ("run", "straight")]
    assert [path.name for path in made] == ["step-00000004"] * 2
    before, resumed, straight = (
        tensors(place) for place in (directory, tmp_path / "run-out", tmp_path / "straight-out")
    )
    assert resumed.keys() == straight.keys() == before.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in resumed)
    towers = [name for name in before if "visual" in name]
    assert towers and all(torch.equal(resumed[name], before[name]) for name in towers)
    assert any(not torch.equal(resumed[name], before[name]) for name in before)
    assert not (tmp_path / "run-out" / towers_code.RECORD).exists()
    whole(tmp_path / "run-out")


@pytest.mark.parametrize("directory", ["gemma3"], indirect=True)
def test_towers_that_are_gone_are_missed_by_name(directory: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(directory, tmp_path / "model"))
    write_rollouts(tmp_path / "rollouts.jsonl", 24)
    run(options(moved, tmp_path / "run", 1))
    shutil.rmtree(moved)
    with pytest.raises(ModelError, match="the towers of this model are read from"):
        export(tmp_path / "run", tmp_path / "out", "float32")


@pytest.mark.parametrize("directory", ["qwen3_5"], indirect=True)
def test_an_adapter_has_the_names_of_the_whole(directory: Path, tmp_path: Path) -> None:
    adapter = {"rank": 2, "alpha": 4.0, "targets": ["down_proj", "up_proj"]}
    config = options(directory, tmp_path / "run", 2, adapter=adapter, optimizer={"learning_rate": 0.05})
    run(config)
    export(tmp_path / "run", tmp_path / "alone", "float32", adapter_alone=True)
    export(tmp_path / "run", tmp_path / "merged", "float32")
    stored = tensors(tmp_path / "alone")
    assert stored and all(name.startswith("base_model.model.model.language_model.layers.") for name in stored)
    ids = torch.from_numpy(DOCUMENTS[0].input_ids)[None]
    with torch.no_grad():
        merged = whole(tmp_path / "merged")(input_ids=ids).logits
        peft = PeftModel.from_pretrained(whole(directory), tmp_path / "alone")(input_ids=ids).logits
        plain = whole(directory)(input_ids=ids).logits
    torch.testing.assert_close(peft, merged, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, merged, rtol=1e-2, atol=1e-2)
    policy = load_policy(directory, device="cpu", adapter=AdapterSource(path=tmp_path / "alone"))
    with torch.no_grad():
        torch.testing.assert_close(
            policy.raw_logits(policy.hidden(pack_all(DOCUMENTS[:1]).tokens)), merged[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("directory", ["gemma3"], indirect=True)
def test_files_of_other_names_are_refused(directory: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(directory, tmp_path / "model"))
    stored = tensors(changed)
    save_file(
        {name.replace("layers.0", "layer.0"): value for name, value in stored.items()}, changed / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"lacks weights|names its weights in another way"):
        load_policy(changed, device="cpu")
