"""What counting documents costs: `train` with `docs_per_step` against the static schedule, on the same micro-batches.

    torchrun --nproc-per-node 2 benchmarks/counting.py [--tokens 1024] [--steps 12] [--device cpu]

Both runs are the real loop over the same documents in the same order and micro-batches (all documents are of one
length); they differ in how a step ends. Rounds of the two alternate, each pair in the other order than the pair before,
after a pair that nobody counts; medians of pairs are compared, with their quartiles. The wait for the plan
(`data_wait_time`) is given too: it is what the counting adds where it is not hidden; and how long making a plan and
agreeing on it takes beside the step, which is all that it could add.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from truestep.config.schema import Config
from truestep.ranks.group import Ranks
from truestep.run.assemble.policy import join_ranks
from truestep.run.train import make_trainer
from truestep.step.plan.ahead import Planned

LENGTH = 64
WARM_UP = 2  # steps of each round
MAKING: dict[str, list[float]] = {"exact": [], "static": []}  # seconds of making plans and agreeing on them


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of each rank in a step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=8, help="pairs that count")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser.parse_args()


def write_case(directory: Path, given: argparse.Namespace, documents: int) -> None:
    sizes = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": given.hidden // 4}
    config = AutoConfig.for_model("qwen3", vocab_size=4096, tie_word_embeddings=True, **sizes, **heads)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory / "model")
    draw = np.random.default_rng(0)
    with (directory / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(documents):
            record = {
                "id": str(number),
                "input_ids": draw.integers(0, 4096, LENGTH).tolist(),
                "prompt_length": 16,
                "logprobs": (-draw.exponential(1.0, LENGTH - 16)).tolist(),
                "advantage": float(draw.normal()),
            }
            file.write(json.dumps(record) + "\n")


def run(given: argparse.Namespace, directory: Path, name: str, ranks: Ranks, docs_per_step: int) -> list[dict]:
    dynamic = name.startswith("exact")
    schedule = {"docs_per_step": docs_per_step} if dynamic else {"depth_first_micro_batches": given.micro_batches}
    config = Config.model_validate(
        {
            "model": {"path": str(directory / "model"), "dtype": "float32", "device": given.device},
            "data": {
                "path": str(directory / "rollouts.jsonl"),
                "advantages": "none",
                "tokens_per_microbatch": given.tokens,
                "epochs": 1000,
            },
            "schedule": schedule | {"steps": given.steps},
            "checkpoint": {"directory": str(directory / name), "every": 0},
            "logging": {"console": False},
        }
    )
    trainer = make_trainer(config, Console(file=io.StringIO()), ranks=ranks)
    make = trainer.plans._make

    def timed() -> Planned:
        start = time.perf_counter()
        try:
            return make()
        finally:
            MAKING[name.partition("-")[0]].append(time.perf_counter() - start)

    trainer.plans._make = timed  # type: ignore[method-assign]
    trainer.run()
    dist.barrier()
    lines = (directory / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][WARM_UP:]


def report(
    given: argparse.Namespace, ranks: Ranks, times: dict[str, list[float]], waits: dict[str, list[float]]
) -> None:
    static, exact = statistics.median(times["static"]), statistics.median(times["exact"])
    ratios = [100 * (one / other - 1) for one, other in zip(times["exact"], times["static"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    where = "CPU" if given.device == "cpu" or not torch.cuda.is_available() else torch.cuda.get_device_name()
    print(
        f"torch {torch.__version__}, {ranks.size} ranks, {where}, {os.cpu_count()} cores, "
        f"{len(ratios)} pairs of {given.steps - WARM_UP} steps"
    )
    print(f"a micro-batch            {1000 * static / given.micro_batches:8.1f} ms")
    print(f"static step              {1000 * static:8.1f} ms")
    print(f"exact step               {1000 * exact:8.1f} ms")
    print(f"exact over static, pairs {middle:+8.2f} %    quartiles {low:+.2f} and {high:+.2f} %")
    for name in ("static", "exact"):
        wait = statistics.median(waits[name])
        print(f"wait for the plan, {name:6}{1000 * wait:8.2f} ms   {100 * wait / static:.3f}% of a step")
    for name in ("static", "exact"):
        making = statistics.median(MAKING[name])
        print(f"making it beside, {name:6}{1000 * making:9.2f} ms   {100 * making / static:.3f}% of a step")


def main() -> None:
    given = options()
    placeholder = Config.model_validate({"model": {"path": "unused", "device": given.device}})
    ranks = join_ranks(placeholder)
    shared = [tempfile.mkdtemp() if ranks.first else None]
    dist.broadcast_object_list(shared, src=0, group=ranks.host)
    directory = Path(str(shared[0]))
    per_step = given.tokens // LENGTH * given.micro_batches * ranks.size
    if ranks.first:
        write_case(directory, given, 4 * per_step)
    dist.barrier()
    times: dict[str, list[float]] = {"exact": [], "static": []}  # the median of each round
    waits: dict[str, list[float]] = {"exact": [], "static": []}
    for number in range(given.rounds + 1):
        for name in ("static", "exact") if number % 2 else ("exact", "static"):
            lines = run(given, directory, f"{name}-{number}", ranks, per_step)
            assert all(line["num_documents"] == per_step for line in lines)
            assert all(line["num_micro_batches"] == given.micro_batches for line in lines)
            if number:
                times[name].append(statistics.median(line["step_time"] for line in lines))
                waits[name] += [line["data_wait_time"] for line in lines]
    if ranks.first:
        report(given, ranks, times, waits)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
