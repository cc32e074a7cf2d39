"""Weights by vLLM's own backend `nccl`: a real server, its own messages, chunks and loading; gloo carries the bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from server.conftest import Servers
from server.linked_server import BY_LINK, VllmByGloo
from server.models import make_model
from server.runs import recorded, server_config
from server.vllm_server import LINKED, NAME, VllmServer
from truestep.generate.errors import ServerError
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.weight_files import Publisher, WeightsDirectory
from truestep.head.logits import HeadSettings
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start


def policy_of(directory: Path, seed: int) -> Policy:
    return load_policy(make_model(directory, seed=seed), head=HeadSettings(fp32=True))


def sums(server: VllmServer) -> dict[str, str]:
    """Ask vLLM for its own checksums of all that its model computes with, packed and joined as it has it."""
    return server.post("/weight_checker", {"action": "checksum"}).json()["checksums"]


def by_link(server: VllmServer, published: list[HostWeights]) -> list[dict[str, str]]:
    """Send weights one after another by the same link; give vLLM's own checksums of what it computes with."""
    found = []

    async def send() -> None:
        remote = VllmByGloo(server.url, NAME, None, 60)
        try:
            assert await remote.link(torch.device("cpu")) is None
            for weights in published:
                await remote.prepare()
                await remote.pause("abort")
                await remote.send(weights)
                await remote.resume()
                found.append(await asyncio.to_thread(sums, server))
                info = await asyncio.to_thread(server.get, "/weight_info")
                assert info.json() == {"weight_version": weights.name}
        finally:
            await remote.close()

    asyncio.run(send())
    return found


def check_links(server: VllmServer, model: Path, directory: Path) -> None:
    """A server computes with what was sent as with the same weights on a disk."""
    disk = WeightsDirectory(directory / "disk")
    by_disk, copies = [], []
    for version, seed in enumerate((41, 42)):
        policy = policy_of(directory / str(seed), seed)
        server.give(disk.write(policy, version, torch.float32))
        by_disk.append(sums(server))
        copied = Publisher(disk, torch.float32, sends=True).write(policy, version)
        assert isinstance(copied, HostWeights)
        copies.append(copied)
    server.give(model)
    assert by_link(server, copies) == by_disk and by_disk[0] != by_disk[1] and len(by_disk[0]) > 10


def test_a_server_computes_with_what_was_sent(servers: Servers, tmp_path: Path) -> None:
    check_links(servers.linked, servers.model, tmp_path)


def test_every_rank_of_a_server_takes_its_part(servers: Servers, tmp_path: Path) -> None:
    tensor = VllmServer(
        servers.linked._starter, servers.model, tmp_path / "log", others=(*LINKED, "--tensor-parallel-size", "2")
    )
    try:
        tensor.start()
        tensor.wait()
        assert tensor.get("/get_world_size").json() == {"world_size": 2}
        check_links(tensor, servers.model, tmp_path)
    finally:
        tensor.kill()


def test_a_server_without_a_backend_is_refused(servers: Servers, tmp_path: Path) -> None:
    url = servers.first.url
    with pytest.raises(ServerError, match='transfer: nccl: .*"backend": "nccl"'):
        recorded(server_config(tmp_path, [url], sampler=BY_LINK))
