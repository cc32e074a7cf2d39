"""State-space models over packed documents: Mamba-2, whose heads have one decay each, and Mamba-1.

A head of Mamba-2 has a state S [P, N]. A token with input x, step dt and vectors B, C changes it to `exp(dt A) S + dt x
B^T` and gives `S C + D x`. Chunks are computed by matrix products (Dao and Gu 2024, arXiv:2405.21060). Mamba-1 has a
decay for each element of its state; its tokens are computed one after another. States are float32, and a padded token
has a step of 0.

Dimensions: T tokens of D documents; R sequences; H heads of size P in G groups, which share B and C; N elements of the
state per input; L tokens of a chunk.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.nn.functional import silu, softplus

from truestep.model.mixers import linear_kernels
from truestep.model.mixers.chunks import make_chunks
from truestep.model.mixers.context_parallel import Context
from truestep.model.mixers.recurrence import Call, LayerState, Recurrence, Spans, exchange_heads

_CHUNK = 64


class Mamba2(Recurrence):
    """`mamba2_chunk_scan(hidden_states [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, G, N]) -> output`."""

    kernel = True
    tokens: ClassVar[Mapping[str, int]] = dict.fromkeys(("hidden_states", "dt", "B", "C"), 1)
    wide = ("A",)

    def state(self, call: Call) -> LayerState:
        return LayerState((*call.hidden_states.shape[2:], call.B.shape[3]), _wide(call.hidden_states))

    def packed(
        self, call: Call, segments: torch.Tensor, longest: int, spans: Spans, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = _inputs(call)
        if call.kernels:
            half, decay = call.hidden_states.dtype, dt * call.A.to(dt.dtype)
            given = (x * dt[..., None]).to(half)
            output, final = linear_kernels.scan_heads(given, decay, b.to(half), c.to(half), segments, spans, initial)
            return _with_input(call, output.to(x.dtype), x)[None], final
        groups = b.shape[1]
        chunks = make_chunks(spans, _CHUNK, x.device)
        dt = chunks.arrange(dt, 0.0).transpose(1, 2).unflatten(1, (groups, -1))  # [chunks, G, H/G, L]
        given = chunks.arrange(x).transpose(1, 2).unflatten(1, (groups, -1)) * dt[..., None]
        b, c = (chunks.arrange(tensor).transpose(1, 2)[:, :, None] for tensor in (b, c))  # [chunks, G, 1, L, N]
        # The log of the decay since the start of the chunk. It is float64, because its gradient is a small difference
        # of sums.
        behind = (dt * call.A.to(dt.dtype).view(groups, -1, 1)).double().cumsum(-1)
        later = torch.ones(dt.shape[-1], dt.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        decay = (behind[..., :, None] - behind[..., None, :]).to(x.dtype).masked_fill(later, -torch.inf).exp()
        inside = (c @ b.transpose(-1, -2) * decay) @ given
        added = (given * (behind[..., -1:] - behind).to(x.dtype).exp()[..., None]).transpose(-1, -2) @ b
        before = behind.to(x.dtype).exp()[..., None]
        kept = before[..., -1:, :]

        def advance(part: slice, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return states, states * kept[part] + added[part]  # [chunks, G, H/G, P, N]

        if initial is None:
            initial = x.new_zeros(len(spans), *self.state(call).shape)
        states, final = chunks.scan(initial.to(x.dtype).unflatten(1, (groups, -1)), advance)
        rows = inside + (c @ states.transpose(-1, -2)) * before
        output = chunks.tokens(rows.flatten(1, 2).transpose(1, 2))
        return _with_input(call, output, x)[None], final.flatten(1, 2)

    def step(self, call: Call, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = _inputs(call)  # R sequences take the place of T tokens
        b, c = (tensor.repeat_interleave(x.shape[1] // tensor.shape[1], dim=1) for tensor in (b, c))
        added = (x * dt[..., None])[..., None] * b[..., None, :]
        states = states * (dt * call.A.to(dt.dtype)).exp()[..., None, None] + added
        output = (states * c[..., None, :]).sum(-1)
        return _with_input(call, output, x)[None], states

    def exchanged(self, call: Call, context: Context) -> tuple[Call, Callable[[Any], Any]]:
        heads = len(call.A)
        call = exchange_heads(call, context, ("hidden_states", "dt"), ("B", "C"))
        own = {name: _share(call.arguments[name], heads, context) for name in ("A", "D", "dt_bias")}
        return call.replaced(**own), lambda output: context.heads_for_tokens(output[0])[None]


class Mamba1(Recurrence):
    """`mamba_selective_scan(hidden_states, dt [1, P, T], A [P, N], B, C [1, N, T]) -> output [1, P, T]`."""

    tokens: ClassVar[Mapping[str, int]] = dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2)
    output_tokens = 2

    def state(self, call: Call) -> LayerState:
        return LayerState(tuple(call.A.shape), _wide(call.hidden_states))

    def packed(
        self, call: Call, segments: torch.Tensor, longest: int, spans: Spans, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = _channels(call)
        tokens = make_chunks(spans, 1, x.device)
        given, steps, inputs, outputs = (tokens.arrange(tensor)[:, 0] for tensor in (x, dt, b, c))
        decays = (steps[..., None] * call.A.to(x.dtype)).exp()
        added = (given * steps)[..., None] * inputs[:, None]

        def advance(part: slice, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            states = states * decays[part] + added[part]
            return (states @ outputs[part][..., None])[..., 0], states

        if initial is None:
            initial = x.new_zeros(len(spans), *call.A.shape)
        rows, final = tokens.scan(initial.to(x.dtype), advance)
        return _gated(call, tokens.tokens(rows[:, None]), x), final

    def step(self, call: Call, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = _channels(call)
        states = states * (dt[..., None] * call.A.to(x.dtype)).exp() + (x * dt)[..., None] * b[:, None]
        return _gated(call, (states @ c[..., None])[..., 0], x), states


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _inputs(call: Call) -> tuple[torch.Tensor, ...]:
    """Return inputs [T, H, P], steps [T, H], B and C [T, G, N] in float32, without the batch dimension."""
    x, dt, b, c = (tensor[0].to(_wide(tensor)) for tensor in (call.hidden_states, call.dt, call.B, call.C))
    if call.dt_bias is not None:
        dt = dt + call.dt_bias.to(dt.dtype)
    if call.dt_softplus:
        dt = softplus(dt)
    return x, dt.clamp(*call.dt_limit), b, c


def _with_input(call: Call, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    output = output if call.D is None else output + call.D.to(x.dtype)[:, None] * x
    return output.contiguous()  # Falcon-H1 calls `view` on it


def _share(values: torch.Tensor | None, heads: int, context: Context) -> torch.Tensor | None:
    each = heads // context.size
    return None if values is None else values[context.rank * each : (context.rank + 1) * each]


def _channels(call: Call) -> tuple[torch.Tensor, ...]:
    """Return Mamba-1's inputs and steps [T, P], B and C [T, N] in float32, without the batch dimension."""
    given = (call.hidden_states, call.dt, call.B, call.C)
    x, dt, b, c = (tensor[0].transpose(0, 1).to(_wide(tensor)) for tensor in given)
    if call.delta_bias is not None:
        dt = dt + call.delta_bias.to(dt.dtype)
    return x, softplus(dt) if call.delta_softplus else dt, b, c


def _gated(call: Call, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # [T, P] -> [1, P, T]
    if call.D is not None:
        output = output + x * call.D.to(x.dtype)
    output = output.transpose(0, 1)[None]
    return output if call.z is None else output * silu(call.z.to(output.dtype))
