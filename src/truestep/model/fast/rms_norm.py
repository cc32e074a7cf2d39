"""RMS norms whose backward pass is one GPU kernel (`rms_norm_kernel`).

The compiler makes two or three kernels and a large reduction; plain torch makes ten. The forward pass computes the same
bits as the module, and in a compiled layer it is fused with the code around it. As in `gradient_accumulation`, autograd
does not see the norm's weight; its gradient is added to a float32 buffer. Norms are recognised by what they compute,
not by their name.

Dimensions: K row width, P partial sums; S tokens, A heads, E head size.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch

from truestep.gpu.operators import operator
from truestep.gpu.self_test import serves
from truestep.model.fast.gradient_accumulation import next_number
from truestep.weights.gradient_buffers import forget_the_gone, keep, keeper_of

SMALLEST, LARGEST = 32, 16_384  # supported row widths

_SIZES = (1, 520), (3000, 128), (700, 2048), (37, 3584), (5, 16_384)  # (rows, row width) in the self-test
_HEADS = (1, 1, 32), (900, 3, 128), (70, 16, 96)  # (tokens, heads, head size) in the self-test


class Sums(Protocol):
    """The owner of gradient buffers."""

    def add_sum(self, parameter: torch.nn.Parameter, parts: torch.Tensor) -> None:
        """Add the sum of partial gradients, [P, K], to a parameter's gradient buffer."""


def _rounded_first(normed: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight * normed.to(dtype)


def _rounded_last(normed: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight * normed).to(dtype)


def _from_one(normed: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (normed * (1.0 + weight.float())).to(dtype)


FORMS: tuple[Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor], ...]
FORMS = _rounded_first, _rounded_last, _from_one
ROUNDED_LAST, FROM_ONE = 1, 2


def compute(x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int) -> torch.Tensor:
    """Compute an RMS norm. `form`: index into `FORMS`, which differ in rounding and in the weight's offset."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return FORMS[form](normed, weight, x.dtype)


@operator(
    "norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? onto, float epsilon, float offset, int number)"
    " -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
@torch.no_grad()
def norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    onto: torch.Tensor | None,
    epsilon: float,
    offset: float,
    number: int,
) -> torch.Tensor:
    """Return the input's gradient, [..., K], plus `onto`, the input's gradient from other paths. Add the weight's
    gradient, [K], to its buffer. `number` is unique per call, because a compiler merges equal calls."""
    from truestep.model.fast.rms_norm_kernel import backward

    result, parts = backward(gradient, x, weight, onto, epsilon, offset)
    _add(weight, parts)
    return result


@operator(
    "heads_backward(Tensor gradient, Tensor x, Tensor weight, Tensor cosine, Tensor sine, float epsilon, float offset,"
    " int number) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
@torch.no_grad()
def heads_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    epsilon: float,
    offset: float,
    number: int,
) -> torch.Tensor:  # [1, A, S, E], [1, S, A, E], [E], [1, 1, S, E] -> [1, S, A, E]
    """Compute `norm_backward` for heads to which RoPE is applied after the norm."""
    result = x.new_empty(x.shape)
    _heads_backward(result[0], gradient, x, weight, cosine, sine, epsilon, offset)
    return result


@operator(
    "heads_side_by_side(Tensor[] gradients, Tensor[] xs, Tensor[] weights, Tensor[] cosines, Tensor[] sines,"
    " float[] epsilons, float[] offsets, int[] numbers, Tensor[] others) -> Tensor",
    lambda _, xs, *given: torch.cat([*(x.flatten(2) for x in xs), *given[-1]], -1),
)
@torch.no_grad()
def heads_side_by_side(
    gradients: list[torch.Tensor],
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    cosines: list[torch.Tensor],
    sines: list[torch.Tensor],
    epsilons: list[float],
    offsets: list[float],
    numbers: list[int],
    others: list[torch.Tensor],
) -> torch.Tensor:  # [..., N of all]
    """Compute `heads_backward` for several kinds of heads, and concatenate the results and then `others`."""
    from truestep.model.fast.rms_norm_kernel import lay_

    sizes = [x.shape[2] * x.shape[3] for x in xs] + [other.shape[-1] for other in others]
    result = xs[0].new_empty(*xs[0].shape[:2], sum(sizes))
    places = list(result.split(sizes, -1))
    for place, x, *given in zip(places, xs, gradients, weights, cosines, sines, epsilons, offsets, strict=False):
        gradient, *rest = given
        _heads_backward(place[0].unflatten(-1, x.shape[2:]), gradient, x, *rest)
    for place, other in zip(places[len(xs) :], others, strict=True):
        lay_(place[0], other[0])
    return result


def _heads_backward(
    result: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    epsilon: float,
    offset: float,
) -> None:
    from truestep.model.fast.rms_norm_kernel import heads_backward_

    parts = heads_backward_(result, gradient.transpose(1, 2), x, weight, (cosine, sine), epsilon, offset)
    _add(weight, parts)


def _add(weight: torch.Tensor, parts: torch.Tensor) -> None:  # [K], [P, K]
    keeper, parameter = keeper_of(weight)
    keeper.add_sum(parameter, parts)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int) -> torch.Tensor:
        saved.save_for_backward(x, weight)
        saved.constants = epsilon, float(FORMS[form] is _from_one)
        return compute(x, weight, epsilon, form)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        x, weight = saved.saved_tensors
        operator = torch.ops.truestep.norm_backward
        return operator(gradient, x, weight, None, *saved.constants, next_number()), None, None, None


@torch.compiler.allow_in_graph  # not traced here; autograd traces the backward pass, with unique numbers
def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int) -> Any:
    return _Norm.apply(x, weight, epsilon, form)


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to heads as transformers does: the first half of a head is rotated with the second half."""
    half = heads.shape[-1] // 2
    return heads * cosine + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sine


class _TurnedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        saved: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        epsilon: float,
        form: int,
    ) -> torch.Tensor:
        saved.save_for_backward(x, weight, cosine, sine)
        saved.constants = epsilon, float(FORMS[form] is _from_one)
        return turned(compute(x, weight, epsilon, form).transpose(1, 2), cosine, sine)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        operator = torch.ops.truestep.heads_backward
        found = operator(gradient, *saved.saved_tensors, *saved.constants, next_number())
        return found, None, None, None, None, None


@torch.compiler.allow_in_graph
def turned_norm(
    x: torch.Tensor, weight: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, epsilon: float, form: int
) -> Any:
    """Compute a norm of heads, [1, S, A, E], then RoPE: [1, A, S, E]."""
    return _TurnedNorm.apply(x, weight, cosine, sine, epsilon, form)


class AddingNorm(torch.nn.Module):
    """The mixin that `_adding` puts before a norm's class, to replace its forward pass in training."""

    weight: torch.nn.Parameter
    own_form: tuple[float, int]

    def forward(self, *given: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and len(given) == 1 and not named and given[0].requires_grad:
            return norm(given[0], self.weight.detach(), *self.own_form)
        return super().forward(*given, **named)


def add_in_norms(modules: Iterable[torch.nn.Module], keeper: Sums, kept: Iterable[torch.nn.Parameter]) -> None:
    """Make the norms among `modules` use the fused backward pass, if `keeper` has buffers for their weights."""
    wanted = set(kept)
    weights = ((module, getattr(module, "weight", None)) for module in modules)
    known = [module for module, weight in weights if isinstance(weight, torch.nn.Parameter) and weight in wanted]
    found = [(module, _form_of(module)) for module in known]
    forms: list[tuple[Any, tuple[float, int]]] = [(module, form) for module, form in found if form is not None]
    if not forms or not kernel_serves(forms[0][0].weight.device, forms[0][0].weight.dtype):
        return
    forget_the_gone()
    for module, form in forms:
        kind: Any = type(module)
        module.__class__, module.own_form = _adding(kind), form
        keep(keeper, module.weight)


@cache
def _adding(norm: Any) -> type[torch.nn.Module]:
    return type(norm.__name__, (AddingNorm, norm), {"__module__": norm.__module__})


def _form_of(module: torch.nn.Module) -> tuple[float, int] | None:
    """Return a norm's epsilon, and the index of the form that computes the same bits; None if no form does."""
    weight: Any = module.weight
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.buffers())
    # torch.nn.RMSNorm already has fused GPU kernels.
    other = isinstance(module, AddingNorm | torch.nn.RMSNorm) or "forward" in vars(module)
    if other or not isinstance(epsilon, float) or not alone or weight.ndim != 1:
        return None
    if not SMALLEST <= len(weight) <= LARGEST:
        return None
    generator = torch.Generator().manual_seed(0)
    # With small rows epsilon dominates, so that another epsilon, or another use of it, shows.
    sizes = torch.tensor([1.0, *(epsilon**0.5 * factor for factor in (0.3, 1.0, 3.0))])
    x = torch.randn(2, 4, len(weight), generator=generator) * sizes[:, None]
    random = torch.randn(len(weight), generator=generator)
    fitting = [form for form in range(len(FORMS)) if _is_form(module, x, random, epsilon, form)]
    return (epsilon, fitting[0]) if fitting else None


@torch.no_grad()
def _is_form(module: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int) -> bool:
    """Tell whether a norm computes the same bits as `compute`, in float32 and in its weight's type."""
    for dtype in (torch.float32, module.weight.dtype):
        try:
            found = torch.func.functional_call(module, {"weight": weight.to(dtype)}, (x.to(dtype),))
        except Exception:  # the module expects other inputs
            return False
        right = compute(x.to(dtype), weight.to(dtype), epsilon, form)
        if not isinstance(found, torch.Tensor) or found.dtype != right.dtype or not torch.equal(found, right):
            return False
    return True


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the kernels run on a device in `dtype`, and agree with autograd."""
    if device.type != "cuda":
        return False
    return serves("the kernel of norms' gradients", "torch's own code makes them", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Describe the first case that the kernels compute wrongly on a device; None if there is none."""
    return _wrong_rows(device, dtype) or _wrong_heads(device, dtype)


def _wrong_heads(device: torch.device, dtype: torch.dtype) -> str | None:
    """Test heads with RoPE, of several sizes, writing the gradients into a wider tensor."""
    from truestep.model.fast.rms_norm_kernel import heads_backward_

    generator = torch.Generator().manual_seed(0)
    for tokens, heads, size in _HEADS:

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        x, gradient, weight = random(tokens, heads, size), random(tokens, heads, size), random(size)
        cosine, sine = random(tokens, size), random(tokens, size)
        wide, exact = (tensor.double().requires_grad_() for tensor in (x, weight))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * exact
        turned(normed, cosine.double()[:, None], sine.double()[:, None]).backward(gradient.double())
        memory = torch.empty(tokens, heads * size + 64, device=device, dtype=dtype)
        result = memory[:, 32:-32].unflatten(-1, (heads, size))
        parts = heads_backward_(result, gradient, x, weight, (cosine, sine), 1e-6, 0.0)
        assert wide.grad is not None and exact.grad is not None
        if not torch.allclose(result.double(), wide.grad, rtol=torch.finfo(dtype).eps, atol=1e-5):
            return f"gradients of {tokens} tokens of {heads} turned heads of {size} numbers"
        if not torch.allclose(parts.double().sum(0), exact.grad, rtol=1e-4, atol=1e-3):
            return f"a weight's gradient over {tokens} tokens of {heads} turned heads"
    return None


def _wrong_rows(device: torch.device, dtype: torch.dtype) -> str | None:
    """Test rows of several widths, with and without an added gradient."""
    from truestep.model.fast.rms_norm_kernel import backward
    from truestep.weights.sum_kernel import add_up

    generator = torch.Generator().manual_seed(0)
    for rows, width in _SIZES:
        gradient, x, onto = (torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(3))
        weight = torch.randn(width, generator=generator).to(device, dtype)
        exact_x, exact_weight = (tensor.double().requires_grad_() for tensor in (x, weight))
        normed = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-6)
        (normed * (0.5 + exact_weight)).backward(gradient.double())
        assert exact_x.grad is not None and exact_weight.grad is not None
        for added in (None, onto):
            found, parts = backward(gradient, x, weight, added, 1e-6, 0.5)
            total = torch.ones(width, device=device)
            add_up(parts, total, adds=added is not None)
            total -= float(added is not None)
            right = exact_x.grad + (0 if added is None else added)
            if not torch.allclose(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5):
                return f"gradients of {rows} rows of {width} numbers"
            if not torch.allclose(total.double(), exact_weight.grad, rtol=1e-4, atol=1e-3):
                return f"a weight's gradient over {rows} rows of {width} numbers"
    return None
