"""Probes: fixed prompts that show whether a server has the trainer's weights and computes the same log-probs.

Probes are the same each time and, if the model permits, longer than a block of the server's prefix cache. So a prefix
cache of old weights would be used, and would be detected. The log-probs of the next token are compared, not samples, so
that the result does not depend on chance.

Dimensions: P prompts, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from truestep.environments.prompts import Prompt
from truestep.generate.errors import BadAnswerError
from truestep.generate.servers.protocol import InferenceServer
from truestep.model.policy import Policy
from truestep.step.next_tokens import next_token_logprobs

TEMPERATURE = 0.7  # not 1: a server whose log-probs ignore the temperature has to be detected
_LENGTHS = (136, 200, 300)  # tokens; vLLM's blocks have 16 tokens on a GPU and 128 on a CPU
_STREAM = 3  # number of the probes' random stream; generate/groups.py and generate/evaluate.py have others
_TOP_TOKENS = 8  # tokens with the highest log-probs that the server is asked for
_LIKELY = math.log(0.01)  # less likely tokens are not compared: their log-probs are mostly rounding


@dataclass(frozen=True, eq=False)
class Expected:
    """The trainer's log-probs of the probes' next tokens, with one version of the weights."""

    version: int
    prompts: tuple[tuple[int, ...], ...]
    logprobs: np.ndarray  # [P, V] float32, at TEMPERATURE
    raw: np.ndarray  # [P, V] float32, at 1


@dataclass(frozen=True)
class Gap:
    """A server's distance from the trainer's log-probs, in nats: the mean over likely tokens, maximum over probes."""

    expected: float  # distance from the trainer's log-probs at TEMPERATURE
    raw: float  # distance from the trainer's log-probs at temperature 1


def make_probes(prompts: Sequence[Prompt], seed: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Draw random sequences of tokens that occur in the run's prompts, each at most `longest` tokens long."""
    tokens = np.array(sorted({token for prompt in prompts[:256] for token in prompt.input_ids}), dtype=np.int64)
    generator = np.random.default_rng([seed, _STREAM])
    return tuple(tuple(generator.choice(tokens, max(1, min(length, longest))).tolist()) for length in _LENGTHS)


def expect(policy: Policy, prompts: tuple[tuple[int, ...], ...], version: int) -> Expected:
    """Score the probes with the forward pass that training uses. All ranks call this."""
    logprobs, raw = next_token_logprobs(policy, prompts, (TEMPERATURE, 1.0))
    return Expected(version, prompts, logprobs, raw)


async def measure(server: InferenceServer, expected: Expected, *, past_the_cache: bool = False) -> Gap:
    """Request the next-token log-probs of each probe from a server, and return their distance from the trainer's."""
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
    """Return the mean distance over the likely tokens of an answer; the likeliest token always counts."""
    likeliest = max(answer, key=lambda token: float(logprobs[token]))
    counted = [token for token in answer if logprobs[token] >= _LIKELY or token == likeliest]
    return float(np.mean([abs(answer[token] - float(logprobs[token])) for token in counted]))
