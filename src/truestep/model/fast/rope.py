"""RoPE of queries and keys, after an optional norm, in one kernel while a model samples.

The compiler makes one kernel for queries and one for keys. For a few hundred tokens the launches dominate, so here one
kernel does both. Like other compiled code, the kernel keeps intermediate values in float32, where a model's own code
rounds.

Dimensions: T tokens, N width of a token's row, A heads, E head size.
"""

from collections.abc import Sequence
from functools import cache

import torch

from truestep.gpu.operators import operator
from truestep.gpu.self_test import serves
from truestep.model.fast import rms_norm as norms


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to heads as transformers does: the first half of a head is rotated with the second half."""
    half = heads.shape[-1] // 2
    return heads * cosine + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sine


@operator(
    "norm_rope(Tensor rows, int[] heads, Tensor[] weights, float[] epsilons, float offset, Tensor cosine, Tensor sine)"
    " -> Tensor",
    lambda rows, heads, *given: rows.new_empty(rows.shape[0], sum(heads), given[-1].shape[-1]),
)
def norm_rope(
    rows: torch.Tensor,
    heads: list[int],
    weights: list[torch.Tensor],
    epsilons: list[float],
    offset: float,
    cosine: torch.Tensor,
    sine: torch.Tensor,
) -> torch.Tensor:  # [T, N], .., [.., T, E] -> [T, A, E]
    """Apply the norm (if there are weights) and RoPE to the heads at the start of each row: queries, then keys."""
    cosine, sine = (turns.reshape(-1, turns.shape[-1]) for turns in (cosine, sine))
    if rows.device.type == "cuda" and kernel_serves(rows.device, rows.dtype):
        from truestep.model.fast.rope_kernel import norm_rope as by_kernel

        return by_kernel(rows, heads, weights, epsilons, offset, cosine, sine)
    return norm_rope_plainly(rows, heads, weights, epsilons, offset, cosine, sine)


def norm_rope_plainly(
    rows: torch.Tensor,
    heads: Sequence[int],
    weights: Sequence[torch.Tensor],
    epsilons: Sequence[float],
    offset: float,
    cosine: torch.Tensor,
    sine: torch.Tensor,
) -> torch.Tensor:
    size = cosine.shape[-1]
    parts = rows[:, : sum(heads) * size].unflatten(1, (-1, size)).split(list(heads), 1)
    if weights:
        form = norms.FROM_ONE if offset else norms.ROUNDED_LAST
        given = zip(parts, weights, epsilons, strict=True)
        parts = tuple(norms.compute(part, weight, epsilon, form) for part, weight, epsilon in given)
    return rotated(torch.cat(parts, 1), cosine[:, None], sine[:, None]).to(rows.dtype)


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the kernel agrees with plain torch on a device."""
    return serves("the kernel of norm and RoPE", "plain torch is used", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Describe the first case that the kernel computes wrongly on a device; None if there is none."""
    from truestep.model.fast.rope_kernel import norm_rope as by_kernel

    generator = torch.Generator().manual_seed(0)
    for tokens, heads, size in ((1, (2, 1), 64), (37, (16, 8), 128), (70, (7,), 96), (3, (40, 10), 256)):

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        rows, cosine, sine = random(tokens, (sum(heads) + 2) * size), random(tokens, size), random(tokens, size)
        weights, epsilons = [random(size) for _ in heads], [0.01 * (1 + number) for number in range(len(heads))]
        for given, offset in (([], 0.0), (weights, 0.0), (weights, 1.0)):
            found = by_kernel(rows, heads, given, epsilons if given else [], offset, cosine, sine)
            parts = rows.double()[:, : sum(heads) * size].unflatten(1, (-1, size)).split(heads, 1)
            normed = [
                part * torch.rsqrt(part.square().mean(-1, keepdim=True) + epsilon) * (offset + weight.double())
                for part, weight, epsilon in zip(parts, given, epsilons, strict=False)
            ]
            turns = cosine.double()[:, None], sine.double()[:, None]
            right = rotated(torch.cat(normed or list(parts), 1), *turns)
            if not torch.allclose(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5):
                return f"{tokens} tokens of {heads} heads of {size} numbers, weights from {offset}"
    return None
