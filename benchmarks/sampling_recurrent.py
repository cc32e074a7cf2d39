"""The sampler with layers that keep states, on one GPU: tokens/s beside the bound, for the shape of Qwen3.5-4B.

    python benchmarks/sampling_recurrent.py [--layers 32] [--rows 32 256] [--prompt 128] [--new 256] [--breakdown]
    python benchmarks/sampling_recurrent.py --tiny       # on a CPU: the script itself

Weights are random, in bfloat16. The bound of a decode step is the time that reading weights, keys and values, and
reading and writing states takes at the copy rate that the same run measures, or, where that is longer, the products of
the rows at its matrix rate; a prompt's tokens cost their products. The first of a case's runs compiles.

It also prints how far the log-probs are from those of training's pass over the same tokens: the mean ratio, the mean of
ratio - 1 - log ratio, and the share of ratios further than 0.2 from 1.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from qwen import QWEN35, write_qwen35
from sampling import options, requests

from truestep.generate.engine.cache import page_bytes, state_bytes
from truestep.generate.engine.engine import Engine, Limits, engine_of
from truestep.generate.generator import Completion
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack_tokens

TINY = {
    "vocab_size": 509, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def made(layers: int, shape: dict[str, int], place: str) -> Policy:
    with tempfile.TemporaryDirectory() as directory:
        write_qwen35(Path(directory), shape, layers, device=place)
        return load_policy(Path(directory), dtype="bfloat16")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    start = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bound:
    """The shortest times of steps, by rates that are measured here."""

    def __init__(self, policy: Policy, layers: list[Any], size: int):
        place = policy.device
        source = torch.empty(size * 2**20, dtype=torch.uint8, device=place)
        target = torch.empty_like(source)
        a, b = (torch.randn(8 * size, 8 * size, device=place, dtype=torch.bfloat16) for _ in range(2))
        self.copy = 2 * source.numel() / statistics.median(timed(lambda: target.copy_(source))[0] for _ in range(10))
        self.product = 2 * len(a) ** 3 / statistics.median(timed(lambda: a @ b)[0] for _ in range(10))
        self.weights = sum(parameter.numel() for parameter in policy.model.parameters())
        self.token, self.state = page_bytes(layers, 1, torch.bfloat16), state_bytes(layers)

    def of(self, rows: int, prompt: int, new: int) -> float:
        moved = 2 * self.weights + 2 * rows * self.state
        step = max(moved / self.copy, 2 * self.weights * rows / self.product)
        cache = sum(rows * self.token * (prompt + at) / self.copy for at in range(new))
        return new * step + cache + 2 * self.weights * rows * prompt / self.product


def sample(policy: Policy, engine: Engine, rows: int, prompt: int, new: int, vocabulary: int) -> list[Completion]:
    done: dict[int, Completion] = {}
    with engine.session(policy, Limits(rows, prompt + new)) as session:
        for number, request in enumerate(requests(rows, prompt, vocabulary=vocabulary)):
            session.submit(number, replace(request, options=options(new)))
        while session.busy:
            done |= dict(session.step())
    return [done[number] for number in range(rows)]


def offs(policy: Policy, completions: list[Completion], prompt: int, vocabulary: int) -> torch.Tensor:
    """Return training's log-probs of some completions minus the engine's."""
    found = []
    asked = requests(len(completions), prompt, vocabulary=vocabulary)
    for request, one in list(zip(asked, completions, strict=True))[:8]:
        ids = torch.tensor([*request.token_ids, *one.token_ids])
        with torch.no_grad():
            hidden = policy.hidden_alone(pack_tokens([ids.numpy()]))[prompt - 1 : len(ids) - 1]
            scored = policy.raw_logits(hidden).float().log_softmax(-1).cpu().gather(1, ids[prompt:, None])[:, 0]
        found.append(scored - torch.tensor(one.logprobs))
    return torch.cat(found).double()


def compare(policy: Policy, completions: list[Completion], prompt: int, vocabulary: int) -> None:
    """Print how far the log-probs of some completions are from training's."""
    off = offs(policy, completions, prompt, vocabulary)
    ratio = off.exp()
    print(
        f"log-probs beside training's: mean ratio {float(ratio.mean()):.5f}, k3 {float((ratio - 1 - off).mean()):.1e}, "
        f"{float(((ratio - 1).abs() > 0.2).double().mean()):.2%} further than 0.2 from 1",
        flush=True,
    )


def breakdown(policy: Policy, engine: Engine, rows: int, prompt: int, vocabulary: int) -> None:
    """Print the kernels in which decode steps spend their time."""
    from torch.profiler import ProfilerActivity, profile

    with engine.session(policy, Limits(rows, prompt + 64)) as session:
        for number, request in enumerate(requests(rows, prompt, vocabulary=vocabulary)):
            session.submit(number, replace(request, options=options(64)))
        while session.counts.drawn_tokens < 8 * rows:
            session.step()
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=kinds if torch.cuda.is_available() else kinds[:1]) as seen:
            took, _ = timed(lambda: [session.step() for _ in range(10)])
    print(f"10 decode steps of {rows} rows: {took * 1e3:.1f} ms")
    print(seen.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    shape = TINY if given.tiny else QWEN35
    policy = made(4 if given.tiny else given.layers, shape, "cpu" if given.tiny else "cuda")
    took, engine = timed(lambda: engine_of(policy))
    if not isinstance(engine, Engine):
        raise SystemExit(f"not served: {engine}")
    device, bound = engine.device, Bound(policy, engine.layers, 2 if given.tiny else 1024)
    print(
        f"torch {torch.__version__}, {device.place}, copy {bound.copy / 1e12:.2f} TB/s, products "
        f"{bound.product / 1e12:.0f} TFLOP/s\n{bound.weights / 1e9:.2f}e9 weights, {bound.state / 2**20:.1f} MiB of "
        f"states a row, {bound.token / 1024:.1f} KiB a token\nengine made in {took:.1f} s: attention "
        f"{device.attend.__module__}, recurrences {device.advance.__module__} (by address: {device.addressed}), layers "
        f"compiled {device.compiles}, graphs {device.graphs}",
        flush=True,
    )
    prompt, new = (7, 5) if given.tiny else (given.prompt, given.new)
    for rows in [3] if given.tiny else given.rows:
        least = bound.of(rows, prompt, new)
        print(f"{rows} prompts of {prompt}, {new} new tokens: bound {rows * new / least:,.0f} tokens/s")
        for number in range(given.runs):
            took, done = timed(partial(sample, policy, engine, rows, prompt, new, shape["vocab_size"]))
            print(f"run {number}: {rows * new / took:,.0f} tokens/s, {took:.2f} s, {least / took:.0%} of the bound")
        compare(policy, done, prompt, shape["vocab_size"])
        if given.breakdown:
            breakdown(policy, engine, rows, prompt, shape["vocab_size"])
    print(f"graphs: {0 if engine.graphs is None else len(engine.graphs)}")


if __name__ == "__main__":
    main()
