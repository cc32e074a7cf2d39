"""The output of a mixture of experts, given each token's experts and their weights.

    y[t] = Σ_j w[t, j] · down[e] · gate(up[e] · x[t]),   e = index[t, j]

Tokens are sorted by expert, multiplied in groups, and summed by token. Experts have no capacity, so no token is
dropped. A choice's weight multiplies the input of the last product. That input is at most half as wide as the output,
and the backward pass then does not need the experts' outputs. It gathers the input rows again.

Sums over a token's experts are deterministic: each token's rows are added in a fixed order.

Dimensions: T tokens, k experts of each, R = T · k rows, E experts, H hidden, I inner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import truestep.model.experts.operators  # noqa: F401 (registers the operators)
from truestep.model.fast.gradient_accumulation import next_call

ours = torch.ops.truestep


@dataclass(frozen=True)
class Weight:
    """The stacked weight matrices of all experts: [E, N, K] if `by_rows`, else [E, K, N]."""

    values: torch.Tensor
    by_rows: bool
    bias: torch.Tensor | None = None  # [E, N]
    # key of `values` in the table of gradient buffers; None: autograd gets their gradient
    number: torch.Tensor | None = None


def _backward(saved: Any, gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> Any:
    """Return the gradients of a product's rows and of its weights. A gradient is None if not required. The weights'
    gradient is also None if it is added to a float32 buffer (`saved.number` is set)."""
    if saved.number is not None:
        return ours.grouped_backward(gradient, rows, weights, ends, saved.by_rows, saved.number, next_call()), None
    of_rows = of_weights = None
    if saved.needs_input_grad[0]:
        of_rows = ours.grouped_product(gradient, weights, ends, not saved.by_rows)
    if saved.needs_input_grad[1]:
        of_weights = ours.grouped_gradient(*((gradient, rows) if saved.by_rows else (rows, gradient)), ends)
    return of_rows, of_weights


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert. A row is one choice: one token at one of its experts."""

    order: torch.Tensor  # [R] the choice of each row; the choices of a token are consecutive
    places: torch.Tensor  # [R] the row of each choice
    ends: torch.Tensor  # [E] the end of each expert's rows
    each: int = 0  # choices per token; 0: it differs between tokens, and `tokens` and `starts` are set
    tokens: torch.Tensor | None = None  # [R] the token of each row
    starts: torch.Tensor | None = None  # [T] the first choice of each token

    @property
    def given(self) -> tuple[Any, ...]:
        return self.order, self.places, self.ends, self.each, self.tokens, self.starts


def _tokens(order: torch.Tensor, each: int, tokens: torch.Tensor | None) -> torch.Tensor:
    """Return the token of each row."""
    return order // each if tokens is None else tokens


def _summed(
    rows: torch.Tensor, places: torch.Tensor, each: int, starts: torch.Tensor | None
) -> torch.Tensor:  # [R, H] -> [T, H]
    """Sum the rows of each token."""
    return rows[places].unflatten(0, (-1, each)).sum(1) if starts is None else ours.summed_runs(rows, places, starts)


class _Taken(torch.autograd.Function):
    """Products of tokens with the first weights of their experts: [T, H] -> [R, N]."""

    @staticmethod
    def forward(
        saved: Any,
        x: Any,
        weights: Any,
        order: Any,
        places: Any,
        ends: Any,
        each: int,
        tokens: Any,
        starts: Any,
        by_rows: bool,
        number: Any,
    ) -> torch.Tensor:
        saved.save_for_backward(x, weights, order, places, ends, tokens, starts)
        saved.each, saved.by_rows, saved.number = each, by_rows, number
        found: torch.Tensor = ours.grouped_product(x[_tokens(order, each, tokens)], weights, ends, by_rows)
        return found

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        x, weights, order, places, ends, tokens, starts = saved.saved_tensors
        taken = x[_tokens(order, saved.each, tokens)]
        rows, of_weights = _backward(saved, gradient.contiguous(), taken, weights, ends)
        of_x = None if rows is None else _summed(rows, places, saved.each, starts)
        return of_x, of_weights, *[None] * 8


class _GivenBack(torch.autograd.Function):
    """Products of rows with the last weights of their experts, summed by token: [R, I] -> [T, H]."""

    @staticmethod
    def forward(
        saved: Any,
        rows: Any,
        weights: Any,
        order: Any,
        places: Any,
        ends: Any,
        each: int,
        tokens: Any,
        starts: Any,
        by_rows: bool,
        number: Any,
    ) -> torch.Tensor:
        saved.save_for_backward(rows, weights, order, ends, tokens)
        saved.each, saved.by_rows, saved.number = each, by_rows, number
        return _summed(ours.grouped_product(rows, weights, ends, by_rows), places, each, starts)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        rows, weights, order, ends, tokens = saved.saved_tensors
        given = gradient[_tokens(order, saved.each, tokens)]
        of_rows, of_weights = _backward(saved, given, rows, weights, ends)
        return of_rows, of_weights, *[None] * 8


class _Sorted(torch.autograd.Function):
    """Reorders the weights of choices: [...] -> [R]. `places` is the inverse of `order`."""

    @staticmethod
    def forward(saved: Any, weights: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        saved.save_for_backward(places)
        saved.shape = weights.shape
        return weights.flatten()[order]

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        (places,) = saved.saved_tensors
        return gradient[places].view(saved.shape), None, None


# The forward pass is not traced; autograd traces the backward pass, where each call has a different number.
@torch.compiler.allow_in_graph
def _taken(*given: Any) -> Any:
    return _Taken.apply(*given)


@torch.compiler.allow_in_graph
def _given_back(*given: Any) -> Any:
    return _GivenBack.apply(*given)


@torch.compiler.allow_in_graph
def in_order(*given: Any) -> Any:
    return _Sorted.apply(*given)


def mixture(
    x: torch.Tensor,  # [T, H]
    index: torch.Tensor,  # [T, k]
    weights: torch.Tensor,  # [T, k]
    first: Weight,
    last: Weight,
    activation: Callable[[torch.Tensor], torch.Tensor],  # [R, outputs of `first`] -> [R, inputs of `last`]
) -> torch.Tensor:  # [T, H]
    """Compute the output of experts for tokens and their chosen experts."""
    order, places, ends = ours.sorted_by_expert(index, first.values.shape[0])
    return of_rows(x, Rows(order, places, ends, index.shape[1]), index, weights, first, last, activation)


def of_rows(
    x: torch.Tensor,  # [T, H]
    rows: Rows,
    index: torch.Tensor,  # [T, k] or [R], the expert of each choice
    weights: torch.Tensor,  # the weight of each choice, in the shape of `index`
    first: Weight,
    last: Weight,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # [T, H]
    """Compute the output of experts, given the rows of the tokens' choices."""
    inner = _taken(x, first.values, *rows.given, first.by_rows, first.number)
    if first.bias is not None:
        inner = inner + _of_rows(first.bias, index, rows.order)
    scale = in_order(weights, rows.order, rows.places)[:, None]
    outer = (activation(inner) * scale).to(x.dtype)
    result = _given_back(outer, last.values, *rows.given, last.by_rows, last.number)
    if last.bias is not None:
        result = result + _weighted(weights, index, rows, len(x), last.bias).to(x.dtype)
    return result


def _of_rows(bias: torch.Tensor, index: torch.Tensor, order: torch.Tensor) -> torch.Tensor:  # [E, N] -> [R, N]
    """Return the bias of each row's expert. The gradient is a matrix product: index sums on a GPU have no fixed
    order."""
    return _chosen(index.flatten()[order], bias) @ bias


def _weighted(
    weights: torch.Tensor, index: torch.Tensor, rows: Rows, tokens: int, bias: torch.Tensor
) -> torch.Tensor:  # [E, N] -> [T, N]
    """Sum the biases of each token's experts, times the weights of the choices."""
    spread = torch.zeros(tokens, bias.shape[0], dtype=weights.dtype, device=weights.device)
    if rows.tokens is None:
        return spread.scatter(1, index, weights).to(bias.dtype) @ bias
    return spread.index_put((rows.tokens[rows.places], index), weights).to(bias.dtype) @ bias


def _chosen(index: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # [R] -> [R, E]
    return torch.nn.functional.one_hot(index, bias.shape[0]).to(bias.dtype)
