"""What code needs to know of a GPU.

operators         operators of ours in compiled code
self_test         a kernel is compared with plain torch on this machine before its first use
memory            free and total memory of the device
pinned            pinned host memory
pinned_counter    a counter in pinned memory that kernels write and the host reads
side_stream       work on a side CUDA stream
marks             which layer the device has reached
"""
