"""Short causal convolutions over packed documents, with independent channels.

Before each document, the input gets the columns that its first outputs read: zeros, or the state. One convolution then
runs over all documents, with the same kernel as for one document.

Dimensions: C channels; W taps; S tokens of D documents; R sequences.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.nn.functional import conv1d
from transformers.activations import ACT2FN

from truestep.model.mixers import linear_kernels
from truestep.model.mixers.context_parallel import Context, check_share
from truestep.model.mixers.recurrence import Call, LayerState, Recurrence, Spans


class Convolution(Recurrence):
    """`causal_conv1d_fn(hidden_states [1, C, S], weight [C, W], bias, activation)`."""

    kernel = True
    tokens: ClassVar[Mapping[str, int]] = {"hidden_states": 2}
    output_tokens = 2

    def state(self, call: Call) -> LayerState:
        return LayerState((call.weight.shape[0], call.weight.shape[1] - 1), call.hidden_states.dtype)

    def packed(
        self, call: Call, segments: torch.Tensor, longest: int, spans: Spans, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if call.kernels and call.activation in (None, "silu", "swish"):
            return linear_kernels.convolve(call, segments, spans, initial)
        given = call.hidden_states[0]  # [C, S]
        width = call.weight.shape[1] - 1
        index, outputs, last = _layout(spans, width, given.device)
        if initial is None:
            before = given.new_zeros(len(given), len(spans) * width)
        else:
            before = initial.to(given.dtype).transpose(0, 1).flatten(1)
        laid_out = torch.cat([given, before], dim=1).index_select(1, index)
        output = _convolve(call, laid_out[None])[..., outputs]
        final = laid_out.index_select(1, last).unflatten(1, (len(spans), width)).transpose(0, 1)
        return output, final

    def step(self, call: Call, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = call.hidden_states[0].transpose(0, 1)[..., None]  # [R, C, 1]
        window = torch.cat([states.to(given.dtype), given], dim=-1)
        return _convolve(call, window)[..., 0].transpose(0, 1)[None], window[..., 1:]

    def exchanged(self, call: Call, context: Context) -> tuple[Call, Callable[[Any], Any]]:
        channels = len(call.weight)
        check_share("channels of a convolution", channels, context.size)
        own = slice(context.rank * channels // context.size, (context.rank + 1) * channels // context.size)
        (given,) = context.tokens_for_shares(call.hidden_states[0].transpose(0, 1))
        bias = None if call.bias is None else call.bias[own]

        def back(output: torch.Tensor) -> torch.Tensor:
            return context.heads_for_tokens(output[0].transpose(0, 1)).transpose(0, 1)[None]

        return call.replaced(hidden_states=given.transpose(0, 1)[None], weight=call.weight[own], bias=bias), back


def _convolve(call: Call, given: torch.Tensor) -> torch.Tensor:  # [R, C, T] -> [R, C, T - W + 1]
    output = conv1d(given.to(call.weight.dtype), call.weight[:, None], call.bias, groups=len(call.weight))
    if call.activation is not None:
        output = ACT2FN[call.activation](output)
    return output.to(call.hidden_states.dtype)


@functools.lru_cache(maxsize=16)
def _layout(spans: Spans, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three indices. The first puts `width` columns of state before each document (the states' columns follow
    the tokens in its source). The second gives each token's output in the convolution's result, the third the columns
    of the final states."""
    tokens = spans[-1][1]
    index, outputs, last = [], [], []
    for document, (start, end) in enumerate(spans):
        room = tokens + document * width
        index += [torch.arange(room, room + width), torch.arange(start, end)]
        behind = end + (document + 1) * width
        outputs.append(torch.arange(start, end) + document * width)
        last.append(torch.arange(behind - width, behind))
    columns, places, states = (torch.cat(each).to(device) for each in (index, outputs, last))
    return columns, places, states
