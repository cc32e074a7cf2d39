"""New weights on their way to a server: the seconds of each part.

    python benchmarks/publication.py --url http://127.0.0.1:8000 --served-name policy --model DIRECTORY
    torchrun --nproc-per-node 2 benchmarks/publication.py --nccl [--layers 8 --hidden 1024 ...]

The first form publishes the policy of DIRECTORY to a vLLM that serves it, and says how long each part takes, from
weights that are there to the first new token: over each of the directories `--over`, of which one may be in memory.
`--device cuda` and `--dtype bfloat16` as in training. The second form is `publication_nccl`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from truestep.generate.generator import DrawOptions, Request
from truestep.generate.servers.probe import expect, measure
from truestep.generate.servers.vllm import Vllm
from truestep.generate.servers.weight_files import Publisher, WeightsDirectory
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.weight_transfer.link import CHUNK


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cpu; with --nccl: cuda")
    parser.add_argument("--dtype", default="float32", help="that is published")
    parser.add_argument("--over", type=Path, nargs="+", default=[Path("/tmp"), Path("/dev/shm")])
    parser.add_argument("--url")
    parser.add_argument("--served-name", default="policy")
    parser.add_argument("--model", type=Path, help="with --url: the Hugging Face directory that is served")
    parser.add_argument("--nccl", action="store_true", help="by NCCL, from ranks that torchrun started")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="with --nccl: bytes that are sent at a time")
    parser.add_argument("--receiver", choices=("auto", "process", "thread"), default="auto", help="with --nccl")
    parser.add_argument("--noted", action="store_true", help="with --nccl: a receiver that shares a GPU enters late")
    given = parser.parse_args()
    if not given.nccl and not (given.url and given.model):
        parser.error("give --url and --model, or --nccl")
    given.device = given.device or ("cuda" if given.nccl else "cpu")
    return given


async def parts(policy: Policy, given: argparse.Namespace, directory: Path) -> None:
    server = Vllm(given.url, given.served_name, None, 600)
    publisher = Publisher(WeightsDirectory(directory), getattr(torch, given.dtype))
    prompts = tuple(tuple(range(3, 3 + length)) for length in (136, 200, 300))
    request = Request(prompts[0], DrawOptions(1.0, 1, frozenset()))
    rows: list[dict[str, float]] = []
    for version in range(given.repeat + 2):
        row: dict[str, float] = {}
        last = time.perf_counter()

        def part(name: str, row: dict[str, float] = row) -> None:
            nonlocal last
            now = time.perf_counter()
            row[name], last = now - last, now

        weights = publisher.write(policy, version)
        assert isinstance(weights, Path)
        part("weights written")
        known = expect(policy, prompts, version)
        part("probes scored by the trainer")
        await server.pause("wait")
        await server.load(weights)
        await server.resume()
        part("pause: read and resumed")
        gap = await measure(server, known)
        part("probes scored by the server")
        await server.complete(request, 1)
        part("first new token")
        rows.append(row)
    publisher.close(finished=True)
    await server.close()
    print(f"over {directory}: a gap of {gap.expected:.1e} nats")
    for name in rows[0]:
        print(f"{name}: {statistics.median(row[name] for row in rows[2:]):.3f} s")
    print(f"all: {statistics.median(sum(row.values()) for row in rows[2:]):.3f} s")


def main() -> None:
    given = options()
    if given.nccl:
        # A kernel that is loaded while another one waits for a peer may wait for it, and both for ever.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that share one wait for each other
        import publication_nccl

        publication_nccl.run(given)
        return
    torch.set_num_threads(1)
    policy = load_policy(given.model, device=given.device)
    for place in given.over:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            asyncio.run(parts(policy, given, Path(scratch) / "weights"))


if __name__ == "__main__":
    main()
