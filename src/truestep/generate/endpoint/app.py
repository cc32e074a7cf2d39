"""The endpoint's routes: OpenAI's API, completions of token ids, and rewards.

A key names a document: a client with the key can write that document and no other. Documents live in the generator's
event loop, and this module runs in another thread.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from truestep.generate.endpoint import requests
from truestep.generate.endpoint.answers import LAST_EVENT, Form, Streamed, as_event, usage
from truestep.generate.endpoint.errors import RequestError
from truestep.generate.endpoint.keys import Keys, Served
from truestep.generate.endpoint.requests import Asked

T = TypeVar("T")
_LARGEST_BODY = 2**24  # bytes
_CLIENT_GONE = 499  # the status of an answer that no client reads

_READ: Mapping[str, Callable[[Mapping[str, Any]], Asked]] = {
    "chat": requests.chat,
    "text": requests.text,
    "token_ids": requests.token_ids,
}


def make_app(keys: Keys, model: str, accepts: Callable[[str], bool], others: Sequence[Route] = ()) -> ASGIApp:
    """`model` is the model's name in answers. `accepts` tells whether a request is answered, given its Host header.
    `others` are routes of another protocol."""
    routes = _Routes(keys, model)
    app = Starlette(
        routes=[
            *others,
            Route("/v1/chat/completions", partial(routes.complete, "chat"), methods=["POST"]),
            Route("/v1/completions", partial(routes.complete, "text"), methods=["POST"]),
            Route("/inference/v1/generate", partial(routes.complete, "token_ids"), methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.one_model),
            Route("/v1/documents/{key}/reward", routes.reward, methods=["POST"]),
            Route("/v1/documents/{key}", routes.document),
            Route("/health", routes.health),
        ],
        exception_handlers={
            RequestError: _refused,
            ClientDisconnect: _gone,
            404: _not_served,
            405: _not_served,
            Exception: _failed,
        },
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        what = "without a secret, only requests to this machine's own names are answered, such as 127.0.0.1"
        refused = None if accepts(host) else _refused_for(RequestError(what, status=403))
        await (refused or app)(scope, receive, send)

    return answer


class _Routes:
    def __init__(self, keys: Keys, model: str):
        self._keys, self._model = keys, model
        self._numbers = itertools.count(1)

    async def complete(self, form: str, request: Request) -> Response:
        served = _served(request, self._keys)
        asked = _READ[form](await _body(request))
        name = {"chat": "chatcmpl", "text": "cmpl", "token_ids": "generate"}[form]
        answers = Form(form, f"{name}-{next(self._numbers)}", self._model, served.document.tokenizer)
        if asked.streams:
            return await _stream(request, served, asked, answers)
        work = served.run(lambda: served.document.complete(asked))
        choices = await _unless_gone(request, work)
        return JSONResponse(answers.answer(asked, choices))

    async def models(self, request: Request) -> Response:
        _served(request, self._keys)
        return JSONResponse({"object": "list", "data": [_model(self._model)]})

    async def one_model(self, request: Request) -> Response:
        _served(request, self._keys)
        if request.path_params["name"] != self._model:
            raise RequestError(f"there is no such model; there is {self._model}", status=404, code="model_not_found")
        return JSONResponse(_model(self._model))

    async def reward(self, request: Request) -> Response:
        served = _served(request, self._keys, request.path_params["key"])
        body = await _body(request)
        await asyncio.wrap_future(served.run(lambda: _post(served, body)))
        return JSONResponse({"object": "reward", "reward": body["reward"]})

    async def document(self, request: Request) -> Response:
        written = _served(request, self._keys, request.path_params["key"]).document
        counts = {"num_turns": len(written.completions), "num_sequences": len(written.sequences)}
        return JSONResponse({"object": "document", **counts, "cut_by": written.cut_by})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "truestep"}


def _served(request: Request, keys: Keys, named: str | None = None) -> Served:
    """Return the document of the request's key. `named` is the key in the path, if any; it must name the same
    document."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    served = keys.find(key.strip()) if scheme.lower() == "bearer" else None
    if served is None or (named is not None and keys.find(named) is not served):
        raise RequestError("the API key does not belong to a document in progress", status=401, code="invalid_api_key")
    return served


async def _body(request: Request) -> dict[str, Any]:
    too_large = RequestError(f"the body has more than {_LARGEST_BODY} bytes", status=413, code="request_too_large")
    said = request.headers.get("content-length", "")
    if said.isascii() and said.isdigit() and int(said[:20]) > _LARGEST_BODY:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_BODY:
            raise too_large
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not an object of JSON")
    return value


async def _post(served: Served, body: dict[str, Any]) -> None:
    served.document.post(body)
    served.posted()


async def _unless_gone(request: Request, work: "Future[T]") -> T:
    """Wait for work, and cancel it when the client disconnects."""
    waited: asyncio.Future[T] = asyncio.wrap_future(work)
    try:
        await _done_or_gone(request, waited)
        if waited.cancelled():
            raise RequestError("the document has ended", status=404, code="document_ended")
        return waited.result()
    finally:
        waited.cancel()


async def _done_or_gone(request: Request, waited: "asyncio.Future[Any]") -> None:
    """Wait for work. Raise `ClientDisconnect` if the client disconnects meanwhile."""
    gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(request))
    waits: set[asyncio.Future[Any]] = {waited, gone}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not waited.done():
            raise ClientDisconnect
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(request: Request, served: Served, asked: Asked, form: Form) -> Response:
    """Answer with a stream of events. An error in the request is found before the first event, so it is answered
    without a stream."""
    here = asyncio.get_running_loop()
    told: asyncio.Queue[tuple[int, Sequence[int]] | None] = asyncio.Queue()

    def tell(number: int, tokens: Sequence[int]) -> None:
        with contextlib.suppress(RuntimeError):  # the endpoint is closed
            here.call_soon_threadsafe(told.put_nowait, (number, list(tokens)))

    work = asyncio.wrap_future(served.run(lambda: served.document.complete(asked, tell)))
    work.add_done_callback(lambda _: told.put_nowait(None))
    first = await _first(request, told, work)
    if first is None and (work.cancelled() or work.exception() is not None):
        return _refused_for(_why(work))

    async def events() -> AsyncIterator[bytes]:
        choices = [Streamed(form, asked, number) for number in range(asked.count)]
        try:
            for choice in choices:
                for part in choice.first():
                    yield as_event(form.event([part]))
            following = first
            while following is not None:
                number, tokens = following
                for part in choices[number].more(tokens):
                    yield as_event(form.event([part]))
                following = await told.get()
            if work.cancelled() or work.exception() is not None:
                yield as_event(_why(work).body)
                return
            for choice, done in zip(choices, work.result(), strict=True):
                for part in choice.last(done):
                    yield as_event(form.event([part]))
            if asked.streams_usage:
                yield as_event(form.event([], usage=usage(work.result())))
            yield LAST_EVENT
        finally:
            work.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _first(request: Request, told: "asyncio.Queue[Any]", work: "asyncio.Future[Any]") -> Any:
    """Return the first item of the queue. Cancel the work if the client disconnects before it comes."""
    telling = asyncio.ensure_future(told.get())
    try:
        await _done_or_gone(request, telling)
    except ClientDisconnect:
        telling.cancel()
        work.cancel()
        raise
    return telling.result()


def _why(work: "asyncio.Future[Any]") -> RequestError:
    error = None if work.cancelled() else work.exception()
    if error is None:
        return RequestError("the document has ended", status=404, code="document_ended")
    return error if isinstance(error, RequestError) else RequestError("an internal error", status=500)


def _refused_for(error: RequestError) -> Response:
    return JSONResponse(error.body, status_code=error.status)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _refused_for(error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _not_served(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} is not served here" if status == 405 else "nothing is served here"
    return _refused_for(RequestError(what, status=status))


async def _failed(request: Request, error: Exception) -> Response:
    return _refused_for(RequestError("an internal error", status=500))
