"""A real redis-server on the loopback interface, and what the tests of streams put into it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import redis

BINARY = os.environ.get("TRUESTEP_REDIS")
needs_redis = pytest.mark.skipif(
    not BINARY, reason="TRUESTEP_REDIS names no redis-server; `make test` installs one and sets it"
)


class RedisServer:
    """Keeps what it is told over `kill` and `start`, in its directory."""

    def __init__(self, directory: Path):
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, host="127.0.0.1", decode_responses=True, protocol=2)
        self.start()

    def start(self) -> None:
        assert BINARY
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "yes", "dir": self._directory}
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen([BINARY, *arguments], stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                self.client.ping()
                return
            except redis.RedisError:
                time.sleep(0.01)
        raise RuntimeError("the redis-server does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.client.close()
        self.kill()

    def send(self, stream: str, records: Iterable[Any]) -> list[str]:
        """The ids of the entries."""
        pipeline = self.client.pipeline(transaction=False)
        for record in records:
            pipeline.xadd(stream, {"record": record if isinstance(record, str) else json.dumps(record)})
        return pipeline.execute()

    def end(self, stream: str) -> str:
        return self.client.xadd(stream, {"event": "end"})

    def pending(self, stream: str, group: str = "truestep") -> list[str]:
        """Messages that are given and not acknowledged."""
        return [entry["message_id"] for entry in self.client.xpending_range(stream, group, "-", "+", 10_000)]

    def events(self, stream: str) -> list[dict[str, str]]:
        return [fields for _, fields in self.client.xrange(stream)]
