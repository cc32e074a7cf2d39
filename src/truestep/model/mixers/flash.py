"""Attention over packed documents by FlashAttention 4, an optional package (`truestep[flash]`).

The forward and backward kernels are custom operators that torch.compile does not look into, so a compiled layer is one
graph, attention included. They read documents' bounds from the device, so a new packing causes no recompilation. Before
a shape of attention is used, its values and gradients are compared with those of plain torch in float32.

Dimensions: S tokens of the micro-batch, Q query heads, K key-value heads, E head size, F size of a value's head.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from truestep.model.mixers.paths import Paths, make_paths, sum_paths

PACKAGE = "flash-attn-4"
_MODULE = "flash_attn.cute"
_LENGTHS = (1, 190, 64, 700, 129, 2)  # document lengths in the comparison with torch
_PARENTS = (-1, -1, 1, 1, 3, 1)  # each segment's parent in the comparison of shared prefixes
_FACTOR = 1.5  # allowed error, as a multiple of plain torch's rounding error in the same type


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention."""

    queries: int
    keys: int
    size: int
    value_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@torch.library.custom_op("truestep::flash_attention", mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
    paths: list[torch.Tensor],
    longest_path: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    k, v = _along(paths, k, v)
    options = _options(segments, longest, scale, window, paths, longest_path)
    output, logsumexp, *_ = _flash_attn_fwd(q, k, v, softcap=softcap, return_lse=True, **options)
    return (output, logsumexp) if sinks is None else take_sinks(output, logsumexp, sinks)


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return output, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("truestep::flash_attention_backward", mutates_args=())
def _gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    segments: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float,
    paths: list[torch.Tensor],
    longest_path: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    k, v = _along(paths, k, v)
    options = _options(segments, longest, scale, window, paths, longest_path)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, output, gradient.contiguous(), logsumexp, softcap=softcap, **options)
    return (dq, sum_paths(dk, paths[1:]), sum_paths(dv, paths[1:])) if paths else (dq, dk, dv)


@_gradients.register_fake
def _(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))  # type: ignore[return-value]


def _along(paths: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values to the paths of segments, if there are any. Copies are not kept for the backward pass."""
    return (k.index_select(0, paths[1]), v.index_select(0, paths[1])) if paths else (k, v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, segments, *constants, sinks, paths, longest_path = inputs
    ctx.constants = *constants, longest_path
    ctx.save_for_backward(q, k, v, *output, segments, sinks, *paths)
    ctx.set_materialize_grads(False)


def _backward(context: Any, gradient: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, output, logsumexp, segments, sinks, *paths = context.saved_tensors
    if gradient is None:
        return (*(None,) * 9, [None] * len(paths), None)
    of_sinks = None if sinks is None else _gradient_of_sinks(gradient, output, logsumexp, sinks)
    *constants, longest_path = context.constants
    how = *constants, paths, longest_path
    of_tensors = _gradients(gradient, q, k, v, output, logsumexp, segments, *how)
    return (*of_tensors, *(None,) * 5, of_sinks, [None] * len(paths), None)


def take_sinks(
    output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # [S, Q, F], [Q, S], [Q]
    """Add sinks to the result of attention without them. With the new logsumexp, which includes the sinks, the backward
    pass without sinks gives the right gradients of queries, keys and values."""
    wide = sinks.to(logsumexp.dtype)[:, None]
    share = (logsumexp - wide).sigmoid().t()[..., None]
    return (output * share).to(output.dtype), torch.logaddexp(logsumexp, wide)


def _gradient_of_sinks(
    gradient: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:  # [Q]
    """Return the sinks' gradient. In each row it is -p · (gradient · output), where p is the sink's share of the
    softmax."""
    along = (gradient.float() * output.float()).sum(-1)  # [S, Q]
    share = (sinks.float() - logsumexp.t()).exp()
    return -(share * along).sum(0).to(sinks.dtype)


_attend.register_autograd(_backward, setup_context=_keep)


def _options(
    segments: torch.Tensor, longest: int, scale: float, window: int | None, paths: list[torch.Tensor], longest_path: int
) -> dict[str, Any]:
    """Return the options of both kernels. Our `window` includes the token itself; theirs counts only the tokens before
    it."""
    return {
        "cu_seqlens_q": segments,
        "cu_seqlens_k": paths[0] if paths else segments,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest_path if paths else longest,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None else window - 1,
    }


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    paths: Paths | None = None,
) -> torch.Tensor:  # [S, Q, E], [S, K, E], [S, K, F] -> [S, Q, F]
    """Compute attention within documents, or along the paths of segments."""
    # The copies are outside the operators, so that the compiler fuses them with the operations that make q, k and v.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    along, longest_path = ([], 0) if paths is None else ([paths.bounds, *paths.index], paths.longest)
    how = segments, longest, scale, window, softcap or 0.0, sinks, along, longest_path
    output: torch.Tensor = _attend(q, k, v, *how)[0]
    return output


@functools.cache
def version() -> str | None:
    """Return the package's version; None if it is not installed."""
    try:
        found = importlib.util.find_spec(_MODULE) is not None
        return importlib.metadata.version(PACKAGE) if found else None
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None


def problem(shapes: tuple[Heads, ...], dtype: torch.dtype, place: torch.device) -> str | None:
    """Return why FlashAttention 4 cannot be used for these shapes on a device; None if it can."""
    if place.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it needs model.dtype: bfloat16"
    if torch.cuda.get_device_capability(place)[0] not in (9, 10):
        return f"it is checked on Hopper and Blackwell GPUs, and this is {torch.cuda.get_device_name(place)}"
    if version() is None:
        return f"the package {PACKAGE} is not installed (pip install 'truestep[flash]')"
    for heads in shapes:
        found = _compared(heads, dtype, place)
        if found:
            return found
    return None


@functools.cache
def _compared(heads: Heads, dtype: torch.dtype, place: torch.device) -> str | None:
    try:
        return compare(heads, dtype, place, attend)
    except Exception as error:  # the kernel compiler's errors have no common base class
        return f"it failed on this machine: {type(error).__name__}: {str(error)[:300]}"


def compare(heads: Heads, dtype: torch.dtype, place: torch.device, kernel: Any) -> str | None:
    """Compare a kernel with plain torch in float32, with separate documents and with shared prefixes. Describe the
    first result whose error exceeds `_FACTOR` times that of plain torch in the kernel's dtype, or return None."""
    return _compare(heads, dtype, place, kernel, ()) or _compare(heads, dtype, place, kernel, _PARENTS)


def _compare(
    heads: Heads, dtype: torch.dtype, place: torch.device, kernel: Any, parents: tuple[int, ...]
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(_LENGTHS)

    def random(count: int, size: int) -> torch.Tensor:
        return torch.randn(tokens, count, size, generator=generator).to(place, dtype)

    sizes = (heads.queries, heads.size), (heads.keys, heads.size), (heads.keys, heads.value_size)
    given: tuple[torch.Tensor, ...] = tuple(random(*each) for each in sizes)
    if heads.sinks:
        given = (*given, random(heads.queries, 1)[0, :, 0])
    gradient = random(heads.queries, heads.value_size)
    bounds = torch.tensor((0, *_LENGTHS)).cumsum(0)
    paths = make_paths(tuple(itertools.pairwise(bounds.tolist())), parents, place) if parents else None
    bounds = bounds.to(place, torch.int32)

    def run(function: Any, wide: bool) -> list[torch.Tensor]:
        inputs = [(tensor.float() if wide else tensor).detach().clone().requires_grad_() for tensor in given]
        with torch.enable_grad():
            output = function(*inputs)
            output.backward(gradient.to(output.dtype))
        return [output.detach().float(), *(tensor.grad.float() for tensor in inputs if tensor.grad is not None)]

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        return _plain(heads, parents, *tensors)

    def fast(*tensors: torch.Tensor) -> torch.Tensor:
        how = bounds, max(_LENGTHS), heads.scale, heads.window, heads.softcap
        output: torch.Tensor = kernel(*tensors[:3], *how, *(tensors[3:] or (None,)), paths)
        return output

    exact, rounded, got = run(plain, True), run(plain, False), run(fast, False)
    names = ["values", "dq", "dk", "dv", *(["dsinks"] if heads.sinks else [])]
    for name, right, like, value in zip(names, exact, rounded, got, strict=True):
        off, allowed = (float((other - right).norm() / right.norm()) for other in (value, like))
        if not off <= _FACTOR * allowed + 1e-4:
            shared = " with shared prefixes" if parents else ""
            return f"its {name} are off by {off:.1e} for {heads}{shared}, plain torch's by {allowed:.1e}"
    return None


def _plain(
    heads: Heads,
    parents: tuple[int, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention segment by segment, with explicit scores."""
    group = heads.queries // heads.keys
    parts = [tensor.split(list(_LENGTHS)) for tensor in (q, k, v)]
    paths: list[list[int]] = []
    outputs = []
    for number, query in enumerate(parts[0]):
        parent = parents[number] if parents else -1
        paths.append([*(paths[parent] if parent >= 0 else ()), number])
        key, value = (torch.cat([part[index] for index in paths[-1]]) for part in parts[1:])
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhe,khe->hqk", query, key).float() * heads.scale
        if heads.softcap is not None:
            scores = torch.tanh(scores / heads.softcap) * heads.softcap
        places = torch.arange(len(key), device=q.device)
        distance = places[len(key) - len(query) :, None] - places
        seen = (distance >= 0) & (distance < (heads.window or len(key)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(key)].to(q.dtype)
        outputs.append(torch.einsum("hqk,khe->qhe", weights, value))
    return torch.cat(outputs)
