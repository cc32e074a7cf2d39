"""Checks of a server when the run starts: does it serve the trainer's model, and is its context length enough?"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from truestep.environments.prompts import Prompt
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import DrawOptions, Request
from truestep.generate.servers.check_answer import complete
from truestep.generate.servers.probe import TEMPERATURE, Gap
from truestep.generate.servers.protocol import Description, InferenceServer
from truestep.types import ROUTES

_FEW = 8  # tokens of a prompt whose experts are asked for


async def check_server(
    server: InferenceServer,
    prompts: Sequence[Prompt],
    vocabulary_size: int,
    longest: int,
    link: Callable[[InferenceServer], Awaitable[None]],
    pause: str = "wait",
) -> int:
    """Raise `ServerError` if a server has another model or too short a context. Return its context length.

    `longest`: tokens of the longest prompt with its completion. `link` prepares the server for weights and ends an
    update that was interrupted, so it is called before the server computes anything.
    """
    try:
        description = await server.describe()
        _check_description(server, description, longest)
        await link(server)
        # A trainer that was killed during a publication has left the server paused.
        await server.resume()
        served_size = description.vocabulary_size
        if served_size is None:
            await _check_last_token(server, vocabulary_size)
        elif served_size != vocabulary_size:
            raise ServerError(
                f"sampler.urls: {server.url} has a vocabulary of {served_size} and the trainer one of "
                f"{vocabulary_size}: it serves another model"
            )
        await _check_tokenizer(server, prompts)
        await find_routes(server, prompts, vocabulary_size, pause)
    except (UnreachableError, BadAnswerError) as error:
        raise ServerError(
            f"sampler.urls: {server.url} does not answer as {server.advice.kind} does: {error}"
        ) from error
    return description.longest_text or longest


def _check_description(server: InferenceServer, description: Description, longest: int) -> None:
    names, limit = description.names, description.longest_text
    if names is not None and server.model not in names:
        raise ServerError(f"sampler.model: {server.url} serves {', '.join(names) or 'nothing'}, not {server.model}")
    if limit is not None and limit < longest:
        raise ServerError(
            f"sampler.urls: {server.url} serves at most {limit} tokens; the longest prompt and sampler.max_new_tokens "
            f"make {longest}: {server.advice.longer_texts.format(tokens=longest)}"
        )


async def _check_last_token(server: InferenceServer, size: int) -> None:
    """Check that a server accepts the last token of the trainer's vocabulary and refuses the next id."""
    try:
        await server.next_token((size - 1,), TEMPERATURE, 1)
    except ServerError as error:
        raise ServerError(
            f"sampler.urls: {server.url} does not know token {size - 1} of the trainer's vocabulary of {size}: it "
            f"serves another model ({error})"
        ) from error
    try:
        await server.next_token((size,), TEMPERATURE, 1)
    except ServerError:
        return
    raise ServerError(
        f"sampler.urls: {server.url} accepts token {size}, but the trainer's vocabulary has only {size} tokens: it "
        "serves another model"
    )


async def _check_tokenizer(server: InferenceServer, prompts: Sequence[Prompt]) -> None:
    """Raise an error if the server's tokenizer differs from the trainer's. A server without one passes, since the
    trainer sends token ids."""
    for prompt in [prompt for prompt in prompts if isinstance(prompt.prompt, str)][:3]:
        try:
            tokens = await server.tokenize(str(prompt.prompt))
        except (ServerError, UnreachableError):
            return
        if tokens is not None and tokens != list(prompt.input_ids):
            raise ServerError(
                f"sampler.urls: {server.url} tokenises prompt {prompt.id} as {_short(tokens)} and the trainer as "
                f"{_short(prompt.input_ids)}: it serves another model or another tokenizer"
            )


async def find_routes(
    server: InferenceServer, prompts: Sequence[Prompt], vocabulary_size: int, pause: str = "wait"
) -> None:
    """If experts are wanted, test whether a server returns them. If it does not, they are not requested from it again.
    If they are required, raise a `ServerError`."""
    wanted = server.routes
    if wanted is None:
        return
    if pause != "keep" or server.streams_routes:
        server.routes = replace(wanted, required=False)
        request = Request(prompts[0].input_ids[:_FEW], DrawOptions(1.0, 1, frozenset()))
        try:
            (choice,) = await complete(server, request, 1, vocabulary_size, 0)
        except ServerError:  # the server does not know this option, or refuses to return experts
            choice = None
        if choice is not None and choice.routes is not None:
            server.routes = wanted
            return
    server.routes = None
    if wanted.required:
        raise ServerError(f"model.experts.replay: require: {server.url} returns no {ROUTES}. {server.advice.routes}")


def _short(tokens: Sequence[int]) -> str:
    return f"[{', '.join(map(str, tokens[:8]))}{', …' if len(tokens) > 8 else ''}]"


def explain_raw(server: InferenceServer, gap: Gap) -> str | None:
    """Return the message for a server that reports log-probs before temperature, or None. The probe's answer is
    compared with the policy's log-probs at both temperatures: the tolerance alone may not tell them apart."""
    if gap.expected <= 1e-4 or gap.raw >= gap.expected / 4:
        return None
    return (
        f"sampler.urls: {server.url} gives raw_logprobs: a probe at temperature {TEMPERATURE} is {gap.expected:.2g} "
        f"nats from the policy's log-probs at {TEMPERATURE} and {gap.raw:.2g} from those at 1. "
        f"{server.advice.processed_logprobs}"
    )
