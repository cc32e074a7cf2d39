"""Whether a run stays as it is for 20,000 tiny steps: its memory, descriptors, threads and step time, in ten windows.

    python benchmarks/soak.py [files] [in_process] [stream] [--steps 20000]

Every run is the real loop in a process of its own, on a model so small that the loop is most of a step. What is
measured is kept as sums of a window, so that the measuring itself does not grow. Numbers are of a window's end; step
time is the window's mean. The verdict compares the last window with the second (the first is warm-up); of time it takes
what the processor worked, in pieces of the same work done now and then beside the steps: a processor that others use as
well is slower at both.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from truestep.config.schema import Config
from truestep.metrics.observers import Observer
from truestep.run.train import make_trainer
from truestep.run.trainer import Trainer
from truestep.tools.demo.model import make_tokenizer

WORDS = [str(number) for number in range(10)]
_WINDOWS, _DOCS = 10, 2
_MOST_MEMORY, _MOST_TIME = 8.0, 1.25  # MiB that memory may differ by, and times that a step may take
_PIECES = 50  # of the same work in a window


def reward(prompt: object, completion: str, **_: object) -> float:
    return len(completion) % 7 / 7


def make_model(directory: Path) -> Path:
    torch.manual_seed(0)
    vocabulary = make_tokenizer(directory, WORDS)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=1, **shape)).save_pretrained(directory)
    return directory


def records(first: int, count: int) -> str:
    draw = random.Random(first)
    lines = []
    for number in range(first, first + count):
        one = {"input_ids": [draw.randrange(2, 10) for _ in range(4)], "prompt_length": 2, "logprobs": [-1.0, -1.0]}
        lines.append(json.dumps(one | {"advantage": draw.uniform(-1, 1), "id": str(number)}) + "\n")
    return "".join(lines)


def memory() -> float:
    """Measure the private memory of this process, in MiB, without pages of libraries: these count as private where no
    other process on the machine has the same library, and come and go with such processes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) / 1024


def piece() -> float:
    """Do a little work that is always the same, in Python and in torch, and give its processor time in ms."""
    began = time.thread_time()
    value = {str(number): [number] * 5 for number in range(200)}
    matrix = torch.ones(16, 16)
    for _ in range(10):
        value = json.loads(json.dumps(value))
        matrix = (matrix @ matrix).clamp(max=1.0)
    return 1000 * (time.thread_time() - began)


class Windows:
    """Prints a line for each tenth of the steps."""

    def __init__(self, steps: int):
        self._size = max(1, steps // _WINDOWS)
        self._began, self._worked, self._done = time.perf_counter(), time.process_time(), 0
        self._pieces: list[float] = []  # of this window
        self._second: tuple[float, int, int, float] | None = None
        self.flat = True
        print("| steps | memory | descriptors | threads | a step | its processor time | in pieces |", flush=True)
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)

    def step(self) -> None:
        self._done += 1
        if self._done % max(1, self._size // _PIECES) == 0:
            self._pieces.append(piece())
        if self._done % self._size:
            return
        took = 1000 * (time.perf_counter() - self._began) / self._size
        worked = (1000 * (time.process_time() - self._worked) - sum(self._pieces)) / self._size
        pieces = worked / (sum(self._pieces) / len(self._pieces))
        now = (memory(), len(os.listdir("/proc/self/fd")), threading.active_count(), pieces)
        places = f"{now[0]:.1f} MiB | {now[1]} | {now[2]}"
        print(f"| {self._done:,} | {places} | {took:.2f} ms | {worked:.2f} ms | {pieces:.2f} |", flush=True)
        if self._done == 2 * self._size:
            self._second = now
        elif self._done == _WINDOWS * self._size and self._second is not None:
            before = self._second
            self.flat = now[0] - before[0] <= _MOST_MEMORY and now[1] <= before[1] and now[2] <= before[2]
            self.flat = self.flat and now[3] <= _MOST_TIME * before[3]
        self._began, self._worked, self._pieces = time.perf_counter(), time.process_time(), []


def send(directory: Path, trainer: Trainer, documents: int) -> None:
    """Send a little more than the run has trained on, in files of a hundred that are removed once trained on."""
    sent, size, removed = 0, 100, 0
    while sent < documents:
        if sent - trainer.state.documents_seen > 10 * size:
            time.sleep(0.005)
            continue
        beside = directory / ".partial"
        beside.write_text(records(sent, size), encoding="utf-8")
        beside.rename(directory / f"{sent:09}.jsonl")
        sent += size
        while removed + 60 * size < trainer.state.documents_seen:
            (directory / f"{removed:09}.jsonl").unlink()
            removed += size


def config(kind: str, folder: Path, steps: int) -> Config:
    sections: dict[str, Any] = {
        "model": {"path": str(make_model(folder / "model")), "dtype": "float32"},
        "data": {"advantages": "none", "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": _DOCS, "steps": steps},
        "checkpoint": {"directory": str(folder / "run"), "every": max(1, steps // 20), "keep": 2},
        "logging": {"console": False},
    }
    if kind == "files":
        (folder / "rollouts.jsonl").write_text(records(0, 1000), encoding="utf-8")
        sections["data"] |= {"path": str(folder / "rollouts.jsonl"), "epochs": -(-_DOCS * steps // 1000)}
    elif kind == "stream":
        (folder / "sent").mkdir()
        sections["data"] |= {"source": {"type": "files", "directory": str(folder / "sent")}}
    else:
        prompts = "".join(json.dumps({"prompt": f"{number % 10} {number // 10 % 10}"}) + "\n" for number in range(100))
        (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
        sections["data"] |= {"advantages": "group_mean", "group_size": _DOCS}
        sections["sampler"] = {"prompts": str(folder / "prompts.jsonl"), "reward": "soak:reward", "max_new_tokens": 2}
    return Config.model_validate(sections)


def soak(kind: str, steps: int) -> bool:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        trainer = make_trainer(config(kind, Path(name), steps), Console(file=io.StringIO()))
        windows = Windows(steps)

        class Counts(Observer):
            def updated(self, step: int, documents_seen: int) -> None:
                windows.step()

        trainer.observers.add(Counts())
        if kind == "stream":
            arguments = (Path(name) / "sent", trainer, _DOCS * steps)
            threading.Thread(target=send, args=arguments, daemon=True).start()
        ended = trainer.run()
    print(f"\n{ended}: {'flat' if windows.flat else 'NOT FLAT'}\n", flush=True)
    return windows.flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.kinds or ["files", "in_process", "stream"]
    if options.here:
        sys.exit(not soak(kinds[0], options.steps))
    failed = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
    for kind in kinds:
        print(f"{kind}, {options.steps:,} steps\n", flush=True)
        command = [sys.executable, __file__, kind, "--here", "--steps", str(options.steps)]
        failed += [kind] if subprocess.run(command, env=environment, check=False).returncode else []
    sys.exit(f"not flat: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
