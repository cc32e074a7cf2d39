"""Families whose layers differ, on one GPU in bfloat16: errors of packed documents and of documents alone, and how far
the engine's log-probs are from training's.

    python benchmarks/families.py [--only qwen3_5_text nemotron_h ...]
    python benchmarks/families.py --tiny            # on a CPU: the script itself

Random models of 4 layers. What is right are log-probs and gradients of the same weights in float32, each document
alone. An error is the norm of the difference over the norm of what is right: of the log-probs of all labels, and of all
gradients together, of a supervised step. Where routers choose experts, bfloat16 may choose others, packed or alone.
The last columns are of completions that the engine drew, scored again by training's pass.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sampling_recurrent import offs, sample

from step import document
from truestep.generate.engine.engine import Engine, engine_of
from truestep.losses.label_losses import CrossEntropy
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan
from truestep.types import Rollout

LENGTHS = (2, 190, 64, 700, 129, 333)
WIDE = {
    "hidden": 1024, "heads": 8, "head": 128, "groups": 2, "states": 16, "small": 128, "experts": 16, "words": 32_000,
}  # fmt: skip
NARROW = {"hidden": 32, "heads": 4, "head": 16, "groups": 2, "states": 4, "small": 8, "experts": 4, "words": 97}


def configs(size: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return the options of each family's configuration, for sizes such as `WIDE`."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    delta = {
        "linear_num_value_heads": size["states"], "linear_num_key_heads": size["states"] // 2,
        "linear_key_head_dim": size["small"], "linear_value_head_dim": size["small"], "head_dim": size["head"],
        "layer_types": kinds,
    }  # fmt: skip
    experts = {
        "num_experts": size["experts"], "num_local_experts": size["experts"], "n_routed_experts": size["experts"],
        "num_experts_per_tok": 2, "moe_intermediate_size": size["hidden"] // 2, "n_group": 1, "topk_group": 1,
        "shared_expert_intermediate_size": size["hidden"] // 2,
    }  # fmt: skip
    mamba = {
        "mamba_n_heads": 2 * size["hidden"] // size["small"], "mamba_d_head": size["small"],
        "mamba_d_state": size["small"], "mamba_n_groups": 2, "mamba_chunk_size": 4 * size["small"], "mamba_expand": 2,
    }  # fmt: skip
    return {
        "qwen3": {"head_dim": size["head"]},
        "qwen3_5_text": delta,
        "qwen3_5_moe_text": delta | experts,
        "nemotron_h": experts | {
            "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "mamba_num_heads": 2 * size["hidden"] // size["small"], "mamba_head_dim": size["small"],
            "ssm_state_size": size["small"], "n_groups": 2, "chunk_size": 4 * size["small"], "head_dim": size["head"],
            "moe_shared_expert_intermediate_size": size["hidden"] // 2,
        },
        "granitemoehybrid": mamba | {
            "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": size["experts"],
            "num_experts_per_tok": 2, "shared_intermediate_size": size["hidden"] // 2,
        },
        "falcon_h1": mamba | {"mamba_d_ssm": 2 * size["hidden"], "head_dim": size["head"]},
        "kimi_linear": experts | {
            "layer_types": kinds, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_head_dim": size["small"], "linear_num_heads": size["heads"], "num_key_value_heads": size["heads"],
            "kv_lora_rank": size["hidden"] // 4, "qk_nope_head_dim": size["head"],
            "qk_rope_head_dim": size["head"] // 2,
            "v_head_dim": size["head"],
        },
        "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
        "gpt_oss": experts | {
            "head_dim": size["head"], "sliding_window": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "gemma4_text": {
            "head_dim": size["head"], "global_head_dim": size["head"], "sliding_window": 128,
            "vocab_size_per_layer_input": size["words"], "hidden_size_per_layer_input": size["small"],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    }  # fmt: skip


def write(directory: Path, family: str, size: dict[str, int], place: str) -> None:
    common = {
        "vocab_size": size["words"], "hidden_size": size["hidden"], "intermediate_size": 2 * size["hidden"],
        "num_hidden_layers": 4, "num_attention_heads": size["heads"], "num_key_value_heads": size["groups"],
        "max_position_embeddings": 4096, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **(common | configs(size)[family]))
    torch.manual_seed(0)
    with torch.device(place):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


def documents(words: int) -> list[Rollout]:
    generator = np.random.default_rng(0)
    return [
        document(str(number), generator.integers(2, words, length), length - 1, generator)
        for number, length in enumerate(LENGTHS)
    ]


def computed(policy: Policy, some: list[Rollout], together: bool) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return the log-probs of the labels of all documents, and the gradients of a step."""
    batches = [list(range(len(some)))] if together else [[number] for number in range(len(some))]
    runner = StepRunner(policy, Objective(CrossEntropy(), Denominator("labels")), keep_scores=True)
    found = runner.accumulate(make_plan(some, batches, 0))
    gradients = {name: value.double().cpu() for name, value in policy.weights.gradients.items()}
    return np.concatenate([score.logprobs for score in found.scores]).astype(np.float64), gradients


def error(got: Any, right: Any) -> tuple[float, float]:
    (logprobs, gradients), (exact, exact_gradients) = got, right
    assert gradients.keys() == exact_gradients.keys()
    off = sum(float((gradients[name] - value).norm()) ** 2 for name, value in exact_gradients.items()) ** 0.5
    size = sum(float(value.norm()) ** 2 for value in exact_gradients.values()) ** 0.5
    return float(np.linalg.norm(logprobs - exact) / np.linalg.norm(exact)), off / size


def drawn(policy: Policy, words: int, tiny: bool) -> str:
    engine = engine_of(policy)
    if not isinstance(engine, Engine):
        return f"not sampled by the engine: {engine}"
    prompt, new = (7, 5) if tiny else (64, 128)
    off = offs(policy, sample(policy, engine, 4 if tiny else 32, prompt, new, words), prompt, words)
    ratio = off.exp()
    far = float(((ratio - 1).abs() > 0.2).double().mean())
    return f"{float(ratio.mean()):8.5f} {float((ratio - 1 - off).mean()):8.1e} {far:7.2%}"


def report(family: str, size: dict[str, int], given: argparse.Namespace) -> str:
    place = "cpu" if given.tiny else "cuda"
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), family, size, place)
        some = documents(size["words"])
        exact = load_policy(Path(directory), dtype="float32", device=place)
        right = computed(exact, some, together=False)
        del exact
        policy = load_policy(Path(directory), dtype="bfloat16", device=place)
    alone, packed = (error(computed(policy, some, together), right) for together in (False, True))
    errors = "   ".join(f"{a:8.1e} {p:8.1e} {p / a:5.2f}" for a, p in zip(alone, packed, strict=True))
    return f"{errors}   {drawn(policy, size['words'], given.tiny)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(configs(WIDE)))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    size = NARROW if given.tiny else WIDE
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'':18} log-probs: alone, packed       gradients: alone, packed     engine: mean ratio, k3, beyond 0.2")
    for family in given.only:
        start = time.perf_counter()
        try:
            line = report(family, size, given)
        except Exception as problem:  # a family that this version of transformers lacks is a row
            line = f"{type(problem).__name__}: {problem}"[:150]
        print(f"{family:18} {line}   {time.perf_counter() - start:.0f} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
