"""The backend `truestep` of vLLM's weight transfer: each worker takes its part of weights that lie in shared memory.

A transfer is `/start_weight_update`, then two calls of `/update_weights`. The first (`stage`) has the weights checked
in a thread while completions run; the second (`load`), behind a pause, copies them. `/finish_weight_update` ends it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from truestep.transfer.receiver import NOT_TAKEN, Receiver, TransferError


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The trainer's memory, and the word that is found there."""

    directory: str
    token: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One of the two calls: `stage` with `marks`, or `load`."""

    stage: str | None = None
    marks: str = ""
    load: str | None = None


class SharedMemoryEngine(WeightTransferEngine):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._receiver = Receiver()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._receiver.connect(init_info.directory, init_info.token)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.stage is not None:
            self._receiver.stage(update_info.stage, update_info.marks)
        elif update_info.load is not None:
            self._receiver.load(update_info.load, self._load)

    def finish_weight_update(self) -> None:
        self._receiver.release()

    def shutdown(self) -> None:
        self._receiver.release()

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load weights as vLLM loads those of a directory into a model that runs."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        wanted = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(weights)
        finally:  # layers that have no weights would end the engine with the next request
            finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and self.model_config.quantization is None and (missing := wanted - set(loaded)):
            raise TransferError(f"{NOT_TAKEN} anything for {len(missing)} of its weights, such as {min(missing)}")
