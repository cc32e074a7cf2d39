"""Causal attention over packed documents: no token sees another document.

With shared prefixes, a segment attends to the tokens of its path (`paths`): those of its ancestor segments and its own.

It is registered with transformers under two names, so that models' own code calls it. `FLASH` uses FlashAttention 4
(see `flash`); `choose` selects it where it works. `NAME` uses one of two implementations on torch:

- `varlen`: one fused kernel over all documents (GPU, half precision, no softcap; with sinks, without gradients);
- `rows`: segments of similar length are the rows of a batch, called a bucket. Short rows are padded with the segment's
  last token. Attention is causal, so no real query sees the padding; outputs of padding are not read.

A sink is one more score per query head in the softmax, without a value.

With context parallelism each rank computes a share of the heads for all tokens (see `context_parallel`).

Dimensions: S tokens of the micro-batch, Q query heads, K key-value heads, E head size; R rows of X tokens in a bucket.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from truestep.model.handed import handed
from truestep.model.mixers import flash
from truestep.model.mixers.context_parallel import Context
from truestep.model.mixers.paths import Paths, Span, make_paths
from truestep.types import sent
from truestep.weights.errors import ModelError

NAME, FLASH = "truestep_packed", "truestep_packed_fast"  # not "flash": transformers loads kernels for such names
# The end of an error message about a model that never calls the attention function that was set.
ITS_OWN = "computes attention, if it has any, by code of its own and not by a function that transformers registers"
_SCORES_BYTES = 256 * 2**20  # limit for the score matrices in memory at a time


@dataclass(frozen=True)
class Bucket:
    """Segments of similar length as rows of a batch."""

    queries: torch.Tensor  # [R, X] index into S
    keys: torch.Tensor  # [R, Y] index into the keys
    # [R, X] each query's index among its row's keys; None: queries and keys are the same tokens
    places: torch.Tensor | None


@dataclass(frozen=True)
class RowLayout:
    """Indices that arrange a micro-batch's segments as rows of buckets, and back."""

    buckets: tuple[Bucket, ...]
    restore: torch.Tensor  # [S] index of each token in the concatenated rows of all buckets


@dataclass  # not frozen: torch.compile guards on the values of frozen dataclasses, and would recompile for each layout
class PackedLayout:
    """The positions of segments in a micro-batch, made once for all layers."""

    segments: torch.Tensor  # [segments + 1] int32 cumulative lengths, on the model's device
    longest: int  # the longest segment's length
    spans: tuple[tuple[int, int], ...]  # each segment's begin and end, on the host; for `rows`
    context: Context | None = None  # the ranks that share the tokens
    paths: Paths | None = None  # the keys of segments with ancestors; None: every segment is a whole sequence

    @functools.cached_property
    def rows(self) -> RowLayout:
        """The row layout. Made on first use, because the fused kernel does not need it."""
        keys = self.spans if self.paths is None else self.paths.spans
        return _make_rows(self.spans, keys, self.segments.device)


def make_layout(
    segments: torch.Tensor,
    device: torch.device,
    context: Context | None = None,
    send: Callable[[torch.Tensor], torch.Tensor] | None = None,
    parents: Sequence[int] = (),
) -> PackedLayout:
    """Make a layout from cumulative lengths on the host, and the parents of segments if there are any. `send` replaces
    the default copy to the device."""
    bounds = segments.tolist()
    there = sent(segments, device) if send is None else send(segments)
    spans = tuple(itertools.pairwise(bounds))
    paths = make_paths(spans, parents, device) if parents else None
    return PackedLayout(there, max((end - start for start, end in spans), default=0), spans, context, paths)


def _make_rows(spans: Sequence[Span], key_spans: Sequence[Span], device: torch.device) -> RowLayout:
    order = sorted(range(len(spans)), key=lambda number: (_length(spans[number]), _length(key_spans[number]), number))
    buckets: list[Bucket] = []
    restore = torch.empty(max((end for _, end in spans), default=0), dtype=torch.int64)
    offset = 0
    while order:
        # At most a quarter of a bucket is padding, except for very short segments.
        limits = [max(size + size // 3, 16) for size in (_length(spans[order[0]]), _length(key_spans[order[0]]))]
        members = [n for n in order if _length(spans[n]) <= limits[0] and _length(key_spans[n]) <= limits[1]]
        taken = set(members)
        order = [number for number in order if number not in taken]
        queries, real = _padded([spans[number] for number in members])
        keys, _ = _padded([key_spans[number] for number in members])
        # A row's last query is its last key. Padding has the index of the token that it repeats.
        behind = torch.tensor([key_spans[number][1] - key_spans[number][0] - spans[number][1] for number in members])
        places = queries + behind[:, None]
        restore[queries[real]] = torch.arange(offset, offset + queries.numel()).view_as(queries)[real]
        offset += queries.numel()
        alike = all(_length(spans[number]) == _length(key_spans[number]) for number in members)
        buckets.append(Bucket(queries.to(device), keys.to(device), None if alike else places.to(device)))
    return RowLayout(tuple(buckets), restore.to(device))


def _length(span: Span) -> int:
    return span[1] - span[0]


def _padded(spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:  # [R, X], [R, X] bool
    """Return rows of positions, one span per row, padded with the span's last position; and which entries are not
    padding."""
    first = torch.tensor([start for start, _ in spans])[:, None]
    last = torch.tensor([end - 1 for _, end in spans])[:, None]
    places = torch.arange(max(map(_length, spans)))
    return torch.minimum(first + places, last), places <= last - first


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Q, S, E]
    key: torch.Tensor,  # [1, K, S, E]
    value: torch.Tensor,  # [1, K, S, E]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_layout: PackedLayout | None = None,
    s_aux: torch.Tensor | None = None,  # [Q] the heads' sinks, by the name that models give them
    *,
    fast: bool = False,
    **unused: object,
) -> tuple[torch.Tensor, None]:  # [1, S, Q, E]
    """Compute attention within documents. transformers calls this. `fast`: use FlashAttention 4."""
    packed_layout = handed("packed_layout", packed_layout)
    sliding_window = handed("sliding_window", sliding_window)
    if packed_layout is None:
        raise RuntimeError(f"{type(module).__name__} does not pass the packed layout on to its attention")
    if dropout:
        raise RuntimeError(
            f"{type(module).__name__} asks for attention dropout {dropout}: it must be 0, so that log-probs depend on "
            "the weights alone"
        )
    if not getattr(module, "is_causal", True):
        raise RuntimeError(f"{type(module).__name__} is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    context = packed_layout.context
    if context is not None:
        q, k, v = context.tokens_for_heads(q, k, v)
        s_aux = None if s_aux is None else context.own_heads(s_aux)
    if _seen is not None:
        shape = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        _seen.add(flash.Heads(*shape, scale, sliding_window, softcap, s_aux is not None))
    if fast:
        bounds = packed_layout.segments, packed_layout.longest
        output = flash.attend(q, k, v, *bounds, scale, sliding_window, softcap, s_aux, packed_layout.paths)
    elif is_fused(q.device, q.dtype, softcap, s_aux is not None):
        attend = functools.partial(_varlen, layout=packed_layout, scale=scale, window=sliding_window, sinks=s_aux)
        # The backward pass recomputes this, so that gathered copies of keys and values need not be kept.
        recomputes = packed_layout.paths is not None and torch.is_grad_enabled()
        output = checkpoint(attend, q, k, v, use_reentrant=False) if recomputes else attend(q, k, v)
    else:
        output = _rows(q, k, v, packed_layout, scale, sliding_window, softcap, s_aux)
    if context is not None:
        output = context.heads_for_tokens(output)
    return output[None], None


_uncompiled = torch.compiler.disable(packed_attention)  # compiled layers call it outside their graphs


def _flash_attention(module: torch.nn.Module, *tensors: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Compute FlashAttention 4, inside a compiled layer's graph unless context ranks exchange tokens for heads."""
    layout = options.get("packed_layout")
    attend: Any = packed_attention if layout is not None and layout.context is None else _uncompiled
    attended: tuple[torch.Tensor, None] = attend(module, *tensors, fast=True, **options)
    return attended


_seen: set[flash.Heads] | None = None


@contextmanager
def shapes_seen() -> Iterator[set[flash.Heads]]:
    """Collect the shapes of all attention calls within the block."""
    global _seen
    _seen = set()
    try:
        yield _seen
    finally:
        _seen = None


@dataclass(frozen=True)
class AttentionKernel:
    """The attention implementation of a model, and why FlashAttention 4 is not used."""

    name: str  # `NAME` or `FLASH`
    instead: str | None = None  # the reason why FlashAttention 4 is not used

    @property
    def story(self) -> str:
        if self.name == FLASH:
            return f"FlashAttention 4 ({flash.PACKAGE} {flash.version()}), which agreed with float32 on this machine"
        return f"torch's own; FlashAttention 4 is not used: {self.instead}" if self.instead else "torch's own"


BY_TORCH = AttentionKernel(NAME)


def choose(wanted: str, shapes: Iterable[flash.Heads], dtype: torch.dtype, place: torch.device) -> AttentionKernel:
    """Choose the implementation for attention of these shapes. `wanted`: auto, flash or torch."""
    if wanted == "torch":
        return BY_TORCH
    reason = flash.problem(tuple(shapes), dtype, place)
    if reason is None:
        return AttentionKernel(FLASH)
    if wanted == "flash":
        raise ModelError(f"model.attention: flash cannot be used: {reason}. model.attention: torch needs nothing more")
    return AttentionKernel(NAME, reason)


@contextmanager
def using(model: Any, name: str) -> Iterator[None]:
    """Use another attention implementation within the block, and evaluation mode: in training mode transformers may
    recompute activations, which forbids a KV cache."""
    before, training = model.config._attn_implementation, [module for module in model.modules() if module.training]
    model.set_attn_implementation(name)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True


def is_fused(device: torch.device, dtype: torch.dtype, softcap: float | None, sinks: bool = False) -> bool:
    """Tell whether the fused kernel is used. It reads the documents' bounds from the device."""
    if softcap is not None or device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return not sinks or (not torch.is_grad_enabled() and _gives_logsumexp())


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # [S, Q, E], [S, K, E], [S, K, E] -> [S, Q, E]
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    known, trains, paths = _known_options(varlen_attn), torch.is_grad_enabled(), layout.paths
    bounds, longest = (layout.segments, layout.longest) if paths is None else (paths.bounds, paths.longest)
    if "window_size" not in known and window is not None and window < longest:
        return _rows(q, k, v, layout, scale, window, None, sinks)
    if paths is not None:
        k, v = paths.gather(k), paths.gather(v)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        elif trains or not _shares_heads(q.device, q.dtype, q.shape[2]):
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    if "window_size" in known:
        # `window` includes the token itself; torch's window counts only the tokens to its left.
        options["window_size"] = (-1 if window is None or window >= longest else window - 1, 0)
    else:
        options["is_causal"] = True
    q, k, v = (tensor if not trains and _in_lines(tensor) else tensor.contiguous() for tensor in (q, k, v))
    return _with_sinks(sinks, q, k, v, layout.segments, bounds, layout.longest, longest, scale=scale, **options)


def _with_sinks(sinks: torch.Tensor | None, *given: Any, **options: Any) -> torch.Tensor:
    """Call the fused kernel. With sinks, scale its output by the softmax share that is left beside them."""
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn  # its options differ between torch versions
    if sinks is None:
        return attend(*given, **options)
    output, logsumexp = attend(*given, **options, return_aux=varlen.AuxRequest(lse=True))
    return flash.take_sinks(output, logsumexp, sinks)[0]


@functools.cache
def _gives_logsumexp() -> bool:
    from torch.nn.attention import varlen

    return "return_aux" in _known_options(varlen.varlen_attn) and hasattr(varlen, "AuxRequest")


def attend_to_past(
    q: torch.Tensor,  # [X, Q, E] the last tokens of each sequence
    k: torch.Tensor,  # [Y, K, E] all tokens of each sequence
    v: torch.Tensor,  # [Y, K, E]
    bounds: tuple[torch.Tensor, torch.Tensor],  # cumulative lengths of the queries and of the keys, int32
    longest: tuple[int, int],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # [X, Q, E]
    """Attend from the last tokens of packed sequences to all tokens of the same sequence up to each, by the fused
    kernel, without gradients."""
    from torch.nn.attention.varlen import varlen_attn

    known = _known_options(varlen_attn)
    if q.shape[1] != k.shape[1] and "enable_gqa" not in known and not _shares_heads(q.device, q.dtype, q.shape[2]):
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and "enable_gqa" in known else {}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None or window >= longest[1] else window - 1, 0)
    elif window is not None and window < longest[1]:
        raise NotImplementedError("the fused kernel of this torch has no windows")
    else:
        options["is_causal"] = True
    return _with_sinks(sinks, q.contiguous(), k, v, *bounds, *longest, scale=scale, **options)


def _in_lines(tensor: torch.Tensor) -> bool:
    """Tell whether the kernel can read a tensor without a copy: token-major, each head contiguous, 16-byte aligned."""
    *outer, inner = tensor.stride()
    aligned = not any(place * tensor.element_size() % 16 for place in outer) and not tensor.data_ptr() % 16
    return aligned and inner == 1 and outer[0] >= outer[1]


@functools.cache
def _shares_heads(place: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Tell whether the kernel supports grouped-query attention in a torch version without the option `enable_gqa`, by
    trying it without gradients."""
    from torch.nn.attention.varlen import varlen_attn

    attend: Any = varlen_attn
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 5, 5, 140], dtype=torch.int32, device=place)
    q, k, v = (torch.randn(140, heads, size, generator=generator).to(place, dtype) for heads in (6, 2, 2))
    how: dict[str, Any] = {"scale": 0.125}
    how |= {"window_size": (-1, 0)} if "window_size" in _known_options(varlen_attn) else {"is_causal": True}
    try:
        with torch.no_grad():
            shared = attend(q, k, v, lengths, lengths, 135, 135, **how)
            alone = attend(q, *(one.repeat_interleave(3, dim=1) for one in (k, v)), lengths, lengths, 135, 135, **how)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError):
        return False
    return torch.equal(shared, alone)


@functools.cache
def _known_options(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # [S, Q, E], [S, K, E], [S, K, F] -> [S, Q, F]
    if layout.paths is not None:
        k, v = layout.paths.gather(k), layout.paths.gather(v)
    outputs = []
    for bucket in layout.rows.buckets:
        rows, width = bucket.queries.shape
        step, most = rows, bucket.keys.shape[1]
        masked = softcap is not None or sinks is not None or (window is not None and window < most)
        if masked or bucket.places is not None:
            step = max(1, _SCORES_BYTES // (4 * q.shape[1] * width * most))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            query = _as_rows(q, bucket.queries[part])
            key, value = (_as_rows(tensor, bucket.keys[part]) for tensor in (k, v))
            places = None if bucket.places is None else bucket.places[part]
            attended = _dense(query, key, value, scale, window, softcap, sinks, places)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.rows.restore)


def _as_rows(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [S, heads, E] -> [R, heads, X, E]
    rows = tensor.index_select(0, positions.flatten())
    return rows.view(*positions.shape, *tensor.shape[1:]).transpose(1, 2)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    places: torch.Tensor | None,
) -> torch.Tensor:  # [R, Q, X, E], [R, K, Y, E], [R, K, Y, F] -> [R, Q, X, F]
    """Attend within rows. `places` [R, X]: each query's index among the keys; None: query i is at key i."""
    width, keys = q.shape[2], k.shape[2]
    if window is not None and window >= keys:
        window = None
    by_scores = softcap is not None or sinks is not None
    mask = None
    if window is not None or by_scores or places is not None:
        own = torch.arange(width, device=q.device) if places is None else places[:, None]  # [X] or [R, 1, X]
        distance = own[..., None] - torch.arange(keys, device=q.device)
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if not by_scores:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    assert mask is not None
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # a sink is one more column of scores, without a value
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide)[..., :keys].to(q.dtype) @ v


AttentionInterface.register(NAME, _uncompiled)
AttentionInterface.register(FLASH, _flash_attention)
