"""Steps of every kind of run, made again bit for bit: whoever sampled, a replay needs no sampler and no source."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ranks.cases import on_ranks
from replay.made_again import KEEP, exactly
from selection import long_except
from server.models import make_mixture, make_model
from server.runs import label_versions, server_config
from server.sglang_server import FakeSglang, serving
from server.vllm_server import NAME
from small_runs import (
    file_config,
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
from truestep.config.schema import Config
from truestep.rollouts.kept.records import blocks_of
from truestep.run.train import train
from truestep.tools.replay.replay import replay
from truestep.types import ROUTES, Rollout

Model = Callable[[str], Path]


def made_again(run: Path, *steps: int) -> None:
    """From the run's beginning, and from a checkpoint."""
    for step in steps:
        exactly(replay(run, step))


def kept(run: Path) -> list[Rollout]:
    return [document for block in blocks_of(run / "records") for document in block.read()]


class SlowSglang(FakeSglang):
    """Its completions take longer than the trainer's steps, so that they go on under new weights."""

    async def _generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for answer in super()._generate(body):
            yield answer
            await asyncio.sleep(0.05)


def test_asynchronous_servers_with_staleness_and_partial_completions(tmp_path: Path) -> None:
    model = make_model(tmp_path / "served", seed=2)
    fake = SlowSglang(model, NAME)
    sampler = {"protocol": "sglang", "pause": "keep", "max_staleness": 16}
    with serving(fake) as url:
        sections = {**KEEP, "schedule": {"docs_per_step": 8, "steps": 5}, "optimizer": {"learning_rate": 1e-2}}
        quiet_trainer(server_config(tmp_path, [url], sampler=sampler, **sections)).run()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert any(line["max_staleness"] > 0 for line in lines)
    versions = [set(label_versions(document).tolist()) for document in kept(tmp_path / "run")]
    assert any(len(some) > 1 for some in versions), "completions that went on under new weights"
    (tmp_path / "prompts.jsonl").unlink()
    made_again(tmp_path / "run", 1, 4)


@pytest.mark.parametrize("several", [False, True])
def test_a_watched_directory(tiny_model: Model, tmp_path: Path, several: bool) -> None:
    records = tiny_records(22)
    if several:
        records = [part for number, record in enumerate(records) for part in in_two(record, number)]
    put(tmp_path / "sent", "a.jsonl", records)
    (tmp_path / "sent" / "END").touch()
    source = {"type": "files", "directory": str(tmp_path / "sent")}
    quiet_trainer(sent_config(tiny_model("llama"), source, tmp_path / "run", **KEEP)).run()
    if several:
        assert any(document.starts for document in kept(tmp_path / "run"))
    made_again(tmp_path / "run", 1, 4)


def in_two(record: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Every third record, as a document of two sequences."""
    if number % 3:
        return [record]
    shared = {"document_id": record["id"], "sequences": 2}
    return [{**record, **shared, "id": f"{record['id']}/{part}"} for part in range(2)]


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


@needs_redis
def test_a_stream(tiny_model: Model, tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.send("rollouts", tiny_records(22))
    redis_server.end("rollouts")
    quiet_trainer(redis_config(tiny_model("llama"), redis_server, tmp_path / "run", **KEEP)).run()
    redis_server.kill()
    made_again(tmp_path / "run", 1, 4)


def test_episodes_of_several_turns_and_sequences(tmp_path: Path) -> None:
    """A template that leaves out the past, so that an episode is several sequences."""
    prompts = write_lines(tmp_path / "p.jsonl", [{"id": f"p{number}", "prompt": "what is 1+2"} for number in range(4)])
    sampler: dict[str, Any] = {
        "reward": None,
        "environment": {"class": "turn_environments:Tooled"},
        "stop": list(STOPS),
    }
    sampler |= {"stop": list(STOPS), "max_episode_tokens": 64, "max_turns": 3, "max_new_tokens": 12}
    model = tool_model(tmp_path / "model", shown="[-3:]")
    quiet_trainer(sampled_config(model, prompts, tmp_path / "run", sampler=sampler, **KEEP)).run()
    documents = kept(tmp_path / "run")
    assert any(len(document.starts) > 1 for document in documents) and all(document.turns for document in documents)
    made_again(tmp_path / "run", 1, 3)


SAMPLED: dict[str, dict[str, Any]] = {
    "exact": {"sampler": {"exact": True}, "model": {"dtype": "bfloat16", "head": {"fp32_lm_head": True}}},
    "LoRA": {"adapter": {"rank": 2}},
    "a reference": {"loss": {"kl_reference": {"weight": 0.1}}},
    "exact, LoRA, recomputed activations": {
        "sampler": {"exact": True},
        "adapter": {"rank": 2},
        "model": {"dtype": "bfloat16", "activation_checkpointing": True},
    },
    "several updates, old log-probs of its own": {
        "loss": {"old_logprobs": "recompute"},
        "schedule": {"updates_per_batch": 2, "steps": 5},
    },
}


@pytest.mark.parametrize(
    "kind", long_except(list(SAMPLED), "exact", "LoRA", "a reference", "several updates, old log-probs of its own")
)
def test_sampled_in_process(tmp_path: Path, kind: str) -> None:
    model = word_model(tmp_path / "model")
    prompts = write_lines(tmp_path / "p.jsonl", sort_prompts(7))
    quiet_trainer(sampled_config(model, prompts, tmp_path / "run", **KEEP, **SAMPLED[kind])).run()
    prompts.unlink()
    made_again(tmp_path / "run", 1, 3)


def test_experts_that_servers_name(tmp_path: Path) -> None:
    """A mixture whose documents carry the experts of each token."""
    served, model = (make_mixture(tmp_path / name, seed=seed) for name, seed in (("served", 2), ("model", 1)))
    fake = FakeSglang(served, NAME)
    fake.returns_routes = True
    sections = {**KEEP, "schedule": {"docs_per_step": 8, "steps": 3}, "optimizer": {"learning_rate": 1e-2}}
    sampler = {"protocol": "sglang", "max_new_tokens": 8}
    with serving(fake) as url:
        config = server_config(tmp_path, [url], model={"experts": {"replay": "require"}}, sampler=sampler, **sections)
        quiet_trainer(config).run()
    assert model.is_dir() and all(ROUTES in document.token_fields for document in kept(tmp_path / "run"))
    made_again(tmp_path / "run", 1, 3)


def train_here(config: dict[str, Any]) -> None:
    """On every rank: a run of these ranks, and its steps again."""
    run = train(Config.model_validate(config), Console(file=io.StringIO())).directory.path
    for step in (1, 4):
        exactly(replay(run, step))


def replay_here(run: str, parallel: list[str]) -> None:
    found = replay(Path(run), 4, overrides=parallel)
    assert found.lawful and not found.exact, found.text


@pytest.mark.long
def test_four_ranks_and_their_steps_at_two_other_layouts(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 24)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", **KEEP)
    on_ranks(4, train_here, config.model_dump())
    for ranks, options in ((1, []), (2, ["--parallel.data_shard", "1", "--parallel.tensor", "2"])):
        if ranks == 1:
            replay_here(str(tmp_path / "run"), options)
        else:
            on_ranks(ranks, replay_here, str(tmp_path / "run"), options)
