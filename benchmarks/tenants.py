"""What a loop of one's own costs beside `train`, what HTTP adds to it, and whether ten tenants get as much together as
one gets alone.

    python benchmarks/tenants.py [--tiny] [--tenants 10] [--rank 32] [--no-samples]
    python benchmarks/tenants.py --turns 3 --no-server      # `train` and a Session alone, in turn

A random model of Qwen3's shape (1.72B) with an adapter on all linear layers. The same documents, 64k tokens a step, are
trained on by `train`, by a `Session`, and through the Tinker protocol on loopback, by a client of the standard library
in a process of its own that waits for each step. Then one tenant trains and samples alone, and ten do so at once; the
first of the ten has the seed and the documents that the single one had, and their losses are compared.

A step of `train` is counted from the end of the one before, so all that it does between steps is in it. Of a Session
the records of a step are read and checked before the clock starts; `train` reads them meanwhile. `processor` is of the
thread that launches kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tenants_client
import torch
from qwen import add_shape, write_model
from rich.console import Console

from truestep import Session
from truestep.commands.tinker.serving import Tinker
from truestep.config.schema import Config
from truestep.metrics.observers import Observer
from truestep.run.checkpoint.saves import SaveRule
from truestep.run.train import make_trainer
from truestep.tools.serve import serve

WARM = 2  # steps that are not timed


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024, help="of a document")
    parser.add_argument("--documents", type=int, default=64, help="of a step where steps are compared")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that are not")
    parser.add_argument("--tenants", type=int, default=10)
    parser.add_argument("--tenant-documents", type=int, default=16, help="of a tenant's step")
    parser.add_argument(
        "--prompts", type=int, default=16, help="that a tenant asks for at once, with four samples each"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--compile", action="store_true", help="the layers, in training")
    parser.add_argument("--no-samples", action="store_true", help="tenants only train")
    parser.add_argument("--turns", type=int, default=1, help="of `train` and of a Session")
    parser.add_argument("--no-server", action="store_true", help="neither HTTP nor tenants")
    parser.add_argument("--tiny", action="store_true", help="a model and documents that a CPU computes in seconds")
    given = parser.parse_args()
    if given.tiny:
        given.layers, given.hidden, given.intermediate, given.vocabulary = 2, 64, 128, 512
        given.length, given.documents, given.tokens, given.tenant_documents = 32, 16, 128, 4
        given.rank, given.prompts, given.new = 4, 2, 4
    return given


def records(given: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    """Documents of which all tokens but the first are labels."""
    draw = np.random.default_rng(0)
    return [
        {
            "id": str(number),
            "input_ids": draw.integers(0, given.vocabulary, given.length).tolist(),
            "prompt_length": 1,
            "logprobs": [-12.0] * (given.length - 1),
            "advantage": float(draw.normal()),
        }
        for number in range(steps * given.documents)
    ]


def config_of(folder: Path, given: argparse.Namespace) -> Config:
    model = {"path": str(folder / "model"), "dtype": "float32" if given.tiny else "bfloat16", "compile": given.compile}
    return Config.model_validate(
        {
            "model": {**model, "head": {"fp32_lm_head": True}},
            "adapter": {"rank": given.rank, "alpha": 32.0, "targets": "all-linear"},
            "loss": {"type": "grpo", "normalize_by": "labels"},
            "data": {"path": str(folder / "records.jsonl"), "tokens_per_microbatch": given.tokens},
            "schedule": {"docs_per_step": given.documents, "steps": WARM + given.steps},
            "optimizer": {"learning_rate": 1e-5},
            "checkpoint": {"directory": str(folder / "run")},
        }
    )


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Measured:
    """The steps of one run, in seconds."""

    name: str
    steps: list[float]
    reads: list[float]  # in which documents are read
    processor: list[float]  # seconds of the processor, of the thread that launches kernels


class Clock(Observer):
    """Notes the end of each step of `train`."""

    def __init__(self) -> None:
        self.ends, self.processor = list[float](), list[float]()

    def step(self, line: Mapping[str, Any]) -> None:
        self.ends.append(time.perf_counter())
        self.processor.append(time.thread_time())


def by_train(config: Config, folder: Path) -> Measured:
    shutil.rmtree(folder / "run", ignore_errors=True)
    trainer, clock = make_trainer(config, Console(file=io.StringIO())), Clock()
    trainer.save_rule = SaveRule(never=True)
    trainer.observers.add(clock)
    trainer.run()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    del trainer
    free()
    times, processor = (
        [end - before for before, end in pairwise(of)][WARM - 1 :] for of in (clock.ends, clock.processor)
    )
    return Measured("train", times, [line["data_wait_time"] for line in lines[WARM:]], processor)


def by_session(config: Config, found: Sequence[dict[str, Any]], given: argparse.Namespace) -> Measured:
    times, reads, processor = [], [], []
    with Session(config) as session:
        for first in range(0, len(found), given.documents):
            start = time.perf_counter()
            some = session.documents(found[first : first + given.documents])
            totals = session.totals(some)
            reads.append(time.perf_counter() - start)
            start, begun = time.perf_counter(), time.thread_time()
            session.forward_backward(some, totals=totals)
            session.step()
            times.append(time.perf_counter() - start)
            processor.append(time.thread_time() - begun)
    free()
    return Measured("Session", times[WARM:], reads[WARM:], processor[WARM:])


def in_turn(config: Config, folder: Path, found: Sequence[dict[str, Any]], given: argparse.Namespace) -> float:
    """Print the seconds of a step of `train` and of a Session; return a Session's. A warm card is slower than a cool
    one, so they take turns."""
    runs: list[Measured] = []
    for _ in range(given.turns):
        runs += [by_train(config, folder), by_session(config, found, given)]
    for run in runs:
        step, processor = map(statistics.median, (run.steps, run.processor))
        print(f"  {run.name}: {step:.3f} s, {processor:.3f} of the processor")

    def middle(name: str, of: Callable[[Measured], list[float]]) -> float:
        return statistics.median(second for run in runs if run.name == name for second in of(run))

    step, session = (middle(name, lambda run: run.steps) for name in ("train", "Session"))
    waits, reads = (middle(name, lambda run: run.reads) for name in ("train", "Session"))
    tokens = given.documents * given.length
    print(
        f"train            {step:8.3f} s   {tokens / step:,.0f} tokens/s   of them {waits:.3f} s for reading\n"
        f"Session          {session:8.3f} s   {tokens / session:,.0f} tokens/s   {session / step - 1:+.2%} to train, "
        f"and {reads:.3f} s before for its records",
        flush=True,
    )
    return session


@dataclass
class Serving(Tinker):
    """A server that ends when its client has ended."""

    command: Sequence[str] = ()
    url: str = ""

    async def run(self) -> None:
        client = subprocess.Popen([*self.command, "--url", self.url.removesuffix("/v1")])
        serving = asyncio.ensure_future(super().run())
        try:
            while client.poll() is None and not serving.done():
                await asyncio.sleep(0.05)
        finally:
            if client.poll() is None:
                client.kill()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        if client.returncode:
            raise SystemExit(client.returncode)


def by_http(config: Config, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    (folder / "plan.json").write_text(json.dumps(vars(given) | {"warm": WARM}))
    command = [sys.executable, tenants_client.__file__, "--folder", str(folder)]
    tinker = Serving(folder / "checkpoints", command=command)

    def ready(url: str) -> None:
        tinker.url = url

    serve(config.changed({"adapter": None}), port=0, beside=tinker, ready=ready)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def show(found: dict[str, Any], session: float, given: argparse.Namespace) -> None:
    tokens = given.documents * given.length
    http = found["step"]
    print(f"by HTTP          {http:8.3f} s   {tokens / http:,.0f} tokens/s   {http / session - 1:+.2%} to a Session")
    for what in ("trained", "sampled"):
        if what in found["one"]:
            one, ten = found["one"][what], found["all"][what]
            print(
                f"tokens {what}: one tenant {one:,.0f}/s, {given.tenants} at once {ten:,.0f}/s in all ({ten / one:.0%})"
            )
    alone, among = (np.asarray(found[which]["losses"]) for which in ("one", "all"))
    apart = float(np.max(np.abs(alone - among) / np.abs(alone)))
    print(f"losses of the tenant alone and among others: {'equal bit for bit' if apart == 0 else f'{apart:.1e} apart'}")
    if torch.cuda.is_available():
        print(f"peak memory of the server {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def main() -> None:
    given, start = options(), time.perf_counter()
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_model(folder / "model", given, device=device)
        free()
        found, config = records(given, WARM + given.steps), config_of(folder, given)
        (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
        tokens = given.documents * given.length
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        print(f"torch {torch.__version__}, {where}; {tokens:,} tokens a step")
        session = in_turn(config, folder, found, given)
        if given.no_server:
            return
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        show(by_http(config, folder, given), session, given)
    print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
