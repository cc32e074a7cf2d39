"""Checks that a server's answer must pass before its completions may become documents, for all kinds of servers."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from truestep.generate.errors import BadAnswerError
from truestep.generate.generator import Completion, DrawOptions, OnTokens, Request
from truestep.generate.servers.protocol import InferenceServer
from truestep.rollouts.routes import check_routes
from truestep.rollouts.values import BadRecord
from truestep.types import ROUTES


async def complete(
    server: InferenceServer, request: Request, n: int, vocabulary_size: int, version: int
) -> list[Completion]:
    """Request completions. The caller makes sure that weights of `version` sample all of them."""
    choices = check_choices(await server.complete(request, n), request, n, vocabulary_size, version)
    return _with_routes(server, choices, request)


async def stream(
    server: InferenceServer,
    request: Request,
    n: int,
    vocabulary_size: int,
    version: Callable[[], int],
    on_tokens: OnTokens | None = None,  # only for n = 1
) -> list[Completion]:
    """Request completions as a stream. Each token gets the version that `version()` returns when the token arrives."""
    versions: defaultdict[int, list[int]] = defaultdict(list)
    errors: list[Exception] = []  # errors raised by `on_tokens`

    def arrived(index: int, tokens: Sequence[int]) -> None:
        _check_ids(tokens, vocabulary_size)
        versions[index] += [version()] * len(tokens)
        if on_tokens is not None and tokens:
            try:
                on_tokens(tokens)
            except Exception as error:
                errors.append(error)
                raise

    try:
        choices = await server.stream(request, n, arrived)
    except BadAnswerError:
        if errors:  # `on_tokens` raised it, and it was mistaken for an unreadable answer
            raise errors[0] from None
        raise
    return _with_routes(server, check_choices(choices, request, n, vocabulary_size, versions), request)


def _with_routes(server: InferenceServer, choices: list[Completion], request: Request) -> list[Completion]:
    """Check the experts that came with completions. Drop experts that were not requested."""
    if server.routes is None:
        return [replace(choice, routes=None) for choice in choices]
    for choice in choices:
        tokens = len(request.token_ids) + len(choice.token_ids)
        if choice.aborted:
            continue
        try:
            if choice.routes is not None and len(choice.routes) != tokens - 1:
                raise BadRecord(f"{ROUTES} has {len(choice.routes)} rows for {tokens} tokens: only the last has none")
            check_routes(choice.routes, tokens, server.routes)
        except BadRecord as error:
            missing = f". {server.advice.routes}" if choice.routes is None else ""
            raise BadAnswerError(f"{server.url}: {error}{missing}") from error
    return choices


def check_choices(
    choices: Sequence[Completion],
    request: Request,
    n: int,
    vocabulary_size: int,
    versions: Mapping[int, list[int]] | int,
) -> list[Completion]:
    """Check completions and return them with their tokens' versions. `versions`: one for all tokens, or a list for each
    completion's index."""
    if len(choices) != n:
        raise BadAnswerError(f"asked for {n} completions, got {len(choices)}")
    return [
        choice
        if choice.aborted
        else _checked(choice, request, vocabulary_size, versions if isinstance(versions, int) else versions[index])
        for index, choice in enumerate(choices)
    ]


def _checked(choice: Completion, request: Request, vocabulary_size: int, versions: list[int] | int) -> Completion:
    tokens = choice.token_ids
    if not tokens:
        raise BadAnswerError("a completion without tokens")
    _check_ids(tokens, vocabulary_size)
    _check_end(choice, request.options)
    check_logprobs(choice.logprobs, len(tokens))
    token_versions = [versions] * len(tokens) if isinstance(versions, int) else versions
    if len(token_versions) != len(tokens):
        raise BadAnswerError(f"{len(tokens)} tokens, of which {len(token_versions)} came with a version")
    return replace(choice, logprobs=[float(value) for value in choice.logprobs], versions=token_versions)


def _check_ids(tokens: Sequence[int], vocabulary_size: int) -> None:
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary_size:
            raise BadAnswerError(f"token id {token!r} is not in the vocabulary of {vocabulary_size}")


def _check_end(choice: Completion, options: DrawOptions) -> None:
    tokens, most = choice.token_ids, options.max_new_tokens
    inner = tokens[:-1] if choice.stopped else tokens
    if any(token in options.stop_ids for token in inner):
        raise BadAnswerError("a completion goes on after a stop token")
    if choice.stopped and tokens[-1] not in options.stop_ids:
        raise BadAnswerError(f"finish_reason is stop, and the last token, {tokens[-1]}, is not a stop token")
    if choice.stopped and len(tokens) > most:
        raise BadAnswerError(f"{len(tokens)} tokens where {most} were asked for")
    if not choice.stopped and len(tokens) != most:
        raise BadAnswerError(f"finish_reason is length after {len(tokens)} tokens where {most} were asked for")


def check_logprobs(values: Sequence[float], count: int) -> None:
    if len(values) != count:
        raise BadAnswerError(f"{count} tokens and {len(values) or 'no'} log-probs")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > 0:
            raise BadAnswerError(f"a log-prob is {value!r}: neither finite nor at most 0")
