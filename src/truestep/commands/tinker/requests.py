"""Converts requests: documents to score, and sampling options. Raises `ApiError` for requests that cannot be
computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truestep.commands.tinker.errors import ApiError, not_served
from truestep.commands.tinker.wire import Datum, ForwardBackward
from truestep.generate.generator import DrawOptions
from truestep.losses.client import ELEMENTWISE, FIELDS, INPUTS, NUMBERS, PREFIX, ClientLossError, loss_of, terms
from truestep.types import Rollout

_MOST_DATA = 1024  # most data in a request
_MOST_TARGETS = 1024  # most targets per position
_MOST_DOCUMENTS = 2**16  # most documents in a request; each target at a position makes a document
_MOST_SAMPLES = 1024
_MOST_STOPS = 64
_MOST_ALTERNATIVES = 1024
_OPTIONAL = ("weights",)  # inputs that may be missing; they are then 1
_INTEGERS = ("target_tokens",)


@dataclass(frozen=True)
class Model:
    """Limits that requests must respect."""

    vocabulary: int
    longest: int  # most tokens of a document, including the last target
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Batch:
    """The documents of a request for a pass. A datum with K targets per position becomes K documents."""

    request: ForwardBackward
    documents: tuple[Rollout, ...]
    columns: tuple[int | None, ...]  # for each datum: K, or None if its targets have no second dimension

    def outputs(self, logprobs: Sequence[np.ndarray]) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Return the outputs for the client, given the log-probs of all documents."""
        found: list[dict[str, np.ndarray]] = []
        total, at = 0.0, 0
        for columns in self.columns:
            own = slice(at, at + (1 if columns is None else columns))
            at = own.stop
            losses = [
                _losses(self.request.loss, *pair) for pair in zip(self.documents[own], logprobs[own], strict=True)
            ]
            total += sum(float(each.sum()) for each in losses)
            together = [np.stack(each, -1) if columns is not None else each[0] for each in (logprobs[own], losses)]
            found.append({"logprobs": together[0].astype(np.float32)})
            if self.request.loss in ELEMENTWISE:
                found[-1]["elementwise_loss"] = together[1].astype(np.float32)
        return found, {"loss:sum": total}


def _losses(name: str, document: Rollout, logprobs: np.ndarray) -> np.ndarray:
    """Compute the loss of each token of a document in float64."""
    used = (*INPUTS[name], *NUMBERS[name])
    values = {each: torch.from_numpy(document.fields[PREFIX + each][1:].astype(np.float64)) for each in used}
    own = torch.from_numpy(logprobs.astype(np.float64))
    return terms(name, own, values, lambda each: each.sum().expand_as(each))[0].numpy()


def batch_of(request: ForwardBackward, model: Model) -> Batch:
    """Make the documents of a request. A document is the datum's input, followed by the last target."""
    try:
        loss_of(request.loss)
    except ClientLossError as error:
        raise ApiError(str(error)) from None
    numbers = dict(NUMBERS[request.loss])
    for name, value in request.config.items():
        if name not in numbers:
            raise ApiError(f"loss_fn_config: {request.loss} has no {name[:60]}: it has {', '.join(numbers) or 'none'}")
        if isinstance(value, str) or not np.isfinite(value):
            raise ApiError(f"loss_fn_config: {name} is {value!r:.60}: a finite number is expected")
        numbers[name] = float(value)
    if not request.data:
        raise ApiError("there are no data")
    documents: list[Rollout] = []
    columns = []
    if len(request.data) > _MOST_DATA:
        raise ApiError(f"{len(request.data)} data are more than {_MOST_DATA}")
    for number, datum in enumerate(request.data):
        made, count = _documents(datum, f"datum {number}", request.loss, numbers, model)
        documents += made
        if len(documents) > _MOST_DOCUMENTS:
            raise ApiError(f"the data have more than {_MOST_DOCUMENTS} targets side by side")
        columns.append(count)
    return Batch(request, tuple(documents), tuple(columns))


def _documents(
    datum: Datum, where: str, loss: str, numbers: Mapping[str, float], model: Model
) -> tuple[list[Rollout], int | None]:
    tokens = datum.tokens
    if not len(tokens):
        raise ApiError(f"{where}: the model input has no tokens")
    if len(tokens) + 1 > model.longest:
        raise ApiError(f"{where}: {len(tokens)} tokens are more than {model.longest - 1}, the longest that is served")
    targets = _input(datum, where, "target_tokens", None)
    _check_ids(tokens, f"{where}: the model input", model)
    _check_ids(targets, f"{where}: target_tokens", model)
    if targets.ndim not in (1, 2) or targets.shape[0] != len(tokens) or not targets.size:
        raise ApiError(f"{where}: target_tokens have the shape {list(targets.shape)} for {len(tokens)} tokens of input")
    if targets.ndim == 2 and targets.shape[1] > _MOST_TARGETS:
        raise ApiError(f"{where}: {targets.shape[1]} targets at a position are more than {_MOST_TARGETS}")
    if targets.ndim == 2 and loss not in ELEMENTWISE:
        raise ApiError(f"{where}: {loss} takes one target for each position, [N]")
    allowed = {*INPUTS[loss], *numbers, "target_tokens"}
    if odd := sorted(set(datum.inputs) - allowed):
        raise ApiError(f"{where}: loss_fn_inputs: {loss} has no {odd[0][:60]}: it has {', '.join(sorted(allowed))}")
    values: dict[str, np.ndarray | float] = {}
    for name in FIELDS:
        if name in INPUTS[loss] or name in datum.inputs:
            values[name] = _input(datum, where, name, targets.shape)
        else:
            values[name] = numbers.get(name, 0.0)
    if targets.ndim == 1:
        return [_document(f"{where}", tokens, targets, values)], None
    columns = range(targets.shape[1])
    made = [
        _document(
            f"{where}.{k}",
            tokens,
            targets[:, k],
            {name: each[:, k] if isinstance(each, np.ndarray) else each for name, each in values.items()},
        )
        for k in columns
    ]
    return made, len(columns)


def _input(datum: Datum, where: str, name: str, shape: tuple[int, ...] | None) -> np.ndarray:
    """Return an input of the loss as float32, which must have this shape. `shape` None: integers of any shape."""
    found = datum.inputs.get(name)
    if found is None:
        if name in _OPTIONAL and shape is not None:
            return np.ones(shape, np.float32)
        raise ApiError(f"{where}: loss_fn_inputs has no {name}")
    if (found.dtype.kind == "i") != (name in _INTEGERS) and name in _INTEGERS:
        raise ApiError(f"{where}: {name} are of type float32; int64 is expected")
    if shape is None:
        return found
    if found.shape != shape:
        raise ApiError(f"{where}: {name} have the shape {list(found.shape)}, and target_tokens {list(shape)}")
    if not np.isfinite(found).all():
        raise ApiError(f"{where}: {name} have numbers that are not finite")
    return found.astype(np.float32, copy=False)


def _check_ids(ids: np.ndarray, what: str, model: Model) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < model.vocabulary:
        raise ApiError(f"{what} has ids outside of the vocabulary of {model.vocabulary}")


def _document(name: str, tokens: np.ndarray, targets: np.ndarray, values: Mapping[str, np.ndarray | float]) -> Rollout:
    size = len(tokens) + 1

    def behind(first: Any, rest: np.ndarray | float, dtype: Any) -> np.ndarray:
        """Return an array for the document's tokens. The first token is no target."""
        made = np.empty(size, dtype)
        made[0], made[1:] = first, rest
        return made

    ids = np.empty(size, np.int64)
    ids[:-1], ids[-1] = tokens, targets[-1]
    return Rollout(
        id=name,
        input_ids=ids,
        loss_mask=behind(False, True, np.bool_),
        targets=behind(0, targets, np.int64),
        fields={PREFIX + each: behind(0.0, array, np.float32) for each, array in values.items()},
    )


@dataclass(frozen=True)
class Asked:
    """A request for samples."""

    prompt: tuple[int, ...]
    count: int
    draw: DrawOptions
    seed: int | None
    prompt_logprobs: bool = False
    last: int | None = None  # number of last prompt tokens to score; None: all
    top_prompt: int = 0
    top_sampled: int = 0
    targets: np.ndarray | None = None  # [prompt - 1, K] tokens to score at each position; -1: none
    alternatives: int = 0

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or bool(self.top_prompt or self.alternatives) or self.targets is not None

    @property
    def scores(self) -> bool:
        """Tell whether log-probs are needed besides those of the drawn tokens."""
        return self.scores_prompt or bool(self.top_sampled)


def asked(body: Mapping[str, Any], model: Model) -> Asked:
    """Read a request for samples."""
    prompt = _prompt(body.get("prompt"), model)
    count = _whole(body, "num_samples", 1, 1, _MOST_SAMPLES)
    last = body.get("prompt_logprobs_last_n")
    last = None if last is None else _whole(body, "prompt_logprobs_last_n", 0, 1, max(1, len(prompt) - 1))
    if body.get("record_stability_info"):
        raise not_served("record_stability_info, which only stable_reinforce needs,")
    targets = None
    if (given := body.get("target_prompt_logprobs")) is not None:
        targets = _targets(given, len(prompt), model)
    most = min(model.vocabulary, _MOST_ALTERNATIVES)
    sampling = body.get("sampling_params")
    if not isinstance(sampling, Mapping):
        raise ApiError("sampling_params: an object is expected")
    seed = sampling.get("seed")
    return Asked(
        prompt,
        count,
        _draw(sampling, len(prompt), model),
        None if seed is None else _whole(sampling, "seed", 0, -(2**63), 2**64 - 1),
        bool(body.get("prompt_logprobs")),
        last,
        _whole(body, "topk_prompt_logprobs", 0, 0, most),
        _whole(body, "topk_sample_logprobs", 0, 0, most),
        targets,
        _whole(body, "prompt_alt_tokens_k", 0, 0, _MOST_ALTERNATIVES),
    )


def _prompt(given: Any, model: Model) -> tuple[int, ...]:
    chunks = given.get("chunks") if isinstance(given, Mapping) else None
    if not isinstance(chunks, list):
        raise ApiError("prompt: a list of chunks is expected")
    ids: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, Mapping) or chunk.get("type") != "encoded_text":
            raise not_served("a prompt with images or audio")
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or any(type(one) is not int for one in tokens):
            raise ApiError("prompt: tokens must be whole numbers")
        ids += tokens
    if not ids:
        raise ApiError("prompt: it has no tokens")
    if len(ids) >= model.longest:
        raise ApiError(f"prompt: {len(ids)} tokens leave no room of the {model.longest} that are served")
    if not 0 <= min(ids) <= max(ids) < model.vocabulary:
        raise ApiError(f"prompt: it has ids outside of the vocabulary of {model.vocabulary}")
    return tuple(ids)


def _draw(given: Mapping[str, Any], prompt: int, model: Model) -> DrawOptions:
    # Leave room for one token, so that the result can be scored by a request that draws one token after it.
    room = max(1, model.longest - prompt - 1)
    most = given.get("max_tokens")
    most = room if most is None else min(room, _whole(given, "max_tokens", 1, 1, 2**31))
    numbers = {"temperature": 1.0, "top_p": 1.0}
    for name, bound in (("temperature", 100.0), ("top_p", 1.0)):
        value = given.get(name)
        value = numbers[name] if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= bound:
            raise ApiError(f"sampling_params: {name} is {value!r:.60}: a number from 0 to {bound:g} is expected")
        numbers[name] = float(value)
    if numbers["top_p"] == 0:
        raise ApiError("sampling_params: top_p is 0: more than 0 is expected")
    top_k = _whole(given, "top_k", -1, -1, 2**31)
    stop_ids, texts = model.stop_ids, ()
    if (stop := given.get("stop")) is not None:
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or len(stop) > _MOST_STOPS:
            raise ApiError(f"sampling_params: stop: a text, or up to {_MOST_STOPS} texts or tokens are expected")
        if all(type(one) is int for one in stop):
            stop_ids = frozenset(stop)  # an empty list: no token stops the completion
        elif all(isinstance(one, str) and one for one in stop):
            texts = tuple(stop)
        else:
            raise ApiError("sampling_params: stop: all texts, or all tokens are expected")
    return DrawOptions(numbers["temperature"], most, stop_ids, numbers["top_p"], max(top_k, 0), stop=texts)


def _targets(given: Any, prompt: int, model: Model) -> np.ndarray:
    """Read token ids [prompt - 1, K] whose log-probs are requested."""
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), list):
        raise ApiError("target_prompt_logprobs: a tensor is expected")
    if given.get("sparse_crow_indices") is not None:
        raise not_served("a sparse target_prompt_logprobs")
    shape = given.get("shape")
    try:
        ids = np.array(given["data"], np.int64).reshape(shape)
    except (ValueError, TypeError, OverflowError):
        raise ApiError("target_prompt_logprobs: its data do not fit its shape") from None
    if ids.ndim != 2 or ids.shape[0] != prompt - 1:
        raise ApiError(f"target_prompt_logprobs: the shape must be [{prompt - 1}, K]")
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < model.vocabulary:
        raise ApiError(f"target_prompt_logprobs: it has ids outside of the vocabulary of {model.vocabulary}")
    return ids


def _whole(given: Mapping[str, Any], name: str, otherwise: int, least: int, most: int) -> int:
    value = given.get(name)
    if value is None:
        return otherwise
    if type(value) is not int or not least <= value <= most:
        raise ApiError(f"{name} is {value!r:.60}: a whole number from {least} to {most} is expected")
    return value
