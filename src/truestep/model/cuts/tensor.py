"""Tensor parallelism: layers, embedding and head cut over ranks, by the plan in the model's configuration.

A layer has two halves, attention and MLP. A half's first matrices are cut by output (heads or neurons), its last matrix
by input, so that a rank computes some heads and neurons of every token. Between halves, norms and residual sums run on
a contiguous part of the tokens (sequence parallelism); while sampling, a rank has all tokens. See `TokenExchange`.
Parameters are plain tensors that hold this rank's slices.

Dimensions: S tokens of the micro-batch, R ranks, H hidden, V vocabulary.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep.model.adapter import LoraLinear, product
from truestep.model.experts.grouped import is_experts
from truestep.model.heads import HeadSizes
from truestep.ranks.axes import slice_at
from truestep.ranks.exchange import TokenExchange
from truestep.ranks.group import Ranks
from truestep.weights.errors import ModelError
from truestep.weights.pieces import WeightSlice, slice_of

# A plan's styles for weights that are not cut, such as norms; their gradients are summed over tensor ranks.
_UNCUT = ("replicated_with_grad_allreduce", "replicate", "sequence_parallel")
# The style of weights whose outputs are gathered at once. Such a module is not cut: each rank runs it on all tokens.
_WHOLE = "colwise_gather_output"
_KEY_VALUE = ("k_proj", "v_proj")
_EXPERTS = "moe_tp_experts"  # experts are cut by `parallel.expert`, not by the plan


@dataclass(frozen=True)
class TensorPlan:
    """The names of linear layers cut by columns (output) and by rows (input), with `*` for the layer's index."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    whole: frozenset[str] = frozenset()  # uncut modules, such as recurrent layers

    @property
    def halves(self) -> set[str]:
        """The names of attention and MLP modules. Each takes all tokens and returns partial sums."""
        return {_parent(name) for name in self.columns}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def tensor_plan(config: Any, ranks: int, *, divided: bool = False) -> TensorPlan:
    """Make the plan from a model's configuration alone, so that a model is refused before weights are read. `divided`:
    experts are divided over these ranks, and MoE blocks run on a rank's own tokens."""
    text = config.get_text_config()
    kind = config.model_type
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    of_layers = {name: style for name, style in plan.items() if "*" in name and style not in _UNCUT}
    experts = {name for name, style in of_layers.items() if style == _EXPERTS and divided}
    of_layers = {name: style for name, style in of_layers.items() if not {name, _parent(name)} & experts}
    if not of_layers:
        raise _refusal(f"{kind} has no plan for tensor parallelism (base_model_tp_plan)")
    gathering = {name for name, style in of_layers.items() if style == _WHOLE}
    whole = frozenset(_parent(name) for name in gathering)
    of_layers = {name: style for name, style in of_layers.items() if name not in gathering}
    for name, style in of_layers.items():
        if _parent(name) in whole:  # a module is either computed whole or cut
            first = next(other for other in plan if other in gathering and _parent(other) == _parent(name))
            raise _refusal(f"{kind}'s plan has {first}: {_WHOLE}; only colwise and rowwise are supported")
        if style not in ("colwise", "rowwise"):
            raise _refusal(f"{kind}'s plan has {name}: {style}; only colwise and rowwise are supported")
    columns = tuple(name for name, style in of_layers.items() if style == "colwise")
    cut = TensorPlan(columns, tuple(name for name in of_layers if name not in columns), whole)
    unpaired = cut.halves ^ {_parent(name) for name in cut.rows}
    if unpaired:
        raise _refusal(f"{kind}'s plan cuts {min(unpaired)} either by columns or by rows; both are needed")
    if experts and not any("attn" in name for name in (*cut.halves, *whole)):
        raise _refusal(f"{kind}'s plan does not cut attention")
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size % ranks:
            raise _refusal(f"{name} is {size}, which {ranks} tensor ranks do not divide")
    vocabulary = text.vocab_size
    if slice_at(vocabulary, ranks, ranks - 1)[1] == 0:
        raise _refusal(f"a vocabulary of {vocabulary} is too small for {ranks} tensor ranks: the last one has no row")
    return cut


def _refusal(reason: str) -> ModelError:
    return ModelError(f"parallel.tensor: {reason}: set parallel.tensor: 1 for this model")


def cut_model(
    model: Any,
    plan: TensorPlan,
    ranks: Ranks,
    exchange: TokenExchange,
    pieces: Mapping[str, WeightSlice],
    device: torch.device,
) -> dict[str, WeightSlice]:
    """Cut a model with unread weights, in place. Return `pieces` with the cuts added."""
    cuts = _Cuts(model, ranks, exchange, pieces, device)
    met = set()
    for name, module in list(model.base_model.named_modules()):
        pattern = re.sub(r"\.\d+\.", ".*.", name, count=1)
        met.add(pattern)
        if any(is_experts(child) for child in module.children()):
            # This block computes only the rank's own tokens. Dense layers' MLP may have the same name in the plan.
            met |= {named for named in (*plan.columns, *plan.rows) if _parent(named) == pattern}
            continue
        if pattern in plan.halves | plan.whole:
            _gather_for(module, exchange)
        if pattern in plan.whole:
            _keep_own_tokens(module, exchange)
        if pattern in (*plan.columns, *plan.rows):
            if type(module) not in (torch.nn.Linear, LoraLinear):
                raise _refusal(f"{name} is a {type(module).__name__} and not a plain linear layer")
            if pattern in plan.columns:
                cuts.columns(name, module)
            else:
                cuts.rows(module)
    absent = {*plan.columns, *plan.rows} - met
    if absent:
        raise _refusal(f"{type(model).__name__} has no {min(absent)}, which its plan cuts")
    cuts.vocabulary(model.get_input_embeddings(), model.get_output_embeddings())
    return cuts.pieces


class _Cuts:
    def __init__(
        self, model: Any, ranks: Ranks, exchange: TokenExchange, pieces: Mapping[str, WeightSlice], device: torch.device
    ):
        self._model, self._ranks, self._exchange, self._device = model, ranks, exchange, device
        self.pieces = dict(pieces)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        heads = HeadSizes.of(model.config)
        self._queries, self._keys = heads.queries, heads.keys

    def _cut(self, module: Any, parameter: str, dimension: int) -> None:
        uncut = getattr(module, parameter)
        if uncut is None:
            return
        name = self._names.pop(uncut)
        piece = self.pieces[name] = replace(self.pieces[name], cut={"tensor": dimension})
        own_slice = piece.slice(uncut.detach(), self._ranks)
        setattr(module, parameter, torch.nn.Parameter(own_slice, requires_grad=uncut.requires_grad))

    def columns(self, name: str, linear_layer: Any) -> None:
        if name.endswith(_KEY_VALUE) and self._keys % self._ranks.tensor:
            heads = _compute_needed_heads(linear_layer, self._keys, self._queries, self._ranks, self._device)
            # transformers' own attention reads this. It samples from models that the engine does not support.
            attention: Any = self._model.base_model.get_submodule(_parent(name))
            attention.num_key_value_groups = self._queries // self._ranks.tensor // heads
            return
        if linear_layer.out_features % self._ranks.tensor:
            raise _refusal(f"{name} has {linear_layer.out_features} outputs, which tensor ranks do not divide")
        self._cut(linear_layer, "weight", 0)
        self._cut(linear_layer, "bias", 0)
        if isinstance(linear_layer, LoraLinear):
            self._cut(linear_layer.lora_B, "weight", 0)
        linear_layer.out_features = linear_layer.weight.shape[0]

    def rows(self, linear_layer: Any) -> None:
        self._cut(linear_layer, "weight", 1)
        if isinstance(linear_layer, LoraLinear):
            self._cut(linear_layer.lora_A, "weight", 1)
        linear_layer.in_features = linear_layer.weight.shape[1]
        exchange = self._exchange

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            summed = exchange.sum(product(linear_layer, inputs))
            # Every rank has the whole bias, and adds it after the sum, to its own tokens.
            return summed if linear_layer.bias is None else summed + linear_layer.bias

        linear_layer.forward = forward

    def vocabulary(self, embedding: Any, head: Any) -> None:
        tied = head.weight is embedding.weight
        _look_up_slice(embedding, *slice_of(embedding.weight.shape[0], self._ranks, "tensor"), self._exchange)
        self._cut(embedding, "weight", 0)
        embedding.num_embeddings = embedding.weight.shape[0]
        if tied:
            head.weight = embedding.weight
        else:
            self._cut(head, "weight", 0)
        head.out_features = head.weight.shape[0]


def _gather_for(half: Any, exchange: TokenExchange) -> None:
    """Gather all tokens once per half, before its first matrices."""

    def gather(
        module: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in named:
            return arguments, named | {"hidden_states": exchange.gather(named["hidden_states"])}
        return (exchange.gather(arguments[0]), *arguments[1:]), named

    half.register_forward_pre_hook(gather, with_kwargs=True)


def _keep_own_tokens(module: Any, exchange: TokenExchange) -> None:
    """Keep only this rank's tokens of the output of a module that ran on all tokens. The gradients of its weights are
    then those of these tokens."""
    module.register_forward_hook(lambda module, arguments, output: exchange.own(output))


def _compute_needed_heads(linear_layer: Any, keys: int, queries: int, ranks: Ranks, device: torch.device) -> int:
    """Keep a key or value projection uncut if the number of ranks does not divide its heads. Compute only the heads
    that this rank's query heads use, so each rank has a part of the gradient. If query heads share key heads unevenly,
    a key head is computed once per query head. Return the number of heads computed."""
    first, count = slice_of(queries, ranks, "tensor")
    looked_at = [query * keys // queries for query in range(first, first + count)]
    different = sorted(set(looked_at))
    each = count // len(different)
    even = looked_at == [head for head in different for _ in range(each)]
    size = linear_layer.out_features // keys
    computed = different if even else looked_at
    chosen = (torch.tensor(computed)[:, None] * size + torch.arange(size)).flatten().to(device)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        bias = None if linear_layer.bias is None else linear_layer.bias.index_select(0, chosen)
        return product(linear_layer, inputs, chosen, bias)

    linear_layer.forward = forward
    return len(computed)


def _look_up_slice(embedding: Any, first: int, size: int, exchange: TokenExchange) -> None:
    """Make an embedding look up tokens in this rank's slice of the vocabulary, and sum the results over tensor
    ranks."""
    look_up: Callable[[torch.Tensor], torch.Tensor] = embedding.forward

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        owned = (input_ids >= first) & (input_ids < first + size)
        found = look_up(torch.where(owned, input_ids - first, 0))
        return exchange.sum(torch.where(owned[..., None], found, 0))

    embedding.forward = forward
