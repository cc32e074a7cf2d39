"""Sampling with the weights that are trained: by the engine, or in static batches if it does not serve the model.

The draws of a completion depend on its own seed alone, not on the batch or on earlier draws. Log-probs are those of the
full distribution at the sampling temperature, before truncation by top_p, top_k or min_p. They are computed with the
head that training uses.

Dimensions: R completions of a batch, P prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from truestep.generate.completions import Completion, DecodeOptions, Done, Request
from truestep.generate.engine.draw import Drawn, DrawRows, Truncation, draw, key_of
from truestep.generate.engine.engine import Engine, Limits, engine_of
from truestep.generate.engine.stops import StopTexts
from truestep.generate.engine.team import Team, check
from truestep.model.policy import Policy
from truestep.process import progress

__all__ = ["Completion", "DecodeOptions", "Done", "Request", "decode", "decode_here", "decode_plainly"]

_ROWS = {"cuda": 1024, "cpu": 256}  # completions in flight where `batch_size` is None


def decode(
    policy: Policy,
    requests: Sequence[Request],
    options: DecodeOptions,
    on_done: Done | None = None,
    used: Callable[[float], None] | None = None,
) -> list[Completion]:
    """Return the completions of all requests, in their order, on every rank. The requests are spread over the ranks;
    tensor ranks sample the same ones. `on_done` is called with each completion as soon as it ends, on one of the ranks
    that sample it. `used` is called with the peak fraction of the KV cache in use."""
    team = Team.of(policy)

    def work(part: Sequence[int]) -> list[Completion]:
        def done(number: int, completion: Completion) -> None:
            if on_done is not None and number % team.size == team.number:
                on_done(part[number], completion)

        return decode_here(policy, [requests[index] for index in part], options, done, used)

    return policy.weights.ranks.spread(
        range(len(requests)),
        work,
        kind=lambda index: requests[index].input_ids,
        cost=lambda index: len(requests[index].input_ids) + options.max_new_tokens,
    )


def decode_here(
    policy: Policy,
    requests: Sequence[Request],
    options: DecodeOptions,
    on_done: Done | None = None,
    used: Callable[[float], None] | None = None,
) -> list[Completion]:
    """Return the completions of requests, in their order, sampled by this rank together with its tensor ranks.
    `on_done` is called with a request's index and its completion as soon as it ends. `used` as in `decode`."""

    def done(number: int, completion: Completion) -> None:
        progress.made("completions")
        if on_done is not None:
            on_done(number, completion)

    with torch.no_grad(), policy.weights.gathered():
        with progress.working("preparing the sampler", "kernels"):
            engine = engine_of(policy, options.exact) if requests and options.engine else ""
        with progress.working("sampling", "completions", len(requests)):
            if isinstance(engine, Engine):
                return _decode_by_engine(policy, engine, requests, options, done, used)
            return decode_plainly(policy, requests, options, done)


def _decode_by_engine(
    policy: Policy,
    engine: Engine,
    requests: Sequence[Request],
    options: DecodeOptions,
    on_done: Done,
    used: Callable[[float], None] | None,
) -> list[Completion]:
    rows = min(len(requests), options.batch_size or _ROWS.get(policy.device.type, 256))
    longest = max(len(request.input_ids) for request in requests) + options.max_new_tokens
    completions: dict[int, Completion] = {}
    with engine.session(policy, Limits(rows, longest)) as session:
        for number, request in enumerate(requests):
            session.submit(number, request, options)
        while session.busy:
            for number, completion in session.step():
                completions[number] = completion
                on_done(number, completion)
        if used is not None:
            used(session.counts.most_pages / session.counts.pages)
    return [completions[number] for number in range(len(requests))]


def decode_plainly(
    policy: Policy, requests: Sequence[Request], options: DecodeOptions, on_done: Done | None = None
) -> list[Completion]:
    """Return the completions of requests, sampled in static batches with transformers' own attention and cache."""
    # Prompts of similar lengths share a batch: less padding.
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].input_ids))
    completions: dict[int, Completion] = {}
    size = options.batch_size or 256
    with torch.no_grad(), policy.weights.gathered(), policy.plain_attention(), policy.tokens_everywhere():
        for start in range(0, len(order), size):
            members = order[start : start + size]
            batch = _Batch(policy, [requests[index] for index in members], options)
            for index, completion in zip(members, batch.run(), strict=True):
                completions[index] = completion
                if on_done is not None:
                    on_done(index, completion)
    return [completions[index] for index in range(len(requests))]


class _Batch:
    def __init__(self, policy: Policy, requests: Sequence[Request], options: DecodeOptions):
        self._policy, self._options, self._team = policy, options, Team.of(policy)
        self._device = policy.device
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._log_mass: list[list[float]] = [[] for _ in requests]
        self._stopped = [False] * len(requests)
        self._stops = StopTexts(policy.tokenizer, options.stop) if options.stop else None
        self._active = list(range(len(requests)))  # the request behind each row of the cache
        self._keys = torch.tensor([key_of(request.seed) for request in requests])
        prompts = [torch.tensor(request.input_ids, device=self._device) for request in requests]
        self._ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        self._mask = pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left")
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None

    def run(self) -> list[Completion]:
        for number in range(self._options.max_new_tokens):
            self._keep(self._choose(self._forward(), number))
            if not self._active:
                break
        done = []
        for tokens, logprobs, log_mass, stopped in zip(
            self._tokens, self._logprobs, self._log_mass, self._stopped, strict=True
        ):
            cut = [a - b for a, b in zip(logprobs, log_mass, strict=True)] if self._options.truncates else None
            done.append(Completion(tokens, logprobs, stopped, cut))
        return done

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

    def _choose(self, hidden: torch.Tensor, number: int) -> Drawn:
        options, count = self._options, len(hidden)

        def all_rows(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=self._device)

        truncation = None
        if options.truncates:
            truncation = Truncation(
                all_rows(options.top_p), all_rows(options.top_k, torch.int64), all_rows(options.min_p)
            )
        keys = self._keys[self._active].to(self._device)
        rows = DrawRows(keys, all_rows(number, torch.int64), all_rows(options.temperature), truncation)
        drawn = draw(self._policy.raw_logits(hidden), rows, self._policy.head)
        self._team.agree_(drawn.tokens)
        return drawn

    def _keep(self, drawn: Drawn) -> None:
        """Record the new tokens. Remove finished rows from the batch once at least half of its rows are finished."""
        values = (drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.log_mass.tolist())
        check(values[0])
        made = 0
        for request, token, logprob, log_mass in zip(self._active, *values, strict=True):
            if self._stopped[request]:
                continue
            made += 1
            self._tokens[request].append(token)
            self._logprobs[request].append(logprob)
            self._log_mass[request].append(log_mass)
            self._stopped[request] = token in self._options.stop_ids or (
                self._stops is not None and self._stops.reached(self._tokens[request])
            )
        progress.made("tokens", made)
        rows = [row for row, request in enumerate(self._active) if not self._stopped[request]]
        self._ids = drawn.tokens[:, None]
        self._positions = self._positions[:, -1:] + 1
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=-1)
        if len(rows) > len(self._active) // 2:
            return
        self._active = [self._active[row] for row in rows]
        if rows:
            kept = torch.tensor(rows, device=self._device)
            self._cache.batch_select_indices(kept)
            self._ids, self._positions, self._mask = self._ids[kept], self._positions[kept], self._mask[kept]
