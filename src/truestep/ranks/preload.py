"""Imported first by the server that ranks are forked from, which must never start CUDA: its forks could not use it.

Without a GPU, Triton's kernels are to run interpreted where a rank asks for that, and they can only if Triton was first
imported so. That variable is taken back at once.
"""

import contextlib
import os

# Else torch counts devices by CUDA itself, here and in libraries that look for a GPU while they are imported.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    if before is None:
        del os.environ["TRITON_INTERPRET"]
