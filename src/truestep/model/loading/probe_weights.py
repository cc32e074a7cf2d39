"""Gives a model's layers shared weights for the probes, because a rank may not have memory for all weights.

A probe tests a model's code: attention masks, positions, cuts between layers. Every layer runs with its own settings
and index. Layers whose weights have the same names and shapes share the values of the first of these layers.

Equal values in every layer can amplify rounding errors until two correct results differ. So the residual update of a
layer with borrowed weights is divided by the number of layers. An error in any layer is still far above the tolerance.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from truestep.weights.layers import layers_of
from truestep.weights.lazy import read_parameters


@contextmanager
def borrowed_weights(model: Any, device: torch.device) -> Iterator[None]:
    """Read an unread model's weights within the block: those outside its layers, and those of the first layer of each
    kind. Other layers share the first one's."""
    _, layers = layers_of(model)
    firsts: dict[Any, torch.nn.Module] = {}
    lent: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    borrowing = []
    for layer in layers:
        first = firsts.setdefault(tuple((name, weight.shape) for name, weight in layer.named_parameters()), layer)
        lent |= dict(zip(layer.parameters(), first.parameters(), strict=True))
        if first is not layer:
            borrowing.append(layer)
    put_back = read_parameters(model, device, lent)
    hooks = [layer.register_forward_hook(_adding_a_part(1.0 / len(layers)), with_kwargs=True) for layer in borrowing]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        put_back()


def _adding_a_part(part: float) -> Callable[..., Any]:
    def behind(layer: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        before = arguments[0] if arguments else named.get("hidden_states")
        after = output[0] if isinstance(output, tuple) else output
        if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape):
            return output  # not a layer from hidden states to hidden states
        damped = before + (after - before) * part
        return (damped, *output[1:]) if isinstance(output, tuple) else damped

    return behind
