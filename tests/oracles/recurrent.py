"""Operations of recurrent layers as the papers define them: a loop of one token at a time, for one document.

Written for any type of number; the tests run it in float64. Names and shapes are those of transformers' functions,
for a batch of one: S tokens, H heads, G groups of heads that share keys (or B and C), K and V the sizes of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:  # [1, C, S]
    """Each channel's output is a weighted sum of its last inputs; before the document there are zeros."""
    taps = weight.shape[1]
    outputs = []
    for now in range(x.shape[2]):
        total = torch.zeros_like(x[0, :, 0]) if bias is None else bias
        for tap in range(taps):
            back = taps - 1 - tap
            if now >= back:
                total = total + weight[:, tap] * x[0, :, now - back]
        outputs.append(total)
    output = torch.stack(outputs, dim=1)[None]
    return output * output.sigmoid() if activation == "silu" else output


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule with normalized queries and keys. `g`: [1, S, H], or [1, S, H, K] for KDA. Return the output
    [1, S, H, V] and the last state [H, K, V]."""
    _, tokens, heads, size = value.shape
    each = heads // key.shape[2]
    states = [value.new_zeros(key.shape[3], size) for _ in range(heads)]
    rows = []
    for now in range(tokens):
        read = []
        for head in range(heads):
            q, k = (tensor[0, now, head // each] for tensor in (query, key))
            q, k = (vector / (vector.square().sum() + 1e-6).sqrt() for vector in (q, k))
            decay = g[0, now, head].exp()
            state = states[head] * (decay[:, None] if decay.ndim else decay)
            wrong = value[0, now, head] - k @ state
            states[head] = state + torch.outer(k, beta[0, now, head] * wrong)
            read.append((q / q.shape[0] ** 0.5) @ states[head])
        rows.append(torch.stack(read))
    return torch.stack(rows)[None], torch.stack(states)


def mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [1, S, H, P] and the last state [H, P, N]."""
    _, tokens, heads, size = hidden_states.shape
    each = heads // B.shape[2]
    states = [hidden_states.new_zeros(size, B.shape[3]) for _ in range(heads)]
    rows = []
    for now in range(tokens):
        read = []
        for head in range(heads):
            x, step = hidden_states[0, now, head], torch.log1p((dt[0, now, head] + dt_bias[head]).exp())
            b, c = (tensor[0, now, head // each] for tensor in (B, C))
            states[head] = (step * A[head]).exp() * states[head] + step * torch.outer(x, b)
            read.append(states[head] @ c + D[head] * x)
        rows.append(torch.stack(read))
    return torch.stack(rows)[None], torch.stack(states)


def mamba1(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [1, P, S] and the last state [P, N]."""
    state = torch.zeros_like(A)
    columns = []
    for now in range(hidden_states.shape[2]):
        x, step = hidden_states[0, :, now], torch.log1p((dt[0, :, now] + delta_bias).exp())
        state = (step[:, None] * A).exp() * state + torch.outer(step * x, B[0, :, now])
        columns.append((state @ C[0, :, now] + D * x) * z[0, :, now] * z[0, :, now].sigmoid())
    return torch.stack(columns, dim=1)[None], state
