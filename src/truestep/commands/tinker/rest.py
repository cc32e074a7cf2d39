"""The routes that list, describe and delete runs, checkpoints, sessions and samplers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from truestep.commands.tinker.bodies import read_body, read_json
from truestep.commands.tinker.checkpoints import SAMPLER, WEIGHTS, Checkpoints, Saved, stamp, time_to_live
from truestep.commands.tinker.errors import ApiError, not_served, unknown
from truestep.commands.tinker.objects import Model
from truestep.commands.tinker.state import State

T = TypeVar("T")
Handler = Callable[[str, Request], Awaitable[Response]]
Guard = Callable[[Handler], Callable[[Request], Awaitable[Response]]]


def routes(state: State, checkpoints: Checkpoints, base: str, guarded: Guard) -> list[Route]:
    own = _Rest(state, checkpoints, base)
    run = "/api/v1/training_runs/{run}"
    one = run + "/checkpoints/{kind}/{name}"
    return [
        Route("/api/v1/training_runs", guarded(own.runs)),
        Route(run, guarded(own.run)),
        Route(run + "/checkpoints", guarded(own.of_run)),
        Route(one, guarded(own.remove), methods=["DELETE"]),
        Route(one + "/ttl", guarded(own.set_ttl), methods=["PUT"]),
        Route(one + "/publish", guarded(own.publish), methods=["POST", "DELETE"]),
        Route("/api/v1/checkpoints", guarded(own.of_tenant)),
        Route("/api/v1/weights_info", guarded(own.weights_info), methods=["POST"]),
        Route("/api/v1/sessions", guarded(own.sessions)),
        Route("/api/v1/sessions/{session}", guarded(own.session)),
        Route("/api/v1/sessions/{session}/finish", guarded(own.finish), methods=["POST"]),
        Route("/api/v1/samplers/{sampler}", guarded(own.sampler)),
    ]


class _Rest:
    def __init__(self, state: State, checkpoints: Checkpoints, base: str):
        self._state, self._checkpoints, self._base = state, checkpoints, base

    async def runs(self, tenant: str, request: Request) -> Response:
        """List a tenant's runs: those of live models, and those with checkpoints."""
        shown = await self._on_disk(tenant, lambda: self._runs(tenant))
        page, cursor = _page(request, sorted(shown, key=lambda one: one["last_request_time"], reverse=True))
        return JSONResponse({"training_runs": page, "cursor": cursor})

    def _on_disk(self, tenant: str, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Read or change a tenant's checkpoints, in that tenant's order."""
        return asyncio.wrap_future(self._state.write_of_tenant(tenant, work))

    def _runs(self, tenant: str) -> list[dict[str, Any]]:
        with self._state.lock:
            models = [model for model in self._state.models.values() if model.tenant == tenant]
        found: dict[str, list[Saved]] = {}
        for saved in self._checkpoints.of_tenant(tenant):
            found.setdefault(saved.run, []).append(saved)
        shown = [self._shown(model, found.pop(model.id, [])) for model in models]
        return shown + [self._of_checkpoints(run, own) for run, own in found.items()]

    async def run(self, tenant: str, request: Request) -> Response:
        name = request.path_params["run"]
        model, found = self._state.models.get(name), await self._found(tenant, name)
        if model is not None and model.tenant == tenant:
            return JSONResponse(self._shown(model, found))
        if not found:
            raise unknown("training run")
        return JSONResponse(self._of_checkpoints(name, found))

    async def _found(self, tenant: str, run: str) -> list[Saved]:
        return await self._on_disk(tenant, lambda: self._checkpoints.of_run(tenant, run))

    def _shown(self, model: Model, found: list[Saved]) -> dict[str, Any]:
        return {
            "training_run_id": model.id,
            "base_model": model.base,
            "model_owner": "you",
            "is_lora": True,
            "lora_rank": model.adapted.rank,
            "last_request_time": stamp(model.last_request),
            "user_metadata": model.user_metadata,
            **self._last(found),
        }

    def _of_checkpoints(self, run: str, found: list[Saved]) -> dict[str, Any]:
        """Describe a run without a live model by its checkpoints."""
        return {
            "training_run_id": run,
            "base_model": self._base,
            "model_owner": "you",
            "is_lora": True,
            "lora_rank": found[0].adapted["rank"],
            "last_request_time": stamp(found[0].time),
            **self._last(found),
        }

    @staticmethod
    def _last(found: list[Saved]) -> dict[str, Any]:
        last = {kind: next((one.shown() for one in found if one.kind == kind), None) for kind in (WEIGHTS, SAMPLER)}
        return {"last_checkpoint": last[WEIGHTS], "last_sampler_checkpoint": last[SAMPLER]}

    async def of_run(self, tenant: str, request: Request) -> Response:
        name = request.path_params["run"]
        model, found = self._state.models.get(name), await self._found(tenant, name)
        if not found and (model is None or model.tenant != tenant):
            raise unknown("training run")
        return JSONResponse({"checkpoints": [one.shown() for one in found], "cursor": None})

    async def of_tenant(self, tenant: str, request: Request) -> Response:
        found = await self._on_disk(tenant, lambda: self._checkpoints.of_tenant(tenant))
        page, cursor = _page(request, [one.shown() for one in found])
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def remove(self, tenant: str, request: Request) -> Response:
        await self._on_disk(tenant, lambda: self._checkpoints.remove(tenant, _path(request)))
        return JSONResponse({})

    async def set_ttl(self, tenant: str, request: Request) -> Response:
        seconds = time_to_live((read_json(await read_body(request))).get("ttl_seconds"))
        await self._on_disk(tenant, lambda: self._checkpoints.set_expiry(tenant, _path(request), seconds))
        return JSONResponse({})

    async def publish(self, tenant: str, request: Request) -> Response:
        raise not_served("a checkpoint that others may read")

    async def weights_info(self, tenant: str, request: Request) -> Response:
        path = (read_json(await read_body(request))).get("tinker_path")
        saved, _ = await self._on_disk(tenant, lambda: self._checkpoints.find(tenant, path))
        adapted = saved.adapted
        return JSONResponse(
            {
                "base_model": self._base,
                "is_lora": True,
                "lora_rank": adapted["rank"],
                "train_unembed": False,
                "train_mlp": adapted["train_mlp"],
                "train_attn": adapted["train_attn"],
            }
        )

    async def sessions(self, tenant: str, request: Request) -> Response:
        page, _ = _page(request, [one.id for one in self._state.all_sessions(tenant)])
        return JSONResponse({"sessions": page})

    async def session(self, tenant: str, request: Request) -> Response:
        session = self._state.any_session(tenant, request.path_params["session"])
        return JSONResponse(
            {
                "training_run_ids": session.models,
                "sampler_ids": session.samplers,
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    async def finish(self, tenant: str, request: Request) -> Response:
        session = self._state.any_session(tenant, request.path_params["session"])
        await asyncio.wrap_future(self._state.finish(session))
        return JSONResponse({})

    async def sampler(self, tenant: str, request: Request) -> Response:
        sampler = self._state.sampler(tenant, request.path_params["sampler"])
        return JSONResponse({"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path})


def _path(request: Request) -> str:
    named = request.path_params
    return f"tinker://{named['run']}/{named['kind']}/{named['name']}"


def _page(request: Request, every: list[Any]) -> tuple[list[Any], dict[str, int]]:
    numbers = {}
    for name, otherwise in (("limit", 20), ("offset", 0)):
        given = request.query_params.get(name, str(otherwise))
        if not given.isascii() or not given.isdigit() or int(given[:12]) > 10**6:
            raise ApiError(f"{name}: a whole number is expected")
        numbers[name] = int(given)
    page = every[numbers["offset"] : numbers["offset"] + numbers["limit"]]
    return page, {**numbers, "total_count": len(every)}
