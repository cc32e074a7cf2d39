"""Requests for completions in the three forms that are served: chat, text and token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from truestep.environments.episodes.conversation import Said
from truestep.generate.endpoint.errors import RequestError
from truestep.generate.endpoint.messages import from_client, tools_of
from truestep.generate.generator import DrawOptions
from truestep.text import printable

_MOST_CHOICES = 128
_MOST_STOPS = 16
# Fields that do not affect the completion, or that ask for what is done here anyway.
_HARMLESS = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("parallel_tool_calls", "return_token_ids", "return_tokens_as_token_ids", "request_id", "priority"),
        *("stream_options", "cache_salt", "include_stop_str_in_output", "skip_special_tokens"),
    }
)
# Fields that are accepted only with these values. With any other value the completion would not be what was asked for.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "ignore_eos": (None, False),
    "min_tokens": (None, 0),
}


_DRAWN = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Draw:
    """The sampling options of a request; None: the request does not give the option."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Asked:
    """A request for `count` completions."""

    said: Said
    tools: Sequence[Any]
    count: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    draw: Draw
    logprobs: bool
    streams: bool
    streams_usage: bool
    names_ids: bool  # tokens are named by their ids
    returns_ids: bool

    def options(self, base: DrawOptions, most_tokens: int, obeys: bool) -> DrawOptions:
        """Return the options with which the request is sampled. `base` are the run's own options. `obeys`: options that
        the request gives replace them."""
        options = replace(
            base,
            max_new_tokens=most_tokens,
            stop=(*base.stop, *self.stop),
            stop_ids=base.stop_ids | self.stop_ids,
        )
        if not obeys:
            return options
        given: dict[str, Any] = {name: getattr(self.draw, name) for name in _DRAWN}
        return replace(options, **{name: value for name, value in given.items() if value is not None})

    def differs(self, base: DrawOptions) -> str | None:
        """Return the request's sampling options that differ from `base`, such as "temperature 0.7"; None if there are
        none."""
        given = {name: getattr(self.draw, name) for name in _DRAWN}
        unlike = [f"{name} {value:g}" for name, value in given.items() if value not in (None, getattr(base, name))]
        return ", ".join(unlike) or None


def chat(body: Mapping[str, Any]) -> Asked:
    """Read a body of /v1/chat/completions. Raises RequestError."""
    known = {"messages", "tools", "max_completion_tokens", "top_logprobs", "tool_choice", "response_format"}
    tools = [] if body.get("tool_choice") == "none" else tools_of(body.get("tools"))
    logprobs = _of_type(body, "logprobs", bool, False)
    return _asked(body, known, from_client(body.get("messages")), tools, logprobs=logprobs)


def text(body: Mapping[str, Any]) -> Asked:
    """Read a body of /v1/completions, whose prompt is a text or token ids. Raises RequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        prompt = _ids(prompt, "prompt")
    elif not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt: expected one text, or one list of token ids", param="prompt")
    logprobs = _of_type(body, "logprobs", int, None)
    if logprobs not in (None, 0, 1):
        raise RequestError("logprobs: only those of the drawn tokens are known: give 0 or 1", param="logprobs")
    return _asked(body, {"prompt"}, prompt, [], logprobs=logprobs is not None)


def token_ids(body: Mapping[str, Any]) -> Asked:
    """Read a body of /inference/v1/generate. Raises RequestError."""
    sampling = body.get("sampling_params")
    sampling = {} if sampling is None else sampling
    if not isinstance(sampling, Mapping):
        raise RequestError("sampling_params: expected an object", param="sampling_params")
    if unknown := sorted(body.keys() - {"token_ids", "sampling_params", "stream", *_HARMLESS}):
        raise _unknown(unknown[0])
    if sampling.get("logprobs") not in (None, 0, 1):
        raise RequestError("sampling_params.logprobs: expected 0 or 1", param="sampling_params.logprobs")
    ids = _ids(body.get("token_ids"), "token_ids")
    merged = {"stream": body.get("stream"), **sampling}
    return _asked(merged, {"logprobs"}, ids, [], logprobs=sampling.get("logprobs") is not None)


def _asked(body: Mapping[str, Any], known: set[str], said: Said, tools: Sequence[Any], *, logprobs: bool) -> Asked:
    for name, values in _ONLY.items():
        if body.get(name) not in values:
            raise RequestError(f"{name}: {printable(repr(body[name]), 60)} is not supported", param=name)
    read = {"n", "max_tokens", "stop", "stop_token_ids", "stream", "logprobs", *Draw.__dataclass_fields__}
    if unknown := sorted(body.keys() - known - read - _HARMLESS - _ONLY.keys()):
        raise _unknown(unknown[0])
    most = body.get("max_completion_tokens")
    most = body.get("max_tokens") if most is None else most
    if most is not None and (type(most) is not int or most < 1):
        raise RequestError("max_tokens: expected a number of tokens", param="max_tokens")
    count = 1 if body.get("n") is None else body["n"]
    if type(count) is not int or not 1 <= count <= _MOST_CHOICES:
        raise RequestError(f"n: expected 1 to {_MOST_CHOICES}", param="n")
    streaming = body.get("stream_options")
    return Asked(
        said,
        tools,
        count,
        most,
        _stops(body.get("stop")),
        frozenset(() if body.get("stop_token_ids") is None else _ids(body["stop_token_ids"], "stop_token_ids", 0)),
        _draw(body),
        logprobs,
        bool(_of_type(body, "stream", bool, False)),
        bool(streaming.get("include_usage")) if isinstance(streaming, Mapping) else False,
        body.get("return_tokens_as_token_ids") is True,
        body.get("return_token_ids") is True,
    )


def _draw(body: Mapping[str, Any]) -> Draw:
    bounds = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1)}
    found: dict[str, Any] = {}
    for name, (least, most) in bounds.items():
        value = body.get(name)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            raise RequestError(f"{name}: expected a number from {least} to {most}", param=name)
        found[name] = None if value is None else float(value)
    if found["top_p"] == 0:
        raise RequestError("top_p: expected more than 0", param="top_p")
    for name, least in (("top_k", -1), ("seed", -(2**63))):
        value = body.get(name)
        if value is not None and (type(value) is not int or not least <= value < 2**63):
            raise RequestError(f"{name}: expected a whole number", param=name)
        found[name] = value
    if found["top_k"] == -1:  # vLLM's value for off
        found["top_k"] = 0
    return Draw(**found)


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(one, str) and one for one in stops)
    ):
        raise RequestError(f"stop: expected a text or a list of up to {_MOST_STOPS}", param="stop")
    return tuple(stops)


def _ids(given: Any, name: str, least: int = 1) -> tuple[int, ...]:
    if not isinstance(given, list) or len(given) < least or any(type(one) is not int or one < 0 for one in given):
        raise RequestError(f"{name}: expected a list of token ids", param=name)
    return tuple(given)


def _of_type(body: Mapping[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = body.get(name)
    if value is None:
        return otherwise
    if type(value) is not kind:
        raise RequestError(f"{name}: {printable(repr(value), 60)} is of another type than {kind.__name__}", param=name)
    return value


def _unknown(name: str) -> RequestError:
    return RequestError(f"Unrecognized request argument supplied: {printable(name, 60)}", param=printable(name, 60))
