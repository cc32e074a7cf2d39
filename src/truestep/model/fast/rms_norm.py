"""RMS norms whose backward pass is one GPU kernel (`rms_norm_kernel`).

The compiler makes two or three kernels and a large reduction; plain torch makes ten. The forward pass computes the same
bits as the module, and in a compiled layer it is fused with the code around it. As in `gradient_accumulation`, autograd
does not see the norm's weight; its gradient is added to a float32 buffer. Norms are recognised by what they compute,
not by their name.

Dimensions: K row width, P partial sums.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch

from truestep.gpu.operators import operator
from truestep.gpu.self_test import serves
from truestep.model.fast.by_class import put_in
from truestep.model.fast.gradient_accumulation import next_call
from truestep.weights.gradient_buffers import enter, entry

SMALLEST, LARGEST = 32, 16_384  # supported row widths

_SIZES = (1, 520), (3000, 128), (700, 2048), (37, 3584), (5, 16_384)  # (rows, row width) in the self-test


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
    "norm_backward(Tensor gradient, Tensor x, Tensor weight, float epsilon, float offset, Tensor number, int call)"
    " -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
@torch.no_grad()
def norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    offset: float,
    number: torch.Tensor,
    call: int,
) -> torch.Tensor:
    """Return the input's gradient, [..., K], and add the weight's gradient, [K], to its buffer. `call` is unique,
    because a compiler merges equal calls."""
    from truestep.model.fast.rms_norm_kernel import backward

    result, parts = backward(gradient, x, weight, epsilon, offset)
    add_sum(number, parts)
    return result


def add_sum(number: torch.Tensor, parts: torch.Tensor) -> None:  # [], [P, K]
    """Add the sum of partial gradients to the buffer of the weight with this number."""
    owner, parameter = entry(int(number))
    owner.add_sum(parameter, parts)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        saved: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int, number: torch.Tensor
    ) -> torch.Tensor:
        saved.save_for_backward(x, weight, number)
        saved.constants = epsilon, float(form == FROM_ONE)
        return compute(x, weight, epsilon, form)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        x, weight, number = saved.saved_tensors
        operator = torch.ops.truestep.norm_backward
        return operator(gradient, x, weight, *saved.constants, number, next_call()), None, None, None, None


# The forward pass is not traced; autograd traces the backward pass, where each call has a different number.
@torch.compiler.allow_in_graph
def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: int, number: torch.Tensor) -> Any:
    return _Norm.apply(x, weight, epsilon, form, number)


class AddingNorm(torch.nn.Module):
    """Our class, put before a norm's own class. It replaces the forward pass in training."""

    weight: torch.nn.Parameter
    own_form: tuple[float, int]
    number: torch.Tensor

    def forward(self, *given: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and len(given) == 1 and not named and given[0].requires_grad:
            return norm(given[0], self.weight.detach(), *self.own_form, self.number)
        return super().forward(*given, **named)


def add_in_norms(modules: Iterable[torch.nn.Module], owner: Sums, kept: Iterable[torch.nn.Parameter]) -> None:
    """Make the norms among `modules` use the fused backward pass, if `owner` has buffers for their weights."""
    wanted = set(kept)
    weights = ((module, getattr(module, "weight", None)) for module in modules)
    known: list[Any] = [each for each, weight in weights if isinstance(weight, torch.nn.Parameter) and weight in wanted]
    found = [(module, form_of(module)) for module in known if SMALLEST <= module.weight.shape.numel() <= LARGEST]
    forms: list[tuple[Any, tuple[float, int]]] = [(module, form) for module, form in found if form is not None]
    if not forms or not kernel_serves(forms[0][0].weight.device, forms[0][0].weight.dtype):
        return
    for module, form in forms:
        put_in(module, AddingNorm, own_form=form, number=enter(owner, module.weight))


def form_of(module: torch.nn.Module) -> tuple[float, int] | None:
    """Return a norm's epsilon, and the index of the form that computes the same bits; None if no form does."""
    weight: Any = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.buffers())
    # torch.nn.RMSNorm already has fused GPU kernels.
    other = isinstance(module, AddingNorm | torch.nn.RMSNorm) or "forward" in vars(module)
    if other or not isinstance(epsilon, float) or not alone or weight.ndim != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    # In rows of small values epsilon dominates, so a different epsilon, or a different use of it, is found.
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
    return serves("the kernel of norms' gradients", "torch's own code is used", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Test rows of several widths. Describe the first case that the kernels compute wrongly on a device."""
    from truestep.model.fast.rms_norm_kernel import backward
    from truestep.weights.sum_kernel import add_up

    generator = torch.Generator().manual_seed(0)
    for rows, width in _SIZES:
        gradient, x = (torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(2))
        weight = torch.randn(width, generator=generator).to(device, dtype)
        exact_x, exact_weight = (tensor.double().requires_grad_() for tensor in (x, weight))
        normed = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-6)
        (normed * (0.5 + exact_weight)).backward(gradient.double())
        assert exact_x.grad is not None and exact_weight.grad is not None
        found, parts = backward(gradient, x, weight, 1e-6, 0.5)
        if not torch.allclose(found.double(), exact_x.grad, rtol=torch.finfo(dtype).eps, atol=1e-5):
            return f"gradients of {rows} rows of {width} numbers"
        for adds in (False, True):
            total = torch.ones(width, device=device)
            add_up(parts, total, adds=adds)
            if not torch.allclose(total.double() - float(adds), exact_weight.grad, rtol=1e-4, atol=1e-3):
                return f"a weight's gradient over {rows} rows of {width} numbers"
    return None
