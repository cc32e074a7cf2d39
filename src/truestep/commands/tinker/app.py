"""The routes of the protocol, under /api/v1. They run in the server's thread, and submit jobs to the compute thread."""

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from truestep.commands.tinker import rest, wire
from truestep.commands.tinker.bodies import read_beginning, read_body, read_json
from truestep.commands.tinker.checkpoints import Adapted, Checkpoints
from truestep.commands.tinker.errors import ApiError, JobError, not_served
from truestep.commands.tinker.objects import Job, Model, Result, Sampler
from truestep.commands.tinker.orders import JSON_PATHS, Orders, check_optimizer, check_own, metadata_of, whole_number
from truestep.commands.tinker.requests import Model as Fits
from truestep.commands.tinker.requests import asked
from truestep.commands.tinker.state import State
from truestep.commands.tinker.tenants import Tenants, older_name
from truestep.commands.tinker.usage import exposition
from truestep.commands.tinker.work import Create, Sample, seed_of
from truestep.commands.tinker.writes import Stopped

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 20.0  # how long a request for a result waits for it; the client's own limit is 45 s
_MOST_RANK = 512
_PROTOBUF = "application/x-protobuf"

Body = dict[str, Any]
Route_ = Callable[[str, Body], Awaitable[Any]]


@dataclass(frozen=True)
class Served:
    """The base model and the state that the routes work on."""

    name: str  # the base model's name
    names: tuple[str, ...]  # names that clients may use for the base model
    tokenizer: str | None  # where the client finds the tokenizer; None: nowhere
    fits: Fits
    orders: Orders
    has_tokenizer: bool
    tenants: Tenants
    state: State
    checkpoints: Checkpoints
    poll_seconds: float = _POLL_SECONDS


def routes(served: Served) -> list[Route]:
    """Return the routes of the protocol."""
    own = _Routes(served)
    posts: Mapping[str, Route_] = {
        "client/config": own.client_config,
        "client/dynamic_config": own.dynamic_config,
        "create_session": own.create_session,
        "session_heartbeat": own.heartbeat,
        "create_sampling_session": own.create_sampling_session,
        "join_sampling_session": own.join_sampling_session,
        "create_model": own.create_model,
        "get_info": own.get_info,
        "unload_model": own.unload_model,
        **{path: own._ordered(path) for path in JSON_PATHS},
        "load_weights": own.load_weights,
        "asample": own.sample,
        "cancel_future": own.cancel,
        "telemetry": own.telemetry,
        **{name: _refusing(what) for name, what in _NOT_SERVED.items()},
    }
    made = [Route(f"/api/v1/{name}", own.json(route), methods=["POST"]) for name, route in posts.items()]
    made += [
        Route("/api/v1/healthz", own.health),
        Route("/metrics", own.metrics),
        Route("/api/v1/get_server_capabilities", own.guarded(own.capabilities)),
        Route("/api/v1/forward_backward", own.guarded(own.forward_backward), methods=["POST"]),
        Route("/api/v1/retrieve_future", own.guarded(own.retrieve), methods=["POST"]),
    ]
    return made + rest.routes(served.state, served.checkpoints, served.name, own.guarded)


_NOT_SERVED = {
    "create_custom_loss": "a loss that runs on the server",
    "copy_weights": "a copy of weights",
    "retrieve_futures": "a poll of many futures",
    "auth/token": "an exchange of credentials",
    "sessions/search": "a search of sessions",
    "forward": "the path forward, which is forward_backward with forward_only,",
}


def _refusing(what: str) -> Route_:
    async def refuse(tenant: str, body: Body) -> Any:
        raise not_served(what)

    return refuse


class _Routes:
    def __init__(self, served: Served):
        self._served, self._state, self._orders = served, served.state, served.orders
        self._seen: set[str] = set()  # tenants that have sent a request

    # All requests

    def guarded(
        self, handler: Callable[[str, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: find the tenant first, and return errors in the client's format."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(await self._tenant(request), request)
            except ApiError as error:
                wait = {} if error.wait is None else {"retry-after": f"{math.ceil(error.wait)}"}
                return JSONResponse({"error": str(error), "detail": str(error)}, error.status, wait)
            except wire.WireError as error:
                return JSONResponse({"error": str(error), "detail": str(error)}, 400)
            except ClientDisconnect:
                return Response(status_code=499)
            except Stopped:  # the client sends the request again
                return JSONResponse({"error": "the server ends"}, 503)
            except OSError as error:  # the client sends the request again
                log.exception("a request could not be kept")
                return JSONResponse({"error": f"the request cannot be kept: {error.strerror}"}, 503)

        return handle

    def json(self, route: Route_) -> Callable[[Request], Awaitable[Response]]:
        async def handler(tenant: str, request: Request) -> Response:
            return JSONResponse(await route(tenant, read_json(await read_body(request))))

        return self.guarded(handler)

    async def _tenant(self, request: Request) -> str:
        key, served = _key(request), self._served
        tenant = served.tenants.of(key)
        if tenant not in self._seen and served.tenants.by_keys:
            older = older_name(key or "")
            rename = self._state.write_of_tenant(tenant, lambda: served.checkpoints.rename_tenant(older, tenant))
            await _written(rename)
        self._seen.add(tenant)
        return tenant

    # Server

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer with the metrics of all tenants, for Prometheus."""
        try:
            self._served.tenants.check_metrics(_key(request))
        except ApiError as error:
            return Response(str(error), error.status)
        return PlainTextResponse(exposition(*self._state.used(), self._state.busy))

    async def capabilities(self, tenant: str, request: Request) -> Response:
        about = {"model_name": self._served.name, "max_context_length": self._served.fits.longest}
        return JSONResponse({"supported_models": [{**about, "trainable": True, "sampleable": True}]})

    async def client_config(self, tenant: str, body: Body) -> Any:
        return {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "use_pyqwest_transport": False,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": True,
            "custom_loss_server_side": False,
        }

    async def dynamic_config(self, tenant: str, body: Body) -> Any:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    async def telemetry(self, tenant: str, body: Body) -> Any:
        """Accept the client's telemetry, and discard it."""
        return {"status": "accepted"}

    # Sessions

    async def create_session(self, tenant: str, body: Body) -> Any:
        name = body.get("display_name")
        if name is not None and not isinstance(name, str):
            raise ApiError("display_name: a text is expected")
        metadata = metadata_of(body.get("user_metadata"))
        session = await _written(self._state.write_of_tenant(tenant, lambda: self._state.begin(tenant, metadata, name)))
        return {"type": "create_session", "session_id": session.id}

    async def heartbeat(self, tenant: str, body: Body) -> Any:
        self._state.session(tenant, body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def create_sampling_session(self, tenant: str, body: Body) -> Any:
        state = self._state
        session = state.session(tenant, body.get("session_id"))
        name = f"{session.id}:sample:{whole_number(body, 'sampling_session_seq_id')}"
        path = body.get("model_path")
        if path is None and body.get("base_model") not in self._served.names:
            raise self._no_model(body.get("base_model"))

        def add() -> None:
            if path is not None:
                self._served.checkpoints.find(tenant, path)
            state.session(tenant, session.id)  # it may have finished in the meantime
            if name not in state.samplers:
                state.add_sampler(Sampler(name, tenant, session.id, self._served.name, path))

        await _written(state.write(session, add))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def join_sampling_session(self, tenant: str, body: Body) -> Any:
        sampler = self._state.sampler(tenant, body.get("sampling_session_id"))
        session = self._state.session(tenant, sampler.session)
        count = await _written(self._state.write(session, lambda: self._state.add_clone(session)))
        return {"type": "join_sampling_session", "client_counter": count}

    def _no_model(self, name: Any) -> ApiError:
        return ApiError(f"base_model is {name!r:.200}, and this server has {self._served.name}", 404)

    # Models

    async def create_model(self, tenant: str, body: Body) -> Any:
        if body.get("base_model") not in self._served.names:
            raise self._no_model(body.get("base_model"))
        check_optimizer(body.get("optimizer_config"))
        given = body.get("lora_config")
        if not isinstance(given, dict):
            raise not_served("a model without lora_config")
        rank, seed = given.get("rank"), given.get("seed")
        if type(rank) is not int or not 1 <= rank <= _MOST_RANK:
            raise ApiError(f"lora_config: rank is {rank!r:.60}: a whole number from 1 to {_MOST_RANK} is expected")
        if seed is not None and (type(seed) is not int or not -(2**62) <= seed < 2**62):
            raise ApiError("lora_config: seed: a whole number is expected")
        mlp, attention = given.get("train_mlp", True) is True, given.get("train_attn", True) is True
        if not (mlp or attention):
            raise not_served("an adapter of the unembedding alone")
        name = self._model_name(tenant, body)
        # Without a given seed, each model gets different initial values.
        seed = seed_of(name, 0, None) % 2**31 if seed is None else abs(seed)
        return await self._new(tenant, body, name, Adapted(rank, seed, [], mlp, attention))

    def _model_name(self, tenant: str, body: Body) -> str:
        session = self._state.session(tenant, body.get("session_id"))
        return f"{session.id}:train:{whole_number(body, 'model_seq_id')}"

    async def _new(self, tenant: str, body: Body, name: str, adapted: Adapted, **how: Any) -> Body:
        """Make a model, and promise it. `how`: the checkpoint that it begins with."""
        session, metadata = self._state.session(tenant, body.get("session_id")), metadata_of(body.get("user_metadata"))

        def make() -> Job:
            given = Model(name, tenant, session.id, self._served.name, adapted, metadata)
            work = Create(self._state.add_model(given, **how), **how)
            reads = work.checkpoint
            return self._state.submit(Job(f"{name}:0", tenant, session.id, work, model=name, reads=reads))

        return _promise(await _written(self._state.write(session, make)))

    async def get_info(self, tenant: str, body: Body) -> Any:
        model = self._state.model(tenant, body.get("model_id"))
        name = self._served.name
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"model_name": name, "tokenizer_id": self._served.tokenizer},
            "model_name": name,
            "is_lora": True,
            "lora_rank": model.adapted.rank,
        }

    async def unload_model(self, tenant: str, body: Body) -> Any:
        raise not_served("unload_model (finish the session instead, which frees its models)")

    # Training

    async def forward_backward(self, tenant: str, request: Request) -> Response:
        if request.headers.get("content-type", "") != _PROTOBUF or request.headers.get("content-encoding"):
            raise ApiError(f"the body of forward_backward is uncompressed {_PROTOBUF}", 415)
        body, too_large = await read_beginning(request)
        head = await asyncio.to_thread(wire.read_head, body)
        model = self._state.model(tenant, head.model_id)
        known = self._state.known(tenant, f"{model.id}:{head.seq_id}")
        if known is not None:
            return JSONResponse(_promise(known))

        return JSONResponse(await self._order(model, head.seq_id, "forward_backward", body, too_large))

    def _ordered(self, path: str) -> Route_:
        """Return the route of a request that a model computes in its turn."""

        async def route(tenant: str, body: Body) -> Any:
            model = self._state.model(tenant, body.get("model_id"))
            seq = whole_number(body, "seq_id")
            return await self._order(model, seq, path, json.dumps(body).encode())

        return route

    async def _order(self, model: Model, seq: int, path: str, body: bytes, refused: ApiError | None = None) -> Body:
        """Write a request of a model, and promise its result."""

        def order() -> Job:
            job = self._orders.job(model, seq, path, body, refused or self._state.too_grown(model, path))
            if (said := self._state.too_large(job)) is not None:
                job = self._orders.job(model, seq, path, body, ApiError(said))
            return self._state.submit(job, model)

        return _promise(await _written(self._state.write_request(model, len(body), order)))

    # Checkpoints

    async def load_weights(self, tenant: str, body: Body) -> Any:
        if body.get("model_id") is not None:
            return await self._ordered("load_weights")(tenant, body)
        check_own(body)
        check_optimizer(body.get("optimizer_config"))
        path = body.get("path")
        found = self._state.write_of_tenant(tenant, lambda: self._served.checkpoints.find(tenant, path))
        saved, _ = await _written(found)
        if body.get("base_model") is not None and body["base_model"] not in self._served.names:
            raise self._no_model(body.get("base_model"))
        name = self._model_name(tenant, body)
        how: Body = {"checkpoint": saved.path, "optimizer": body.get("optimizer") is True}
        return await self._new(tenant, body, name, Adapted(**saved.adapted), **how)

    # Samples

    async def sample(self, tenant: str, body: Body) -> Any:
        state = self._state
        given = body.get("sampling_session_id")
        if given is None:
            raise not_served("a request for samples without a sampling session")
        sampler = state.sampler(tenant, given)
        seq = whole_number(body, "seq_id")
        wanted = asked(body, self._served.fits)
        if wanted.draw.stop and not self._served.has_tokenizer:
            raise ApiError("sampling_params: stop: the model has no tokenizer: give tokens, and no texts")
        work = Sample(sampler, wanted, seed_of(sampler.id, seq, wanted.seed))
        together = ("sample", sampler.path, sampler.model, sampler.version, sampler.tenant if sampler.path else "")
        size = 32 * len(wanted.prompt) + (0 if wanted.targets is None else wanted.targets.nbytes)
        cost = wanted.count * wanted.draw.max_new_tokens
        sizes: Body = {"size": size, "cost": cost, "tokens": len(wanted.prompt), "reads": sampler.path}
        job = Job(f"{sampler.id}:{seq}", tenant, sampler.session, work, together, **sizes)
        if (said := state.too_large(job)) is not None:
            raise ApiError(said)
        job = state.submit(job)
        ids = [f"{job.id}:{number}" for number in range(wanted.count)]
        return {**_promise(job), "sample_sequence_ids": ids}

    # Futures

    async def cancel(self, tenant: str, body: Body) -> Any:
        self._state.cancel(self._state.future(tenant, body.get("request_id")))
        return {}

    async def retrieve(self, tenant: str, request: Request) -> Response:
        """Return a job's result. If it is not ready after a while, return its queue state."""
        body = read_json(await read_body(request))
        job = self._state.future(tenant, body.get("request_id"))
        waited = asyncio.wrap_future(job.future)
        done, _ = await asyncio.wait([waited], timeout=self._served.poll_seconds)
        if not done:
            queue, reason = self._state.queue_state(job)
            answer = {"type": "try_again", "request_id": job.id, "queue_state": queue, "queue_state_reason": reason}
            return JSONResponse(answer, 408)
        self._state.retrieved(job)
        error = waited.exception()
        if error is not None:
            own = isinstance(error, JobError)
            said = str(error) if own else f"an internal error ({error})"
            return JSONResponse({"error": said, "category": "user" if own else "server"})
        return _answer(waited.result())


def _written(future: "Future[T]") -> "asyncio.Future[T]":
    """Return the result of a write, for the event loop."""
    return asyncio.wrap_future(future)


def _key(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else None)


def _answer(result: Result) -> Response:
    if result.json is None:
        return Response(result.message, media_type=_PROTOBUF)
    return JSONResponse(result.json)


def _promise(job: Job) -> dict[str, Any]:
    return {"request_id": job.id, "model_id": job.model}
