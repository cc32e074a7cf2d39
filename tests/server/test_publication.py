"""Weights on their way to servers from every layout: bit for bit those of one process, and no rank has the whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints import latest, read_weights
from ranks.cases import on_ranks, train_all
from selection import in_tiers
from server.conftest import Servers
from server.models import make_model as make_served_model
from server.runs import server_config
from server.sglang_server import FakeSglang, serving
from server.vllm_server import NAME
from small_runs import merged, read_lines
from tiny import expert_model, make_model
from truestep.config.schema import Config
from truestep.generate.servers.probe import expect
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.model.policy import Policy
from truestep.model.save import save_policy, weight_groups
from truestep.ranks.group import ALONE
from truestep.ranks.launch import RankError
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.weights.protocol import Weights

PROBES = ((3, 4, 5, 6, 7, 8, 9), (11, 12), tuple(range(2, 40)))
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {}),
    (2, {"data_shard": 1, "data_replicate": 2}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (2, {"context": 2}),
    (4, {"tensor": 2}),
    (4, {"pipeline": 2, "data_shard": 2}),
    (4, {"context": 2, "data_shard": 2}),
]
EXPERTS = [layout for layout in LAYOUTS if "tensor" not in layout[1]]  # whose plan is refused


def config_of(model: Path, parallel: dict[str, int]) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "head": {"fp32_lm_head": True}},
        "data": {"path": "none", "advantages": "none", "tokens_per_microbatch": 256},
        "schedule": {"stall_timeout": 30},
        "parallel": parallel,
        "checkpoint": {"directory": "none"},
    }


def publish(config: dict[str, Any], folder: str) -> None:
    """What a rank does for new weights. Each leaves the most that it was given of other ranks' weights."""
    given = Config.model_validate(config)
    ranks = join_ranks(given)
    policy = make_policy(given, ranks)
    most, honest = [0], Weights.on_first

    def counted(self: Weights, *arguments: Any) -> dict[str, torch.Tensor]:
        found = honest(self, *arguments)
        most[0] = max(most[0], sum(tensor.numel() for tensor in found.values()))
        return found

    Weights.on_first = counted  # type: ignore[method-assign]
    try:
        path = WeightsDirectory(Path(folder)).write(policy, 8, torch.bfloat16)
        expected = expect(policy, PROBES, 8)
    finally:
        Weights.on_first = honest  # type: ignore[method-assign]
    whole = sum(piece.shape.numel() for piece in policy.weights.pieces.values())
    kept = {"path": str(path), "most": most[0], "whole": whole}
    Path(folder, f"rank-{ranks.rank}.json").write_text(json.dumps(kept))
    if ranks.first:
        np.savez(Path(folder, "expected.npz"), logprobs=expected.logprobs, raw=expected.raw)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def check_published(model: Path, size: int, parallel: dict[str, int], folder: Path) -> None:
    folder.mkdir()
    config = config_of(model, parallel)
    on_ranks(size, publish, config, str(folder))
    kept = json.loads((folder / "rank-0.json").read_text())
    whole: Policy = make_policy(Config.model_validate(config_of(model, {})), ALONE)
    save_policy(whole, folder / "whole", torch.bfloat16)
    found, right = stored(Path(kept["path"])), stored(folder / "whole")
    if whole.facts.tied:
        head = found.pop("lm_head.weight")
        assert torch.equal(head, whole.head_weight.detach().bfloat16())
    assert set(found) == set(right)
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert kept["most"] == max(
        sum(whole.weights.pieces[name].shape.numel() for name in names) for names in weight_groups(whole)
    ), "a layer or the embedding, and never more"
    assert kept["most"] < kept["whole"] / 2
    loaded = AutoModelForCausalLM.from_pretrained(kept["path"], dtype=torch.float32)
    assert loaded.config.num_hidden_layers == 2
    known = np.load(folder / "expected.npz")
    alone_known = expect(whole, PROBES, 8)
    np.testing.assert_allclose(known["logprobs"], alone_known.logprobs, atol=1e-5)
    np.testing.assert_allclose(known["raw"], alone_known.raw, atol=1e-5)


CASES = [
    (kind, size, parallel)
    for kind in ("qwen3_tied", "gemma2", "llama", "experts")
    for size, parallel in (EXPERTS if kind == "experts" else LAYOUTS)
]
SHORT = [case for case in CASES if case[:2] == ("qwen3_tied", 2)]
LONG = [case for case in CASES if case not in SHORT and case[0] in ("qwen3_tied", "experts")]


@pytest.mark.parametrize(("kind", "size", "parallel"), in_tiers(CASES, SHORT, LONG))
def test_what_is_published_is_what_one_process_has(
    kind: str, size: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    model = expert_model(tmp_path / "model") if kind == "experts" else make_model(tmp_path / "model", kind)
    check_published(model, size, parallel, tmp_path / "out")


def run_config(directory: Path, url: str, **sections: Any) -> dict[str, Any]:
    options = merged({"sampler": {"protocol": "sglang", "max_new_tokens": 8}, "logging": {"console": False}}, sections)
    return server_config(directory, [url], **options).model_dump(mode="json", exclude_unset=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("served") / "model", seed=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "parallel"),
    in_tiers(LAYOUTS, [(2, {}), (2, {"pipeline": 2})], [(4, {"tensor": 2})]),
)
def test_a_run_trains_on_policy_under_every_layout(
    size: int, parallel: dict[str, int], served: Path, tmp_path: Path
) -> None:
    fake = FakeSglang(served, NAME)
    with serving(fake) as url:
        on_ranks(size, train_all, [run_config(tmp_path, url, parallel=parallel)])
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 4
    for line in metrics:
        assert abs(line["ratio_new_old"] - 1) < 1e-4 and line["kl_new_old"] < 1e-6 and line["max_staleness"] == 0
        assert (line["grad_norm"] > 0) == (line["zero_advantage_groups"] < 1), "zero where rewards agree"
    assert metrics[0]["grad_norm"] > 0
    assert fake.paths.count("/update_weights_from_disk") == 5, "before the first step and after each"
    final = read_weights(latest(tmp_path / "run"))
    served = fake._model.state_dict()
    for name, value in final.items():
        assert torch.equal(served[name], value), f"{name}: the server has the weights of the last step"


def evaluated(
    directory: Path, size: int, parallel: dict[str, int], served: Path, servers: bool
) -> list[dict[str, Any]]:
    directory.mkdir()
    with serving(FakeSglang(served, NAME)) as url:
        evaluation = {
            "prompts": str(directory / "prompts.jsonl"),
            "every": 2,
            "max_prompts": 12,
            "servers": servers,
            "samples_per_prompt": 2,
            "pass_reward": 0.2,
        }
        config = run_config(directory, url, parallel=parallel, evaluation=evaluation, optimizer={"learning_rate": 0.0})
        on_ranks(size, train_all, [config])
    return read_lines(directory / "run" / "evaluation.jsonl")


@pytest.mark.parametrize(
    ("size", "parallel"),
    in_tiers([(1, {}), (2, {"pipeline": 2}), (2, {})], [(1, {})], [(2, {"pipeline": 2})]),
)
def test_servers_answer_held_out_prompts_as_the_policy_does(
    size: int, parallel: dict[str, int], served: Path, tmp_path: Path
) -> None:
    """The weights stand still, so greedy answers do; they are another model's than the server was started with."""
    here = evaluated(tmp_path / "here", 1, {}, served, servers=False)
    there = evaluated(tmp_path / "there", size, parallel, served, servers=True)
    assert [line["step"] for line in there] == [0, 2, 4] and all(line["num_unrated"] == 0 for line in there)
    assert [line["greedy_reward"] for line in there] == [line["greedy_reward"] for line in here]
    assert [line["examples"] for line in there] == [line["examples"] for line in here]
    assert all(0 <= line["sampled_reward"] <= 1 and line["num_prompts"] == 12 for line in there)
    assert all(0 <= line["pass@1"] <= line["pass@2"] <= 1 for line in there)


@pytest.mark.vllm
@pytest.mark.timeout(600)  # the first test waits for the servers to start
def test_a_real_server_gets_weights_from_tensor_ranks(servers: Servers, tmp_path: Path) -> None:
    """From other layouts: test_weights_of_vllm."""
    sampler = {"protocol": "vllm", "max_staleness": 16}
    config = run_config(tmp_path, servers.first.url, parallel={"tensor": 2}, sampler=sampler)
    on_ranks(2, train_all, [config])
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 4 and metrics[0]["max_staleness"] == 0
    assert abs(metrics[0]["ratio_new_old"] - 1) < 1e-4
    assert max(line["max_staleness"] for line in metrics) == 16, "sampling went on beside training"


@pytest.mark.parametrize(
    ("takes", "said"),
    [
        ("nothing", "was given the weights of version"),
        pytest.param("half", "was given the weights of version", marks=pytest.mark.long),
        pytest.param("another layer's", "was given the weights of version", marks=pytest.mark.long),
    ],
)
def test_a_server_that_takes_other_weights_ends_the_run_on_all_ranks(
    takes: str, said: str, served: Path, tmp_path: Path
) -> None:
    fake = FakeSglang(served, NAME)
    loads = iter(["all", *[takes] * 9])

    def before() -> None:
        fake.takes = next(loads)

    fake.on_load = before
    config = run_config(tmp_path, "", optimizer={"learning_rate": 1e-2})
    with serving(fake) as url, pytest.raises(RankError, match=said) as caught:
        config["sampler"]["urls"] = [url]
        on_ranks(2, train_all, [config])
    assert "stuck: []" in str(caught.value)
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 1, "nothing of the wrong weights was trained on"


@pytest.mark.long
def test_a_server_that_was_restarted_is_found_before_its_documents_are_used(served: Path, tmp_path: Path) -> None:
    fake = FakeSglang(served, NAME)
    generated, honest = [0], fake._last

    async def last(body: dict[str, Any]) -> dict[str, Any]:
        generated[0] += 1
        if generated[0] == 38:  # in the middle of the second step's documents, behind the probes of its weights
            fake.restart()
        return await honest(body)

    fake._last = last  # type: ignore[method-assign]
    with serving(fake) as url:
        on_ranks(2, train_all, [run_config(tmp_path, url, optimizer={"learning_rate": 1e-2})])
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 4 and all(abs(line["ratio_new_old"] - 1) < 1e-4 for line in metrics)
    assert fake.paths.count("/update_weights_from_disk") == 6, "once more, after its restart"


def train_and_kill(config: dict[str, Any], rank: int, group: int) -> None:
    """This rank is killed while it gathers that group of the second publication."""
    honest, calls = Weights.on_first, [0]

    def caught(self: Weights, *arguments: Any) -> dict[str, torch.Tensor]:
        calls[0] += 1
        if int(os.environ["RANK"]) == rank and calls[0] == group:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, *arguments)

    Weights.on_first = caught  # type: ignore[method-assign]
    train_all([config])


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_dies_in_the_middle_of_it(rank: int, served: Path, tmp_path: Path) -> None:
    fake = FakeSglang(served, NAME)
    with serving(fake) as url:
        config = run_config(tmp_path, url, checkpoint={"every": 1})
        groups = 4  # two layers, the embedding, the norm
        with pytest.raises(RankError, match="rank . is gone|-9"):
            on_ranks(2, train_and_kill, config, rank, 2 * groups - 1)
        on_ranks(2, train_all, [config])
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(abs(line["ratio_new_old"] - 1) < 1e-4 for line in metrics)
    names = [name for line in read_lines(tmp_path / "run" / "ledger.jsonl") for name in line["documents"]]
    assert len(names) == len(set(names)) == 64
    assert not (tmp_path / "run" / "weights").exists(), "a finished run's weights are in its checkpoint"


def test_an_error_of_the_disk_is_raised_on_every_rank(served: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    fake = FakeSglang(served, NAME)
    with serving(fake) as url, pytest.raises(RankError, match="NotADirectoryError|FileExistsError") as caught:
        on_ranks(2, train_all, [run_config(tmp_path, url, sampler={"weights_directory": str(blocked)})])
    assert "stuck: []" in str(caught.value)
