"""A vLLM server: the paths, bodies and status codes of vLLM's API."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from truestep.generate.errors import BadAnswerError, ForgottenError, ServerError, UnreachableError
from truestep.generate.generator import Completion, Request
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.http import QUICK_SECONDS, HttpServer
from truestep.generate.servers.nccl_link import Link
from truestep.generate.servers.protocol import Advice, check_size, most_tokens
from truestep.generate.servers.routed import read_npy
from truestep.model.adapter_files import is_adapter
from truestep.text import printable
from truestep.types import RouteShape
from truestep.weight_transfer.nccl import NcclWire

# Sampling without truncation or penalties, whatever the model's defaults are.
_PLAIN_SAMPLING: dict[str, Any] = {
    "ignore_eos": True,  # the trainer sends its own list of stop tokens
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


_PATIENCE = 60.0  # most seconds for ranks to join, and for one message of weights
_REFUSED = "answered 500"  # vLLM's status for all errors of its engine
_ADAPTERS = (
    " For adapters start the server with --enable-lora, --max-lora-rank (adapter.rank or more) and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)


class Vllm(HttpServer):
    hints: ClassVar[Mapping[int, str]] = {
        **HttpServer.hints,
        404: "; is sampler.model the served name, and was the server started with VLLM_SERVER_DEV_MODE=1?",
    }
    advice = Advice(
        kind="a vLLM server",
        longer_texts="start it with --max-model-len {tokens} or more",
        processed_logprobs="Start the server with --logprobs-mode processed_logprobs",
        emptied_cache="although /reset_prefix_cache was called",
        loaded="although reload_weights was called",
        routes="Start the server with --enable-return-routed-experts, and set sampler.pause to wait or abort: keep "
        "needs streams, and vLLM's streams do not return experts",
    )

    _device: torch.device | None = None  # the trainer's device from which weights are sent; None: over the disk
    _link: Link | None = None  # None: not joined, or weights are not sent
    _adapter: str | None = None  # the name of the adapter that was loaded last; each version has another name

    async def complete(self, request: Request, n: int) -> list[Completion]:
        answer = await self._post("/v1/completions", self._body(request, n), tokens=most_tokens(request, n))
        return read_choices(answer, request, n, self.routes)

    async def stream(
        self, request: Request, n: int, on_tokens: Callable[[int, Sequence[int]], None]
    ) -> list[Completion]:
        choices: dict[int, dict[str, Any]] = {}

        def read_event(event: dict[str, Any]) -> None:
            for piece in event.get("choices") or ():
                index, tokens = piece.get("index"), piece.get("token_ids") or []
                empty = {"index": index, "token_ids": [], "logprobs": {"token_logprobs": []}}
                choice = choices.setdefault(index, empty)
                choice["token_ids"] += tokens
                choice["logprobs"]["token_logprobs"] += (piece.get("logprobs") or {}).get("token_logprobs") or []
                for name in ("finish_reason", "prompt_token_ids"):
                    choice[name] = piece.get(name) or choice.get(name)
                check_size(request, n, index, len(choice["token_ids"]))
                on_tokens(index, tokens)

        body = self._body(request, n) | {"stream": True}
        await self._events("/v1/completions", body, read_event, most_tokens(request, n))
        return read_choices({"choices": list(choices.values())}, request, n)

    def _body(self, request: Request, n: int) -> dict[str, Any]:
        """Return a request's body. It has no seed: with one, vLLM's CPU engine dies if it prefills a prompt in
        chunks."""
        return {
            "model": self._adapter or self.model,
            "prompt": list(request.token_ids),
            "n": n,
            "temperature": request.options.temperature,
            "max_tokens": request.options.max_new_tokens,
            "stop_token_ids": sorted(request.options.stop_ids),
            **_PLAIN_SAMPLING,
            "logprobs": 0,
            "return_token_ids": True,
        }

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        body = {
            "model": self._adapter or self.model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": temperature,
            **_PLAIN_SAMPLING,
            "logprobs": count,
            "return_tokens_as_token_ids": True,
        }
        salt = {"cache_salt": secrets.token_hex(8)} if past_the_cache else {}
        answer = await self._post("/v1/completions", body | salt, tokens=len(prompt) + count)
        try:
            (logprobs,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            return {int(name.removeprefix("token_id:")): float(value) for name, value in logprobs.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise BadAnswerError("a probe was answered without the log-probs of its next token") from error

    async def pause(self, mode: str) -> None:
        await self._order(f"/pause?mode={mode}")

    async def link(self, device: torch.device) -> str | None:
        self._device = device
        try:
            await self._join_first()
        except ServerError as error:
            return str(error)
        except UnreachableError as error:
            if _REFUSED not in str(error):
                raise
            return str(error)
        return None

    def _make_link(self, device: torch.device) -> Link:
        return Link(NcclWire(device), min(self._timeout, _PATIENCE))

    async def _join_first(self) -> None:
        """Join a server for the first time. An earlier trainer may have left it in the middle of an update."""
        await self.pause("abort")
        try:
            await self._give_up_update()
        finally:
            await self.resume()
        await self._join()

    async def _join(self) -> None:
        """Make a group of the trainer and all ranks of the server, with vLLM's own weight transfer backend `nccl`."""
        assert self._device is not None
        found = await self._get("/get_world_size", QUICK_SECONDS)
        ranks = found.get("world_size") if isinstance(found, dict) else None
        if type(ranks) is not int or ranks < 1:
            raise BadAnswerError("/get_world_size has no number of ranks")
        link = self._make_link(self._device)

        async def ask(init_info: dict[str, Any]) -> Any:
            return await self._order("/init_weight_transfer_engine", {"init_info": init_info})

        try:
            await link.join(ranks, ask)
        except BaseException:
            link.close()
            raise
        self._link = link

    async def send(self, weights: HostWeights) -> None:
        if self._link is None:
            raise UnreachableError("it is in no group with the trainer: it was restarted")

        async def announce(update_info: dict[str, Any]) -> Any:
            return await self._order("/update_weights", {"update_info": update_info})

        try:
            await self._start_update()
            await self._link.send(weights, announce)
            await self._order("/finish_weight_update", {"weight_version": weights.name})
        except BaseException:  # it is unknown how much the server received, so the trainer leaves the group
            self._link.close()
            self._link = None
            await asyncio.shield(self._give_up_update())
            raise
        await self._forget()

    async def _give_up_update(self) -> None:
        """End a failed update, so that the server can compute again. The beginning of the update has emptied its
        layers, and the next request would crash its engine. If vLLM has ended the update itself, begin and end a new
        one."""
        for path in ("/start_weight_update", "/finish_weight_update"):
            with contextlib.suppress(UnreachableError, ServerError, BadAnswerError):
                await self._order(path, None, QUICK_SECONDS)

    async def prepare(self) -> None:
        """If weights are sent by NCCL, join a restarted server again."""
        if self._device is not None and self._link is None:
            await self._join()

    async def _start_update(self) -> None:
        try:
            await self._order("/start_weight_update")
        except UnreachableError as error:
            if _REFUSED not in str(error):
                raise
            # An update that was interrupted, by this trainer or by one that was killed, is still in progress.
            with contextlib.suppress(UnreachableError):
                await self._order("/finish_weight_update")
            await self._order("/start_weight_update")

    async def load(self, weights: Path) -> None:
        if is_adapter(weights):
            await self._load_adapter(weights)
            return
        try:
            kwargs = {"weights_path": str(weights)}
            await self._order("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        except UnreachableError as error:
            await self._blame(weights, error)
        await self._forget()

    async def _forget(self) -> None:
        """Clear the KV cache, including that of running completions, which are prefilled again with the new weights."""
        answer = await self._order("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UnreachableError(
                "/reset_prefix_cache did not succeed: requests still use the KV cache of the old weights"
            )

    async def _load_adapter(self, weights: Path) -> None:
        """Load an adapter under a new name, so that no prefix cache applies to it, and unload the one before."""
        before, name = self._adapter, weights.name
        if before == name:  # the same version again: a probe failed, or the server was restarted
            await self._unload(name)
        try:
            await self._tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(weights)}, self._timeout)
        except UnreachableError as error:
            await self._blame(weights, error)
        except ServerError as error:
            raise ServerError(f"{error}{_ADAPTERS}") from error
        self._adapter = name
        if before not in (None, name):
            await self._unload(before)

    async def _unload(self, name: str | None) -> None:
        with contextlib.suppress(ServerError):  # a restarted server does not know the adapter
            await self._tell("/v1/unload_lora_adapter", {"lora_name": name}, QUICK_SECONDS)

    async def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._adapter is not None:
            with contextlib.suppress(UnreachableError):
                await self._unload(self._adapter)
        await super().close()

    def _check_status(self, path: str, status: int, text: str) -> None:
        if status == 404 and self._adapter is not None and path == "/v1/completions":
            raise ForgottenError(f"it no longer knows the adapter {self._adapter}: it was restarted")
        super()._check_status(path, status, text)

    async def _blame(self, weights: Path, error: UnreachableError) -> None:
        """Raise `error`, or a ServerError if the server is alive and has refused the weights, because it would refuse
        them again."""
        if _REFUSED not in str(error) or not await self._lives():
            raise error
        raise ServerError(
            f"sampler.urls: {self.url} could not load the weights in {weights}: {error}. Is that directory on a disk "
            "that the server sees (sampler.weights_directory), and is the served model of the trainer's architecture?"
            f"{_ADAPTERS if is_adapter(weights) else ''}"
        ) from error

    async def resume(self) -> None:
        await self._order("/resume", None, QUICK_SECONDS)


def read_choices(answer: Any, request: Request, n: int, routes: RouteShape | None = None) -> list[Completion]:
    """Read completions from an answer's JSON, by index. `check_answer.check_choices` checks their tokens later.
    `routes` is the shape of the experts to read; None: they are not read."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadAnswerError("the answer has no list of choices")
    indices = sorted(_index(choice) for choice in choices)
    if indices != list(range(n)):
        raise BadAnswerError(f"asked for {n} completions, got those of index {indices}")
    return [_read(choice, request, routes) for choice in sorted(choices, key=_index)]


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    if type(index) is not int:
        raise BadAnswerError(f"a completion's index is {printable(repr(index), 60)}")
    return index


def _read(choice: dict[str, Any], request: Request, routes: RouteShape | None) -> Completion:
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != list(request.token_ids):
        raise BadAnswerError("the completion is of another prompt: prompt_token_ids are not those that were sent")
    reason = choice.get("finish_reason")
    if reason == "abort":
        return Completion([], [], stopped=False, aborted=True)
    if reason not in ("stop", "length"):
        shown = printable(repr(reason), 60)
        raise BadAnswerError(f"finish_reason is {shown}, neither stop nor length: the completion is not whole")
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list) or not tokens:
        raise BadAnswerError("a completion without token_ids: the server must obey return_token_ids (vLLM >= 0.10.2)")
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    experts = read_npy(choice.get("routed_experts"), routes, len(request.token_ids) + len(tokens))
    return Completion(tokens, values if isinstance(values, list) else [], stopped=reason == "stop", routes=experts)
