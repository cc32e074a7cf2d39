"""Frozen weights that lie in host memory while nobody uses them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from truestep.gpu.pinned import to_host
from truestep.weights.protocol import Weights


class HostCopies:
    """Keeps a copy of frozen weights on the host, and gives back their memory on the device between uses.

    The tensors stay the same objects, and only their memory comes and goes: a model, and what FSDP gathers from, need
    not be told. What is never trained never has to be copied back.
    """

    def __init__(self, weights: Weights):
        if weights.master:
            raise ValueError("weights that are trained have to stay where their optimizer is")
        self._weights = weights
        # By address: tensors may be parts of the same memory. A rank that has nothing of a tensor has none.
        parts = (tensor.untyped_storage() for tensor in weights.frozen.values())
        found = {part.data_ptr(): part for part in parts if part.nbytes()}
        self._storages = [(part, part.nbytes(), to_host(_as_bytes(part))) for part in found.values()]
        self._let_go()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device: inside, the model computes."""
        for storage, size, copy in self._storages:
            storage.resize_(size)
            _as_bytes(storage).copy_(copy, non_blocking=True)
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._weights.let_go_of_gathered()
        for storage, _, _ in self._storages:
            storage.resize_(0)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
