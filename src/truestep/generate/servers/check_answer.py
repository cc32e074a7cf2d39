"""Checks that a server's answer must pass before its completions may become documents, for all kinds of servers."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from truestep.generate.servers.errors import BadAnswerError
from truestep.generate.servers.protocol import CompletionRequest, InferenceServer, ServerCompletion


async def complete(server: InferenceServer, request: CompletionRequest, version: int) -> list[ServerCompletion]:
    """Request completions. The caller makes sure that weights of `version` sample all of them."""
    return check_choices(await server.complete(request), request, version)


async def stream(
    server: InferenceServer, request: CompletionRequest, version: Callable[[], int]
) -> list[ServerCompletion]:
    """Request completions as a stream. Each token gets the version that `version()` returns when the token arrives."""
    versions: defaultdict[int, list[int]] = defaultdict(list)

    def on_tokens(index: int, tokens: int) -> None:
        versions[index] += [version()] * tokens

    return check_choices(await server.stream(request, on_tokens), request, versions)


def check_choices(
    choices: Sequence[ServerCompletion], request: CompletionRequest, versions: Mapping[int, list[int]] | int
) -> list[ServerCompletion]:
    """Check completions and return them with their tokens' versions. `versions`: one for all tokens, or a list for each
    completion's index."""
    if len(choices) != request.n:
        raise BadAnswerError(f"asked for {request.n} completions, got {len(choices)}")
    return [
        choice
        if choice.aborted
        else _checked(choice, request, versions if isinstance(versions, int) else versions[index])
        for index, choice in enumerate(choices)
    ]


def _checked(choice: ServerCompletion, request: CompletionRequest, versions: list[int] | int) -> ServerCompletion:
    tokens = choice.token_ids
    if not tokens:
        raise BadAnswerError("a completion without tokens")
    for token in tokens:
        if type(token) is not int or not 0 <= token < request.vocabulary_size:
            raise BadAnswerError(f"token id {token!r} is not in the vocabulary of {request.vocabulary_size}")
    _check_end(choice, request)
    _check_logprobs(choice.logprobs, len(tokens))
    token_versions = [versions] * len(tokens) if isinstance(versions, int) else versions
    if len(token_versions) != len(tokens):
        raise BadAnswerError(f"{len(tokens)} tokens, of which {len(token_versions)} came with a version")
    return replace(choice, logprobs=[float(value) for value in choice.logprobs], versions=token_versions)


def _check_end(choice: ServerCompletion, request: CompletionRequest) -> None:
    tokens = choice.token_ids
    inner = tokens[:-1] if choice.stopped else tokens
    if any(token in request.stop_ids for token in inner):
        raise BadAnswerError("a completion goes on after a stop token")
    if choice.stopped and tokens[-1] not in request.stop_ids:
        raise BadAnswerError(f"finish_reason is stop, and the last token, {tokens[-1]}, is not a stop token")
    if choice.stopped and len(tokens) > request.max_new_tokens:
        raise BadAnswerError(f"{len(tokens)} tokens where {request.max_new_tokens} were asked for")
    if not choice.stopped and len(tokens) != request.max_new_tokens:
        raise BadAnswerError(
            f"finish_reason is length after {len(tokens)} tokens where {request.max_new_tokens} were asked for"
        )


def _check_logprobs(values: Sequence[float], count: int) -> None:
    if len(values) != count:
        raise BadAnswerError(f"{count} tokens and {len(values) or 'no'} log-probs")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > 0:
            raise BadAnswerError(f"a log-prob is {value!r}: neither finite nor at most 0")
