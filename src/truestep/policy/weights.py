"""Float32 weights and float32 gradients, whatever type the model computes in.

For a float32 model the weights are the model's own parameters. For a bfloat16 model they are float32 masters beside it:
each micro-batch's gradient is added to a float32 buffer as soon as autograd has it, and an update rounds the masters
into the model once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Weights:
    """Takes a model with float32 weights and makes it compute in `dtype`."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        # `named_parameters` gives a tied tensor once, under the name it is first registered by: its input embedding's.
        self._computed = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.master: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.Tensor] = {}  # float32, as they came and as they are saved
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                self.frozen[name] = parameter.detach()
                parameter.data = parameter.data.to(dtype)
        for name, parameter in self._computed.items():
            master = parameter
            if parameter.dtype != dtype:
                master = torch.nn.Parameter(parameter.detach())
                # The parameters alone: buffers such as rotary frequencies stay float32, as transformers keeps them.
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(self._accumulate_into(master))
            master.grad = torch.zeros_like(master)
            self.master[name] = master
        self._names = {id(parameter): name for name, parameter in self._computed.items()}

    @staticmethod
    def _accumulate_into(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        def accumulate(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            _gradient(master).add_(parameter.grad)
            parameter.grad = None

        return accumulate

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: _gradient(master) for name, master in self.master.items()}

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The float32 buffer behind one of the model's parameters; None if it is frozen."""
        name = self._names.get(id(parameter))
        return None if name is None else _gradient(self.master[name])

    def zero_gradients(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, after an update or a load."""
        for name, parameter in self._computed.items():
            if parameter is not self.master[name]:
                parameter.copy_(self.master[name])


def _gradient(master: torch.nn.Parameter) -> torch.Tensor:
    assert master.grad is not None, "a gradient buffer is cleared, never dropped"
    return master.grad
