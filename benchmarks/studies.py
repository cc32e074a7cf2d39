"""Studies of many short runs: sort digits by a tiny model that samples from old weights. The runs go side by side, each
on one CPU core, and each is a line of JSON in a file. A study that has stopped goes on with the runs that its file
lacks."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from truestep.config.load import load_config
from truestep.config.schema import Config
from truestep.environments import sorting
from truestep.files.whole import read_json_lines, write_json_lines
from truestep.generate.in_process import InProcessSource
from truestep.metrics.observers import Observer
from truestep.model.policy import Policy
from truestep.rollouts.source import Taken
from truestep.run.assemble.policy import make_policy
from truestep.run.train import make_trainer, train

HELD_OUT, PROMPTS, DOCUMENTS, STEPS = 200, 2048, 128, 100
COLLAPSE = 0.1  # a run has collapsed whose last accuracy is that far below its best, or below that before training
NOT_MADE = "not made: "  # begins the `ended` of a run that failed before it trained; it is made again

Line = dict[str, Any]


# -- what a run begins with


def make_base(
    base: Path,
    digits: int,
    right: float,
    seed: int,
    make_model: Callable[[Path, Sequence[str], int], object],
    options: dict[str, Any],
) -> Path:
    """Make the base model of a task and its prompts. The model has learned from a corpus in which a share of `right`
    answers is right. `options`: more of the configuration's section `model`. Return the model's directory."""
    if not (base / "done").is_file():
        base.mkdir(parents=True, exist_ok=True)
        make_model(base / "model", sorting.WORDS, seed)
        stream = sorting.prompts(seed, digits)
        write_json_lines(base / "held_out.jsonl", itertools.islice(stream, HELD_OUT))
        prompts = list(itertools.islice(stream, PROMPTS))
        write_json_lines(base / "prompts.jsonl", prompts)
        write_json_lines(base / "corpus.jsonl", make_corpus(prompts, base / "model", right, seed))
        config = {
            "model": {"path": str(base / "model"), "dtype": "float32", **options},
            "loss": {"type": "cross_entropy"},
            "data": {"path": str(base / "corpus.jsonl"), "tokens_per_microbatch": 4096},
            "schedule": {"docs_per_step": 128, "steps": 240},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20, "schedule": "linear"},
            "checkpoint": {"directory": str(base / "warm-up")},
            "seed": seed,
        }
        train(write_config(base / "warm-up.yaml", config), Console(file=io.StringIO()))
        (base / "done").touch()
    return sorted((base / "warm-up" / "checkpoints").iterdir())[-1]


def make_corpus(prompts: Sequence[dict[str, str]], model: Path, right: float, seed: int) -> Iterator[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = random.Random(seed)
    for number in range(240 * 128):
        prompt = generator.choice(prompts)
        digits, draw = prompt["prompt"].split()[1:-1], generator.random()
        wrong = digits if draw < (1 + right) / 2 else sorted(digits, reverse=True)
        answer = prompt["answer"].split() if draw < right else wrong
        ids = tokenizer(prompt["prompt"])["input_ids"]
        ends = [*tokenizer(" ".join(answer))["input_ids"], tokenizer.eos_token_id]
        yield {"id": str(number), "input_ids": [*ids, *ends], "prompt_length": len(ids)}


def write_config(file: Path, config: dict[str, Any], *overrides: str) -> Config:
    file.write_text(yaml.safe_dump(config))
    return load_config(file, list(overrides))


def rl_config(base: Path, model: Path, digits: int, seed: int, directory: Path) -> dict[str, Any]:
    """Return the configuration of a run that begins with a base model, with the default loss."""
    return {
        "model": {"path": str(model), "dtype": "float32", "head": {"fp32_lm_head": True}},
        "loss": {"metrics": "basic"},
        "data": {"group_size": 8, "tokens_per_microbatch": 8192},
        "sampler": {
            "prompts": str(base / "prompts.jsonl"),
            "reward": "truestep.environments.sorting:reward",
            "reward_workers": 1,
            "max_new_tokens": digits + 4,
        },
        "evaluation": {"prompts": str(base / "held_out.jsonl"), "every": 10},
        "schedule": {"docs_per_step": DOCUMENTS, "steps": STEPS},
        "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
        "checkpoint": {"directory": str(directory)},
        "seed": seed,
    }


# -- a run


def unchanged(weight: torch.Tensor) -> torch.Tensor:
    return weight


def to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Round each row of a matrix to 255 values; a vector stays."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


class OldWeights(Observer):
    """Lets a source sample from weights of some steps ago, as another policy computes them. `change` is applied to each
    weight."""

    def __init__(
        self,
        source: InProcessSource,
        trained: Policy,
        sampling: Policy,
        staleness: int,
        change: Callable[[torch.Tensor], torch.Tensor] = unchanged,
    ):
        self._trained, self._sampling, self._change = trained, sampling, change
        self._lag, self._history = staleness * DOCUMENTS, deque[dict[str, torch.Tensor]](maxlen=staleness + 1)
        self._take = source.take
        source.generator.policy = sampling
        source.take = self.take  # type: ignore[method-assign]
        self.publish()

    def take(self, count: int, documents_seen: int) -> Taken:
        return self._take(count, max(documents_seen - self._lag, 0))

    def updated(self, step: int, documents_seen: int) -> None:
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        self._history.append({name: weight.detach().clone() for name, weight in self._trained.weights.master.items()})
        for name, parameter in self._sampling.model.named_parameters():
            parameter.copy_(self._change(self._history[0][name]))


@dataclass(frozen=True)
class Sampler:
    """How a run's sampler differs from its policy."""

    options: Config  # the configuration of the model that samples
    staleness: int  # its weights are so many steps old
    change: Callable[[torch.Tensor], torch.Tensor] = unchanged  # what it does to each weight
    frozen: bool = True  # False: it is a policy whose routes are recorded


def follow(options: Config, sampler: Sampler, directory: Path) -> tuple[Line, list[Line]]:
    """Train. Return what a study's line says of any run, and the run's metrics."""
    trainer = make_trainer(options, Console(file=io.StringIO()))
    source = trainer.source
    assert isinstance(source, InProcessSource)
    sampling = make_policy(sampler.options, trainer.ranks, frozen=sampler.frozen)
    trainer.observers.add(OldWeights(source, trainer.policy, sampling, sampler.staleness, sampler.change))
    start, ended = time.perf_counter(), "steps"
    try:
        trainer.run()
    except Exception as error:  # that a run breaks is a result
        ended = describe(error)
    steps, evaluations = (
        read_json_lines(file) if (file := directory / name).is_file() else []
        for name in ("metrics.jsonl", "evaluation.jsonl")
    )
    accuracy = {line["step"]: line["sampled_reward"] for line in evaluations}
    line = {
        "ended": ended, "before": accuracy.get(0), "final": accuracy[max(accuracy)] if accuracy else None,
        "best": max(accuracy.values(), default=None),
        "steps_to_90": next((step for step, value in sorted(accuracy.items()) if value >= 0.9), None),
        "accuracy": accuracy, "largest_norm": max(values_of(steps, "grad_norm"), default=None),
        "clipped": mean_of(steps, "clipped_fraction") or 0.0,
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    return line, steps


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def values_of(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def mean_of(lines: Sequence[Line], name: str) -> float | None:
    """Return the mean of a field over the lines that have it. None: no line has it."""
    values = values_of(lines, name)
    return statistics.mean(values) if values else None


# -- many runs


@dataclass(frozen=True)
class Study:
    fields: tuple[str, ...]  # the fields of a line that tell its run from others: its cell
    make_base: Callable[..., object]  # of a folder and what `base_of` says
    base_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    run: Callable[..., Line]  # of a folder and a cell

    def cell_of(self, line: Line) -> tuple[Any, ...]:
        return tuple(line[field] for field in self.fields)

    def read(self, file: Path) -> list[Line]:
        """Return the last line of each run that was made."""
        lines = read_json_lines(file) if file.exists() else []
        made = {self.cell_of(line): line for line in lines if not line["ended"].startswith(NOT_MADE)}
        return list(made.values())


def make_runs(study: Study, cells: Sequence[tuple[Any, ...]], out: Path, jobs: int, seconds: float) -> None:
    """Make the runs that a file lacks, and add each to it. A run that fails is a line too. After so many seconds no
    run begins."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out.parent.mkdir(parents=True, exist_ok=True)
    known = set(map(study.cell_of, study.read(out)))
    wanted = [cell for cell in cells if cell not in known]
    folder, end = out.with_suffix(".bases"), time.time() + seconds
    # New interpreters: each sees no GPU and has one thread.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_start) as pool:
        making = {
            base: pool.submit(study.make_base, folder, *base) for base in dict.fromkeys(map(study.base_of, wanted))
        }
        for base, made in making.items():
            if (error := made.exception()) is not None:
                print(f"{base}: a base model could not be made: {describe(error)}", flush=True)
        wanted = [cell for cell in wanted if making[study.base_of(cell)].exception() is None]
        print(f"{len(wanted)} runs to make", flush=True)
        run = partial(_run_before, end, study.run, study.fields, folder)
        for future in as_completed([pool.submit(run, cell) for cell in wanted]):
            if (error := future.exception()) is not None:  # its process is gone
                print(f"a run could not be made: {describe(error)}", flush=True)
            elif (line := future.result()) is not None:
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                cell = ", ".join(map(str, study.cell_of(line)))
                print(f"{cell}: {line['before']} -> {line['final']}, {line['seconds']} s, {line['ended']}", flush=True)
    if left := len(set(cells) - set(map(study.cell_of, study.read(out)))):
        print(f"{left} runs are left: the same command goes on with them", flush=True)


def _start() -> None:
    torch.set_num_threads(1)


def _run_before(
    end: float, run: Callable[..., Line], fields: Sequence[str], folder: Path, cell: tuple[Any, ...]
) -> Line | None:
    """Make a run, if it can begin before a time of the clock."""
    if time.time() > end:
        return None
    start = time.perf_counter()
    try:
        return run(folder, *cell)
    except Exception as error:
        nothing = dict.fromkeys(("before", "final", "best", "steps_to_90", "largest_norm"))
        said = {"ended": NOT_MADE + describe(error), "seconds": round(time.perf_counter() - start, 1)}
        return dict(zip(fields, cell, strict=True)) | nothing | said


# -- tables


def collapsed(line: Line) -> bool:
    return line["ended"] != "steps" or line["final"] < line["before"] or line["final"] < line["best"] - COLLAPSE


def text_of(found: Sequence[Line]) -> str:
    """Write the runs of a cell: the mean of the last accuracy, its least and largest, the step at which most had 90%,
    and how many collapsed."""
    if not found:
        return ""
    last = [100 * line["final"] for line in found if line["final"] is not None]
    spread = f" ({min(last):.0f}–{max(last):.0f})" if len(last) > 1 else ""
    parts = [f"{statistics.mean(last):.0f}{spread}" if last else "–"]
    reached = [line["steps_to_90"] for line in found if line["steps_to_90"] is not None]
    if 2 * len(reached) > len(found):
        parts.append(f"@{statistics.median_low(reached)}")
    if fallen := sum(map(collapsed, found)):
        parts.append(f"↓{fallen}")
    return " ".join(parts)
