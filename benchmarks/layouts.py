"""The same model, the same rollouts, the same steps under any layout: losses, tokens a second and memory side by side.

    python benchmarks/layouts.py prepare DIR [--length 1000]      # a random model of Qwen3-1.7B's shape, and rollouts
    torchrun --nproc-per-node 4 benchmarks/layouts.py train DIR NAME --parallel context=4 [--steps 20]
    python benchmarks/layouts.py table DIR [--exact NAME --usual NAME]

`train` is the real loop of `truestep train`. Each run leaves DIR/NAME.json. `table` compares each run's losses with
those of the run `--exact` (float32, say): in bfloat16 a layout may be 1.5 times as far from it as the run `--usual` is.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from qwen import add_shape, write_model
from rich.console import Console

from truestep.config.schema import Config
from truestep.ranks.group import leave
from truestep.ranks.watch import Watch
from truestep.run.assemble.policy import join_ranks
from truestep.run.checkpoint.saves import SaveRule
from truestep.run.train import make_trainer

GIB = 2**30
WARM_UP = 3  # steps that are not timed
COMPARED = ("loss", "new_logprobs", "grad_norm")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare")
    prepare.add_argument("directory", type=Path)
    add_shape(prepare)
    prepare.add_argument("--head-size", type=int, default=128)
    prepare.add_argument("--length", type=int, default=1000, help="of documents, about; half of each are labels")
    prepare.add_argument("--documents", type=int, default=64, help="of a step")
    prepare.add_argument("--steps", type=int, default=20)
    prepare.add_argument("--device", default="cuda")
    train = commands.add_parser("train")
    train.add_argument("directory", type=Path)
    train.add_argument("name")
    train.add_argument("--parallel", nargs="*", default=[], help="option=number")
    train.add_argument("--rollouts", default="rollouts", help="the file that `prepare` made, without .jsonl")
    train.add_argument("--documents", type=int, default=64, help="of a step")
    train.add_argument("--tokens", type=int, default=17_384, help="of a micro-batch")
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--dtype", default="bfloat16")
    train.add_argument("--device", default="auto")
    train.add_argument("--keep-activations", action="store_true", help="recompute nothing")
    table = commands.add_parser("table")
    table.add_argument("directory", type=Path)
    table.add_argument("--exact")
    table.add_argument("--usual")
    return parser.parse_args()


def prepare(given: argparse.Namespace) -> None:
    if not (given.directory / "model").exists():
        torch.manual_seed(0)
        write_model(given.directory / "model", given, device=given.device, head_size=given.head_size, longest=131_072)
    name = "rollouts" if given.length < 16_384 else f"rollouts-{given.length}"
    draw = np.random.default_rng(given.length)
    # A random model's log-probs lie around that of an even guess: ratios on both sides of the bounds.
    guess = -math.log(given.vocabulary)
    with (given.directory / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for number in range(given.steps * given.documents):
            spread = draw.uniform(0.5, 1.5) if given.length < 16_384 else 1.0
            length = int(given.length * spread)
            labels = length - length // 2
            record = {
                "id": str(number),
                "input_ids": draw.integers(0, given.vocabulary, length).tolist(),
                "prompt_length": length // 2,
                "logprobs": np.minimum(guess + 0.3 * draw.normal(size=labels), 0).round(4).tolist(),
                "advantage": round(float(draw.normal()), 4),
            }
            file.write(json.dumps(record) + "\n")


def train(given: argparse.Namespace) -> None:
    parallel: dict[str, Any] = {name: int(value) for name, value in (pair.split("=") for pair in given.parallel)}
    config = Config.model_validate(
        {
            "model": {
                "path": str(given.directory / "model"),
                "dtype": given.dtype,
                "device": given.device,
                "activation_checkpointing": not given.keep_activations,
                "head": {"fp32_lm_head": True, "logits_chunk_size": 2048},
            },
            "loss": {"type": "grpo"},
            "data": {
                "path": str(given.directory / f"{given.rollouts}.jsonl"),
                "advantages": "none",
                "tokens_per_microbatch": given.tokens,
            },
            "schedule": {"docs_per_step": given.documents, "steps": given.steps, "stall_timeout": 120.0},
            "parallel": parallel,
            "optimizer": {"learning_rate": 1e-5},
            "checkpoint": {"directory": str(given.directory / "runs" / given.name), "every": 0},
            "logging": {"console": False},
        }
    )
    started = time.perf_counter()
    ranks = join_ranks(config)
    watch = Watch(ranks, config.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(config, Console(file=io.StringIO()), ranks=ranks, watch=watch)
        lines: list[dict[str, Any]] = []
        trainer.sinks[:] = [_Lines(lines)]
        trainer.save_rule = SaveRule(never=True)  # a checkpoint is no part of this
        on_gpu = trainer.policy.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loaded = time.perf_counter() - started
        trainer.run()
        peaks = ranks.gather(torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0)
        if ranks.first:
            timed = lines[min(WARM_UP, len(lines) - 1) :]
            seconds = [line["step_time"] for line in timed]
            result = {
                "parallel": parallel,
                "ranks": ranks.size,
                "dtype": given.dtype,
                "device": torch.cuda.get_device_name() if on_gpu else "CPU",
                "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
                "step_seconds": statistics.median(seconds),
                "tokens_per_second": sum(line["num_tokens"] for line in timed) / sum(seconds),
                "micro_batches": [line["num_micro_batches"] for line in lines],
                "peak_gib": peaks,
                "seconds_to_load": loaded,
                **{name: [line[name] for line in lines] for name in COMPARED},
            }
            (given.directory / f"{given.name}.json").write_text(json.dumps(result), encoding="utf-8")
            print(f"{given.name}: {result['tokens_per_second']:,.0f} tokens/s, {max(peaks):.2f} GiB", flush=True)
    leave()


class _Lines:
    def __init__(self, lines: list[dict[str, Any]]):
        self._lines = lines

    def step(self, line: dict[str, Any]) -> None:
        self._lines.append(line)

    def evaluation(self, line: dict[str, Any]) -> None:
        pass


def table(given: argparse.Namespace) -> None:
    runs = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(given.directory.glob("*.json"))}
    first = next(iter(runs.values()))
    print(f"{first['versions']}, {first['device']}")
    print(f"{'layout':28} ranks  s a step   tokens/s   GiB a rank (least, most)", end="")
    if given.exact:
        print("   " + "  ".join(f"{name} off" for name in COMPARED), end="")
    print()
    usual = _distances(runs[given.usual], runs[given.exact]) if given.exact and given.usual else None
    for name, run in runs.items():
        peaks = run["peak_gib"]
        print(f"{name:28} {run['ranks']:5} {run['step_seconds']:9.3f} {run['tokens_per_second']:10,.0f}", end="")
        print(f"   {min(peaks):8.2f} {max(peaks):8.2f}          ", end="")
        if given.exact:
            found = _distances(run, runs[given.exact])
            for kind, value in found.items():
                times = f" ({value / usual[kind]:.2f}x)" if usual and usual[kind] else ""
                print(f"   {value:.1e}{times}", end="")
        print()


def _distances(run: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Root mean square over the steps."""
    return {
        name: math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(run[name], exact[name], strict=True)))
        for name in COMPARED
    }


if __name__ == "__main__":
    arguments = options()
    {"prepare": prepare, "train": train, "table": table}[arguments.command](arguments)
