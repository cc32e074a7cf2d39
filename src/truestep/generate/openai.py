"""A client of an OpenAI-compatible URL, for judges and teachers. The server has its own model; no weights are sent to
it."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import httpx

from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import Completion, OnTokens, Request
from truestep.generate.servers.check_answer import check_logprobs
from truestep.generate.servers.http import HttpClient
from truestep.generate.servers.protocol import check_size, most_tokens
from truestep.text import keep_secret, printable

T = TypeVar("T")

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0  # seconds before an overloaded or unreachable server is asked again
_LONGEST_WAIT = 300.0  # the most seconds, even if the server asks for more
_AS_ID = "token_id:"  # the beginning of a token's name with return_tokens_as_token_ids
_KEY_HINT = "; it needs the right api_key"


class _BusyError(UnreachableError):
    """The server is busy, and says how long to wait."""

    def __init__(self, problem: str, seconds: float):
        super().__init__(problem)
        self.seconds = seconds


class OpenAiUrl(HttpClient):
    """A client of one OpenAI-compatible server, for completions and chat. One event loop uses it.

    Example: `OpenAiUrl("https://judge.example/v1", "judge", api_key=os.environ["JUDGE_KEY"])`. `generate` completes
    requests as `Generator.generate` does, and needs a server that returns token ids, such as vLLM; `chat` works with
    any. A call that finds the server overloaded or out of reach is repeated until `timeout` seconds have passed.
    """

    hints: ClassVar[Mapping[int, str]] = {401: _KEY_HINT, 403: _KEY_HINT}
    kind = "an OpenAI-compatible server"

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None = None,
        timeout: float = 600.0,  # seconds of a whole call, including repetitions
        at_once: int = 64,  # most requests in flight
    ):
        if not url.startswith(("http://", "https://")):
            raise ServerError(
                f"{printable(url)} is no address of a server: it begins neither with http:// nor https://"
            )
        keep_secret(api_key)
        super().__init__(url, api_key, timeout)
        self.model = model
        self._places = asyncio.Semaphore(at_once)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a request. Its log-probs are as the server reports them. Raise `UnreachableError`, `BadAnswerError`
        or `ServerError` as the client of any server does."""
        body, most = self._body(request), most_tokens(request, 1)

        async def whole() -> Completion:
            answer = await self._post("/v1/completions", body, tokens=most)
            choice = _Choice(request, None)
            choice.read(answer if isinstance(answer, dict) else {})
            return self._checked(choice)

        async def streamed() -> Completion:
            choice = _Choice(request, on_tokens)
            try:
                await self._events("/v1/completions", body | {"stream": True}, choice.read, most)
            except (UnreachableError, BadAnswerError) as error:
                if choice.error is not None:  # `on_tokens` raised it, and it was mistaken for an unreadable answer
                    raise choice.error from None
                if choice.token_ids and isinstance(error, UnreachableError):  # the caller already has tokens of it
                    raise _StreamLostError(f"{self.url}: {error}, after {len(choice.token_ids)} tokens") from error
                raise
            return self._checked(choice)

        return await self._repeat(whole if on_tokens is None else streamed)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        **options: Any,  # other fields of the request's body, such as top_p, seed or response_format
    ) -> str:
        """Return the reply to a conversation. If it is cut off at `max_tokens`, return the part that there is."""
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            **options,
        }

        async def whole() -> str:
            answer = await self._post("/v1/chat/completions", body, tokens=max_tokens)
            try:
                content = answer["choices"][0]["message"]["content"]
            except (KeyError, IndexError, TypeError) as error:
                raise BadAnswerError(f"{self.url}: the answer has no message") from error
            if not isinstance(content, str):
                raise BadAnswerError(f"{self.url}: the message has no text")
            return content

        return await self._repeat(whole)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make an attempt. While the server is overloaded or out of reach, repeat it with growing delays."""
        delay, problem = _FIRST_DELAY, f"no answer within {self._timeout:g} s"
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    while True:
                        try:
                            return await attempt()
                        except _StreamLostError:
                            raise
                        except UnreachableError as error:
                            problem = str(error)
                            asked = error.seconds if isinstance(error, _BusyError) else 0.0
                        await asyncio.sleep(max(asked, delay * random.uniform(0.5, 1.0)))  # not all at the same moment
                        delay = min(2 * delay, _LONGEST_DELAY)
            except TimeoutError:
                if not limit.expired():
                    raise
        raise UnreachableError(f"{self.url}: {problem} (asked for {self._timeout:g} s)")

    def _body(self, request: Request) -> dict[str, Any]:
        options = request.options
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.token_ids),
            "temperature": options.temperature,
            "max_tokens": options.max_new_tokens,
            "top_p": options.top_p,
            "logprobs": 1,  # some servers take 0 for none
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # for servers that do not know the option above
        }
        if options.stop_ids:
            body["stop_token_ids"] = sorted(options.stop_ids)
        if options.stop:
            body["stop"] = list(options.stop)
        if options.top_k:
            body["top_k"] = options.top_k
        if options.min_p:
            body["min_p"] = options.min_p
        return body

    def _checked(self, choice: "_Choice") -> Completion:
        """Return a completion, or raise an error if it is not whole."""
        if choice.reason not in ("stop", "length"):
            shown = printable(repr(choice.reason), 60)
            raise BadAnswerError(f"{self.url}: finish_reason is {shown}, neither stop nor length")
        if not choice.has_ids:
            raise ServerError(
                f"{self.url} returns no token ids: it must obey return_token_ids or return_tokens_as_token_ids, as "
                "vLLM does; chat needs no ids"
            )
        check_logprobs(choice.logprobs, len(choice.token_ids))
        return Completion(
            choice.token_ids,
            [float(value) for value in choice.logprobs],
            stopped=choice.reason == "stop",
            server=self.url,
        )

    async def _check(self, path: str, response: httpx.Response) -> None:
        try:
            await super()._check(path, response)
        except UnreachableError as error:
            said = response.headers.get("Retry-After", "")
            if said.isascii() and said.isdigit():  # otherwise it is a date
                raise _BusyError(str(error), min(float(said), _LONGEST_WAIT)) from error
            raise


class _StreamLostError(UnreachableError):
    """A stream ended after some of its tokens."""


class _Choice:
    """One completion, as its parts arrive."""

    def __init__(self, request: Request, on_tokens: OnTokens | None):
        self._request, self._on_tokens = request, on_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.reason: Any = None
        self.has_ids = True
        self.error: Exception | None = None  # an error of `on_tokens`

    def read(self, event: Mapping[str, Any]) -> None:
        """Add a part of the completion, or all of it."""
        choices = event.get("choices")
        if not isinstance(choices, list) or not all(isinstance(piece, dict) for piece in choices):
            raise BadAnswerError("the answer has no list of choices")
        for piece in choices:  # a last event may have none
            logprobs = piece.get("logprobs")
            logprobs = logprobs if isinstance(logprobs, dict) else {}
            values = logprobs.get("token_logprobs")
            values = values if isinstance(values, list) else []
            ids = _ids(piece.get("token_ids"), logprobs.get("tokens"))
            self.has_ids = self.has_ids and (ids is not None or not (values or piece.get("text")))
            self.token_ids += ids or []
            self.logprobs += values
            self.reason = piece.get("finish_reason") or self.reason
            check_size(self._request, 1, piece.get("index"), len(self.token_ids))
            if ids and self._on_tokens is not None:
                self._pass_on(self._on_tokens, ids)

    def _pass_on(self, on_tokens: OnTokens, ids: list[int]) -> None:
        try:
            on_tokens(ids)
        except Exception as error:
            self.error = error
            raise


def _ids(token_ids: Any, names: Any) -> list[int] | None:
    """Return the ids of tokens, from the list of them or from their names. None: the server gives neither."""
    if token_ids is None:
        if not isinstance(names, list) or not all(isinstance(name, str) and name.startswith(_AS_ID) for name in names):
            return None
        with contextlib.suppress(ValueError):
            token_ids = [int(name.removeprefix(_AS_ID)) for name in names]
    if not isinstance(token_ids, list) or any(type(token) is not int or token < 0 for token in token_ids):
        raise BadAnswerError(f"token ids are {printable(repr(token_ids), 60)}")
    return token_ids
