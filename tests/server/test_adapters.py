"""Adapters on a real vLLM: served alone beside the model, by several runs at once, and merged."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from adapters import write_adapter
from server.fake import make_prompts
from server.models import make_model
from server.runs import recorded, server_config
from server.vllm_server import NAME, Starter, VllmServer
from small_runs import quiet_trainer
from truestep.generate.errors import ForgottenError, ServerError
from truestep.generate.generator import DrawOptions, Request
from truestep.generate.servers.probe import expect, make_probes, measure
from truestep.generate.servers.vllm import Vllm
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.model.adapter import AdapterSource
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class Served:
    server: VllmServer
    model: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    python = os.environ.get("TRUESTEP_VLLM")
    if not python:
        pytest.skip("TRUESTEP_VLLM does not name the Python of a vLLM: `make vllm` installs one and prints it")
    directory = tmp_path_factory.mktemp("adapters")
    model = make_model(directory / "model", seed=1)
    starter = Starter(python, directory / "starter.log")
    others = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    server = VllmServer(starter, model, directory / "server.log", others=others)
    try:
        server.start()
        server.wait()
        yield Served(server, model)
    finally:
        server.kill()
        starter.stop()


def adapted(model: Path, adapter: Path, seed: int) -> Policy:
    write_adapter(adapter, model, rank=8, alpha=8.0, seed=seed)
    return load_policy(model, device="cpu", adapter=AdapterSource(path=adapter))


def test_two_adapters_on_one_server_score_as_their_trainers(served: Served, tmp_path: Path) -> None:
    policies = [adapted(served.model, tmp_path / str(seed), seed) for seed in (1, 2)]
    probes = make_probes(make_prompts(), 0, 150)
    paths = [
        WeightsDirectory(tmp_path / f"for-{number}", adapter_alone=True).write(policy, 0, torch.float32)
        for number, policy in enumerate(policies)
    ]
    known = [expect(policy, probes, 0) for policy in policies]
    assert np.abs(known[0].logprobs - known[1].logprobs).max() > 0.1

    async def main() -> None:
        servers = [Vllm(served.server.url, NAME, None, 60) for _ in policies]
        base = Vllm(served.server.url, NAME, None, 60)
        try:
            for server, path in zip(servers, paths, strict=True):
                await server.pause("wait")
                await server.load(path)
                await server.resume()
            for _ in range(2):  # the second time out of the server's cache
                for server, scores in zip(servers, known, strict=True):
                    assert (await measure(server, scores)).expected < 1e-4
            plain = expect(policies[0].without_adapter(), probes, 0)
            assert (await measure(base, plain)).expected < 1e-4, "the model itself is as it was"
            assert (await measure(base, known[0])).expected > 0.1
            # The same adapter once more, as after a probe that found it wrong; and one that another run took away.
            await servers[0].load(paths[0])
            assert (await measure(servers[0], known[0])).expected < 1e-4
            served.server.post("/v1/unload_lora_adapter", {"lora_name": paths[1].name})
            with pytest.raises(ForgottenError, match="no longer knows the adapter"):
                await servers[1].complete(Request((3, 4), DrawOptions(1.0, 2, frozenset())), 1)
            await servers[1].load(paths[1])
            assert (await measure(servers[1], known[1])).expected < 1e-4
        finally:
            for server in (*servers, base):
                await server.close()

    asyncio.run(main())


def test_an_adapter_that_the_server_has_no_room_for_is_named(served: Served, tmp_path: Path) -> None:
    write_adapter(tmp_path / "large", served.model, rank=16)

    async def main() -> None:
        server = Vllm(served.server.url, NAME, None, 60)
        try:
            with pytest.raises(ServerError, match="--max-lora-rank"):
                await server.load(tmp_path / "large")
        finally:
            await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["served", "merged"])
@pytest.mark.parametrize("ahead", [0, 16])
def test_every_label_of_a_run_is_of_the_adapter_that_it_names(
    how: str, ahead: int, served: Served, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", seed=1)
    adapter = {"rank": 8, "alpha": 16.0}
    sampler = {"adapter": how, "max_staleness": ahead}
    config = server_config(tmp_path, [served.server.url], adapter=adapter, sampler=sampler)
    run = recorded(config)
    run.trainer.run()
    assert len(run.steps) == 4 and len(run.weights) >= 4
    assert run.worst_gap() < 1e-4
    if how == "merged":  # the model is put back for other tests
        served.server.give(WeightsDirectory(tmp_path / "back").write(load_policy(served.model), 0, torch.float32))


def test_a_server_that_forgot_the_adapter_gets_it_again(served: Served, tmp_path: Path) -> None:
    """Its adapters are taken away between steps, as by a restart."""
    make_model(tmp_path / "model", seed=1)
    sampler = {"adapter": "served"}
    trainer = quiet_trainer(server_config(tmp_path, [served.server.url], adapter={"rank": 4}, sampler=sampler))
    honest = trainer.directory.record_step

    def forgetting(number: int, *arguments: object) -> None:
        honest(number, *arguments)  # type: ignore[arg-type]
        if number == 2:
            listed = httpx.get(f"{served.server.url}/v1/models", timeout=60).json()["data"]
            names = [entry["id"] for entry in listed]
            for name in names:
                if name != NAME:
                    served.server.post("/v1/unload_lora_adapter", {"lora_name": name})

    trainer.directory.record_step = forgetting  # type: ignore[method-assign, assignment]
    trainer.run()
    assert trainer.step == 4
