"""Probes: fixed prompts that show whether a server has the trainer's weights and scores them as the trainer does.

A prompt is longer than a block of the engine's prefix cache wherever the model permits, because a shorter one is
computed anew each time and cannot show a cache of old weights. It is the same prompt each time, so that a cache that
was not emptied is used. What is compared is the distribution of the next token, not a sample: no luck is in it.

Dimensions: P prompts, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from truestep.environments.prompts import Prompt
from truestep.generate.servers.errors import BadAnswerError
from truestep.generate.servers.protocol import InferenceServer
from truestep.model.policy import Policy
from truestep.step.next_tokens import next_token_logprobs

TEMPERATURE = 0.7  # at 1 a server that ignores it could not be told from one that does not
_LENGTHS = (136, 200, 300)  # tokens; vLLM's blocks have 16 tokens on a GPU and 128 on a CPU
_STREAM = 3  # of randomness, beside those of generate/groups.py and generate/evaluate.py
_TOP_TOKENS = 8  # asked for, of each probe's next token
_LIKELY = math.log(0.01)  # log-probs of unlikely tokens carry more rounding than meaning


@dataclass(frozen=True, eq=False)
class Expected:
    """The trainer's log-probs of the probes' next tokens, with one version of the weights."""

    version: int
    prompts: tuple[tuple[int, ...], ...]
    logprobs: np.ndarray  # [P, V] float32, at TEMPERATURE
    raw: np.ndarray  # [P, V] float32, at 1


@dataclass(frozen=True)
class Gap:
    """A server's distance from the trainer's log-probs, in nats: the mean over likely tokens, of the worst probe."""

    expected: float
    raw: float


def make_probes(prompts: Sequence[Prompt], seed: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Draw tokens of the run's own prompts: text that the model knows and does not know by heart."""
    tokens = np.array(sorted({token for prompt in prompts[:256] for token in prompt.input_ids}), dtype=np.int64)
    generator = np.random.default_rng([seed, _STREAM])
    return tuple(tuple(generator.choice(tokens, max(1, min(length, longest))).tolist()) for length in _LENGTHS)


def expect(policy: Policy, prompts: tuple[tuple[int, ...], ...], version: int) -> Expected:
    """Score the probes by the forward pass that training uses. Every rank calls this."""
    logprobs, raw = next_token_logprobs(policy, prompts, (TEMPERATURE, 1.0))
    return Expected(version, prompts, logprobs, raw)


async def measure(server: InferenceServer, expected: Expected, *, past_the_cache: bool = False) -> Gap:
    """Ask a server for the next token of each probe, and compare."""
    vocabulary_size = expected.logprobs.shape[1]
    gaps = []
    for number, prompt in enumerate(expected.prompts):
        count = min(_TOP_TOKENS, vocabulary_size)
        answer = await server.next_token(prompt, TEMPERATURE, count, past_the_cache=past_the_cache)
        if not answer or any(not 0 <= token < vocabulary_size or math.isnan(value) for token, value in answer.items()):
            raise BadAnswerError("the answer to a probe has log-probs that are NaN, or of tokens that do not exist")
        gaps.append([_gap(answer, logprobs[number]) for logprobs in (expected.logprobs, expected.raw)])
    return Gap(*np.array(gaps).max(axis=0).tolist())


def _gap(answer: dict[int, float], logprobs: np.ndarray) -> float:
    """Average over the likely tokens of an answer, and over the likeliest where none of them is likely."""
    likeliest = max(answer, key=lambda token: float(logprobs[token]))
    counted = [token for token in answer if logprobs[token] >= _LIKELY or token == likeliest]
    return float(np.mean([abs(answer[token] - float(logprobs[token])) for token in counted]))
