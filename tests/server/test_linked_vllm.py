"""Weights by vLLM's own backend `nccl`: a real server, its own messages, chunks and loading; gloo carries the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server.conftest import Servers
from server.linked_server import BY_LINK, VllmByGloo
from server.runs import recorded, server_config
from server.test_memory_of_vllm import give, policy_of, sums
from server.vllm_server import LINKED, NAME, VllmServer
from truestep.sampler.server.errors import ServerError
from truestep.sampler.server.sync import Publisher, Wanted, WeightsDirectory
from truestep.transfer.memory import SharedMemory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    made = SharedMemory(tmp_path)
    yield made
    made.close()


def by_link(server: VllmServer, indices: list[Path]) -> list[dict[str, str]]:
    """Send weights one after another by the same link; give vLLM's own checksums of what it computes with."""
    found = []

    async def send() -> None:
        remote = VllmByGloo(server.url, NAME, None, 60)
        try:
            assert await remote.link(torch.device("cpu")) is None
            for index in indices:
                await remote.stage(index)
                await remote.pause("abort")
                await remote.load(index)
                await remote.resume()
                found.append(await asyncio.to_thread(sums, server))
                info = await asyncio.to_thread(server.get, "/weight_info")
                assert info.json() == {"weight_version": index.name.split(".")[0]}
        finally:
            await remote.close()

    asyncio.run(send())
    return found


def check_links(server: VllmServer, model: Path, memory: SharedMemory, directory: Path) -> None:
    """A server computes with what was sent as with the same weights on a disk."""
    publisher = Publisher(WeightsDirectory(directory / "disk"), torch.float32)
    by_disk, indices = [], []
    for version, seed in enumerate((41, 42)):
        policy = policy_of(directory / str(seed), seed)
        places = publisher.write(policy, version, Wanted(True, True), memory)
        assert places.disk is not None and places.memory is not None
        give(server, places.disk, None)
        by_disk.append(sums(server))
        indices.append(places.memory)
    give(server, model, None)
    assert by_link(server, indices) == by_disk and by_disk[0] != by_disk[1] and len(by_disk[0]) > 10


def test_a_server_computes_with_what_was_sent(servers: Servers, memory: SharedMemory, tmp_path: Path) -> None:
    check_links(servers.linked, servers.model, memory, tmp_path)


def test_every_rank_of_a_server_takes_its_part(servers: Servers, memory: SharedMemory, tmp_path: Path) -> None:
    tensor = VllmServer(
        servers.linked._starter, servers.model, tmp_path / "log", others=(*LINKED, "--tensor-parallel-size", "2")
    )
    try:
        tensor.start()
        tensor.wait()
        assert tensor.get("/get_world_size").json() == {"world_size": 2}
        check_links(tensor, servers.model, memory, tmp_path)
    finally:
        tensor.kill()


@pytest.mark.parametrize("other", ["first", "second"])
def test_a_server_with_another_backend_or_none_is_refused(other: str, servers: Servers, tmp_path: Path) -> None:
    url = getattr(servers, other).url
    with pytest.raises(ServerError, match='transfer: nccl: .*"backend": "nccl"'):
        recorded(server_config(tmp_path, [url], sampler=BY_LINK))
