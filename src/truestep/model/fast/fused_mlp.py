"""MLPs whose gate and up projections are one product: `down(act(gate(x)) * up(x))`."""

from typing import Any

import torch

from truestep.model.fast.by_class import acts, is_product, put_in
from truestep.model.fast.fused_products import products_of
from truestep.model.fast.gradient_accumulation import AddingLinear, products

_TOKENS = 5  # in the comparison with a module's own forward pass


class FusedMLP(torch.nn.Module):
    gate_proj: torch.nn.Linear
    up_proj: torch.nn.Linear
    down_proj: torch.nn.Linear
    act_fn: Any
    joins: bool  # the inner products can be joined
    # keys of the inner weights in the table of gradient buffers; None: autograd computes gradients
    numbers: torch.Tensor | None

    def forward(self, x: torch.Tensor, *given: Any, **named: Any) -> Any:
        if not acts() or not self.joins:
            return super().forward(x, *given, **named)
        if not torch.is_grad_enabled():
            return self.down_proj(self.middle(*products_of(x, self.inner)[1]))
        if self.numbers is None or not x.requires_grad:
            return super().forward(x, *given, **named)
        gate, up, empty = products(x, self.numbers, *(layer.weight.detach() for layer in self.inner))
        rows = self.middle(gate, up)
        return self.down_proj(rows, empty) if isinstance(self.down_proj, AddingLinear) else self.down_proj(rows)

    @property
    def inner(self) -> tuple[torch.nn.Linear, torch.nn.Linear]:
        return self.gate_proj, self.up_proj

    def middle(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.act_fn(gate) * up
        return made


@torch.no_grad()
def fuse_mlp(module: Any) -> None:
    """Replace a module's class if it is an MLP with the same results as `FusedMLP`, bit for bit."""
    inner: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj")]
    if not all(is_product(layer) and layer.bias is None for layer in inner) or not hasattr(module, "act_fn"):
        return
    gate, up = inner
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, gate.in_features, generator=generator).to(gate.weight)
    try:
        found, expected = module.down_proj(module.act_fn(gate(x)) * up(x)), module(x)
    except Exception:  # not an MLP of this form, although it has these attributes
        return
    if isinstance(expected, torch.Tensor) and expected.any() and torch.equal(found, expected):
        put_in(module, FusedMLP, joins=True, numbers=None)
