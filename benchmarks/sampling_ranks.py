"""The embedded sampler over two GPUs: weights that are sharded and gathered for sampling, and tensor ranks.

    torchrun --nproc-per-node 2 benchmarks/sampling_ranks.py --layout tensor [--size 1.7B --rows 512 --new 256]
    torchrun --nproc-per-node 2 benchmarks/sampling_ranks.py --layout data --log-normal --rows 8192

Each GPU is bounded by what it reads: over data ranks all weights and the cache of its own rows, over tensor ranks its
part of the weights and its part of the cache of all rows; or by its products, where these take longer. Copy and matrix
rates are measured in the same run.

With `--log-normal`, lengths of completions differ: their median is `--new`, the logarithm's deviation 0.7, and four
times the median the most. It prints until when each rank computed, as a share of the phase.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from fits import made_up
from sampling import SIZES, VOCABULARY, Rates, complete, half_way, options, profiled, requests
from transformers import Qwen3Config

from truestep.generate.engine.engine import Engine, engine_of
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator, Spent
from truestep.generate.generator import Generate, Request
from truestep.model.loading import load
from truestep.model.policy import Policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks, join, leave

LAYOUTS = {"data": RankLayout(data_shard=2), "tensor": RankLayout(tensor=2)}


def make_policy(size: str, ranks: Ranks) -> Policy:
    hidden, wide, layers, heads = SIZES[size]
    load.read_directory = partial(made_up, "cuda")  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=wide,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
            max_position_embeddings=32_768, tie_word_embeddings=size != "8B",
        ).save_pretrained(folder)  # fmt: skip
        return load.load_policy(Path(folder), dtype="bfloat16", device="cuda", ranks=ranks)


def bound(policy: Policy, given: argparse.Namespace, rates: Rates, layout: str) -> float:
    """The seconds that one GPU takes at the least."""
    config = policy.model.config
    weights = sum(piece.shape.numel() for piece in policy.weights.pieces.values())
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # bytes in the cache
    rows = given.rows / 2  # of the cache, and of products by all weights, either way
    read = weights if layout == "data" else weights / 2
    step = max(2 * read / rates.copy, 2 * weights * rows / rates.product)
    cache = sum(rows * token * (given.prompt + at) / rates.copy for at in range(given.new))
    return given.new * step + cache + 2 * weights * rows * given.prompt / rates.product


def measure(layout: str, given: argparse.Namespace, ranks: Ranks, rates: Rates) -> Policy:
    policy = make_policy(given.size, ranks)
    with torch.no_grad(), policy.weights.gathered():
        engine = engine_of(policy)
    assert isinstance(engine, Engine), engine
    if ranks.first:
        device = engine.device
        print(
            f"{layout}: attention {device.attend.__module__.rpartition('.')[2]}, layers compiled {device.compiles}, "
            f"graphs {device.graphs is not None}"
        )
    asked, seconds = requests(given.rows, given.prompt), []
    for _ in range(given.repeat + 1):
        torch.cuda.synchronize()
        dist.barrier(group=ranks.host)
        start = time.perf_counter()
        found = complete(policy, asked, options(given.new))
        torch.cuda.synchronize()
        dist.barrier(group=ranks.host)
        seconds.append(time.perf_counter() - start)
        assert all(len(completion.token_ids) == given.new for completion in found)
    took, least, tokens = statistics.median(seconds[1:]), bound(policy, given, rates, layout), given.rows * given.new
    if ranks.first:
        print(
            f"{layout}: {given.rows} prompts of {given.prompt}, {given.new} new tokens: {took:.2f} s (the first "
            f"{seconds[0]:.2f}), {tokens / took:,.0f} tokens/s, {tokens / took / 2:,.0f} a GPU; bound "
            f"{tokens / least / 2:,.0f}, {least / took:.0%} of it",
            flush=True,
        )
    return policy


def uneven(policy: Policy, given: argparse.Namespace, ranks: Ranks) -> None:
    """Print until when each rank computed, where lengths of completions are log-normal."""
    lengths = np.random.default_rng(0).lognormal(np.log(given.new), 0.7, given.rows).clip(8, 4 * given.new).astype(int)
    asked = [
        replace(request, options=options(int(length)))
        for request, length in zip(requests(given.rows, given.prompt), lengths, strict=True)
    ]
    service = EngineGenerator(policy, EngineSettings(rows=256))

    async def work(request: Request, generate: Generate) -> int:
        return len((await generate(request)).token_ids)

    for _ in range(given.repeat + 1):
        service.spent = Spent()
        dist.barrier(group=ranks.host)
        start = time.perf_counter()
        drawn = service.map(asked, work)
        took = time.perf_counter() - start
        assert drawn == lengths.tolist()
        until = ranks.gather(service.spent.sampling)
        if ranks.first:
            ended = ", ".join(f"{seconds / took:.1%}" for seconds in until)
            print(
                f"{given.rows} requests of {min(lengths)} to {max(lengths)} new tokens, {np.mean(lengths):.0f} in the "
                f"mean: {took:.2f} s, {sum(lengths) / took:,.0f} tokens/s; ranks compute until {ended} of it",
                flush=True,
            )


def profile(policy: Policy, given: argparse.Namespace, ranks: Ranks) -> None:
    """Where the first GPU's time of a step goes, over 20 steps in the middle."""
    rows = given.rows if ranks.tensor > 1 else given.rows // 2
    with torch.no_grad(), policy.weights.gathered(), half_way(policy, rows, given.prompt, given.new) as session:
        took, kernels = profiled(session, 20)
    if ranks.first:
        print(f"a step of {rows} rows: {took / 20 * 1e3:.2f} ms; by kernel, ms and calls:")
        for event in sorted(kernels, key=lambda event: -event.device_time_total)[:24]:
            print(f"  {event.device_time_total / 20e3:7.3f} {event.count / 20:6.1f}  {event.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), required=True)
    parser.add_argument("--size", choices=tuple(SIZES), default="1.7B")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--log-normal", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    ranks = join(LAYOUTS[given.layout], device="cuda", stall_timeout=240)
    rates = Rates()
    if ranks.first:
        print(
            f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {rates.copy / 1e12:.2f} TB/s, products "
            f"{rates.product / 1e12:.0f} TFLOP/s",
            flush=True,
        )
    if given.log_normal:
        uneven(make_policy(given.size, ranks), given, ranks)
    else:
        policy = measure(given.layout, given, ranks, rates)
        if given.profile:
            profile(policy, given, ranks)
    leave()


if __name__ == "__main__":
    main()
