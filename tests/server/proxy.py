"""A faulty proxy in front of a real server: what it is told to spoil it spoils, and all else it passes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

Answer = tuple[int, bytes]
Fault = Callable[[dict[str, Any]], Any]  # an answer's JSON, spoiled


class Proxy:
    """`spoil(path, body, answer)` gives the answer to send instead, or None to cut it short in its middle."""

    def __init__(self, url: str, spoil: Callable[[str, Any, Answer], Awaitable[Answer | None]] | None = None):
        self.upstream, self.spoil = url, spoil
        self.down = False  # connections are refused, or rather closed unanswered
        self.requests: list[tuple[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> asyncio.Server:
        # A server closes a connection with an error that it answers, and the next request would be lost on it.
        alone, many = {"Connection": "close"}, httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=self.upstream, timeout=120, limits=many, headers=alone)
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)

    async def _stop(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.down:
                await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        length = int({name.lower(): value for name, value in headers.items()}.get("content-length", 0))
        body = await reader.readexactly(length)
        asked = json.loads(body) if body else None
        self.requests.append((target, asked))
        response = await self._http.request(
            method, target, content=body, headers={"Content-Type": "application/json"} if body else {}
        )
        answer: Answer | None = (response.status_code, response.content)
        if self.spoil is not None:
            answer = await self.spoil(target, asked, (response.status_code, response.content))
        status, content = answer or (response.status_code, response.content)
        start = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode()
        writer.write(start + (content if answer else content[: len(content) // 2]))
        await writer.drain()


def is_group(path: str, asked: Any) -> bool:
    """A request for completions, and no probe."""
    return path == "/v1/completions" and asked.get("return_token_ids", False)
