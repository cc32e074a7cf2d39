"""Batched decoding with a KV cache, from the very weights being trained.

What is drawn depends on a completion's own seed and on nothing beside it: neither on which others share its batch nor
on what was drawn before. Log-probs are those of the whole distribution at the sampling temperature, before any
truncation, from the same head that training uses.

Dimensions: R completions of a batch, P prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from truestep import progress
from truestep.head.logits import scaled_logits
from truestep.policy.policy import Policy


@dataclass(frozen=True)
class DecodeOptions:
    temperature: float  # 0: greedy
    top_p: float
    max_new_tokens: int
    batch_size: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Request:
    input_ids: tuple[int, ...]
    seed: tuple[int, ...]  # decides everything that is drawn for it


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # of each, given those before it
    stopped: bool  # by a stop token, and not by the length


OnDone = Callable[[int, Completion], None]  # called with the request's place among those of all ranks


def decode(
    policy: Policy, requests: Sequence[Request], options: DecodeOptions, on_done: OnDone | None = None
) -> list[Completion]:
    """Complete requests, in their order. Each rank decodes some, and every rank gets all completions. `on_done` gets
    each completion as soon as it ends, on the rank that decodes it."""
    ranks = policy.weights.ranks

    def done(index: int, completion: Completion) -> None:
        if on_done is not None:
            on_done(ranks.rank + index * ranks.size, completion)  # as `spread` divides them

    return ranks.spread(requests, lambda part: _decode(policy, part, options, done))


def _decode(policy: Policy, requests: Sequence[Request], options: DecodeOptions, on_done: OnDone) -> list[Completion]:
    # Like lengths together: less padding, and batches that end together.
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].input_ids))
    completions: dict[int, Completion] = {}
    with torch.no_grad(), policy.weights.gathered(), policy.plain_attention():
        for start in range(0, len(order), options.batch_size):
            members = order[start : start + options.batch_size]
            batch = _Batch(policy, [requests[index] for index in members], options)
            ended = dict(zip(members, batch.run(), strict=True))
            for index, completion in ended.items():
                on_done(index, completion)
            completions |= ended
    return [completions[index] for index in range(len(requests))]


class _Batch:
    def __init__(self, policy: Policy, requests: Sequence[Request], options: DecodeOptions):
        self._policy, self._options = policy, options
        self._device = policy.device
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._stopped = [False] * len(requests)
        self._active = list(range(len(requests)))  # the request behind each row of the cache
        self._draws = torch.from_numpy(
            np.stack([np.random.default_rng(request.seed).random(options.max_new_tokens) for request in requests])
        )
        prompts = [torch.tensor(request.input_ids, device=self._device) for request in requests]
        self._ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        self._mask = pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left")
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None

    def run(self) -> list[Completion]:
        for number in range(self._options.max_new_tokens):
            hidden = self._forward()
            tokens, logprobs = self._choose(hidden, number)
            self._keep(tokens, logprobs)
            if not self._active:
                break
        return [Completion(*fields) for fields in zip(self._tokens, self._logprobs, self._stopped, strict=True)]

    def _forward(self) -> torch.Tensor:  # [R, hidden] of the last token
        output = self._policy.model.base_model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
        return output.last_hidden_state[:, -1]

    def _choose(self, hidden: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:  # [R], [R]
        options = self._options
        temperature = torch.full((len(hidden),), options.temperature or 1.0, device=self._device)
        z = scaled_logits(hidden, self._policy.head_weight, temperature, self._policy.head)
        log_p = z - z.logsumexp(-1, keepdim=True)
        if options.temperature == 0:
            tokens = log_p.argmax(-1)
        else:
            draws = self._draws[self._active, number].to(self._device)
            tokens = _draw(log_p, draws, options.top_p)
        return tokens, log_p.gather(-1, tokens[:, None]).squeeze(-1)

    def _keep(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Record the new tokens, and drop the rows that are done once they are half of the batch."""
        progress.made("tokens", len(tokens))
        for request, token, logprob in zip(self._active, tokens.tolist(), logprobs.tolist(), strict=True):
            if self._stopped[request]:
                continue
            self._tokens[request].append(token)
            self._logprobs[request].append(logprob)
            self._stopped[request] = token in self._options.stop_ids
        rows = [row for row, request in enumerate(self._active) if not self._stopped[request]]
        self._ids = tokens[:, None]
        self._positions = self._positions[:, -1:] + 1
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=-1)
        if len(rows) > len(self._active) // 2:
            return
        self._active = [self._active[row] for row in rows]
        if rows:
            kept = torch.tensor(rows, device=self._device)
            self._cache.batch_select_indices(kept)
            self._ids, self._positions, self._mask = self._ids[kept], self._positions[kept], self._mask[kept]


def _draw(log_p: torch.Tensor, draws: torch.Tensor, top_p: float) -> torch.Tensor:  # [R, V], [R] -> [R]
    """Invert the cumulative distribution, the likeliest token first where `top_p` cuts it, in float64."""
    p, order = log_p.double().exp(), None
    if top_p < 1.0:
        p, order = p.sort(dim=-1, descending=True, stable=True)
        # The smallest set that reaches top_p, the token that crosses it included.
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0)
    cumulative = p.cumsum(-1)
    target = draws[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the draw; one of probability 0 never does.
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=p.shape[-1] - 1)
    return (index if order is None else order.gather(-1, index)).squeeze(-1)
