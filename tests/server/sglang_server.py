"""A server that speaks as SGLang's documentation and source say that it does, written anew, around a real tiny model.

The real one does not run where tests run: its kernels need a GPU.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


class RefusedError(Exception):
    """SGLang's 400."""


class FakeSglang:
    def __init__(self, model: Path, name: str, longest: int = 1024):
        self._load(model)
        self._name, self._longest = name, longest
        self._generator = torch.Generator().manual_seed(0)
        self.draws_of: Callable[[dict[str, Any]], torch.Generator] = lambda body: self._generator
        self._paused = self._aborting = False
        self._running = 0
        self.asked: list[tuple[str, Any]] = []  # paths and bodies
        self.incremental = False  # events have new tokens only
        self.returns_routes = False  # --enable-return-routed-experts
        self.spoil: Callable[[np.ndarray], np.ndarray] = lambda routes: routes
        self.takes = "all"  # of the weights that it says it has loaded; or nothing, half, or another layer's
        self._started_with = model
        self.on_load: Callable[[], None] | None = None  # before it loads

    def _load(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._routed: dict[int, torch.Tensor] = {}  # by hidden layer, the experts of the last pass
        for number, layer in enumerate(self._model.model.layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(partial(self._note, number))

    def _note(self, number: int, router: Any, given: Any, found: Any) -> None:
        self._routed[number] = found[2]

    def _routes(self) -> np.ndarray:
        """Of the tokens of the last pass, in all hidden layers: [tokens, layers, k] int32, 0 where none routes."""
        rows, chosen = next(iter(self._routed.values())).shape
        found = np.zeros((rows, self._model.config.num_hidden_layers, chosen), np.int32)
        for number, index in self._routed.items():
            found[:, number] = index
        return self.spoil(found)

    def _take(self, directory: Path) -> None:
        before = {name: value.clone() for name, value in self._model.state_dict().items()}
        if self.takes == "nothing":
            return
        self._load(directory)
        state = self._model.state_dict()
        with torch.no_grad():
            if self.takes == "half":
                for name in list(state)[: len(state) // 2]:
                    state[name].copy_(before[name])
            elif self.takes == "another layer's":
                state["model.layers.0.mlp.up_proj.weight"].copy_(state["model.layers.1.mlp.up_proj.weight"])

    def restart(self) -> None:
        """Become another process: with the weights that it was started with."""
        self._load(self._started_with)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    # ---- what it computes

    @torch.no_grad()
    def _scores(self, ids: list[int], temperature: float) -> torch.Tensor:
        vocabulary = self._model.config.vocab_size
        if max(ids) >= vocabulary:
            raise RefusedError(f"The input_ids {ids[:4]} contains values greater than the vocab size {vocabulary}.")
        # Greedy, SGLang gives the log-probs before any temperature.
        return (self._model(torch.tensor([ids])).logits[0, -1].float() / (temperature or 1.0)).log_softmax(-1)

    async def _generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Give the state of one completion behind each of its tokens."""
        options = body["sampling_params"]
        assert not options.get("ignore_eos"), "SGLang would ignore stop_token_ids as well"
        stops, most = set(options.get("stop_token_ids", ())), options["max_new_tokens"]
        draws = self.draws_of(body)
        scored: list[list[Any]] = []
        top: list[list[Any]] = []
        finish: dict[str, Any] | None = None
        self._running += 1
        try:
            while finish is None:
                await asyncio.sleep(0)
                if self._aborting:
                    finish = {"type": "abort", "message": "Abort in waiting queue"}
                    yield self._answer(body, scored, top, finish)
                    return
                while self._paused:
                    await asyncio.sleep(0.001)
                row = self._scores([*body["input_ids"], *(token for _, token, _ in scored)], options["temperature"])
                routes = self._routes() if self.returns_routes else None
                token = int(torch.multinomial(row.exp(), 1, generator=draws))
                token = token if options["temperature"] else int(row.argmax())
                scored.append([min(float(row[token]), 0.0), token, None])
                if wanted := body.get("top_logprobs_num"):
                    values, tokens = row.topk(wanted)
                    pairs = zip(values.tolist(), tokens.tolist(), strict=True)
                    top.append([[value, index, None] for value, index in pairs])
                if token in stops:
                    finish = {"type": "stop", "matched": token}
                elif len(scored) == most:
                    finish = {"type": "length", "length": most}
                answer = self._answer(body, scored, top, finish)
                if finish is not None and routes is not None:
                    self._show_routes(answer, body, routes)
                yield answer
        finally:
            self._running -= 1

    def _answer(self, body: dict[str, Any], scored: Any, top: Any, finish: Any) -> dict[str, Any]:
        shown = scored[-1:] if self.incremental and body.get("stream") else list(scored)
        meta = {
            "id": "some",
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(scored),
            "output_token_logprobs": shown,
        }
        if top:
            meta["output_top_logprobs"] = list(top)
        return {"text": "", "output_ids": [token for _, token, _ in shown], "meta_info": meta}

    def _show_routes(self, answer: dict[str, Any], body: dict[str, Any], routes: np.ndarray) -> None:
        if body.get("return_routed_experts"):
            answer["meta_info"]["routed_experts"] = base64.b64encode(routes.tobytes()).decode()

    # ---- how it answers

    async def _reply(self, path: str, body: Any) -> Any:
        if path == "/health":
            return None
        if path == "/v1/models":
            return {"data": [{"id": self._name, "max_model_len": self._longest}]}
        if path == "/generate":
            wanted = body["sampling_params"].get("n", 1)
            answers = await asyncio.gather(*(self._last(body) for _ in range(wanted)))
            return answers if wanted > 1 else answers[0]
        if path == "/pause_generation":
            if body["mode"] == "abort":
                self._aborting = True
                while self._running:
                    await asyncio.sleep(0.001)
                self._aborting = False
            self._paused = True
            return {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            self._paused = False
            return {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/update_weights_from_disk":
            while self._running and not self._paused:  # the writer's lock
                await asyncio.sleep(0.001)
            if not os.path.isdir(body["model_path"]):
                raise RefusedError(json.dumps({"success": False, "message": f"no {body['model_path']}"}))
            if self.on_load is not None:
                self.on_load()
            self._take(Path(body["model_path"]))
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        raise FileNotFoundError(path)

    async def _last(self, body: dict[str, Any]) -> dict[str, Any]:
        answers = [answer async for answer in self._generate(body)]
        return answers[-1]

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        wanted = body["sampling_params"].get("n", 1)

        async def one(index: int) -> None:
            async for answer in self._generate(body):
                event = answer | ({"index": index} if wanted > 1 else {})
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()

        await asyncio.gather(*map(one, range(wanted)))
        writer.write(b"data: [DONE]\n\n")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            path = head[0].split()[1]
            length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else None
            self.asked.append((path, body))
            if path == "/generate" and body.get("stream"):
                await self._stream(body, writer)
            else:
                status, answer = await self._status(path, body)
                text = b"" if answer is None else json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
                )
                writer.write(text)
            await writer.drain()
        writer.close()

    async def _status(self, path: str, body: Any) -> tuple[int, Any]:
        try:
            return 200, await self._reply(path, body)
        except RefusedError as refused:
            return 400, {"error": {"message": str(refused)}}
        except FileNotFoundError:
            return 404, {"detail": "Not Found"}


@contextlib.contextmanager
def serving(server: FakeSglang) -> Iterator[str]:
    """Give where it listens, until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.serve, "127.0.0.1", 0), loop).result(60)

    async def end() -> None:
        listening.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
