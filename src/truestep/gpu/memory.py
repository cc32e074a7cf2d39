"""The memory of the device that a rank computes on."""

import torch


def device_memory(device: torch.device | None = None) -> int:
    """Give the bytes of a GPU: of this rank's, unless another one is named."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_memory(device: torch.device | None = None) -> int:
    """Give the bytes of a GPU that this process may still take: free ones, and what its allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
