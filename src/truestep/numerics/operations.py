"""Exact arithmetic for a model's own code: within `Exactly`, each torch operation is one of two kinds, or is refused.

- Operations that move numbers or are elementwise stay as they are; on a CPU, some elementwise functions are applied in
  blocks, so that an element's index does not change its rounding.
- Operations that multiply matrices or sum are replaced as listed in `REPLACED`.

So any model either computes exactly or is refused with the name of the operation. There are no gradients, because
operations are replaced below autograd.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.errors import TruestepError
from truestep.numerics import arithmetic, plain

aten = torch.ops.aten


class InexactError(TruestepError):
    """An operation without an exact form."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that move, create or compare numbers: nothing is rounded.
_MOVES = _names("""
    _local_scalar_dense _reshape_alias _to_copy _unsafe_view alias all amax amin any arange argmax argmin cat clone
    constant_pad_nd copy copy_ detach embedding empty empty_like empty_strided fill fill_ flip full full_like gather
    index index_copy index_copy_ index_put index_put_ index_select lift_fresh lift_fresh_copy max min new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like repeat resize_ roll scalar_tensor scatter
    select_scatter set_ slice_scatter sort split split_with_sizes split_with_sizes_copy stack topk tril triu unbind view
    zero_ zeros zeros_like
""")
# Elementwise operations that are rounded correctly, whatever the element's index.
_ROUNDED = _names("""
    abs add add_ bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_ clamp_max clamp_min copysign div div_
    eq floor floor_divide ge gt isfinite isinf isnan le logical_and logical_not logical_or lt masked_fill masked_fill_
    maximum minimum mul mul_ ne neg neg_ reciprocal relu remainder round rsqrt rsub sign sqrt square sub sub_ trunc
    where
""")


def _matrix(b: torch.Tensor) -> torch.Tensor:  # [K, N] -> [N, K]
    return b.transpose(-1, -2)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return arithmetic.product(a, _matrix(b))


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    if beta != 1 or alpha != 1 or bias.dim() > 1:
        raise InexactError("a product that is scaled, or has a matrix added")
    return arithmetic.product(a, _matrix(b), bias)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[-1] == 1:  # an outer product without sums, as in RoPE
        return a * b
    return torch.stack([_mm(one, other) for one, other in zip(a, b, strict=True)])


def _last(x: torch.Tensor, dimensions: Any) -> bool:
    return dimensions is not None and [dimension % x.dim() for dimension in dimensions] == [x.dim() - 1]


def _reduced(
    reduce: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    dimensions: Any,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    if not _last(x, dimensions):
        raise InexactError("a sum over another dimension than the last")
    if not x.is_floating_point():
        return x.sum(dimensions, keepdim, dtype=dtype)
    found = reduce(x.to(dtype or x.dtype)).to(dtype or x.dtype)
    return found.unsqueeze(-1) if keepdim else found


def _mean(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _reduced(arithmetic.row_mean, x, dim, keepdim, dtype)


def _sum(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _reduced(arithmetic.row_sum, x, dim, keepdim, dtype)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if not _last(x, [dim]):
        raise InexactError("a softmax over another dimension than the last")
    z = x.to(plain.wide(x.dtype))
    weights = plain.each(torch.exp, z - z.amax(-1, keepdim=True))
    found = weights / arithmetic.row_sum(weights)[..., None]
    return found if half_to_float else found.to(x.dtype)


def _layer_norm(
    x: torch.Tensor, shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(shape) != 1:
        raise InexactError("a layer norm over more than the last dimension")
    z = x.to(plain.wide(x.dtype))
    mean = arithmetic.row_mean(z)[..., None]
    z = z - mean
    scale = torch.rsqrt(arithmetic.row_mean(z * z)[..., None] + eps)
    z = z * scale
    z = z if weight is None else z * weight
    return (z if bias is None else z + bias).to(x.dtype), mean, scale


def _rms_norm(
    x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(shape) != 1:
        raise InexactError("a norm over more than the last dimension")
    z = x.to(plain.wide(x.dtype))
    scale = torch.rsqrt(arithmetic.row_mean(z * z)[..., None] + (torch.finfo(z.dtype).eps if eps is None else eps))
    z = z * scale
    return (z if weight is None else z * weight).to(x.dtype), scale


def _pow(x: torch.Tensor, exponent: float) -> torch.Tensor:
    return x * x if exponent == 2 else plain.each(torch.pow, x, exponent)


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten._softmax.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten.pow.Tensor_Scalar: _pow,
}
if hasattr(aten, "_fused_rms_norm"):
    REPLACED[aten._fused_rms_norm.default] = _rms_norm


# Namespaces of profiler marks and of FSDP's gathers, which compute nothing.
_PASSED = ("profiler", "fsdp")


def keeps_rows_apart(operation: Any) -> bool:
    """Return whether an operation only moves numbers or is elementwise."""
    if operation.namespace in _PASSED:
        return True
    return operation.is_view or _name(operation) in _MOVES | _ROUNDED or torch.Tag.pointwise in operation.tags


def _name(operation: Any) -> str:
    return str(operation.overloadpacket).rpartition(".")[2]


def _elementwise(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an operation on a CPU. There, the rounding of some of torch's elementwise functions may depend on an
    element's index."""
    scaled = options.get("alpha", 1) != 1
    moves = operation.is_view or operation.namespace in _PASSED or _name(operation) in _MOVES | _ROUNDED
    if moves and not scaled:
        return operation(*arguments, **options)
    tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
    if scaled or len(tensors) != 1 or tensors[0] is not arguments[0] or _name(operation).endswith("_"):
        raise InexactError(str(operation))
    return plain.each(operation, *arguments, **options)


_ACTIVE: list["Exactly"] = []


class Exactly(TorchDispatchMode):
    """A context in which every torch operation is exact or refused."""

    def __enter__(self) -> "Exactly":
        super().__enter__()
        _ACTIVE.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        replaced = REPLACED.get(operation)
        try:
            if replaced is not None:
                return replaced(*args, **options)
            if not keeps_rows_apart(operation):
                raise InexactError(str(operation))
            on_cpu = not any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
            return _elementwise(operation, args, options) if on_cpu else operation(*args, **options)
        except InexactError as error:
            raise InexactError(
                f"sampler.exact: this model computes {error} ({operation}), for which there is no proof that a row's "
                "result depends on that row alone: leave out sampler.exact"
            ) from None


@contextmanager
def by_itself() -> Iterator[None]:
    """Suspend `Exactly` for code that is already exact."""
    active = _ACTIVE[-1] if _ACTIVE else None
    if active is None:
        yield
        return
    active.__exit__(None, None, None)
    try:
        yield
    finally:
        active.__enter__()
