"""Sampling in static batches with transformers' own attention and cache, for models that the engine does not serve.

Dimensions: R completions of a batch, P prompt tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from truestep.generate.engine.draw import Drawn, DrawRows, Truncation, draw, key_of
from truestep.generate.engine.engine import Counts
from truestep.generate.engine.stops import StopTexts
from truestep.generate.engine.team import Team, check
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.model.policy import Policy
from truestep.process import progress

_ROWS = 256  # completions of a batch


class PlainSession:
    """Samples requests as `Session` does, but a step is a whole batch."""

    def __init__(self, policy: Policy, rows: int | None):
        self._policy, self._rows = policy, rows or _ROWS
        self._waiting: dict[int, Request] = {}
        self.counts = Counts()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def takes(self, request: Request) -> bool:
        return True

    def submit(self, number: int, request: Request) -> None:
        self._waiting[number] = request

    def cancel(self, number: int) -> None:
        self._waiting.pop(number, None)

    def step(self) -> list[tuple[int, Completion]]:
        """Sample a batch of requests with equal options. Prompts of similar lengths share a batch, which needs less
        padding."""
        options = next(iter(self._waiting.values())).options
        numbers = [number for number, request in self._waiting.items() if request.options == options]
        numbers = sorted(numbers, key=lambda number: len(self._waiting[number].token_ids))[: self._rows]
        requests = [self._waiting.pop(number) for number in numbers]
        with self._policy.plain_attention(), self._policy.tokens_everywhere():
            return list(zip(numbers, _Batch(self._policy, requests, options).run(), strict=True))

    def drawn(self, number: int) -> Sequence[int]:
        """Return the tokens drawn so far: none, because a completion is either finished or not begun."""
        return ()


class _Batch:
    def __init__(self, policy: Policy, requests: Sequence[Request], options: DrawOptions):
        self._policy, self._options, self._team = policy, options, Team.of(policy)
        self._device = policy.device
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._log_mass: list[list[float]] = [[] for _ in requests]
        self._stopped = [False] * len(requests)
        self._stops = StopTexts(policy.tokenizer, options.stop) if options.stop else None
        self._active = list(range(len(requests)))  # the request of each row of the cache
        self._keys = torch.tensor([key_of(request.seed) for request in requests])
        prompts = [torch.tensor(request.token_ids, device=self._device) for request in requests]
        self._ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        self._mask = pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left")
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None
        routing = policy.routing
        self._routing = routing if routing is not None and routing.replays else None
        # The routes of the tokens that the model processed.
        self._routes: list[list[np.ndarray]] = [[] for _ in requests]

    def run(self) -> list[Completion]:
        for number in range(self._options.max_new_tokens):
            self._keep(self._choose(self._forward(), number))
            if not self._active:
                break
        done = []
        for tokens, logprobs, log_mass, stopped, routes in zip(
            self._tokens, self._logprobs, self._log_mass, self._stopped, self._routes, strict=True
        ):
            cut = [a - b for a, b in zip(logprobs, log_mass, strict=True)] if self._options.truncates else None
            fed = np.concatenate(routes)[: len(routes[0]) + len(tokens) - 1] if routes else None
            done.append(Completion(tokens, logprobs, stopped, cut, routes=fed))
        return done

    def _forward(self) -> torch.Tensor:  # [R, hidden] of the last token
        if self._routing is None:
            return self._computed()
        found: dict[int, torch.Tensor] = {}
        with self._routing.recording(found.__setitem__):
            hidden = self._computed()
        # [R · tokens, L, k] -> [R, tokens, L, k]; the first tokens of shorter prompts are padding
        routes = torch.stack([found[place] for place in sorted(found)], dim=1).unflatten(0, self._ids.shape).cpu()
        for row, request in enumerate(self._active):
            fed = self._mask[row, -self._ids.shape[1] :].bool().cpu()
            self._routes[request].append(routes[row][fed].numpy().astype(np.uint16))
        return hidden

    def _computed(self) -> torch.Tensor:
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
