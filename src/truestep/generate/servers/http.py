"""HTTP, JSON and server-sent events. Each failure is raised as one of the three errors of `InferenceServer`."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from truestep.files.bounded import MIB, RECORD, TooLargeError, load_json, too_long
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.hosts import leads_to_loopback
from truestep.generate.servers.protocol import Description, InferenceServer
from truestep.generate.servers.routed import bytes_of_routes
from truestep.text import printable

CONNECT_SECONDS = 10.0
QUICK_SECONDS = 30.0  # timeout of requests for which the server computes nothing
_BUSY = (408, 425, 429)  # statuses below 500 after which a later request may succeed
_ALONE = {"Connection": "close"}  # the connection is not reused
_IDENTITY = {"Accept-Encoding": "identity"}  # the size of a compressed answer could not be bounded
_SMALL = 4 * MIB  # bytes of an answer without tokens
_TOKEN = 512  # bytes of a token: its id, log-prob and text, which an answer contains up to four times
_SHOWN = 64 * 1024  # bytes of an error message that are read
_KEY_HINT = "; set sampler.api_key_env to the variable that holds its key"


def answers(url: str) -> bool:
    """Tell whether a server of this machine answers a GET request with success."""
    try:
        return httpx.get(url, timeout=QUICK_SECONDS, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class HttpClient:
    """Requests to one address. Answers are bounded and uncompressed, and redirects are not followed. No cookie is kept,
    because a server could set new ones in each answer, and all later requests would carry them."""

    hints: ClassVar[Mapping[int, str]] = {}  # appended to error messages, by status
    setting: ClassVar[str] = ""  # begins error messages: the option that names the address
    kind = "a server"  # in error messages

    def __init__(self, url: str, api_key: str | None, timeout: float):
        self.url, self._timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=_IDENTITY | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            # A proxy of the environment cannot reach this machine's loopback.
            trust_env=not leads_to_loopback(urlsplit(self.url).netloc),
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str, timeout: float) -> Any:
        return await self._json("GET", path, None, timeout)

    async def _post(self, path: str, body: Any = None, timeout: float | None = None, tokens: int = 0) -> Any:
        """Send a POST request whose answer may hold up to `tokens` tokens. Return its JSON."""
        return await self._json("POST", path, body, timeout or self._timeout, tokens=tokens)

    async def _order(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """Send a POST request that changes the server's state, on a connection of its own, because a server may close
        the connection after an error, and the next request on it would be lost."""
        return await self._json("POST", path, body, timeout or self._timeout, _ALONE)

    async def _tell(self, path: str, body: Any, timeout: float) -> None:
        """Send a POST request that changes the server's state. The answer's body is ignored."""
        await self._request("POST", path, body, timeout, _ALONE)

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        tokens: int = 0,
    ) -> bytes:
        async with _reaching(path, timeout), self._http.stream(method, path, json=body, headers=headers) as response:
            await self._check(path, response)
            return b"".join([piece async for piece in _pieces(path, response, self._size(tokens))])

    async def _json(
        self,
        method: str,
        path: str,
        body: Any,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        tokens: int = 0,
    ) -> Any:
        content = await self._request(method, path, body, timeout, headers, tokens)
        try:
            return load_json(content, self._scale(tokens)) if content else None
        except TooLargeError as error:
            raise BadAnswerError(f"{path}: the answer is not read: {error}") from error
        except ValueError as error:
            raise BadAnswerError(f"{path} answered what is not JSON") from error

    async def _events(self, path: str, body: Any, read: Callable[[dict[str, Any]], None], tokens: int) -> None:
        """Read server-sent events up to `[DONE]`; a stream that ends without it was cut short. `tokens`: the most
        tokens of an event; some servers repeat all tokens so far in each event."""
        async with _reaching(path, self._timeout), self._http.stream("POST", path, json=body) as response:
            await self._check(path, response)
            async for line in _lines(path, response, self._size(tokens)):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    event = _event(line.removeprefix(b"data: "), self._scale(tokens))
                    try:
                        read(event)
                    except (AttributeError, TypeError) as error:
                        raise BadAnswerError(f"an event of the stream is not in {self.kind}'s format") from error
        raise UnreachableError(f"{path}: the stream ended early")

    def _size(self, tokens: int) -> int:
        """Return the most bytes of a well-formed answer with `tokens` tokens."""
        return _SMALL + _TOKEN * tokens

    def _scale(self, tokens: int) -> int:
        return 1 + self._size(tokens) // RECORD

    async def _check(self, path: str, response: httpx.Response) -> None:
        """Raise an error unless the status is 2xx. At most `_SHOWN` bytes of the body are read for the message."""
        if response.status_code // 100 == 2:
            return
        said = b""
        async for piece in response.aiter_raw():
            said += piece
            if len(said) >= _SHOWN:
                break
        self._check_status(path, response.status_code, said[:_SHOWN].decode(errors="replace"))
        moved = printable(response.headers.get("Location", "elsewhere"))
        raise ServerError(
            f"{self.setting}{self.url}{path} answered {response.status_code} and points to {moved}, which is not "
            "followed: give the address of the server itself"
        )

    def _check_status(self, path: str, status: int, text: str) -> None:
        """Raise the error for a status of 400 or above."""
        if status < 400:
            return
        problem = f"{path} answered {status}: {printable(text)}"
        if status >= 500 or status in _BUSY:
            raise UnreachableError(problem)
        raise ServerError(f"{self.setting}{self.url}{problem}{self.hints.get(status, '')}")


class HttpServer(HttpClient, InferenceServer):
    """Base class of inference servers that speak HTTP. A subclass adds its own paths and bodies."""

    hints: ClassVar[Mapping[int, str]] = {401: _KEY_HINT, 403: _KEY_HINT}
    setting: ClassVar[str] = "sampler.urls: "

    def __init__(self, url: str, model: str, api_key: str | None, timeout: float):
        super().__init__(url, api_key, timeout)
        self.model, self.kind = model, self.advice.kind

    def _size(self, tokens: int) -> int:
        return super()._size(tokens) + bytes_of_routes(self.routes, tokens)

    async def describe(self) -> Description:
        await self._get("/health", QUICK_SECONDS)
        models = await self._get("/v1/models", QUICK_SECONDS)
        listed = models.get("data") if isinstance(models, dict) else None
        entries = listed if isinstance(listed, list) else ()
        named = {str(entry.get("id")): entry for entry in entries if isinstance(entry, dict)}
        return Description(tuple(named), named.get(self.model, {}).get("max_model_len"))

    async def tokenize(self, text: str) -> list[int] | None:
        asked = {"model": self.model, "prompt": text}
        answer = await self._post("/tokenize", asked, QUICK_SECONDS, tokens=len(text.encode()))
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def _lives(self) -> bool:
        try:
            await self._get("/health", QUICK_SECONDS)
        except (UnreachableError, ServerError):
            return False
        return True


async def _pieces(path: str, response: httpx.Response, most: float = math.inf) -> AsyncIterator[bytes]:
    """Yield an answer's bytes as they arrive. Raise an error if there are more than `most`, or if it is compressed."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BadAnswerError(
            f"{path}: the answer is compressed ({printable(encoding, 60)}), which was not requested: it is not read"
        )
    read = 0
    async for piece in response.aiter_raw():
        read += len(piece)
        if read > most:
            raise BadAnswerError(f"{path}: the answer is not read: {too_long(int(most))}, more than it may hold")
        yield piece


async def _lines(path: str, response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Yield the lines of an answer. Raise an error if one has more than `most` bytes."""
    line = bytearray()  # grows in place: a line may come in millions of pieces
    async for piece in _pieces(path, response):
        for number, part in enumerate(piece.split(b"\n")):
            if number:
                yield bytes(line.rstrip(b"\r"))
                line.clear()
            line += part
            if len(line) > most:
                raise BadAnswerError(f"{path}: an event is not read: {too_long(most)}, more than it may hold")


@contextlib.asynccontextmanager
async def _reaching(path: str, timeout: float) -> AsyncIterator[None]:
    """Limit the time for the whole answer, not for each read, and raise transport errors as `UnreachableError`."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except (TimeoutError, httpx.TimeoutException) as error:
        raise UnreachableError(f"{path} gave no whole answer within {timeout:g} s") from error
    except httpx.TransportError as error:
        raise UnreachableError(f"{path}: {printable(repr(error))}") from error


def _event(text: bytes, scale: int) -> dict[str, Any]:
    try:
        event = load_json(text, scale)
    except ValueError as error:
        raise BadAnswerError("an event of the stream is not JSON that can be read") from error
    if not isinstance(event, dict) or "error" in event:
        raise BadAnswerError(f"the stream says {printable(text)}")
    return event
