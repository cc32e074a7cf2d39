"""Total and free memory of a GPU."""

import torch


def device_memory(device: torch.device | None = None) -> int:
    """Return the total memory of a GPU in bytes. `device` None: the current GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_memory(device: torch.device | None = None) -> int:
    """Return the bytes of a GPU that this process may still allocate: free memory and unused memory of its
    allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
