"""Measure how long a run waits for large rollout files, and what they take of memory.

    python benchmarks/data.py --documents 1000000 --directory /somewhere/with/space

Rollouts of about 1,000 tokens are made (unless they are there), opened by a new process for the first time and twice
again, and a few thousand documents are read in a shuffled order. The bound beside it is the time that one core takes to
read the same bytes as JSON and do nothing with them, divided by the number of cores.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from truestep.rollouts.record import Checks, Needs

TOKENS, LABELS, GROUP = 1000, 750, 8


def generate(path: Path, documents: int) -> None:
    if path.exists():
        return
    rng = np.random.default_rng(0)
    # Numbers are drawn from a pool of text: making them costs more than reading them.
    ids = [str(number) for number in rng.integers(0, 150_000, 1 << 16)]
    logprobs = [repr(float(np.float32(-number))) for number in rng.exponential(0.5, 1 << 16)]
    draw = random.Random(0)
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        for number in range(documents):
            first, second = draw.randrange(len(ids) - TOKENS), draw.randrange(len(logprobs) - LABELS)
            file.write(
                f'{{"id": "d{number}", "input_ids": [{", ".join(ids[first : first + TOKENS])}], '
                f'"prompt_length": {TOKENS - LABELS}, "logprobs": [{", ".join(logprobs[second : second + LABELS])}], '
                f'"reward": {draw.random()!r}, "group_id": "g{number // GROUP}", "model_version": {number // 4096}}}\n'
            )
    partial.replace(path)


def open_once(path: Path, cache: Path) -> None:
    """Open the files as a run does, in this process, and print figures."""
    from truestep.rollouts.source import FileSource
    from truestep.rollouts.stored import load_stored

    needs = Needs(logprobs=True, advantages=True, advantage_rule="group_normalized")
    start = time.perf_counter()
    documents = load_stored([path], Checks(needs, 151_936, 1.0, 16384, group_size=GROUP), cache)
    opened = time.perf_counter() - start
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(one.ru_utime + one.ru_stime for one in used)
    source = FileSource(documents.rollouts, documents.rejected, shuffle_seed=1)
    start = time.perf_counter()
    source.state()
    state = time.perf_counter() - start
    start = time.perf_counter()
    taken = source.take(2048, 0).documents
    read = time.perf_counter() - start
    memory = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    private = sum(int(memory[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) / 2**10
    anonymous = int(memory["Anonymous"].split()[0]) / 2**10
    figures = {
        "documents": len(documents.rollouts),
        "tokens": sum(document.num_tokens for document in taken),
        "open, seconds": opened,
        "processor time until then, milliseconds a document": 1e3 * processor / len(documents.rollouts),
        "first state of a shuffle, seconds": state,
        "read a document, microseconds": 1e6 * read / len(taken),
        "private memory, MiB": private,
        "of it anonymous, MiB": anonymous,
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--open", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path, cache = options.directory / f"rollouts-{options.documents}.jsonl", options.directory / "cache"
    if options.open:
        open_once(path, cache)
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    generate(path, options.documents)
    shutil.rmtree(cache, ignore_errors=True)
    with path.open("rb") as file:
        lines = [file.readline() for _ in range(min(2000, options.documents))]
    start = time.perf_counter()
    for line in lines:
        json.loads(line)
    cores = len(os.sched_getaffinity(0))
    bound = (time.perf_counter() - start) / len(lines) * options.documents / cores
    print(
        f"{path.stat().st_size / 2**30:.2f} GiB, {cores} cores; json.loads alone would take {bound:.1f} s", flush=True
    )
    command = [sys.executable, __file__, "--documents", str(options.documents), "--directory", str(options.directory)]
    for name in ("first start", "second", "third"):
        start = time.perf_counter()
        figures = subprocess.run([*command, "--open"], check=True, capture_output=True, text=True).stdout
        print(
            f"{name}: {time.perf_counter() - start:.1f} s with the process's own start; {figures.strip()}", flush=True
        )


if __name__ == "__main__":
    main()
