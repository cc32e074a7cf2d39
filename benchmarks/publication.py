"""New weights on their way to a server of this machine: rates through shared memory, and the seconds of each part.

    python benchmarks/publication.py [--layers 8 --hidden 1024 --intermediate 3072 --vocabulary 32000 --repeat 5]
    python benchmarks/publication.py --url http://127.0.0.1:8000 --served-name policy --model DIRECTORY
    torchrun --nproc-per-node 2 benchmarks/publication.py --nccl [...]

The first form needs no server. A random model of Qwen3's shape is published, and another process checks and copies it,
each as in a run; beside them, in the same process and of as many bytes, a plain copy between two arrays whose pages are
there, by one thread and by as many as the trainer has. The second form publishes the policy of DIRECTORY to a vLLM that
serves it with `--weight-transfer-config '{"backend": "truestep"}'`, and says how long each part takes, from weights
that are there to the first new token: through memory, and over the disk of the temporary directory.
`--device cuda` and `--dtype bfloat16` as in training. `--processor-time` counts the processor's seconds in the
first form: on a machine that does other work, they say more. The third form is `publication_nccl`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from qwen import write_model

from truestep.policy.loading.load import load_policy
from truestep.policy.policy import Policy
from truestep.ranks.processes import usable_cores
from truestep.sampler.server.probe import expect, measure
from truestep.sampler.server.protocol import CompletionRequest
from truestep.sampler.server.sync import Publisher, Wanted, WeightsDirectory
from truestep.sampler.server.vllm import Vllm
from truestep.transfer.link import CHUNK
from truestep.transfer.memory import SharedMemory
from truestep.transfer.receiver import Receiver


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
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--served-name", default="policy")
    parser.add_argument("--model", type=Path, help="with --url: the Hugging Face directory that is served")
    parser.add_argument("--nccl", action="store_true", help="by NCCL, from ranks that torchrun started")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="with --nccl: bytes that are sent at a time")
    parser.add_argument("--receiver", choices=("auto", "process", "thread"), default="auto", help="with --nccl")
    parser.add_argument("--noted", action="store_true", help="with --nccl: a receiver that shares a GPU enters late")
    given = parser.parse_args()
    given.device = given.device or ("cuda" if given.nccl else "cpu")
    return given


def copy_rate(size: int, repeat: int, clock: Callable[[], float], threads: int) -> float:
    """Measure a plain copy of so many bytes by so many threads, in GB a second."""
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeat):
            start = clock()
            list(pool.map(lambda part: np.copyto(*part), parts))
            seconds.append(clock() - start)
    return size / 1e9 / statistics.median(seconds)


def receive(pipe: Any, clock: Callable[[], float]) -> None:
    """Check weights, then copy each tensor to its place in the model: what a worker does."""
    torch.set_num_threads(1)
    receiver, model = Receiver(), dict[str, torch.Tensor]()
    for index, marks in iter(pipe.recv, None):
        start = clock()
        receiver.stage(index, marks)
        assert receiver._staged is not None
        receiver._staged._thread.join()
        checked = clock()

        def load(weights: Any) -> None:
            for name, value in weights:
                if name not in model:
                    model[name] = torch.ones_like(value)
                model[name].copy_(value)

        receiver.load(index, load)
        pipe.send((checked - start, clock() - checked))


def rates(policy: Policy, given: argparse.Namespace, memory: SharedMemory, folder: Path) -> None:
    publisher = Publisher(WeightsDirectory(folder / "disk"), getattr(torch, given.dtype))
    clock = time.process_time if given.processor_time else time.perf_counter
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there, clock))
    process.start()
    rows = []
    for version in range(given.repeat + 2):  # two files are made first
        start = clock()
        index = publisher.write(policy, version, Wanted(False, True), memory).memory
        written = clock() - start
        assert index is not None
        marks = folder / str(version)
        marks.mkdir()
        here.send((str(index), str(marks)))
        rows.append((written, *here.recv()))
    here.send(None)
    process.join()
    size = sum(math.prod(entry["shape"]) for entry in json.loads(index.read_text())["tensors"].values())
    size *= getattr(torch, given.dtype).itemsize
    plain = {threads: copy_rate(size, given.repeat, clock, threads) for threads in sorted({1, memory.num_threads})}
    for threads, rate in plain.items():
        print(f"{size / 1e9:.2f} GB; a plain copy by {threads} threads: {rate:.2f} GB/s")
    for number, name in enumerate(("published by the trainer", "checked by the server", "copied by the server")):
        rate = size / 1e9 / statistics.median(row[number] for row in rows[2:])
        shares = ", ".join(f"{rate / copy:.0%} of a plain copy by {threads}" for threads, copy in plain.items())
        print(f"{name}: {rate:.2f} GB/s, {shares}")


async def parts(policy: Policy, given: argparse.Namespace, memory: SharedMemory, folder: Path, by_memory: bool) -> None:
    server = Vllm(given.url, given.served_name, None, 600)
    publisher = Publisher(WeightsDirectory(folder / "disk"), getattr(torch, given.dtype))
    prompts = tuple(tuple(range(3, 3 + length)) for length in (136, 200, 300))
    size = policy.vocabulary_size
    request = CompletionRequest(prompts[0], 1, 1.0, 1, frozenset(), size)
    rows: list[dict[str, float]] = []
    if by_memory and (reason := await server.reach(memory.path, memory.token)) is not None:
        raise SystemExit(f"the server takes no weights from memory: {reason}")
    for version in range(given.repeat + 2):
        row: dict[str, float] = {}
        last = time.perf_counter()

        def part(name: str, row: dict[str, float] = row) -> None:
            nonlocal last
            now = time.perf_counter()
            row[name], last = now - last, now

        places = publisher.write(policy, version, Wanted(not by_memory, by_memory), memory)
        place = places.memory or places.disk
        assert place is not None
        part("weights into memory" if by_memory else "weights onto the disk")
        known = expect(policy, prompts, version)
        part("probes scored by the trainer")
        if by_memory:
            await server.stage(place)
            part("checked beside completions")
        await server.pause("wait")
        await server.load(place)
        await server.resume()
        part("pause: copied and resumed" if by_memory else "pause: read and resumed")
        gap = await measure(server, known)
        part("probes scored by the server")
        await server.complete(request)
        part("first new token")
        rows.append(row)
    await server.close()
    print(f"a gap of {gap.expected:.1e} nats")
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
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.model is None:
            write_model(folder / "model", given, device=given.device)
        policy = load_policy(given.model or folder / "model", device=given.device)
        memory = SharedMemory(given.memory, usable_cores())
        try:
            if given.url is None:
                rates(policy, given, memory, folder)
            else:
                for by_memory in (True, False):
                    asyncio.run(parts(policy, given, memory, folder, by_memory))
        finally:
            memory.close()


if __name__ == "__main__":
    main()
