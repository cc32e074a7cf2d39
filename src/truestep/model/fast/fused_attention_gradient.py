"""Queries, keys and values of hidden states, with the norm of heads and RoPE: one function with a fused backward pass.

The forward pass is plain torch, which a compiled layer fuses. In the backward pass, kernels undo RoPE and the norm and
write the gradients of queries, keys and values side by side, so that the products before them need one backward
product.

Dimensions: S tokens, H hidden, A heads of one kind, E head size, N outputs of a product.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from truestep.gpu.operators import operator
from truestep.gpu.self_test import serves
from truestep.model.fast import rms_norm
from truestep.model.fast.gradient_accumulation import next_call, products_backward
from truestep.model.fast.rope import rotated

_HEADS = (1, 1, 32), (900, 3, 128), (70, 16, 96)  # (tokens, heads, head size) in the self-test


@operator(
    "heads_backward(Tensor[] gradients, Tensor x, Tensor[] rows, Tensor[] weights, Tensor[] norms, Tensor cosine,"
    " Tensor sine, float[] epsilons, float offset, Tensor numbers, int call) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
@torch.no_grad()
def heads_backward(
    gradients: list[torch.Tensor],  # gradients of queries, keys and values, each [1, A, S, E]
    x: torch.Tensor,  # [1, S, H]
    rows: list[torch.Tensor],  # the products that make queries and keys, each [1, S, N]
    weights: list[torch.Tensor],  # weights of the products for queries, keys and values
    norms: list[torch.Tensor],  # the weights of the norms of queries and of keys, each [E]
    cosine: torch.Tensor,  # [1, S, E]
    sine: torch.Tensor,
    epsilons: list[float],
    offset: float,
    numbers: torch.Tensor,  # keys of `weights` and `norms` in the table of gradient buffers
    call: int,
) -> torch.Tensor:  # [1, S, H]
    """Return the gradient of hidden states, and add the weights' gradients to their buffers."""
    from truestep.model.fast.rms_norm_kernel import heads_backward_, lay_

    sizes = [len(weight) for weight in weights]
    together = x.new_empty(*x.shape[:-1], sum(sizes))
    *places, of_values = together[0].split(sizes, -1)
    for number, norm in enumerate(norms):
        place = places[number].unflatten(-1, (-1, len(norm)))
        gradient = gradients[number].transpose(1, 2)
        parts = heads_backward_(place, gradient, rows[number], norm, (cosine, sine), epsilons[number], offset)
        rms_norm.add_sum(numbers[len(weights) + number], parts)
    lay_(of_values, gradients[-1].transpose(1, 2).flatten(2)[0])
    return products_backward(together, x, weights, numbers[: len(weights)], call, None)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        saved: Any,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        numbers: torch.Tensor,
        epsilons: Sequence[float],
        form: int,
        *weights: torch.Tensor,
    ) -> Any:
        *matrices, first, second = weights
        rows = [linear(x, weight) for weight in matrices]
        parts = [row.unflatten(-1, (-1, len(first))) for row in rows]
        turns = cosine[:, None], sine[:, None]
        made = [
            rotated(rms_norm.compute(part, norm, epsilon, form).transpose(1, 2), *turns)
            for part, norm, epsilon in zip(parts[:2], (first, second), epsilons, strict=True)
        ]
        saved.save_for_backward(x, cosine, sine, numbers, *rows[:2], *weights)
        saved.constants = list(epsilons), float(form == rms_norm.FROM_ONE)
        return *made, parts[2].transpose(1, 2)

    @staticmethod
    def backward(saved: Any, *gradients: torch.Tensor) -> Any:
        x, cosine, sine, numbers, queries, keys, *weights = saved.saved_tensors
        matrices, norms = weights[:3], weights[3:]
        given = gradients, x, [queries, keys], matrices, norms, cosine, sine, *saved.constants, numbers, next_call()
        return torch.ops.truestep.heads_backward(*given), *(None for _ in range(5 + len(weights)))


# The forward pass is not traced; autograd traces the backward pass, where each call has a different number.
@torch.compiler.allow_in_graph
def heads_of(
    x: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    numbers: torch.Tensor,
    epsilons: Sequence[float],
    form: int,
    *weights: torch.Tensor,
) -> Any:
    """Compute queries, keys and values, each [1, A, S, E]. `weights`: of the three products, then of the norms of
    queries and keys. `numbers`: their keys in the table of gradient buffers."""
    return _Heads.apply(x, cosine, sine, numbers, epsilons, form, *weights)


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the kernel of heads' gradients runs on a device in `dtype`, and agrees with autograd."""
    if device.type != "cuda":
        return False
    return serves("the kernel of heads' gradients", "torch's own code is used", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Test heads of several sizes, writing the gradients into a wider tensor. Describe the first wrong case."""
    from truestep.model.fast.rms_norm_kernel import heads_backward_

    generator = torch.Generator().manual_seed(0)
    for tokens, heads, size in _HEADS:

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        x, gradient, weight = random(tokens, heads, size), random(tokens, heads, size), random(size)
        cosine, sine = random(tokens, size), random(tokens, size)
        wide, exact = (tensor.double().requires_grad_() for tensor in (x, weight))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * exact
        rotated(normed, cosine.double()[:, None], sine.double()[:, None]).backward(gradient.double())
        memory = torch.empty(tokens, heads * size + 64, device=device, dtype=dtype)
        result = memory[:, 32:-32].unflatten(-1, (heads, size))
        parts = heads_backward_(result, gradient, x, weight, (cosine, sine), 1e-6, 0.0)
        assert wide.grad is not None and exact.grad is not None
        if not torch.allclose(result.double(), wide.grad, rtol=torch.finfo(dtype).eps, atol=1e-5):
            return f"gradients of {tokens} tokens of {heads} rotated heads of {size} numbers"
        if not torch.allclose(parts.double().sum(0), exact.grad, rtol=1e-4, atol=1e-3):
            return f"a weight's gradient over {tokens} tokens of {heads} rotated heads"
    return None
