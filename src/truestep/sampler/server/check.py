"""What a server says of itself, against what the trainer knows: before the first weights are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.sampler.server.client import Client
from truestep.sampler.server.errors import BadAnswerError, ServerError, UnreachableError
from truestep.sampler.server.probe import Gap

_SECONDS = 30.0


async def check_server(client: Client, prompts: Sequence[Prompt], vocabulary_size: int, longest: int) -> int:
    """The longest text that it takes. `longest`: of a prompt and its completion."""
    try:
        await client.get("/health", timeout=_SECONDS)
        limit = _served_length(client, await client.get("/v1/models", timeout=_SECONDS))
        if limit is not None and limit < longest:
            raise ServerError(
                f"sampler.urls: {client.url} serves at most {limit} tokens; the longest prompt and "
                f"sampler.max_new_tokens make {longest}: start it with --max-model-len {longest} or more"
            )
        # A trainer that was killed in the middle of a sync left it standing still.
        await client.post("/resume", timeout=_SECONDS)
        await _check_vocabulary(client, vocabulary_size)
        await _check_tokenizer(client, prompts)
    except (UnreachableError, BadAnswerError) as error:
        raise ServerError(f"sampler.urls: {client.url} does not answer as a vLLM server does: {error}") from error
    return limit or longest


def _served_length(client: Client, models: Any) -> int | None:
    entries = models.get("data", []) if isinstance(models, dict) else []
    names = {entry.get("id"): entry for entry in entries if isinstance(entry, dict)}
    if client.model not in names:
        raise ServerError(
            f"sampler.model: {client.url} serves {', '.join(map(str, names)) or 'nothing'}, not {client.model}"
        )
    return names[client.model].get("max_model_len")


async def _check_vocabulary(client: Client, size: int) -> None:
    """The last token of the trainer's vocabulary is one of the server's, and the next is not."""
    one = {"model": client.model, "max_tokens": 1, "temperature": 1.0}
    try:
        await client.post("/v1/completions", one | {"prompt": [size - 1]}, _SECONDS)
    except ServerError as error:
        raise ServerError(
            f"sampler.urls: {client.url} does not know token {size - 1} of the trainer's vocabulary of {size}: it "
            f"serves another model ({error})"
        ) from error
    try:
        await client.post("/v1/completions", one | {"prompt": [size]}, _SECONDS)
    except ServerError:
        return
    raise ServerError(
        f"sampler.urls: {client.url} takes token {size}, the trainer's vocabulary having {size}: it serves "
        "another model"
    )


async def _check_tokenizer(client: Client, prompts: Sequence[Prompt]) -> None:
    """Token ids are what is sent, so a server may have no tokenizer; another tokenizer is another model."""
    for prompt in [prompt for prompt in prompts if isinstance(prompt.prompt, str)][:3]:
        try:
            body = {"model": client.model, "prompt": prompt.prompt}
            answer = await client.post("/tokenize", body, _SECONDS)
        except (ServerError, UnreachableError):
            return
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if tokens is not None and tokens != list(prompt.input_ids):
            raise ServerError(
                f"sampler.urls: {client.url} tokenises prompt {prompt.id} as {_short(tokens)} and the trainer as "
                f"{_short(prompt.input_ids)}: it serves another model or another tokenizer"
            )


def _short(tokens: Sequence[int]) -> str:
    return f"[{', '.join(map(str, tokens[:8]))}{', …' if len(tokens) > 8 else ''}]"


def explain_raw(url: str, gap: Gap) -> str | None:
    """Where a server's log-probs are those before the temperature. Nearness decides: a flat model hides much."""
    if gap.expected > 1e-4 and gap.raw < gap.expected / 4:
        return (
            f"sampler.urls: {url} gives raw_logprobs: a probe at temperature 0.7 is {gap.expected:.2g} nats from the "
            f"policy's log-probs at 0.7 and {gap.raw:.2g} from those at 1. Start the server with --logprobs-mode "
            "processed_logprobs"
        )
    return None
