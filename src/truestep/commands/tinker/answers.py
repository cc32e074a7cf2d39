"""Answers to requests for samples: the completions, with log-probs of the prompt and of other tokens."""

from collections.abc import Sequence

import numpy as np

from truestep.commands.tinker.requests import Asked
from truestep.commands.tinker.scoring import Scored, score
from truestep.commands.tinker.wire import Completed, Sampled
from truestep.commands.tinker.work import Sample
from truestep.generate.generator import Completion
from truestep.model.policy import Policy

_NO_TOP = -99999.0  # the client's log-prob for an entry without a token


def answer(policy: Policy, work: Sample, drawn: Sequence[Completion]) -> Sampled:
    asked = work.asked
    scored = None
    if asked.scores_prompt:
        scored = score(
            policy,
            asked.prompt,
            top=asked.top_prompt,
            targets=asked.targets,
            draws=asked.alternatives,
            temperature=asked.draw.temperature,
            seed=work.seed,
        )
    sequences = [Completed(one.token_ids, one.logprobs, one.stopped, _top_sampled(policy, asked, one)) for one in drawn]
    return Sampled(sequences) if scored is None else _with_prompt(Sampled(sequences), asked, scored)


def _top_sampled(policy: Policy, asked: Asked, drawn: Completion) -> tuple[np.ndarray, np.ndarray] | None:
    if not asked.top_sampled or not drawn.token_ids:
        return None
    scored = score(policy, [*asked.prompt, *drawn.token_ids], top=asked.top_sampled)
    assert scored.top is not None
    ids, logprobs = scored.top
    return ids[len(asked.prompt) - 1 :], logprobs[len(asked.prompt) - 1 :]


def _with_prompt(sampled: Sampled, asked: Asked, scored: Scored) -> Sampled:
    """Add the prompt's results. The first token has none. If only the last tokens are scored, earlier tokens have none
    either."""
    unscored = 1 if asked.last is None else max(1, len(asked.prompt) - asked.last)
    logprobs = top = None
    if asked.prompt_logprobs:
        logprobs = np.concatenate([[np.nan], scored.logprobs])
        logprobs[:unscored] = np.nan
    if scored.top is not None:
        ids, values = scored.top
        ids = np.concatenate([np.zeros((1, ids.shape[1]), ids.dtype), ids])
        values = np.concatenate([np.full((1, values.shape[1]), _NO_TOP), values])
        ids[:unscored], values[:unscored] = 0, _NO_TOP
        top = ids, values
    return Sampled(sampled.sequences, logprobs, top, scored.targets, scored.drawn)
