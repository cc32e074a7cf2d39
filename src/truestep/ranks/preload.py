"""Imported first by the server that ranks are forked from, which must never start CUDA: its forks could not use it.

Without a GPU, a rank may ask for Triton's kernels interpreted, which works only if Triton was imported that way first;
so the variable is set for that import alone. What loading any model needs is imported here once, which spares each rank
a second or two.
"""

import contextlib
import importlib
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

# transformers imports these when they are first asked for; a version that lacks one does not need it.
for name in (
    "conversion_mapping",
    "generation.utils",
    "integrations.mistral",
    "masking_utils",
    "modeling_layers",
    "modeling_utils",
    "models.encoder_decoder",
    "models.llama.modeling_llama",
    "models.qwen3.modeling_qwen3",
    "processing_utils",
    "tokenization_utils_tokenizers",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"transformers.{name}")
with contextlib.suppress(ImportError, AttributeError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # a thousand regular expressions, compiled once and kept
