"""The gated delta rule over packed documents, with one decay for each head (Qwen) or for each channel (KDA).

A head's state is a matrix S [K, V]. A token with key k, value v, decay exp(g) and rate beta changes it to

    S <- exp(g) S;   S <- S + beta k (v - k^T S)^T

and reads q^T S. Within a chunk, the tokens' changes of the state solve a triangular system, which is solved for all
chunks at once (Yang et al. 2024, arXiv:2412.06464; Kimi Team 2025, arXiv:2510.26692). States are float32.

Dimensions: S tokens of D documents; R sequences; H value heads, G heads of queries and keys; K, V head sizes; N chunks
of L tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from truestep.model.mixers import linear_kernels
from truestep.model.mixers.chunks import make_chunks
from truestep.model.mixers.context_parallel import Context
from truestep.model.mixers.recurrence import Call, LayerState, Recurrence, Spans, exchange_heads

_PER_HEAD, _PER_CHANNEL = 64, 16  # tokens per chunk; a decay per channel needs K numbers for each pair of tokens


class DeltaRule(Recurrence):
    """`(query, key [1, S, G, K], value [1, S, H, V], g [1, S, H] or [1, S, H, K], beta [1, S, H]) -> (output, None)`,
    as `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention` compute it."""

    kernel = True
    tokens: ClassVar[Mapping[str, int]] = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
    wide = ("g",)

    def state(self, call: Call) -> LayerState:
        heads, size = call.value.shape[2:]
        return LayerState((heads, call.key.shape[3], size), _wide(call.value))

    def packed(
        self, call: Call, segments: torch.Tensor, longest: int, spans: Spans, initial: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor]:
        if call.kernels:
            return linear_kernels.apply_delta_rule(call, segments, spans, initial)
        q, k, v, g, beta = _inputs(call)
        chunks = make_chunks(spans, _PER_CHANNEL if g.ndim == q.ndim else _PER_HEAD, q.device)
        q, k, v = (chunks.arrange(tensor).transpose(1, 2) for tensor in (q, k, v))  # [N, H, L, size]
        g, beta = (chunks.arrange(tensor, 0.0).transpose(1, 2) for tensor in (g, beta))
        # The log of the decay since the start of the chunk. It is float64, because its gradient is a small difference
        # of sums.
        behind = g.double().cumsum(2)  # [N, H, L] or [N, H, L, K]
        keys, reads = _between(q, k, behind)
        if behind.ndim < q.ndim:
            behind = behind[..., None]
        before = behind.to(q.dtype).exp()
        changes, forgets = _solve(keys, k, v, beta, before)
        reading = q * before
        writing = (k * (behind[:, :, -1:] - behind).to(k.dtype).exp()).transpose(2, 3)
        kept = before[:, :, -1:].transpose(2, 3)  # [N, H, 1 or K, 1]

        def advance(part: slice, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            change = changes[part] - forgets[part] @ states
            output = reading[part] @ states + reads[part] @ change
            return output, states * kept[part] + writing[part] @ change

        if initial is None:
            initial = v.new_zeros(len(spans), *self.state(call).shape)
        rows, final = chunks.scan(initial.to(v.dtype), advance)
        output = chunks.tokens(rows.transpose(1, 2))
        return (output[None].to(call.query.dtype), None), final

    def step(self, call: Call, states: torch.Tensor) -> tuple[Any, torch.Tensor]:
        q, k, v, g, beta = _inputs(call)  # R sequences take the place of S tokens
        states = states * (g if g.ndim == q.ndim else g[..., None]).exp()[..., None]
        change = (v - (states * k[..., None]).sum(-2)) * beta[..., None]
        states = states + k[..., None] * change[..., None, :]
        output = (states * q[..., None]).sum(-2)
        return (output[None].to(call.query.dtype), None), states

    def exchanged(self, call: Call, context: Context) -> tuple[Call, Callable[[Any], Any]]:
        call = exchange_heads(call, context, ("value", "g", "beta"), ("query", "key"))
        return call, lambda output: (context.heads_for_tokens(output[0][0])[None], None)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _inputs(call: Call) -> tuple[torch.Tensor, ...]:
    """Return queries and keys [S, H, K], values [S, H, V], log decays and rates in float32, without the batch
    dimension."""
    given = (call.query, call.key, call.value, call.g, call.beta)
    q, k, v, g, beta = (tensor[0].to(_wide(tensor)) for tensor in given)
    if call.use_qk_l2norm_in_kernel:
        q, k = (tensor * ((tensor * tensor).sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k))
    q = q * q.shape[-1] ** -0.5
    if q.shape[1] != v.shape[1]:
        q, k = (tensor.repeat_interleave(v.shape[1] // tensor.shape[1], dim=1) for tensor in (q, k))
    return q, k, v, g, beta


def _between(q: torch.Tensor, k: torch.Tensor, behind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of a chunk's keys with its keys and of its queries with its keys, each times the decay
    between the two tokens: [N, H, L, L]. They are 0 where the second token is later."""
    size = q.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    if behind.ndim < q.ndim:
        between = (behind[..., :, None] - behind[..., None, :]).to(k.dtype)
        decay = between.masked_fill(later, -torch.inf).exp()
        return (k @ k.transpose(2, 3)) * decay, (q @ k.transpose(2, 3)) * decay
    between = (behind[..., :, None, :] - behind[..., None, :, :]).to(k.dtype)
    decay = between.masked_fill(later[..., None], -torch.inf).exp()
    decayed = decay * k[..., None, :, :]
    return (decayed @ k[..., None])[..., 0], (decayed @ q[..., None])[..., 0]


def _solve(
    keys: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the changes that a chunk's tokens make to an empty state, [N, H, L, V], and the matrix [N, H, L, K] whose
    product with the state before the chunk is subtracted from them. `before`: the decay since the start of the chunk,
    [N, H, L, 1 or K]."""
    rate = beta[..., None]
    right = torch.cat([v, k * before], dim=-1) * rate
    solved = torch.linalg.solve_triangular(keys * rate, right, upper=False, unitriangular=True)
    changes, forgets = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return changes, forgets
