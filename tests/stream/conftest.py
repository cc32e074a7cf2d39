from collections.abc import Iterator
from pathlib import Path

import pytest

from stream.clock import Clock
from stream.redis_server import RedisServer
from truestep.rollouts.stream import directory, source


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the source and of the transport that watches a directory."""
    clock = Clock()
    for module in (source, directory):
        monkeypatch.setattr(module, "time", clock)
    return clock
