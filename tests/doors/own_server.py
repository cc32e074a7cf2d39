"""An inference server of somebody's own, outside the trainer: transformers behind lines of JSON on a socket.

`OwnServer` is what `sampler.protocol: doors.own_server:OwnServer` names. `serve` is the server's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import Completion, Request
from truestep.generate.servers.protocol import Description, InferenceServer


class OwnServer(InferenceServer):
    """One request a connection: a line of JSON there and a line of JSON back."""

    def __init__(self, url: str, model: str, api_key: str | None, timeout: float):
        self.url, self.model, self._timeout = url, model, timeout
        self._host, _, port = url.rpartition(":")
        self._port = int(port)

    async def _do(self, what: str, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**24)
                writer.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
                line = await reader.readline()
                writer.close()
        except (OSError, TimeoutError) as error:
            raise UnreachableError(f"{what}: {error!r}") from error
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise BadAnswerError(f"{what} was answered with {line[:80]!r}") from error
        if "refused" in answer:
            raise ServerError(f"{self.url}: {answer['refused']}")
        return answer["gives"]

    async def describe(self) -> Description:
        said = await self._do("describe")
        return Description((said["name"],), said["longest"], said["vocabulary"])

    async def complete(self, request: Request, n: int) -> list[Completion]:
        options = request.options
        gives = await self._do(
            "sample",
            prompt=request.token_ids,
            times=n,
            heat=options.temperature,
            most=options.max_new_tokens,
            ends=sorted(options.stop_ids),
        )
        return [
            Completion(one["tokens"], one["scores"], stopped=one["tokens"][-1] in options.stop_ids) for one in gives
        ]

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        gives = await self._do("score", prompt=prompt, heat=temperature, count=count)
        return {int(token): score for token, score in gives}

    async def pause(self, mode: str) -> None:
        await self._do("halt")

    async def load(self, weights: Path) -> None:
        await self._do("take", directory=str(weights))

    async def resume(self) -> None:
        await self._do("go")

    async def close(self) -> None:
        pass


class Process:
    """The server's side: a model that it was given, and what it was asked to do."""

    def __init__(self, model: Path, name: str, longest: int):
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._name, self._longest = name, longest
        self._generator = torch.Generator().manual_seed(0)
        self.done: list[str] = []
        self.taken: list[str] = []
        self._halted = False

    def describe(self) -> dict[str, Any]:
        return {"name": self._name, "longest": self._longest, "vocabulary": self._model.config.vocab_size}

    @torch.no_grad()
    def _scores(self, ids: list[list[int]], heat: float) -> torch.Tensor:
        return (self._model(torch.tensor(ids)).logits[:, -1].float() / heat).log_softmax(-1)

    def sample(self, prompt: list[int], times: int, heat: float, most: int, ends: list[int]) -> list[dict[str, Any]]:
        assert not self._halted
        return [self._one(prompt, heat, most, ends) for _ in range(times)]

    def _one(self, prompt: list[int], heat: float, most: int, ends: list[int]) -> dict[str, Any]:
        tokens: list[int] = []
        scores: list[float] = []
        while len(tokens) < most and (not tokens or tokens[-1] not in ends):
            row = self._scores([prompt + tokens], heat)[0]
            token = int(torch.multinomial(row.exp(), 1, generator=self._generator))
            tokens.append(token)
            scores.append(min(float(row[token]), 0.0))
        return {"tokens": tokens, "scores": scores}

    def score(self, prompt: list[int], heat: float, count: int) -> list[tuple[int, float]]:
        row = self._scores([prompt], heat)[0]
        values, tokens = row.topk(count)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))

    def halt(self) -> None:
        self._halted = True

    def take(self, directory: str) -> None:
        assert self._halted
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.taken.append(Path(directory).name)

    def go(self) -> None:
        self._halted = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:  # the client has hung up without asking
            writer.close()
            return
        asked = json.loads(line)
        what = asked.pop("do")
        self.done.append(what)
        try:
            answer = {"gives": getattr(self, what)(**asked)}
        except Exception as error:
            answer = {"refused": repr(error)}
        with contextlib.suppress(ConnectionError):  # the client has not waited for its answer
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()


@contextlib.contextmanager
def serve(process: Process) -> Iterator[str]:
    """Where it listens, until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    start = asyncio.start_server(process.answer, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(120)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.close()
