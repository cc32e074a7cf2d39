"""The first import of the server from which ranks are forked. It must not initialise CUDA, or forks could not use CUDA.

Without a GPU, a rank may use Triton's interpreter, which works only if TRITON_INTERPRET is set at Triton's first
import. So the variable is set for that import alone. Modules that loading a model needs are imported here once, which
saves each rank a second or two.
"""

import contextlib
import importlib
import os

# Otherwise torch would initialise CUDA to count devices, here and in libraries that look for a GPU when imported.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    if before is None:
        del os.environ["TRITON_INTERPRET"]

# transformers imports these lazily. A version of it may lack some of them.
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

    get_checkpoint_conversion_mapping("llama")  # compiles and caches a thousand regular expressions
with contextlib.suppress(Exception):  # a broken pandas is reported where it is used
    importlib.import_module("pandas")  # pyarrow imports pandas, if it is installed, with the first array
