"""Root-mean-square norms on a GPU, whose backward pass is one kernel (`norm_kernel.py`). A compiler makes two or three
of it, and a sum of a thousand rows; plain torch makes ten. The forward pass stays the module's own, number for number,
and in a compiled layer it is compiled with what is around it.

As for products (`adding.py`), autograd does not see the norm's weight: its gradient is added to its float32 buffer. A
norm is known by what it computes, not by its name.

Dimensions: R rows, K numbers of a row, P parts of a sum.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch

from truestep.gpu.operators import operator
from truestep.gpu.self_test import serves
from truestep.model.fast.gradient_accumulation import next_number
from truestep.weights.gradient_buffers import forget_the_gone, keep, keeper_of

SMALLEST, LARGEST = 32, 16_384  # numbers of a row

_SIZES = (1, 520), (3000, 128), (700, 2048), (37, 3584), (5, 16_384)  # rows and numbers of a row that are tried
_HEADS = (1, 1, 32), (900, 3, 128), (70, 16, 96)  # tokens, heads and numbers of a head that are tried


class Sums(Protocol):
    """What keeps the gradients."""

    def add_sum(self, parameter: torch.nn.Parameter, parts: torch.Tensor) -> None:
        """Add the sum of parts, [P, K], to the gradient of a parameter."""


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
    """Compute a norm of one of the forms."""
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
    """Give the gradient of rows, [..., K], `onto` what else flows to them, and add the weight's, [K], to its buffer.
    `number` is another one wherever it is called."""
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
    """Do the same for heads that are turned after the norm."""
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
    """Do the same for several kinds of heads, and lay what it gives side by side, and others behind it."""
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


@torch.compiler.allow_in_graph  # the backward pass is traced as it runs, with its numbers
def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int) -> Any:
    return _Norm.apply(x, weight, epsilon, form)


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn heads by their places in a document, as transformers does: the first half of a head's numbers with the
    second."""
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
    """Compute a norm of heads, [1, S, A, E], and turn them: [1, A, S, E]."""
    return _TurnedNorm.apply(x, weight, cosine, sine, epsilon, form)


class AddingNorm(torch.nn.Module):
    """What is put before the class of a norm."""

    weight: torch.nn.Parameter
    own_form: tuple[float, int]

    def forward(self, *given: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and len(given) == 1 and not named and given[0].requires_grad:
            return norm(given[0], self.weight.detach(), *self.own_form)
        return super().forward(*given, **named)


def add_in_norms(modules: Iterable[torch.nn.Module], keeper: Sums, kept: Iterable[torch.nn.Parameter]) -> None:
    """Have the norms among some modules add their weights' gradients so, if the keeper has buffers for them."""
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
    """Find the form of a norm: its epsilon, and which of ours gives the same numbers; None: it is none of them."""
    weight: Any = module.weight
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.buffers())
    # torch's own has a kernel of its own on a GPU, forward too.
    other = isinstance(module, AddingNorm | torch.nn.RMSNorm) or "forward" in vars(module)
    if other or not isinstance(epsilon, float) or not alone or weight.ndim != 1:
        return None
    if not SMALLEST <= len(weight) <= LARGEST:
        return None
    generator = torch.Generator().manual_seed(0)
    # Beside small rows epsilon is large: another rule for it, or another epsilon, shows there.
    sizes = torch.tensor([1.0, *(epsilon**0.5 * factor for factor in (0.3, 1.0, 3.0))])
    x = torch.randn(2, 4, len(weight), generator=generator) * sizes[:, None]
    random = torch.randn(len(weight), generator=generator)
    fitting = [form for form in range(len(FORMS)) if _is_form(module, x, random, epsilon, form)]
    return (epsilon, fitting[0]) if fitting else None


@torch.no_grad()
def _is_form(module: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int) -> bool:
    """Tell whether a norm computes what ours does, number for number, in float32 and in its own type."""
    for dtype in (torch.float32, module.weight.dtype):
        try:
            found = torch.func.functional_call(module, {"weight": weight.to(dtype)}, (x.to(dtype),))
        except Exception:  # it takes something else
            return False
        right = compute(x.to(dtype), weight.to(dtype), epsilon, form)
        if not isinstance(found, torch.Tensor) or found.dtype != right.dtype or not torch.equal(found, right):
            return False
    return True


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the kernel runs on a device, and computes there what autograd does, in `dtype`."""
    if device.type != "cuda":
        return False
    return serves("the kernel of norms' gradients", "torch's own code makes them", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Name what the kernels get wrong on a device."""
    return _wrong_rows(device, dtype) or _wrong_heads(device, dtype)


def _wrong_heads(device: torch.device, dtype: torch.dtype) -> str | None:
    """Try heads that are turned, of several sizes, whose gradients lie among others."""
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
    """Try rows of several sizes, with and without what else flows to them."""
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
