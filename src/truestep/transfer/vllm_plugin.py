"""The plugin by which a vLLM knows the backend `truestep`: the entry point `vllm.general_plugins` calls `register`."""

import contextlib

BACKEND = "truestep"  # of --weight-transfer-config


def register() -> None:
    """Tell vLLM of the backend. vLLM calls this in each of its processes, and may do so more than once."""
    with contextlib.suppress(ImportError):  # a vLLM without an interface for it works as before
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        with contextlib.suppress(ValueError):  # it is known already
            WeightTransferEngineFactory.register_engine(BACKEND, "truestep.transfer.vllm_engine", "SharedMemoryEngine")
