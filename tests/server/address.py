"""A server on this machine that gives prepared answers, and notices when its clients hang up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from server.test_bounds import with_headers


def as_json(body: Any, *headers: str, status: int = 200) -> bytes:
    return with_headers(json.dumps(body).encode(), *headers, status=status)


def stream(*events: Any, last: str = "data: [DONE]\n\n") -> bytes:
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return with_headers((lines + last).encode())


@dataclass
class Address:
    """A server that answers one request after another as it is told, the last answer again and again."""

    answers: list[bytes | None]  # None: it hangs
    url: str = ""
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)  # path, headers, body
    open: int = 0  # connections with a request that is not answered
    most: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.asked.append((head[0].split()[1], headers, json.loads(body)))
                await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0.01)
            reply = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if reply is None or reply.endswith(b"..."):
                writer.write((reply or b"").removesuffix(b"..."))
                await writer.drain()
                await reader.read()  # until the client hangs up
                raise ConnectionResetError
            for start in range(0, len(reply), 2**16):
                writer.write(reply[start : start + 2**16])
                await writer.drain()
            if b"Content-Length" not in reply:
                raise ConnectionResetError
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def listening(*answers: bytes | None) -> AsyncIterator[Address]:
    address = Address(list(answers))
    server = await asyncio.start_server(address.serve, "127.0.0.1", 0)
    address.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield address
    finally:
        server.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(others, timeout=10)
            assert not left, "its clients have hung up"
