"""Recipe: a recurrent layer of your own comes with the model's directory. It is trained, proved and sampled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from completing import decode
from doors import own_model, own_recurrent
from doors.test_model_family import config
from generate.engine.test_engine import engine_for, options, requests
from small_runs import WORDS, quiet_trainer, read_lines, sampled_config, write_lines
from truestep.model.loading.load import load_policy
from truestep.tools.demo.model import make_tokenizer
from truestep.tools.score import score
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

CLASSES = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_recurrent.OwnRecurrentForCausalLM"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own") / "own"
    described = own_model.OwnConfig()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = own_recurrent.OwnRecurrentForCausalLM(described)
        for weight in made.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    directory.mkdir()
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, directory / "model.safetensors")
    fields = described.to_dict() | {"auto_map": CLASSES, "architectures": ["OwnRecurrentForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    for code in (own_model, own_recurrent):
        shutil.copy(str(code.__file__), directory)
    assert make_tokenizer(directory, WORDS) == described.vocab_size
    return directory


def alone(model: Path) -> Any:
    """The user's own code, whose operation runs over one document."""
    return own_recurrent.OwnRecurrentForCausalLM.from_pretrained(model, attn_implementation="eager")


def test_its_scores_are_those_of_its_own_code(model: Path, tmp_path: Path) -> None:
    score(config(model, tmp_path), tmp_path / "scores", gradients=True)
    own, compared = alone(model), 0
    records = {record["id"]: record for record in read_lines(tmp_path / "rollouts.jsonl")}
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


@pytest.mark.long
def test_verify_proves_it(model: Path, tmp_path: Path) -> None:
    names = {"smallest micro-batches", "pipeline 2"}
    verdicts = verify(config(model, tmp_path), tmp_path / "out", only=lambda layout: layout.name in names)
    assert {verdict.layout.name for verdict in verdicts} == names
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


def test_the_engine_draws_what_its_own_code_would(model: Path) -> None:
    policy, own = load_policy(model, trust_remote_code=True), alone(model)
    assert [len(layer.states) for layer in engine_for(policy).layers] == [1, 0]
    asked = requests((3, 17, 1, 17))
    for request, answer in zip(asked, decode(policy, asked, options(temperature=0.0)), strict=True):
        ids, expected = list(request.input_ids), []
        for _ in range(12):
            with torch.no_grad():
                table = own(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(table.argmax()))
            expected.append(float(table.max()))
        assert answer.token_ids == ids[len(request.input_ids) :]
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)


def test_a_whole_run_samples_and_trains_it(model: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": " ".join(WORDS[:length])} for length in (3, 9)])
    given = sampled_config(
        model,
        prompts,
        tmp_path / "run",
        model={"trust_remote_code": True},
        loss={"type": "grpo", "metrics": "full"},
        sampler={"reward": "plain_rewards:letter_reward"},
    )
    quiet_trainer(given).run()
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
        assert line["grad_norm"] > 0
