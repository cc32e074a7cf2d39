"""Log-probs of a prompt's tokens under a policy, and of alternative tokens, at temperature 1.

Dimensions: S tokens, V vocabulary, K requested tokens per position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from truestep.head.logits import scaled_logits
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack_tokens


@dataclass(frozen=True)
class Scored:
    """Log-probs of the token after each position: row i is about token i + 1."""

    logprobs: np.ndarray  # [S - 1]
    top: tuple[np.ndarray, np.ndarray] | None  # ids and log-probs, [S - 1, k]
    targets: np.ndarray | None  # [S - 1, K]; 0 where the requested token is -1
    drawn: tuple[np.ndarray, np.ndarray] | None  # ids and log-probs, [S - 1, k]


@torch.no_grad()
def score(
    policy: Policy,
    ids: Sequence[int],
    *,
    top: int = 0,
    targets: np.ndarray | None = None,
    draws: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
) -> Scored:
    """Compute log-probs of all tokens after the first. `draws`: the number of tokens to draw at each position, at this
    temperature."""
    if len(ids) == 1:  # no token after the first
        none, wide = np.zeros(0, np.float32), [np.zeros((0, k), np.float32) for k in (top, draws)]
        tops, drawn_ = ((np.zeros(each.shape, np.int64), each) if each.shape[1] else None for each in wide)
        return Scored(none, tops, None if targets is None else np.zeros(targets.shape, np.float32), drawn_)
    generator = torch.Generator(policy.device).manual_seed(seed % 2**63)
    found: list[list[torch.Tensor]] = []
    for first, z in _logits(policy, ids):
        logprobs = z - z.logsumexp(-1, keepdim=True)  # nearer to float64 than log_softmax is on a CPU
        behind = torch.tensor(ids[first + 1 : first + 1 + len(z)], device=z.device)
        parts = [logprobs.gather(1, behind[:, None])[:, 0]]
        if top:
            values, chosen = logprobs.topk(top)
            parts += [chosen, values]
        if targets is not None:
            asked = torch.from_numpy(targets[first : first + len(z)]).to(z.device)
            parts.append(torch.where(asked < 0, 0.0, logprobs.gather(1, asked.clamp(min=0))))
        if draws:
            drawn = torch.multinomial((z / max(temperature, 1e-6)).softmax(-1), draws, True, generator=generator)
            parts += [drawn, logprobs.gather(1, drawn)]
        found.append([part.cpu() for part in parts])
    whole = [torch.cat(parts).numpy() for parts in zip(*found, strict=True)]
    tops = (whole[1], whole[2]) if top else None
    last = (whole[-2], whole[-1]) if draws else None
    return Scored(whole[0], tops, None if targets is None else whole[3 if top else 1], last)


def _logits(policy: Policy, ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield chunks of logits [C, V] for all positions except the last, with each chunk's first position."""
    with policy.weights.gathered():
        hidden = policy.hidden(pack_tokens([np.array(ids, np.int64)]).to(policy.device))[: len(ids) - 1]
        rows = policy.head.rows_per_chunk(max(1, len(hidden)), policy.vocabulary_size, 12, policy.device)
        for first in range(0, len(hidden), rows):
            chunk = hidden[first : first + rows]
            ones = torch.ones(len(chunk), device=chunk.device)
            yield first, scaled_logits(chunk, policy.head_weight, ones, policy.head)
