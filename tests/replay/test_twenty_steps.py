"""Each of twenty steps of each kind of run, made again bit for bit at its layout, and by the law at two others; and a
bit that flipped in what the run kept, which is named."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from ranks.cases import on_ranks
from replay.made_again import exactly
from replay.test_kinds import SlowSglang, kept
from replay.test_replay import flip
from selection import in_tiers
from server.models import make_model
from server.runs import label_versions, server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import (
    file_config,
    merged,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
    write_rollouts,
)
from stream.redis_server import RedisServer, needs_redis
from stream.test_train import put, redis_config, sent_config, tiny_records
from tool_models import STOPS, tool_model
from truestep.config.load import load_config
from truestep.config.schema import Config
from truestep.files.tensors import tensor_places
from truestep.rollouts.kept.records import RecordsError, blocks_of
from truestep.run.directory import RunDirectory
from truestep.run.train import train
from truestep.run.weight_lines import read_weight_lines
from truestep.step.compute.runner import StepRunner
from truestep.tools.replay.differences import BOUND, HALF_BOUND, compare_weights
from truestep.tools.replay.replay import replay
from truestep.types import StepPlan

STEPS, DOCUMENTS = 20, 5
EACH = range(1, STEPS + 1)
WHOLE: dict[str, Any] = {
    "logging": {"rollouts": {"documents": "all"}},
    "checkpoint": {"every": 1, "keep": 99},  # the first step after a checkpoint is the one that is judged by the law
    "deterministic": True,
    "optimizer": {"learning_rate": 1e-3},
}


@dataclass(frozen=True)
class Kind:
    """How a run of one kind is made, and a layout of one process that it does not have."""

    make: Callable[..., None]  # of the directory, the model of files, and `sections`
    sections: dict[str, Any]
    other: tuple[str, ...] = ("--data.tokens_per_microbatch", "24")


def of_files(folder: Path, model: Path, sections: dict[str, Any]) -> None:
    write_rollouts(folder / "r.jsonl", STEPS * DOCUMENTS)
    quiet_trainer(file_config(model, folder / "r.jsonl", folder / "run", **sections)).run()
    (folder / "r.jsonl").unlink()


def of_a_directory(folder: Path, model: Path, sections: dict[str, Any]) -> None:
    put(folder / "sent", "a.jsonl", tiny_records(STEPS * DOCUMENTS))
    (folder / "sent" / "END").touch()
    source = {"type": "files", "directory": str(folder / "sent")}
    quiet_trainer(sent_config(model, source, folder / "run", **sections)).run()


def of_a_stream(folder: Path, model: Path, sections: dict[str, Any]) -> None:
    (folder / "redis").mkdir()
    server = RedisServer(folder / "redis")
    try:
        server.send("rollouts", tiny_records(STEPS * DOCUMENTS))
        server.end("rollouts")
        quiet_trainer(redis_config(model, server, folder / "run", **sections)).run()
    finally:
        server.close()


def sampled(folder: Path, sections: dict[str, Any]) -> Config:
    prompts = write_lines(folder / "p.jsonl", sort_prompts(7))
    own = merged({"schedule": {"steps": STEPS}}, sections)
    return sampled_config(word_model(folder / "model"), prompts, folder / "run", **own)


def in_process(folder: Path, model: Path, sections: dict[str, Any]) -> None:
    quiet_trainer(sampled(folder, sections)).run()
    (folder / "p.jsonl").unlink()


def of_servers(folder: Path, model: Path, sections: dict[str, Any]) -> None:
    with serving(SlowSglang(make_model(folder / "served", seed=2), NAME)) as url:
        quiet_trainer(server_config(folder, [url], **sections)).run()
    lines = read_lines(folder / "run" / "metrics.jsonl")
    assert any(line["max_staleness"] > 0 for line in lines)
    versions = [set(label_versions(document).tolist()) for document in kept(folder / "run")]
    assert any(len(some) > 1 for some in versions), "completions that went on under new weights"


def of_agents(folder: Path, model: Path, sections: dict[str, Any]) -> None:
    lines = [{"id": f"p{number}", "prompt": "what is 1+2"} for number in range(4)]
    prompts = write_lines(folder / "p.jsonl", lines)
    own = tool_model(folder / "model", shown="[-3:]")
    quiet_trainer(sampled_config(own, prompts, folder / "run", **sections)).run()
    documents = kept(folder / "run")
    assert any(len(document.starts) > 1 for document in documents) and all(document.turns for document in documents)


EPISODES: dict[str, Any] = {
    "schedule": {"steps": STEPS},
    "sampler": {
        "reward": None,
        "environment": {"class": "turn_environments:Tooled"},
        "stop": list(STOPS),
        "max_episode_tokens": 64,
        "max_turns": 3,
        "max_new_tokens": 12,
    },
}
SERVERS: dict[str, Any] = {
    "schedule": {"docs_per_step": 8, "steps": STEPS},
    "sampler": {"protocol": "sglang", "pause": "keep", "max_staleness": 16},
}
STREAM = "a stream"
HALF: dict[str, Any] = {"model": {"dtype": "bfloat16", "head": {"fp32_lm_head": True}}}
KINDS = {
    "files": Kind(of_files, {}),
    "a watched directory": Kind(of_a_directory, {}),
    STREAM: Kind(of_a_stream, {}),
    "sampled in process": Kind(in_process, {}),
    "exact": Kind(in_process, {"sampler": {"exact": True}, **HALF}),
    "servers": Kind(of_servers, SERVERS, ("--data.tokens_per_microbatch", "64")),
    "agents": Kind(of_agents, EPISODES, ("--data.tokens_per_microbatch", "130")),
    "LoRA": Kind(in_process, {"adapter": {"rank": 2}}),
    "recompute": Kind(
        in_process, {"loss": {"old_logprobs": "recompute"}, "schedule": {"updates_per_batch": 2, "steps": STEPS}}
    ),
    "recomputed activations": Kind(in_process, {"model": {"activation_checkpointing": True}}),
    "a reference": Kind(in_process, {"loss": {"kl_reference": {"weight": 0.1}}}),
    "states in 8 bits": Kind(of_files, {"optimizer": {"type": "adamw_8bit"}}),
}


@pytest.mark.parametrize(
    "kind",
    [
        *in_tiers([kind for kind in KINDS if kind != STREAM], [], ["sampled in process"]),
        pytest.param(STREAM, marks=[needs_redis, pytest.mark.release]),
    ],
)
def test_each_of_twenty_steps(tiny_model: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    how, run = KINDS[kind], tmp_path / "run"
    how.make(tmp_path, tiny_model("llama"), merged(WHOLE, how.sections))
    on_these_ranks(str(run), how.other)
    on_ranks(2, on_these_ranks, str(run), ())
    keep_each_third(run)
    each_again(str(run))
    flips_are_named(run)


def keep_each_third(run: Path) -> None:
    """Remove the other checkpoints, so that a replay makes one step to three."""
    for step in EACH:
        if step % 3:
            shutil.rmtree(run / "checkpoints" / f"step-{step:08}")


def each_again(run: str) -> None:
    assert [line["step"] for line in read_lines(Path(run) / "ledger.jsonl")] == list(EACH)
    for step in EACH:
        found = replay(Path(run), step)
        exactly(found)
        assert found.begins == (step - 1) // 3 * 3


def flips_are_named(run: Path, *overrides: str) -> None:
    """One bit of one document of step 11, and one of one weight of the checkpoint that it begins from."""
    block = next(block for block in reversed(blocks_of(run / "records")) if block.step <= 11)  # of its first update
    number = len(block.sizes) - 1
    place = block.documents + sum(size for size, *_ in block.sizes[:number]) + block.sizes[number][0] // 2
    flip(block.file, place)
    with pytest.raises(RecordsError, match=f"the record of document {number + 1} of step {block.step} is damaged"):
        replay(run, 11, overrides=overrides)
    flip(block.file, place)
    checkpoint = run / "checkpoints" / "step-00000009"
    adapter = checkpoint / "adapter_model.safetensors"
    file = adapter if adapter.is_file() else next((checkpoint / "truestep").glob("part-*.safetensors"))
    places = {name: place for name, (_, place, _) in tensor_places(file).items()}
    name = next(name for name in places if file == adapter or name.startswith("weight/"))
    flip(file, places[name] + 2)
    said = replay(run, 11, overrides=overrides).text
    flip(file, places[name] + 2)
    weight = name.removeprefix("weight/").removeprefix("base_model.model.")
    assert f"step-00000009 are not those that step 9 left: the bits of {weight} differ" in said, said
    assert f"step-00000009 is damaged: {file.relative_to(checkpoint)} is damaged" in said, said


def by_the_law(run: str, step: int, overrides: tuple[str, ...]) -> bool:
    """Make a step again at another layout; return whether it was the same bit for bit all the same. The norms of each
    layer's gradient, and of its weights after the update, are judged too."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    again = Path(run).parent / "again" / f"{ranks} {' '.join(overrides)}" / str(step)
    found = replay(Path(run), step, again, overrides)
    assert found.lawful and not found.changed and found.begins == step - 1, found.text
    assert found.exact or "but for rounding" in found.text, found.text
    lines = [read_weight_lines(RunDirectory(folder))[step] for folder in (Path(run), again)]
    weights = compare_weights(*lines)
    assert weights is not None
    bound = BOUND.get(load_config(again / "config.yaml").model.dtype, HALF_BOUND)
    assert all(one.size <= bound for one in weights.norms), weights.norms
    return found.exact


def on_these_ranks(run: str, overrides: tuple[str, ...]) -> None:
    same = [by_the_law(run, step, overrides) for step in EACH]
    assert not all(same), "another layout rounds otherwise"


def train_here(config: dict[str, Any]) -> None:
    """On every rank: a run of these ranks."""
    train(Config.model_validate(config), Console(file=io.StringIO()))


@pytest.mark.release
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_of_twenty_steps_of_several_ranks(tiny_model: Callable[[str], Path], tmp_path: Path, ranks: int) -> None:
    """Two sample in process; four divide files in two ways."""
    run = str(tmp_path / "run")
    if ranks == 2:
        config = sampled(tmp_path, WHOLE)
    else:
        write_rollouts(tmp_path / "r.jsonl", STEPS * 8)
        cut = merged(WHOLE, {"parallel": {"tensor": 2}, "schedule": {"docs_per_step": 8}})
        config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", **cut)
    on_ranks(ranks, train_here, config.model_dump())
    whole = ("--parallel.tensor", "1")
    on_these_ranks(run, whole)
    on_ranks(2, on_these_ranks, run, ("--parallel.tensor", "2") if ranks == 2 else whole)
    keep_each_third(tmp_path / "run")
    on_ranks(ranks, each_again, run)
    flips_are_named(tmp_path / "run", *whole)


@pytest.mark.release
def test_each_of_twenty_steps_that_are_not_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are added in an order that chance decides, as atomic additions are."""
    accumulate, chance = StepRunner.accumulate, random.Random(4)

    def in_any_order(self: StepRunner, plan: StepPlan, *arguments: Any, **options: Any) -> Any:
        shuffled = chance.sample(plan.micro_batches, len(plan.micro_batches))
        return accumulate(self, replace(plan, micro_batches=tuple(shuffled)), *arguments, **options)

    monkeypatch.setattr(StepRunner, "accumulate", in_any_order)
    in_process(tmp_path, tmp_path, merged(WHOLE, {"deterministic": False}))
    same = [by_the_law(str(tmp_path / "run"), step, ()) for step in EACH]
    assert not all(same)
    found = replay(tmp_path / "run", 10)
    assert "without deterministic: true" in found.text or found.exact, found.text
