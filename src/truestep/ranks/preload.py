"""Imported first by the server that ranks are forked from: without a GPU, Triton's kernels are to run interpreted where
a rank asks for that, and they can only if Triton was first imported so. The variable is taken back at once."""

import contextlib
import os

import torch

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    if before is None:
        del os.environ["TRITON_INTERPRET"]
