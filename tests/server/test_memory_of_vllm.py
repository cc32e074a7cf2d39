"""Weights through memory to a real vLLM, by its own interface and our plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from server.conftest import Servers
from server.models import make_model
from server.proxy import Answer, Proxy
from server.runs import recorded, server_config
from server.vllm_server import NAME, VllmServer
from small_runs import read_lines
from truestep.head.logits import HeadSettings
from truestep.policy.loading.load import load_policy
from truestep.policy.policy import Policy
from truestep.sampler.server.errors import ServerError
from truestep.sampler.server.sync import Publisher, Wanted, WeightsDirectory
from truestep.sampler.server.vllm import Vllm
from truestep.transfer.memory import SharedMemory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    made = SharedMemory(tmp_path)
    yield made
    made.close()


def policy_of(directory: Path, seed: int) -> Policy:
    return load_policy(make_model(directory, seed=seed), head=HeadSettings(fp32=True))


def give(server: VllmServer, weights: Path, memory: SharedMemory | None) -> None:
    async def work() -> None:
        remote = Vllm(server.url, NAME, None, 60)
        try:
            if memory is not None:
                assert await remote.reach(memory.path, memory.token) is None
            await remote.stage(weights)
            await remote.pause("abort")
            await remote.load(weights)
            await remote.resume()
        finally:
            await remote.close()

    asyncio.run(work())


def sums(server: VllmServer) -> dict[str, str]:
    """Ask vLLM for its own checksums of all that its model computes with, packed and joined as it has it."""
    return server.post("/weight_checker", {"action": "checksum"}).json()["checksums"]


def test_what_a_server_has_afterwards_is_what_it_has_of_the_same_weights_on_a_disk(
    servers: Servers, memory: SharedMemory, tmp_path: Path
) -> None:
    policies = [policy_of(tmp_path / str(seed), seed) for seed in (31, 32)]
    publisher = Publisher(WeightsDirectory(tmp_path / "disk"), torch.float32)
    by_disk, by_memory = [], []
    for version, policy in enumerate(policies):
        places = publisher.write(policy, version, Wanted(True, True), memory)
        assert places.disk is not None and places.memory is not None
        give(servers.second, places.disk, None)
        by_disk.append(sums(servers.second))
        other = publisher.write(policies[1 - version], version, Wanted(True, False), None)
        assert other.disk is not None
        give(servers.second, other.disk, None)
        assert sums(servers.second) != by_disk[-1]
        give(servers.second, places.memory, memory)
        by_memory.append(sums(servers.second))
        assert servers.second.get("/weight_info").json() == {"weight_version": places.memory.name.split(".")[0]}
    assert by_memory == by_disk and by_disk[0] != by_disk[1] and len(by_disk[0]) > 10


def test_a_server_without_the_plugin_gets_weights_by_the_disk(servers: Servers, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="does not take weights from this machine's memory: .*not configured"):
        recorded(server_config(tmp_path, [servers.first.url], sampler={"transfer": "memory"}))
    run = recorded(server_config(tmp_path, [servers.first.url, servers.second.url], schedule={"steps": 2}))
    run.trainer.run()
    assert run.worst_gap() < 1e-4


def test_a_server_that_says_yes_and_takes_nothing_is_found(servers: Servers, tmp_path: Path) -> None:
    async def spoil(path: str, asked: Any, answer: Answer) -> Answer:
        return answer

    with Proxy(servers.second.url, spoil) as proxy:
        send = proxy._http.request

        async def lying(method: str, target: str, **rest: Any) -> Any:
            if target.startswith("/update_weights") and b'"load"' in (rest.get("content") or b""):
                return await send("GET", "/health")
            return await send(method, target, **rest)

        proxy._http.request = lying  # type: ignore[method-assign]
        run = recorded(server_config(tmp_path, [proxy.url], sampler={"transfer": "memory"}))
        with pytest.raises(ServerError, match="was given the weights of version 0"):
            run.trainer.run()
    assert not (tmp_path / "run" / "ledger.jsonl").exists() or not read_lines(tmp_path / "run" / "ledger.jsonl")
