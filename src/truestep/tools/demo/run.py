"""The demo: supervised training on a corpus of mixed quality, then RL on a verifiable reward.

Both phases use the trainer of real runs; only the model and the data are small.
"""

import itertools
import random
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from truestep.config.load import dump_config, load_config
from truestep.config.schema import Config
from truestep.environments import sorting
from truestep.errors import TruestepError
from truestep.files.whole import read_json_lines, write_json_lines, write_whole
from truestep.report import write_report
from truestep.run.train import train
from truestep.run.trainer import Trainer
from truestep.tools.demo.model import make_model

PHASES = sorted(Path(__file__).parent.glob("*.yaml"))  # configurations, as a user would write them
HELD_OUT, PROMPTS, CORPUS = 200, 2048, 240 * 128
# Fraction of right answers in the corpus. The other answers repeat the digits, or sort them in descending order.
RIGHT = 0.35
MARK = ".truestep-demo"  # a file in directories that a demo created; only such directories are removed


@dataclass(frozen=True)
class Outcome:
    before: float
    after: float
    page: Path


def run(output: Path, seed: int, console: Console) -> Outcome:
    torch.set_num_threads(1)  # with such small matrices, more threads are slower on a busy machine
    start = time.perf_counter()
    _start_afresh(output)
    console.print(
        f"[bold]truestep demo[/]: sort four digits, seed {seed}, everything in {escape(str(output))}", highlight=False
    )
    base = make_model(output / "model", sorting.WORDS, seed)
    _write_task(output, base, seed)
    first, second = PHASES
    policy = _train(first, base, output, seed, console).checkpoints.latest()
    assert policy is not None
    trained = _train(second, policy, output, seed, console)
    return _show(trained.directory.path, output, console, time.perf_counter() - start)


def _start_afresh(output: Path) -> None:
    """Remove the output of an earlier demo. Raise an error if another program made the directory."""
    if output.exists() and any(output.iterdir()) and not (output / MARK).is_file():
        raise TruestepError(f"{output} exists already, not made by a demo: name a directory that is new or empty")
    shutil.rmtree(output, ignore_errors=True)
    write_whole(output / MARK, b"")


def _write_task(output: Path, model: Path, seed: int) -> None:
    """Write training prompts, held-out prompts, and the corpus of the warm-up."""
    stream = sorting.prompts(seed)
    write_json_lines(output / "held_out.jsonl", itertools.islice(stream, HELD_OUT))
    prompts = list(itertools.islice(stream, PROMPTS))
    write_json_lines(output / "prompts.jsonl", prompts)
    write_json_lines(output / "corpus.jsonl", _corpus(prompts, model, seed))


def _corpus(prompts: Sequence[dict[str, str]], model: Path, seed: int) -> Iterable[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = random.Random(seed)
    for number in range(CORPUS):
        prompt = generator.choice(prompts)
        digits = prompt["prompt"].split()[1:-1]
        draw = generator.random()
        if draw >= RIGHT:
            answer = digits if draw < (1 + RIGHT) / 2 else sorted(digits, reverse=True)
        else:
            answer = prompt["answer"].split()
        prompt_ids = tokenizer(prompt["prompt"])["input_ids"]
        answer_ids = [*tokenizer(" ".join(answer))["input_ids"], tokenizer.eos_token_id]
        yield {"id": str(number), "input_ids": [*prompt_ids, *answer_ids], "prompt_length": len(prompt_ids)}


def phase_config(phase: Path, model: Path, output: Path, seed: int) -> Config:
    """Return the configuration of a phase that starts from `model` and writes to `output`."""
    places = {"data.path": "corpus.jsonl"}
    if load_config(phase).sampler is not None:
        places = {"sampler.prompts": "prompts.jsonl", "evaluation.prompts": "held_out.jsonl"}
    places = {"checkpoint.directory": _title(phase)} | places
    overrides = [word for name, place in places.items() for word in (f"--{name}", str(output / place))]
    overrides += ["--model.path", str(model)]
    return load_config(phase, [*overrides, "--seed", str(seed)])


def _title(phase: Path) -> str:
    return phase.stem.partition("-")[2]


def _train(phase: Path, model: Path, output: Path, seed: int, console: Console) -> Trainer:
    title, config = _title(phase), phase_config(phase, model, output, seed)
    console.print(Rule(phase.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), style="dim"))
    file = output / f"{title}.yaml"
    write_whole(file, dump_config(config).encode())  # so that `truestep train` can resume this phase
    trainer = train(config, console, title)
    if trainer.stopped_by is not None:  # stopped: do not start the next phase
        again = shlex.join(["truestep", "train", str(file)])
        console.print(
            f"the demo is stopped. truestep demo begins it anew; {escape(again)} goes on with this part alone",
            highlight=False,
            soft_wrap=True,
        )
        raise SystemExit(128 + trainer.stopped_by)
    return trainer


def _show(run_directory: Path, output: Path, console: Console, seconds: float) -> Outcome:
    evaluations = read_json_lines(run_directory / "evaluation.jsonl")
    before, after = evaluations[0]["sampled_reward"], evaluations[-1]["sampled_reward"]
    page = write_report([run_directory], output / "report.html", title="truestep demo")
    console.print(f"\npage: {page}\n{seconds:.0f} s in all", highlight=False, soft_wrap=True)
    console.print(f"held-out accuracy: {before:.0%} -> {after:.0%}", highlight=False, soft_wrap=True)
    return Outcome(before, after, page)
