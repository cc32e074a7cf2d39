"""HTTP as inference servers speak it: JSON, events, and each failure as one of the three that the fleet knows."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar

import httpx

from truestep.sampler.server.errors import BadAnswerError, ServerError, UnreachableError
from truestep.sampler.server.protocol import Description, InferenceServer
from truestep.text import printable

CONNECT_SECONDS = 10.0
QUICK_SECONDS = 30.0  # for an answer that takes no computing
_BUSY = (408, 425, 429)  # statuses below 500 that a later request may not meet again
_ALONE = {"Connection": "close"}  # no other request goes by the same connection
_KEY_HINT = "; set sampler.api_key_env to the variable that holds its key"


class HttpServer(InferenceServer):
    """An inference server behind HTTP. A kind of server adds its own paths and bodies."""

    hints: ClassVar[Mapping[int, str]] = {401: _KEY_HINT, 403: _KEY_HINT}  # ends of refusals, by status

    def __init__(self, url: str, model: str, api_key: str | None, timeout: float):
        self.url, self.model, self._timeout = url.rstrip("/").removesuffix("/v1"), model, timeout
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def describe(self) -> Description:
        await self._get("/health", QUICK_SECONDS)
        models = await self._get("/v1/models", QUICK_SECONDS)
        listed = models.get("data") if isinstance(models, dict) else None
        entries = listed if isinstance(listed, list) else ()
        named = {str(entry.get("id")): entry for entry in entries if isinstance(entry, dict)}
        return Description(tuple(named), named.get(self.model, {}).get("max_model_len"))

    async def tokenize(self, text: str) -> list[int] | None:
        answer = await self._post("/tokenize", {"model": self.model, "prompt": text}, QUICK_SECONDS)
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def _lives(self) -> bool:
        try:
            await self._get("/health", QUICK_SECONDS)
        except (UnreachableError, ServerError):
            return False
        return True

    async def _get(self, path: str, timeout: float) -> Any:
        return await self._json("GET", path, None, timeout)

    async def _post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        return await self._json("POST", path, body, timeout or self._timeout)

    async def _order(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """Ask for a change of the server, by a connection of its own: a server may close one with an error that it
        answers, and the next request would be lost on it."""
        return await self._json("POST", path, body, timeout or self._timeout, _ALONE)

    async def _tell(self, path: str, body: Any, timeout: float) -> None:
        """Ask for a change that is answered by a status alone, or with a text for people."""
        await self._request("POST", path, body, timeout, _ALONE)

    async def _request(
        self, method: str, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        async with _reaching(path, timeout):
            response = await self._http.request(method, path, json=body, headers=headers)
        self._check_status(path, response.status_code, response.text)
        return response

    async def _json(
        self, method: str, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        response = await self._request(method, path, body, timeout, headers)
        try:
            return response.json() if response.content else None
        except (ValueError, RecursionError) as error:  # RecursionError: nested without end
            raise BadAnswerError(f"{path} answered what is not JSON") from error

    async def _events(self, path: str, body: Any, read: Callable[[dict[str, Any]], None]) -> None:
        """Read server-sent events up to the one that says it is the last: a stream that only ends was cut short."""
        async with _reaching(path, self._timeout), self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                self._check_status(path, response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = _event(line.removeprefix("data: "))
                    try:
                        read(event)
                    except (AttributeError, TypeError) as error:
                        raise BadAnswerError(
                            f"an event of the stream has another form than that of {self.advice.kind}"
                        ) from error
        raise UnreachableError(f"{path}: the stream ended before its end")

    def _check_status(self, path: str, status: int, text: str) -> None:
        if status < 400:
            return
        problem = f"{path} answered {status}: {printable(text)}"
        if status >= 500 or status in _BUSY:
            raise UnreachableError(problem)
        raise ServerError(f"sampler.urls: {self.url}{problem}{self.hints.get(status, '')}")


@contextlib.asynccontextmanager
async def _reaching(path: str, timeout: float) -> AsyncIterator[None]:
    """Give the whole answer `timeout` seconds, not each of its bytes, and name what goes wrong on its way."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except (TimeoutError, httpx.TimeoutException) as error:
        raise UnreachableError(f"{path} gave no whole answer within {timeout:g} s") from error
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise UnreachableError(f"{path}: {printable(repr(error))}") from error


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError("an event of the stream is not JSON") from error
    if not isinstance(event, dict) or "error" in event:
        raise BadAnswerError(f"the stream says {printable(text)}")
    return event
