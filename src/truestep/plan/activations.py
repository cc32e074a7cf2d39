"""Measures the bytes per token that a layer keeps for its backward pass: the model's code runs on meta tensors, and
all tensors that autograd saves are counted.
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from truestep.model.adapter import Adapter, attach
from truestep.model.fast.activation_checkpointing import is_kept, is_product
from truestep.model.heads import HeadSizes
from truestep.model.mixers import linear_kernels
from truestep.model.mixers.recurrence import Call, Recurrence
from truestep.model.mixers.registered import put_in

_NAME = "truestep_plan"
_TOKENS = 64
_MOST_LAYERS = 25  # the largest number of layers to measure if a model has several kinds
# The share of activations that compiled layers keep: they recompute norms and activation functions from their inputs.
_COMPILED = 0.68


@dataclass(frozen=True)
class Activations:
    """Bytes per token."""

    layer: float  # kept by a layer without recomputation
    boundary: float  # the layer's input, the only tensor kept with full recomputation
    selected: float = 0.0  # kept besides the input with selective or elementwise recomputation


class _Attention(torch.autograd.Function):
    """A stand-in for fused attention that computes nothing, and saves the same tensors: inputs, output, log-sums."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class _Products(TorchDispatchMode):
    """Counts the output bytes of matrix products: `kept`, those that selective recomputation keeps; `every`, all."""

    kept = every = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if is_kept(function, arguments):
            parts = result if isinstance(result, tuple | list) else (result,)
            self.kept += sum(part.nbytes for part in parts)
        if is_product(function):
            self.every += result.nbytes
        return result


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # the kernel does not support grouped-query heads, so keys and values are repeated
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    return _Attention.apply(query, key, value), None


AttentionInterface.register(_NAME, _attend)


class _Kept(torch.autograd.Function):
    """A stand-in for a recurrent layer's kernel: computes nothing, and saves inputs and output."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(output)
        ctx.save_for_backward(output, *inputs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class _Recurring:
    """A stand-in for the engine: layers get it as `paged`."""

    step: "_Recurring"

    def __init__(self) -> None:
        self.step = self

    def recur(self, module: Any, recurrence: Recurrence, call: Call) -> Any:
        if not (recurrence.kernel and linear_kernels.version()):
            bounds = torch.tensor([0, _TOKENS], dtype=torch.int32, device="meta")
            return recurrence.packed(call, bounds, _TOKENS, ((0, _TOKENS),), None)[0]
        with torch.no_grad():
            output = call.function(**call.arguments)
        inputs = [value for value in call.arguments.values() if torch.is_tensor(value)]
        if isinstance(output, tuple):
            return (_Kept.apply(output[0], *inputs), *output[1:])
        return _Kept.apply(output, *inputs)


def measure_activations(
    config: Any,
    dtype: torch.dtype,
    *,
    compiled: bool,
    products: bool = False,
    apart: bool = True,
    adapter: Adapter | None = None,
) -> Activations:
    """Measure the bytes that a layer keeps, as the difference between models of two layers and of one. Every layer gets
    an adapter on each kind of module that has one anywhere. With `products`, `selected` counts all matrix products.
    `apart`: attention is torch's, so compiled code is split around it, and attention keeps its own inputs."""
    kind: Any = type(config)
    rank = 0 if adapter is None else adapter.rank
    adapted = frozenset(_within_layer(name) for name in (() if adapter is None else adapter.modules))
    written = config.to_json_string(use_diff=False)
    layer, boundary, narrow, _ = _measure(kind, written, dtype, rank, adapted)
    text, size = config.get_text_config(), torch.empty((), dtype=dtype).element_size()
    attended = _attended(text, size)
    every = 0.0
    if products:  # an adapter also keeps the activation between its two matrices
        every = _measure(kind, written, dtype, 0, frozenset())[-1] + rank * size * len(adapted)
    if not compiled:
        return Activations(layer, boundary, attended + (every if products else narrow))
    if products:  # the output of the last product is not counted: it is the next layer's input
        given = 3 * HeadSizes.of(text).width * size if apart else 0
        return Activations(layer * _COMPILED, boundary, attended + given + every - boundary)
    # Compiled code is recomputed as a whole, except attention, whose output is kept.
    return Activations(layer * _COMPILED, boundary, attended)


def _attended(text: Any, size: int) -> float:
    """Return the bytes per token of attention's output and of its log-sum per head."""
    heads = HeadSizes.of(text)
    return heads.width * size + 4 * heads.queries


@functools.lru_cache(maxsize=128)  # a search plans many layouts of one model
def _measure(kind: Any, written: str, dtype: torch.dtype, rank: int, adapted: frozenset[str]) -> tuple[float, ...]:
    """Measure bytes per token: kept by a layer, of its input, of the products that selective recomputation keeps, and
    of all products."""
    config = kind.from_dict(json.loads(written, object_hook=_with_infinity))
    text = config.get_text_config()
    size = torch.empty((), dtype=dtype).element_size()
    most = _layers_to_measure(text)
    try:
        one, two = (_saved_bytes(config, layers, dtype, rank, adapted) for layers in (1, most))
    except Exception:  # the model's code reads values, such as the routing of experts
        layer = _by_formula(text, size)
        return layer, text.hidden_size * size, 4.0 * text.hidden_size * size, layer
    layer, products, every = ((more - less) / _TOKENS / (most - 1) for more, less in zip(two, one, strict=True))
    return layer, text.hidden_size * size, products, every


def _with_infinity(part: dict[str, Any]) -> Any:
    """Return part of a configuration's JSON. transformers writes infinity as {"__float__": "Infinity"}: return that as
    a number."""
    return float(part["__float__"]) if part.keys() == {"__float__"} else part


def _layers_to_measure(text: Any) -> int:
    """Return the number of layers of the larger model: two, or enough to average over the kinds of layers."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [""]
    return 2 if len(set(kinds)) == 1 or text.num_hidden_layers < 2 else min(text.num_hidden_layers, _MOST_LAYERS)


def _by_formula(text: Any, size: int) -> float:
    """Estimate the bytes of a layer whose code cannot run on meta tensors: each matrix's input, and the same number of
    elementwise values in float32."""
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 4 * text.hidden_size)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    numbers = 4 * text.hidden_size + 4 * HeadSizes.of(text).width + 3 * inner * chosen
    return numbers * (size + 4)


def _within_layer(name: str) -> str:
    """Return a module's name within its layer: `self_attn.q_proj` for `model.layers.3.self_attn.q_proj`."""
    return re.sub(r"^.*?\.\d+\.", "", name)


def _attach(model: Any, rank: int, adapted: frozenset[str]) -> None:
    modules = tuple(name for name, _ in model.named_modules() if _within_layer(name) in adapted)
    attach(model, Adapter(rank, 1.0, modules), lambda name, shape: torch.empty(shape, dtype=model.dtype, device="meta"))


def _saved_bytes(config: Any, layers: int, dtype: torch.dtype, rank: int, adapted: frozenset[str]) -> tuple[int, ...]:
    from transformers import AutoModelForCausalLM

    small = _with_layers(config, layers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(small, dtype=dtype, attn_implementation=_NAME)
    model.train()
    put_in(model)
    if adapted:
        _attach(model, rank, adapted)
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    seen: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            seen[storage._cdata] = (storage.nbytes(), storage)  # keeping the storage alive keeps its address unique
        return tensor

    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    with _hooks(pack), _Products() as products:
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False, attention_mask=None, paged=_Recurring())
    return sum(count for count, _ in seen.values()), products.kept, products.every


def _hooks(pack: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _with_layers(config: Any, layers: int) -> Any:
    given = config.to_dict()
    small = type(config).from_dict(given)
    text = small.get_text_config()
    before = text.num_hidden_layers
    for name, kinds in list(vars(text).items()):
        if isinstance(kinds, list) and len(kinds) == before and before > 1:
            setattr(text, name, (kinds * layers)[:layers])
    text.num_hidden_layers = layers
    return small
