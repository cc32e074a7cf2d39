"""Sampling in a session: the forms of prompts, the sampling options, and the completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truestep.config.sections import InProcessSampler, SamplerConfig
from truestep.environments.prompts import tokenise
from truestep.errors import TruestepError
from truestep.generate.generator import Completion, DrawOptions
from truestep.generate.read import stop_ids
from truestep.model.policy import Policy
from truestep.run.assemble.sources import draw_options
from truestep.types import ROUTES

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


class SampleError(TruestepError):
    """Raised for a prompt or an option that cannot be used for sampling."""


@dataclass(frozen=True)
class Sample:
    """A completion that the policy drew."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens, at `temperature`
    text: str  # without special tokens; empty if the model has no tokenizer
    stopped: bool  # True: it ended by itself; False: at the token limit
    temperature: float
    version: int  # documents that the policy had been trained on
    routes: np.ndarray | None = None  # [tokens fed to the model, layers, k] expert ids; None: no replay

    @classmethod
    def of(cls, prompt: Sequence[int], drawn: Completion, text: str, temperature: float, version: int) -> "Sample":
        ids, logprobs = tuple(drawn.token_ids), tuple(drawn.logprobs)
        return cls(tuple(prompt), ids, logprobs, text, drawn.stopped, temperature, version, drawn.routes)

    def record(self, **fields: Any) -> dict[str, Any]:
        """Return a record to train on (docs/rollouts.md). `fields`: its other fields, such as reward."""
        tokens = len(self.prompt_ids) + len(self.token_ids)
        return {
            "input_ids": [*self.prompt_ids, *self.token_ids],
            "prompt_length": len(self.prompt_ids),
            "logprobs": list(self.logprobs),
            "temperature": self.temperature,
            "truncated": not self.stopped,
            "model_version": self.version,
            **({} if self.routes is None else {ROUTES: self.routes[:tokens].tolist()}),
            **fields,
        }


def default_options(sampler: SamplerConfig | None, policy: Policy) -> DrawOptions:
    """Return the sampling options of a configuration."""
    if isinstance(sampler, InProcessSampler):
        return draw_options(sampler, policy)
    if sampler is None:
        return DrawOptions(1.0, 256, stop_ids(policy))
    return DrawOptions(sampler.temperature, sampler.max_new_tokens, stop_ids(policy))


def with_options(draw: DrawOptions, given: Mapping[str, Any]) -> DrawOptions:
    """Return sampling options: those in `given`, and those of `draw` for the rest."""
    bounds = {
        "temperature": lambda value: value >= 0,
        "max_new_tokens": lambda value: isinstance(value, int) and value >= 1,
        "top_p": lambda value: 0 < value <= 1,
        "top_k": lambda value: isinstance(value, int) and value >= 0,
        "min_p": lambda value: 0 <= value <= 1,
    }
    for name, value in given.items():
        if name == "stop":
            if isinstance(value, str) or not all(isinstance(text, str) and text for text in value):
                raise SampleError(f"sample: stop is {value!r}: give a list of texts")
        elif name not in bounds:
            raise SampleError(f"sample: {name} is unknown: it may be {', '.join(bounds)} or stop")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not bounds[name](value):
            raise SampleError(f"sample: {name} cannot be {value!r}")
    return replace(draw, **{**given, **({"stop": tuple(given["stop"])} if "stop" in given else {})})


def ids_of(prompts: Sequence[Prompt], policy: Policy) -> list[tuple[int, ...]]:
    """Return the token ids of prompts: texts, chat messages, or ids."""
    if isinstance(prompts, str):
        raise SampleError("sample: give a list of prompts, and not one text")
    return [_ids(prompt, number, policy) for number, prompt in enumerate(prompts)]


def _ids(prompt: Prompt, number: int, policy: Policy) -> tuple[int, ...]:
    where = f"sample: prompt {number}"
    if isinstance(prompt, np.ndarray) or (not isinstance(prompt, str) and all(_is_id(token) for token in prompt)):
        ids = tuple(int(token) for token in prompt)  # type: ignore[arg-type]
        if not ids or min(ids) < 0 or max(ids) >= policy.vocabulary_size:
            problem = f"has an id outside of the vocabulary of {policy.vocabulary_size}" if ids else "has no tokens"
            raise SampleError(f"{where} {problem}")
        return ids
    if policy.tokenizer is None:
        raise SampleError(f"{where} is text, and the model in {policy.path} has no tokenizer: give token ids")
    return tokenise(prompt if isinstance(prompt, str) else list(prompt), policy.tokenizer, where)


def _is_id(token: object) -> bool:
    return isinstance(token, (int, np.integer)) and not isinstance(token, bool)
