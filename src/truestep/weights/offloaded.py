"""Frozen weights that are in host memory between uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from truestep.gpu.pinned import to_host
from truestep.weights.protocol import Weights


class HostCopies:
    """Keeps a copy of frozen weights on the host, and frees their device memory between uses.

    The tensors stay the same objects; only their storage is freed and allocated. So neither a model nor FSDP has to be
    updated. Frozen weights do not change, so they are never copied back to the host.
    """

    def __init__(self, weights: Weights):
        if weights.master:
            raise ValueError("weights that are trained have to stay where their optimizer is")
        self._weights = weights
        # By address, because tensors may share storage. This rank's part of a tensor may be empty.
        parts = (tensor.untyped_storage() for tensor in weights.frozen.values())
        found = {part.data_ptr(): part for part in parts if part.nbytes()}
        self._storages = [(part, part.nbytes(), to_host(_as_bytes(part))) for part in found.values()]
        self._let_go()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Load the weights onto the device within the block."""
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
