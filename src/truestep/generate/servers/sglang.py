"""An SGLang server: the paths, bodies and status codes of SGLang's API."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import Completion, Request
from truestep.generate.servers.http import HttpServer
from truestep.generate.servers.protocol import Advice, check_size, most_tokens
from truestep.generate.servers.routed import read_integers
from truestep.text import printable
from truestep.types import RouteShape

# Sampling without truncation or penalties, whatever the model's defaults are. `ignore_eos` stays off: with it SGLang
# ignores `stop_token_ids` too.
_PLAIN_SAMPLING: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
}
# A retracted request is prefilled again with the new weights when it resumes.
_MODES = {"keep": "retract", "abort": "abort"}


class Sglang(HttpServer):
    advice = Advice(
        kind="an SGLang server",
        longer_texts="start it with --context-length {tokens} or more",
        processed_logprobs="Start the server without SGLANG_RETURN_ORIGINAL_LOGPROB",
        emptied_cache="although SGLang empties the cache when it loads weights",
        loaded="although /update_weights_from_disk said that the new weights are loaded",
        routes="Start the server with --enable-return-routed-experts",
    )
    streams_routes = True
    hints: ClassVar[Mapping[int, str]] = {**HttpServer.hints, 404: "; is it SGLang 0.5.6 or later?"}

    async def complete(self, request: Request, n: int) -> list[Completion]:
        answer = await self._post("/generate", self._body(request, n), tokens=most_tokens(request, n))
        return self._read(answer if isinstance(answer, list) else [answer], request, n)

    async def stream(
        self, request: Request, n: int, on_tokens: Callable[[int, Sequence[int]], None]
    ) -> list[Completion]:
        answers: dict[int, dict[str, Any]] = {}

        def read_event(event: dict[str, Any]) -> None:
            index, meta = event.get("index") or 0, event["meta_info"]
            before = answers.get(index, {}).get("meta_info", {}).get("output_token_logprobs", [])
            scored, count = meta.get("output_token_logprobs") or [], int(meta["completion_tokens"])
            # An event has all tokens so far or, with --incremental-streaming-output, those that are new.
            scored = scored if len(scored) == count else before + scored
            check_size(request, n, index, len(scored))
            on_tokens(index, [pair[1] for pair in scored[len(before) :]])
            answers[index] = {"meta_info": meta | {"output_token_logprobs": scored}}

        body = self._body(request, n) | {"stream": True}
        await self._events("/generate", body, read_event, most_tokens(request, n))
        indices = sorted(answers)
        if indices != list(range(n)):
            raise BadAnswerError(f"asked for {n} completions, got those of index {indices}")
        return self._read([answers[index] for index in indices], request, n)

    def _read(self, answers: list[Any], request: Request, n: int) -> list[Completion]:
        return read_answers(answers, n, len(request.token_ids), self.routes)

    def _body(self, request: Request, n: int) -> dict[str, Any]:
        """Return a request's body. It has no seed: SGLang obeys one only with --enable-deterministic-inference."""
        return {
            "input_ids": list(request.token_ids),
            "sampling_params": {
                "n": n,
                "temperature": request.options.temperature,
                "max_new_tokens": request.options.max_new_tokens,
                "stop_token_ids": sorted(request.options.stop_ids),
                **_PLAIN_SAMPLING,
            },
            "return_logprob": True,
            **({} if self.routes is None else {"return_routed_experts": True}),
        }

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, **_PLAIN_SAMPLING},
            "return_logprob": True,
            "top_logprobs_num": count,
        }
        salt = {"extra_key": secrets.token_hex(8)} if past_the_cache else {}
        answer = await self._post("/generate", body | salt, tokens=len(prompt) + count)
        try:
            (likeliest,) = answer["meta_info"]["output_top_logprobs"]
            return {int(entry[1]): float(entry[0]) for entry in likeliest}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadAnswerError("a probe was answered without the log-probs of its next token") from error

    async def pause(self, mode: str) -> None:
        if mode in _MODES:  # wait: none of the run's requests are in flight, and loading waits for others' requests
            await self._order("/pause_generation", {"mode": _MODES[mode]})

    async def load(self, weights: Path) -> None:
        body = {"model_path": str(weights), "flush_cache": True}
        try:
            answer = await self._order("/update_weights_from_disk", body)
        except ServerError as error:
            raise self._refusal(weights, error) from error
        except UnreachableError as error:
            if "answered 500" in str(error) and await self._lives():
                raise self._refusal(weights, error) from error
            raise
        if not isinstance(answer, dict) or answer.get("success") is not True:
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise self._refusal(weights, printable(repr(said)))

    def _refusal(self, weights: Path, problem: object) -> ServerError:
        return ServerError(
            f"sampler.urls: {self.url} could not load the weights in {weights}: {problem}. Is that directory on a disk "
            "that the server sees (sampler.weights_directory), and is the served model of the trainer's architecture?"
        )

    async def resume(self) -> None:
        await self._order("/continue_generation", {})


def read_answers(answers: list[Any], n: int, prompt: int = 0, routes: RouteShape | None = None) -> list[Completion]:
    """Read completions from the answers' JSON. `prompt` is the number of the prompt's tokens.
    `check_answer.check_choices` checks the completions' tokens later. `routes` is the shape of the experts to read;
    None: they are not read."""
    if len(answers) != n:
        raise BadAnswerError(f"asked for {n} completions, got {len(answers)}")
    return [_read(answer, prompt, routes) for answer in answers]


def _read(answer: Any, prompt: int, routes: RouteShape | None) -> Completion:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise BadAnswerError("a completion without meta_info")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else finish
    if reason == "abort":
        return Completion([], [], stopped=False, aborted=True)
    if reason not in ("stop", "length"):
        shown = printable(repr(finish), 60)
        raise BadAnswerError(f"finish_reason is {shown}, neither stop nor length: the completion is not whole")
    scored = meta.get("output_token_logprobs")
    if not isinstance(scored, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in scored):
        raise BadAnswerError("a completion without output_token_logprobs: the server must obey return_logprob")
    ids = answer.get("output_ids")
    tokens = [pair[1] for pair in scored]
    if isinstance(ids, list) and ids != tokens:
        raise BadAnswerError("a completion's output_ids and the tokens of its log-probs differ")
    experts = read_integers(meta.get("routed_experts"), routes, prompt + len(tokens))
    return Completion(tokens, [pair[0] for pair in scored], stopped=reason == "stop", routes=experts)
