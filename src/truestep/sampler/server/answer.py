"""What must hold of a server's answer before any of it may become a document. Nothing here knows HTTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truestep.sampler.server.errors import BadAnswerError


@dataclass(frozen=True)
class Asked:
    """One request: `n` completions of a prompt."""

    prompt: tuple[int, ...]
    n: int
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    vocabulary_size: int


@dataclass(frozen=True)
class Choice:
    """One completion, checked. An aborted one has no tokens: it is to be sampled again."""

    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # of each, given those before it
    versions: list[int]  # of the weights that each was sampled with
    stopped: bool  # by a stop token, and not by the length
    aborted: bool = False


def read_choices(answer: Any, asked: Asked, versions: dict[int, list[int]] | int) -> list[Choice]:
    """In the order of their indices. `versions`: of each choice's tokens, or one of all."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadAnswerError("the answer has no list of choices")
    indices = sorted(_index(choice) for choice in choices)
    if indices != list(range(asked.n)):
        raise BadAnswerError(f"asked for {asked.n} completions, got those of index {indices}")
    return [_read(choice, asked, versions) for choice in sorted(choices, key=_index)]


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    if type(index) is not int:
        raise BadAnswerError(f"a completion's index is {index!r}")
    return index


def _read(choice: dict[str, Any], asked: Asked, versions: dict[int, list[int]] | int) -> Choice:
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != list(asked.prompt):
        raise BadAnswerError("the completion is of another prompt: prompt_token_ids are not those that were sent")
    reason = choice.get("finish_reason")
    if reason == "abort":
        return Choice([], [], [], stopped=False, aborted=True)
    tokens = _tokens(choice.get("token_ids"), asked.vocabulary_size)
    _check_end(tokens, reason, asked)
    logprobs = _logprobs(choice.get("logprobs"), len(tokens))
    made_by = [versions] * len(tokens) if isinstance(versions, int) else versions[_index(choice)]
    if len(made_by) != len(tokens):
        raise BadAnswerError(f"{len(tokens)} tokens, of which {len(made_by)} came with a version")
    return Choice(tokens, logprobs, made_by, stopped=reason == "stop")


def _tokens(given: Any, vocabulary_size: int) -> list[int]:
    if not isinstance(given, list) or not given:
        raise BadAnswerError("a completion without token_ids: the server must obey return_token_ids (vLLM >= 0.10.2)")
    for token in given:
        if type(token) is not int or not 0 <= token < vocabulary_size:
            raise BadAnswerError(f"token id {token!r} is not in the vocabulary of {vocabulary_size}")
    return given


def _check_end(tokens: Sequence[int], reason: Any, asked: Asked) -> None:
    inner = tokens[:-1] if reason == "stop" else tokens
    if any(token in asked.stop_ids for token in inner):
        raise BadAnswerError("a completion goes on behind a stop token")
    if reason == "stop":
        if tokens[-1] not in asked.stop_ids:
            raise BadAnswerError(f"finish_reason is stop, and the last token, {tokens[-1]}, is no stop token")
        if len(tokens) > asked.max_new_tokens:
            raise BadAnswerError(f"{len(tokens)} tokens where {asked.max_new_tokens} were asked for")
    elif reason == "length":
        if len(tokens) != asked.max_new_tokens:
            raise BadAnswerError(
                f"finish_reason is length after {len(tokens)} tokens where {asked.max_new_tokens} were asked for"
            )
    else:
        raise BadAnswerError(f"finish_reason is {reason!r}, neither stop nor length: the completion is not whole")


def _logprobs(given: Any, count: int) -> list[float]:
    values = given.get("token_logprobs") if isinstance(given, dict) else None
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else "no"
        raise BadAnswerError(f"{count} tokens and {found} log-probs")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > 0:
            raise BadAnswerError(f"a log-prob is {value!r}: neither finite nor at most 0")
    return [float(value) for value in values]
