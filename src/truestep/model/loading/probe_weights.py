"""A full model for a probe on a rank that has no room for it: every layer runs, on the weights of one of its kind.

A probe tests a model's code: where attention looks, how positions are used, whether layers can be cut. So every layer
runs with its own settings and number, and only values are borrowed: layers whose weights have the same names and shapes
share those of the first of them.

The same values in every layer may blow rounding up until two right answers differ. So what layers with borrowed weights
add is divided by the number of layers; a fault in any of them stays far above the rounding that a probe allows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from truestep.weights.layers import layers_of
from truestep.weights.lazy import read_parameters


@contextmanager
def borrowed_weights(model: Any, device: torch.device) -> Iterator[None]:
    """Lend a model that is not read yet its weights outside its layers, and those of one layer of each kind."""
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
            return output  # no layer of the usual kind
        damped = before + (after - before) * part
        return (damped, *output[1:]) if isinstance(output, tuple) else damped

    return behind
