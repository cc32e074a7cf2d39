"""Helpers for GPUs.

operators         registers custom operators for torch.compile
self_test         checks a kernel on this machine before its first use
autotune          compiles the candidates of an autotuned kernel in threads
memory            free and total memory of a GPU
pinned            pinned host memory
pinned_counter    a counter in pinned memory that kernels write and the host reads
side_stream       work on a side CUDA stream
marks             how much of its queued work the device has done, layer by layer
"""
