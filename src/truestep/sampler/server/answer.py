"""What must hold of a server's answer before any of it may become a document, whatever kind of server gave it."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from truestep.sampler.server.errors import BadAnswerError
from truestep.sampler.server.protocol import Asked, Choice, InferenceServer


async def complete(server: InferenceServer, asked: Asked, version: int) -> list[Choice]:
    """Ask for completions. The caller makes sure that weights of `version` make all of them."""
    return check_choices(await server.complete(asked), asked, version)


async def stream(server: InferenceServer, asked: Asked, version: Callable[[], int]) -> list[Choice]:
    """Ask for completions whose tokens have the version that `version` gives at the moment when they come."""
    versions: defaultdict[int, list[int]] = defaultdict(list)

    def came(index: int, tokens: int) -> None:
        versions[index] += [version()] * tokens

    return check_choices(await server.stream(asked, came), asked, versions)


def check_choices(choices: Sequence[Choice], asked: Asked, versions: Mapping[int, list[int]] | int) -> list[Choice]:
    """Check completions and give their tokens versions: one for all, or those of each choice."""
    if len(choices) != asked.n:
        raise BadAnswerError(f"asked for {asked.n} completions, got {len(choices)}")
    return [
        choice
        if choice.aborted
        else _checked(choice, asked, versions if isinstance(versions, int) else versions[index])
        for index, choice in enumerate(choices)
    ]


def _checked(choice: Choice, asked: Asked, versions: list[int] | int) -> Choice:
    tokens = choice.token_ids
    if not tokens:
        raise BadAnswerError("a completion without tokens")
    for token in tokens:
        if type(token) is not int or not 0 <= token < asked.vocabulary_size:
            raise BadAnswerError(f"token id {token!r} is not in the vocabulary of {asked.vocabulary_size}")
    _check_end(choice, asked)
    _check_logprobs(choice.logprobs, len(tokens))
    made_by = [versions] * len(tokens) if isinstance(versions, int) else versions
    if len(made_by) != len(tokens):
        raise BadAnswerError(f"{len(tokens)} tokens, of which {len(made_by)} came with a version")
    return replace(choice, logprobs=[float(value) for value in choice.logprobs], versions=made_by)


def _check_end(choice: Choice, asked: Asked) -> None:
    tokens = choice.token_ids
    inner = tokens[:-1] if choice.stopped else tokens
    if any(token in asked.stop_ids for token in inner):
        raise BadAnswerError("a completion goes on behind a stop token")
    if choice.stopped and tokens[-1] not in asked.stop_ids:
        raise BadAnswerError(f"finish_reason is stop, and the last token, {tokens[-1]}, is no stop token")
    if choice.stopped and len(tokens) > asked.max_new_tokens:
        raise BadAnswerError(f"{len(tokens)} tokens where {asked.max_new_tokens} were asked for")
    if not choice.stopped and len(tokens) != asked.max_new_tokens:
        raise BadAnswerError(
            f"finish_reason is length after {len(tokens)} tokens where {asked.max_new_tokens} were asked for"
        )


def _check_logprobs(values: Sequence[float], count: int) -> None:
    if len(values) != count:
        raise BadAnswerError(f"{count} tokens and {len(values) or 'no'} log-probs")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > 0:
            raise BadAnswerError(f"a log-prob is {value!r}: neither finite nor at most 0")
