"""Operations of recurrent layers over packed documents: values, gradients and states against a loop in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

from oracles import recurrent
from truestep.model.mixers.chunks import make_chunks
from truestep.model.mixers.context_parallel import check_share
from truestep.model.mixers.convolution import Convolution
from truestep.model.mixers.delta_rule import DeltaRule
from truestep.model.mixers.recurrence import Call, Recurrence
from truestep.model.mixers.state_space import Mamba1, Mamba2
from truestep.weights.errors import ModelError

HEADS, GROUPS, SIZE, STATE, CHANNELS = 4, 2, 6, 5, 7


class Operation:
    """An operation, with random arguments, its loop in float64 and transformers' own function."""

    def __init__(self, recurrence: Recurrence, function: Any, loop: Callable[..., Any], draw: Callable[..., Any]):
        self.recurrence, self.function, self.loop, self.draw = recurrence, inspect.unwrap(function), loop, draw
        self.constants: dict[str, Any] = {}

    def arguments(self, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return self.draw(lambda *shape: torch.randn(*shape, generator=generator), tokens)

    def call(self, arguments: dict[str, torch.Tensor]) -> Call:
        bound = inspect.signature(self.function).bind(**arguments, **self.constants)
        bound.apply_defaults()
        return Call(self.function, bound.arguments)

    def tokens_of(self, arguments: dict[str, torch.Tensor], span: tuple[int, int]) -> dict[str, torch.Tensor]:
        places = TOKENS[type(self.recurrence)]
        start, end = span
        return {
            name: value.narrow(places[name], start, end - start) if name in places else value
            for name, value in arguments.items()
        }


TOKENS: dict[type[Recurrence], dict[str, int]] = {
    Convolution: {"hidden_states": 2},
    DeltaRule: dict.fromkeys(("query", "key", "value", "g", "beta"), 1),
    Mamba2: dict.fromkeys(("hidden_states", "dt", "B", "C"), 1),
    Mamba1: dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2),
}


def _convolution(normal: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"hidden_states": normal(1, CHANNELS, tokens), "weight": normal(CHANNELS, 4), "bias": normal(CHANNELS)}


def _delta(normal: Any, tokens: int, *last: int) -> dict[str, torch.Tensor]:
    groups = HEADS if last else GROUPS
    return {
        "query": normal(1, tokens, groups, STATE),
        "key": normal(1, tokens, groups, STATE),
        "value": normal(1, tokens, HEADS, SIZE),
        "g": torch.nn.functional.logsigmoid(normal(1, tokens, HEADS, *last) + 1),
        "beta": normal(1, tokens, HEADS).sigmoid(),
    }


def _mamba2(normal: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": normal(1, tokens, HEADS, SIZE),
        "dt": normal(1, tokens, HEADS) - 1,
        "A": -(0.5 * normal(HEADS)).exp(),
        "B": normal(1, tokens, GROUPS, STATE),
        "C": normal(1, tokens, GROUPS, STATE),
        "D": normal(HEADS),
        "dt_bias": normal(HEADS),
    }


def _mamba1(normal: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": normal(1, CHANNELS, tokens),
        "dt": normal(1, CHANNELS, tokens) - 1,
        "A": -(0.5 * normal(CHANNELS, STATE)).exp(),
        "B": normal(1, STATE, tokens),
        "C": normal(1, STATE, tokens),
        "D": normal(CHANNELS),
        "z": normal(1, CHANNELS, tokens),
        "delta_bias": normal(CHANNELS),
    }


def _make() -> dict[str, Operation]:
    silu = Operation(
        Convolution(),
        modeling_qwen3_5.causal_conv1d_fn,
        lambda hidden_states, weight, bias: (recurrent.convolution(hidden_states, weight, bias, "silu"), None),
        _convolution,
    )
    silu.constants = {"activation": "silu"}
    gated = Operation(DeltaRule(), modeling_qwen3_5.torch_chunk_gated_delta_rule, recurrent.delta_rule, _delta)
    kda = Operation(
        DeltaRule(),
        modeling_kimi_linear.chunk_kimi_delta_attention,
        recurrent.delta_rule,
        lambda normal, tokens: _delta(normal, tokens, STATE),
    )
    gated.constants = kda.constants = {"use_qk_l2norm_in_kernel": True}
    mamba2 = Operation(Mamba2(), modeling_nemotron_h.mamba2_chunk_scan, recurrent.mamba2, _mamba2)
    mamba2.constants = {"dt_softplus": True, "chunk_size": 16}
    mamba1 = Operation(Mamba1(), modeling_jamba.mamba_selective_scan, recurrent.mamba1, _mamba1)
    mamba1.constants = {"delta_softplus": True}
    return {"convolution": silu, "gated delta rule": gated, "KDA": kda, "Mamba-2": mamba2, "Mamba-1": mamba1}


OPERATIONS = _make()
each_operation = pytest.mark.parametrize("name", OPERATIONS)
# One token, chunks of 16 and 64 with one token more and less, and documents of several chunks.
PACKINGS = ([1], [5, 1, 65], [64, 63, 17, 2], [16, 130, 15, 1, 33], [200, 3])


def spans_of(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def run(
    operation: Operation, arguments: dict[str, torch.Tensor], lengths: list[int], initial: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    spans = spans_of(lengths)
    bounds = torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32)
    output, final = operation.recurrence.packed(operation.call(arguments), bounds, max(lengths), spans, initial)
    return (output[0] if isinstance(output, tuple) else output), final


def token_dimension(operation: Operation) -> int:
    return TOKENS[type(operation.recurrence)]["hidden_states" if "hidden_states" in operation.arguments(1) else "query"]


def by_loop(operation: Operation, arguments: dict[str, torch.Tensor], lengths: list[int]) -> torch.Tensor:
    outputs = [operation.loop(**operation.tokens_of(arguments, span))[0] for span in spans_of(lengths)]
    return torch.cat(outputs, dim=token_dimension(operation))


def off(value: torch.Tensor, right: torch.Tensor) -> float:
    return float((value.double() - right).norm() / right.norm().clamp(min=1e-6))


@each_operation
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_values_and_gradients_are_those_of_one_token_at_a_time(name: str, lengths: list[int]) -> None:
    operation = OPERATIONS[name]
    given = operation.arguments(sum(lengths), seed=len(lengths))
    wide = {name: value.double().requires_grad_() for name, value in given.items()}
    ours = {name: value.clone().requires_grad_() for name, value in given.items()}
    right, output = by_loop(operation, wide, lengths), run(operation, ours, lengths)[0]
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert off(output, right) < 2e-6
    gradients = torch.autograd.grad((right * weights).sum(), list(wide.values()))
    found = torch.autograd.grad((output * weights.float()).sum(), list(ours.values()))
    for argument, gradient, wanted in zip(given, found, gradients, strict=True):
        assert off(gradient, wanted) < 1e-5, argument


@each_operation
def test_a_document_does_not_depend_on_what_it_is_packed_with(name: str) -> None:
    """Another document's numbers change nothing; its length may change the chunks, and so the last bits."""
    operation, lengths = OPERATIONS[name], [40, 70, 1, 23]
    given, dimension = operation.arguments(sum(lengths)), token_dimension(operation)
    output = run(operation, given, lengths)[0]
    start, end = spans_of(lengths)[1]
    other = operation.arguments(sum(lengths), seed=1)
    inside = operation.tokens_of(given, (start, end))
    places = TOKENS[type(operation.recurrence)]
    mixed = {}
    for argument, value in other.items():
        if argument in places:
            mixed[argument] = value.clone()
            mixed[argument].narrow(places[argument], start, end - start).copy_(inside[argument])
        else:
            mixed[argument] = given[argument]
    again = run(operation, mixed, lengths)[0].narrow(dimension, start, end - start)
    assert torch.equal(again, output.narrow(dimension, start, end - start))
    alone = run(operation, inside, [end - start])[0]
    assert off(alone, again.double()) < 1e-6


@each_operation
@pytest.mark.parametrize("lengths", [[1, 70, 3], [33, 16, 130]], ids=str)
def test_a_document_in_two_pieces_gives_the_same(name: str, lengths: list[int]) -> None:
    """The states of all first pieces are handed to the second pieces, as the engine does with prompts."""
    operation = OPERATIONS[name]
    given, dimension = operation.arguments(2 * sum(lengths)), token_dimension(operation)
    whole, final = run(operation, given, [2 * length for length in lengths])
    spans = spans_of([2 * length for length in lengths])
    halves = [
        [(start, (start + end) // 2) for start, end in spans],
        [((start + end) // 2, end) for start, end in spans],
    ]
    states, outputs = None, []
    for half in halves:
        pieces = [operation.tokens_of(given, span) for span in half]
        places = TOKENS[type(operation.recurrence)]
        joined = {
            argument: torch.cat([piece[argument] for piece in pieces], dim=places[argument])
            if argument in places
            else value
            for argument, value in given.items()
        }
        output, states = run(operation, joined, lengths, states)
        outputs.append(output)
    wanted = [torch.cat([whole.narrow(dimension, a, b - a) for a, b in half], dim=dimension) for half in halves]
    for output, right in zip(outputs, wanted, strict=True):
        assert off(output, right.double()) < 2e-6
    assert states is not None
    assert off(states, final.double()) < 2e-6


@each_operation
def test_steps_give_what_packed_documents_give(name: str) -> None:
    """Two sequences go on from states of different lengths, one token at a time."""
    operation, lengths, more = OPERATIONS[name], [5, 1], 4
    dimension = token_dimension(operation)
    whole = [operation.arguments(length + more, seed=length) for length in lengths]
    shared = {argument: value for argument, value in whole[0].items() if argument not in operation_places(operation)}
    whole = [{**each, **shared} for each in whole]
    right = [run(operation, each, [length + more])[0] for each, length in zip(whole, lengths, strict=True)]
    begun = [
        run(operation, operation.tokens_of(each, (0, length)), [length])[1]
        for each, length in zip(whole, lengths, strict=True)
    ]
    states = torch.cat(begun)
    described = operation.recurrence.state(operation.call(whole[0]))
    assert described.shape == states.shape[1:]
    assert described.dtype == states.dtype == torch.float32
    for step in range(more):
        now = [
            operation.tokens_of(each, (length + step, length + step + 1))
            for each, length in zip(whole, lengths, strict=True)
        ]
        places = operation_places(operation)
        joined = {
            argument: torch.cat([one[argument] for one in now], dim=places[argument]) if argument in places else value
            for argument, value in shared.items() | now[0].items()
        }
        output, states = operation.recurrence.step(operation.call(joined), states)
        output = output[0] if isinstance(output, tuple) else output
        for row, length in enumerate(lengths):
            wanted = right[row].narrow(dimension, length + step, 1)
            assert off(output.narrow(dimension, row, 1), wanted.double()) < 2e-6


def operation_places(operation: Operation) -> dict[str, int]:
    return TOKENS[type(operation.recurrence)]


@each_operation
def test_it_returns_what_the_models_function_returns(name: str) -> None:
    operation = OPERATIONS[name]
    call = operation.call(operation.arguments(37))
    bounds = torch.tensor([0, 37], dtype=torch.int32)
    ours, _ = operation.recurrence.packed(call, bounds, 37, ((0, 37),), None)
    theirs = operation.function(**call.arguments)
    assert type(ours) is type(theirs)
    if isinstance(ours, tuple):
        assert len(ours) == len(theirs) and ours[1] is theirs[1] is None
        ours, theirs = ours[0], theirs[0]
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert off(ours, theirs.double()) < 1e-6


@each_operation
def test_half_precision_is_computed_in_float32(name: str) -> None:
    """The result is off by the rounding of the inputs and of the output, not by that of a state over 300 tokens."""
    operation = OPERATIONS[name]
    rounded = {
        argument: value.to(torch.bfloat16).float().requires_grad_()
        for argument, value in operation.arguments(300).items()
    }
    half = {argument: value.detach().to(torch.bfloat16) for argument, value in rounded.items()}
    right = run(operation, rounded, [300])[0].detach()
    assert off(run(operation, half, [300])[0], right.double()) < 4e-3


def test_chunks_hold_each_token_once() -> None:
    lengths = [5, 1, 130, 64, 65]
    chunks = make_chunks(spans_of(lengths), 64, torch.device("cpu"))
    assert sorted(chunks.index[chunks.real].tolist()) == list(range(sum(lengths)))
    assert chunks.counts == (5, 2, 1)
    values = torch.arange(sum(lengths))
    assert torch.equal(chunks.tokens(chunks.arrange(values)), values)
    assert int(chunks.arrange(values, 0).sum()) == int(values.sum())


def test_a_share_of_heads_is_whole() -> None:
    check_share("heads of the gated delta rule", 6, 3)
    with pytest.raises(ModelError, match=r"parallel\.context: 4 does not divide the 6 heads .*choose a divisor of 6"):
        check_share("heads of the gated delta rule", 6, 4)
