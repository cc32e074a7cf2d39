"""Recipe: a model family of your own comes with the model's directory, and the probe decides whether it is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from doors import own_model
from small_runs import file_config, quiet_trainer, read_lines, write_rollouts
from truestep.tools.score import score
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints
from truestep.weights.errors import ModelError

CLASSES = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}


def own_directory(directory: Path, **settings: Any) -> Path:
    """What a user would download: weights, a configuration that names the code, and the code."""
    config = own_model.OwnConfig(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = own_model.OwnForCausalLM(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    directory.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    described = config.to_dict() | {"auto_map": CLASSES, "architectures": ["OwnForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    shutil.copy(own_model.__file__, directory / "own_model.py")
    return directory


def config(directory: Path, folder: Path, trusted: bool = True, **sections: Any) -> Any:
    write_rollouts(folder / "rollouts.jsonl", 20)
    given = file_config(directory, folder / "rollouts.jsonl", folder / "run", **sections)
    return given.model_copy(update={"model": given.model.model_copy(update={"trust_remote_code": trusted})})


def test_it_trains_and_its_checkpoint_is_a_directory_of_the_same_kind(tmp_path: Path) -> None:
    model = own_directory(tmp_path / "own")
    trainer = quiet_trainer(config(model, tmp_path, schedule={"steps": 3}, checkpoint={"hugging_face_every": 1}))
    assert type(trainer.policy.model).__name__ == "OwnForCausalLM"
    trainer.run()
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert (checkpoint / "own_model.py").is_file()
    before, after = load_file(model / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    again = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True, local_files_only=True)
    assert type(again).__name__ == "OwnForCausalLM"


def test_its_scores_are_those_of_its_own_code(tmp_path: Path) -> None:
    model = own_directory(tmp_path / "own")
    score(config(model, tmp_path), tmp_path / "scores", gradients=True)
    own = own_model.OwnForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    records = {record["id"]: record for record in read_lines(tmp_path / "rollouts.jsonl")}
    compared = 0
    for line in read_lines(tmp_path / "scores" / "scores.jsonl"):
        record = records[line["id"]]
        ids = torch.tensor([record["input_ids"]])
        with torch.no_grad():
            table = (own(ids).logits[0] / record.get("temperature", 1.0)).log_softmax(-1)
        mask = record.get("loss_mask") or [int(i >= record["prompt_length"]) for i in range(ids.shape[1])]
        wanted = [float(table[i - 1, ids[0, i]]) for i, label in enumerate(mask) if label]
        assert line["logprobs"] == pytest.approx(wanted, abs=1e-5)
        compared += len(wanted)
    assert compared > 50


def test_verify_proves_it_under_the_layouts_that_it_permits(tmp_path: Path) -> None:
    """It comes without a plan for tensor ranks, so those layouts are left out."""
    given = config(own_directory(tmp_path / "own"), tmp_path)
    names = {"smallest micro-batches", "context 2", "tensor 2", "pipeline 2"}
    verdicts = verify(given, tmp_path / "out", only=lambda layout: layout.name in names)
    assert {verdict.layout.name for verdict in verdicts} == names - {"tensor 2"}
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


def test_one_that_mixes_tokens_outside_attention_is_refused_by_name(tmp_path: Path) -> None:
    given = config(own_directory(tmp_path / "own", shift=0.5), tmp_path)
    with pytest.raises(ModelError, match="OwnForCausalLM: packed documents give other values"):
        quiet_trainer(given)


def test_its_code_runs_only_where_the_user_says_so(tmp_path: Path) -> None:
    given = config(own_directory(tmp_path / "own"), tmp_path, trusted=False)
    with pytest.raises(ModelError, match="trust_remote_code"):
        quiet_trainer(given)
