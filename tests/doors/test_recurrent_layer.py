"""Recipe: layers that keep a state. The model's code registers what computes its function for packed documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from completing import decode
from doors import own_recurrent
from generate.engine.test_engine import engine_for, options, requests
from small_runs import WORDS, file_config, quiet_trainer, read_lines, sampled_config, write_lines, write_rollouts
from truestep.model.loading.load import load_policy
from truestep.tools.demo.model import make_tokenizer
from truestep.tools.score import score
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints
from truestep.weights.errors import ModelError

CLASSES = {
    "AutoConfig": "own_recurrent.RecurrentConfig",
    "AutoModelForCausalLM": "own_recurrent.RecurrentForCausalLM",
}


def own_model(**settings: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = own_recurrent.RecurrentForCausalLM(own_recurrent.RecurrentConfig(**settings))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return model


def config(folder: Path, *, settings: dict[str, Any] | None = None, **sections: Any) -> Any:
    directory, model = folder / "own", own_model(**(settings or {}))
    directory.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    described = model.config.to_dict() | {"auto_map": CLASSES, "architectures": ["RecurrentForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    shutil.copy(own_recurrent.__file__, directory / "own_recurrent.py")
    write_rollouts(folder / "rollouts.jsonl", 20)
    given = file_config(directory, folder / "rollouts.jsonl", folder / "run", **sections)
    return given.model_copy(update={"model": given.model.model_copy(update={"trust_remote_code": True})})


def test_it_trains(tmp_path: Path) -> None:
    quiet_trainer(config(tmp_path, schedule={"steps": 2}, checkpoint={"hugging_face_every": 1})).run()
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    before, after = load_file(tmp_path / "own" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(after[name], value) for name, value in before.items())


def test_its_scores_are_those_of_its_own_code(tmp_path: Path) -> None:
    score(config(tmp_path), tmp_path / "scores", gradients=True)
    own = own_model().eval()
    own.set_attn_implementation("sdpa")
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


def test_prefixes_are_not_shared_through_it(tmp_path: Path) -> None:
    """It does not say which of its arguments have tokens: auto leaves it, always is refused by name."""
    given = config(tmp_path)
    score(given, tmp_path / "scores", gradients=False)
    given = given.model_copy(update={"data": given.data.model_copy(update={"share_prefixes": "always"})})
    reason = r"share_prefixes: always is not possible with .*: the recurrence registered for \w+ does not name"
    with pytest.raises(ModelError, match=reason):
        score(given, tmp_path / "others", gradients=False)


@pytest.mark.long
def test_verify_proves_it(tmp_path: Path) -> None:
    names = {"one process", "smallest micro-batches", "context 2", "pipeline 2"}
    verdicts = verify(config(tmp_path), tmp_path / "out", only=lambda layout: layout.name in names)
    assert {verdict.layout.name for verdict in verdicts} == names
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


def test_the_engine_draws_what_its_own_code_would(tmp_path: Path) -> None:
    config(tmp_path)
    policy, own = load_policy(tmp_path / "own", trust_remote_code=True), own_model().eval()
    own.set_attn_implementation("sdpa")
    assert [len(layer.states) for layer in engine_for(policy).layers] == [1, 0, 1, 0]
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


def test_a_whole_run_samples_and_trains_it(tmp_path: Path) -> None:
    config(tmp_path)
    make_tokenizer(tmp_path / "own", WORDS)
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": " ".join(WORDS[:length])} for length in (3, 9)])
    given = sampled_config(
        tmp_path / "own",
        prompts,
        tmp_path / "run",
        model={"trust_remote_code": True},
        schedule={"steps": 2},
        loss={"type": "grpo", "metrics": "full"},
        sampler={"reward": "plain_rewards:letter_reward"},
    )
    quiet_trainer(given).run()
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
        assert line["grad_norm"] > 0


def test_a_function_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="RecurrentForCausalLM: packed documents give other values"):
        quiet_trainer(config(tmp_path, settings={"known": False}))
