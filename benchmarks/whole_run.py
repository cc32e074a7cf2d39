"""Where the time of a whole run goes: `train` on one GPU, which samples its own documents, as a user runs it.

    python benchmarks/whole_run.py [--documents 256] [--prompt 128] [--new 512] [--steps 3] [--tokens 16384] [--plain]
                                   [--case recompute kl exact ...]
    python benchmarks/whole_run.py --prompt 2048 --steps 20 --case "as it is" "no shared prefixes"
    python benchmarks/whole_run.py --layers 2 --hidden 64 --intermediate 128 --vocabulary 1009 --documents 16
                                   --prompt 48 --new 8 --tokens 512 --dtype float32
                                   --case "as it is" "no shared prefixes"

The model has random weights in bfloat16 and Qwen3's shape (1.72B parameters), so every completion takes all of its
tokens. `--plain` samples without the engine. `--case` adds what else a step may do, one run after another. Of each run
but the first it says in how many steps it earned what the first earned, and how far apart their weights are at the end,
also as a share of the way that they went. In bfloat16 two runs that round differently draw other tokens before long.
The last line above is for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import qwen
import torch
import yaml
from rich.console import Console

from truestep.config.load import load_config
from truestep.model.loading.load import load_policy
from truestep.run.train import train
from truestep.tools.demo.model import make_tokenizer

REWARD = """
def reward(prompt, completion):
    return float(sum(map(ord, completion)) % 7)
"""

CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "recompute": {"loss": {"old_logprobs": "recompute"}},
    "kl": {"loss": {"kl_reference": {"weight": 0.01}}},
    "kl-offloaded": {"loss": {"kl_reference": {"weight": 0.01, "offload": True}}},
    "exact": {"sampler": {"exact": True}},
    "no shared prefixes": {"data": {"share_prefixes": "off"}},
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {**base, **{name: {**base.get(name, {}), **values} for name, values in over.items()}}


def run(folder: Path, name: str, given: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return the weights at the end, on the host."""
    base: dict[str, Any] = {
        "model": {
            "path": str(folder / "model"),
            "dtype": given.dtype,
            "head": {"fp32_lm_head": True},
            "compile": given.compile,
        },
        "loss": {"type": "grpo"},
        "data": {"group_size": 8, "tokens_per_microbatch": given.tokens},
        "sampler": {
            "prompts": str(folder / "prompts.jsonl"),
            "reward": "whole_run_reward:reward",
            "max_new_tokens": given.new,
            "engine": not given.plain,
        },
        "schedule": {"docs_per_step": given.documents, "steps": given.steps},
        "optimizer": {"learning_rate": 1e-6},
        "checkpoint": {"directory": str(folder / name.replace(" ", "-"))},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(merged(base, CASES[name])))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = train(load_config(file), Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (trainer.directory.path / "metrics.jsonl").read_text().splitlines()]
    print(f"== {name}{', sampled plainly' if given.plain else ''}")
    for line in lines:
        print(
            f"step {line['step']}: {line['step_time']:.2f} s, sampling and rating {line['data_wait_time']:.2f}; "
            f"{line['computed_tokens']:,} of {line['num_tokens']:,} tokens computed; "
            f"ratio {line.get('ratio_new_old', 1)!r}, clipped {line.get('clipped_ratio_fraction', 0)!r}, kl "
            f"{line.get('kl_new_old', 0):.1e}"
        )
    after = lines[1:] or lines
    step, wait = (statistics.median(line[key] for line in after) for key in ("step_time", "data_wait_time"))
    tokens = given.documents * given.new
    print(
        f"median after the first: {step:.2f} s a step; sampling and rating {wait:.2f} s ({wait / step:.0%}, "
        f"{tokens / max(wait, 1e-9):,.0f} new tokens/s), training {step - wait:.2f} s"
    )
    spent = {key[5:]: statistics.median(line.get(key, 0.0) for line in after) for key in lines[-1] if "time/" in key}
    print("  ".join(f"{part} {seconds:.2f}" for part, seconds in spent.items()), flush=True)
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
        print(f"peak memory {allocated:.1f} GiB, reserved {reserved:.1f}", flush=True)
    weights = {weight: value.detach().float().cpu() for weight, value in trainer.policy.weights.master.items()}
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return weights


def compare(folder: Path, names: Sequence[str], ends: Sequence[dict[str, torch.Tensor]]) -> None:
    """Compare a run with the first: the rewards of the steps, and the weights at the end."""
    begun = load_policy(folder / "model", dtype="float32", device="cpu").weights.master
    first, last = ends
    way = math.fsum(float((first[name] - begun[name].detach()).double().square().sum()) for name in first)
    apart = math.fsum(float((first[name] - last[name]).double().square().sum()) for name in first)
    size = math.fsum(float(first[name].double().square().sum()) for name in first)
    lines = [(folder / name.replace(" ", "-") / "metrics.jsonl").read_text().splitlines() for name in names]
    rewards = [[json.loads(line)["reward"] for line in own] for own in lines]
    same = sum(one == other for one, other in zip(*rewards, strict=True))
    print(
        f"{names[1]} beside {names[0]}: {same} of {len(rewards[0])} steps with the same reward; weights "
        f"{(apart / size) ** 0.5:.1e} apart, {(apart / way) ** 0.5:.1e} of the way that they went",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    qwen.add_shape(parser)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="the layers, in training")
    parser.add_argument("--plain", action="store_true", help="without the engine")
    parser.add_argument("--case", nargs="+", default=["as it is"], choices=CASES)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.set_default_dtype(torch.bfloat16)
        qwen.write_model(folder / "model", given, device=device)
        torch.set_default_dtype(torch.float32)
        make_tokenizer(folder / "model", [f"w{number}" for number in range(1000)])
        words = [
            " ".join(f"w{(number * 7 + at) % 1000}" for at in range(given.prompt)) for number in range(given.documents)
        ]
        lines = [json.dumps({"id": str(number), "prompt": text}) for number, text in enumerate(words)]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        (folder / "whole_run_reward.py").write_text(textwrap.dedent(REWARD))
        sys.path.insert(0, str(folder))
        os.chdir(folder)
        first = run(folder, given.case[0], given)
        for name in given.case[1:]:
            compare(folder, (given.case[0], name), (first, run(folder, name, given)))


if __name__ == "__main__":
    main()
