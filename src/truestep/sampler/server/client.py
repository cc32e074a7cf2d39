"""One server over HTTP: requests in, parsed JSON out, and every failure as what is to be done about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from truestep.sampler.server.answer import Asked, Choice, read_choices
from truestep.sampler.server.errors import BadAnswerError, ServerError, UnreachableError

_CONNECT_SECONDS = 10.0
_BUSY = (408, 425, 429)  # statuses below 500 that a later request may not meet again


# The distribution as it is, whatever defaults a server takes from the model.
UNBENT: dict[str, Any] = {
    "ignore_eos": True,  # the trainer's own list of what ends a text is the one that counts
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Client:
    def __init__(self, url: str, model: str, api_key: str | None, timeout: float):
        self.url, self.model, self._timeout = url.rstrip("/").removesuffix("/v1"), model, timeout
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, timeout: float | None = None) -> Any:
        return await self._json("GET", path, None, timeout)

    async def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        return await self._json("POST", path, body, timeout)

    async def complete(self, asked: Asked, version: int) -> list[Choice]:
        """All of them made by weights of that version, or so the caller made sure."""
        return read_choices(await self.post("/v1/completions", self._body(asked)), asked, version)

    async def stream(self, asked: Asked, version: Callable[[], int]) -> list[Choice]:
        """Each token has the version that the server had when the token came."""
        gathered: dict[int, dict[str, Any]] = {}
        versions: dict[int, list[int]] = {}

        def take(event: dict[str, Any]) -> None:
            for piece in event.get("choices") or ():
                index = piece.get("index")
                whole = gathered.setdefault(
                    index, {"index": index, "token_ids": [], "logprobs": {"token_logprobs": []}}
                )
                tokens = piece.get("token_ids") or []
                whole["token_ids"] += tokens
                whole["logprobs"]["token_logprobs"] += (piece.get("logprobs") or {}).get("token_logprobs") or []
                for name in ("finish_reason", "prompt_token_ids"):
                    whole[name] = piece.get(name) or whole.get(name)
                versions.setdefault(index, []).extend([version()] * len(tokens))

        await self._events("/v1/completions", self._body(asked) | {"stream": True}, take)
        return read_choices({"choices": list(gathered.values())}, asked, versions)

    def _body(self, asked: Asked) -> dict[str, Any]:
        """No seed: vLLM's engine for CPUs dies of a seeded request whose prompt it reads in two parts."""
        return {
            "model": self.model,
            "prompt": list(asked.prompt),
            "n": asked.n,
            "temperature": asked.temperature,
            "max_tokens": asked.max_new_tokens,
            "stop_token_ids": sorted(asked.stop_ids),
            **UNBENT,
            "logprobs": 0,
            "return_token_ids": True,
        }

    async def _json(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout or self._timeout):  # of the whole answer, not from byte to byte
                response = await self._http.request(method, path, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise UnreachableError(f"{path} gave no answer within {timeout or self._timeout:g} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise UnreachableError(f"{path}: {_named(error)}") from error
        self._check_status(path, response.status_code, response.text)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise BadAnswerError(f"{path} answered what is not JSON") from error

    async def _events(self, path: str, body: Any, take: Callable[[dict[str, Any]], None]) -> None:
        """Server-sent events, up to the last one that says so: a stream that only ends was cut short."""
        try:
            async with asyncio.timeout(self._timeout), self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    self._check_status(path, response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        take(_event(line.removeprefix("data: ")))
        except (TimeoutError, httpx.TimeoutException) as error:
            raise UnreachableError(f"{path} gave no whole answer within {self._timeout:g} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise UnreachableError(f"{path}: {_named(error)}") from error
        raise UnreachableError(f"{path}: the stream ended before its end")

    def _check_status(self, path: str, status: int, text: str) -> None:
        if status < 400:
            return
        said = f"{path} answered {status}: {text[:300]}"
        if status >= 500 or status in _BUSY:
            raise UnreachableError(said)
        hint = {
            401: "; set sampler.api_key_env to the variable that holds its key",
            404: "; is sampler.model the served name, and was the server started with VLLM_SERVER_DEV_MODE=1?",
        }.get(status, "")
        raise ServerError(f"sampler.urls: {self.url}{said}{hint}")


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError as error:
        raise BadAnswerError("an event of the stream is not JSON") from error
    if not isinstance(event, dict) or "error" in event:
        raise BadAnswerError(f"the stream says {text[:300]}")
    return event


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
