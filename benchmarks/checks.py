"""What a run's checks cost, as a share of its steps.

    python benchmarks/checks.py                       # `truestep demo`
    python benchmarks/checks.py --model [--layers 28 --hidden 2048 --intermediate 6144 --documents 256 --new 512]
    python benchmarks/checks.py --model --turns --steps 40

The first measures a whole demo, both of its phases. `--model` measures `train` with a random model of Qwen3's shape,
which samples its own documents, on a GPU if there is one. Every call of a check is timed:

- `critical path`: seconds of the main thread, in which a step waits for the check;
- `CPU`: processor seconds of all threads in checks, as a share of the run's processor seconds. It counts what runs
  beside the steps too, such as the look at the values of a checkpoint;
- `GPU`: seconds between CUDA events before and after the call. They hold the check's kernels, and the GPU's pauses
  between their launches. On a GPU, `critical path` also has the wait for kernels launched before: it is no cost.

`--turns` replaces all checks by nothing at every second step, and compares the two kinds of steps. So it also sees what
no single call shows, such as cold caches. The checks of the reading of rollouts and of a server's answers are no part.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from qwen import add_shape, write_model
from rich.console import Console

import truestep.tools.demo.run as demo
from truestep.config.load import load_config
from truestep.losses.agreement import COLUMNS
from truestep.report.verdicts.watching import Watching
from truestep.run.train import train
from truestep.run.trainer import Trainer
from truestep.step.before.check import SamplerCheck
from truestep.step.compute import runner
from truestep.tools.demo.model import make_tokenizer
from truestep.weights.finite import Extremes, UpdateCheck

REWARD = """
def reward(prompt, completion):
    return float(sum(map(ord, completion)) % 7)
"""


@dataclass
class Cost:
    calls: int = 0
    critical: float = 0.0  # seconds of the main thread
    processor: float = 0.0  # seconds of all threads
    events: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def gpu(self) -> float:
        return sum(before.elapsed_time(after) for before, after in self.events) / 1e3


class Checks:
    """Times the calls of checks. `off` replaces them by nothing."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.off = False
        self._inside = threading.local()
        self._lock = threading.Lock()
        self.on_gpu = torch.cuda.is_available()

    def wrap(self, place: Any, method: str, name: str, nothing: Callable[..., Any] = lambda *_, **__: None) -> None:
        function = getattr(place, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            if self.off:
                return nothing(*arguments, **named)
            if getattr(self._inside, "check", False):  # a check that another check calls
                return function(*arguments, **named)
            self._inside.check = True
            try:
                return self._time(name, lambda: function(*arguments, **named))
            finally:
                self._inside.check = False

        setattr(place, method, timed)

    def _time(self, name: str, call: Callable[[], Any]) -> Any:
        before = self._event()
        began, processor = time.perf_counter(), time.thread_time()
        result = call()
        took, processor = time.perf_counter() - began, time.thread_time() - processor
        after = self._event()
        with self._lock:
            cost = self.costs[name]
            cost.calls += 1
            cost.processor += processor
            cost.critical += took if threading.current_thread() is threading.main_thread() else 0.0
            if before is not None:
                cost.events.append((before, after))
        return result

    def _event(self) -> Any:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def watched() -> Checks:
    checks = Checks()
    checks.wrap(runner, "_compare", "sums of log-probs", lambda batch, *_: np.zeros((len(batch.members), len(COLUMNS))))
    checks.wrap(runner, "_table", "sums of log-probs", lambda plan, _: np.zeros((len(plan.documents), len(COLUMNS))))
    checks.wrap(SamplerCheck, "before_update", "verdict on the sampler")
    checks.wrap(SamplerCheck, "answers", "verdict on the sampler")
    for method in ("step", "evaluation", "rollouts", "rejected"):
        checks.wrap(Watching, method, "verdicts on the run")
    checks.wrap(UpdateCheck, "ask", "weights after an update")
    checks.wrap(UpdateCheck, "ruined", "weights after an update", lambda *_: [])
    checks.wrap(Extremes, "add", "values of a checkpoint")
    checks.wrap(Extremes, "not_finite", "values of a checkpoint", lambda *_: [])
    return checks


def lines_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.directory.path / "metrics.jsonl").read_text().splitlines()]


def measured(checks: Checks, title: str, run: Callable[[], Trainer]) -> Trainer:
    """Print the costs of a run's checks."""
    checks.costs.clear()
    processor = time.process_time()
    trainer = run()
    processor = time.process_time() - processor
    if checks.on_gpu:
        torch.cuda.synchronize()
    lines = lines_of(trainer)
    steps = sum(line["step_time"] for line in lines)
    print(f"{title}: {len(lines)} steps, {steps:.2f} s in steps, {processor:.2f} s of processors")
    for name, cost in [*checks.costs.items(), ("all checks", _sum(checks.costs.values()))]:
        parts = [f"{name:24} {cost.calls:6} calls"]
        parts.append(f"critical path {cost.critical / len(lines) * 1e3:7.3f} ms a step {cost.critical / steps:7.3%}")
        parts.append(f"CPU {cost.processor / len(lines) * 1e3:7.3f} ms {cost.processor / processor:7.3%}")
        parts += [f"GPU {cost.gpu / steps:7.3%}"] if checks.on_gpu else []
        print("  " + "  ".join(parts), flush=True)
    return trainer


def _sum(costs: Any) -> Cost:
    total = Cost()
    for cost in costs:
        total.calls += cost.calls
        total.critical += cost.critical
        total.processor += cost.processor
        total.events += cost.events
    return total


def run_demo(checks: Checks, given: argparse.Namespace) -> None:
    train_phase = demo.train

    def phase(config: Any, console: Console, title: str) -> Trainer:
        return measured(checks, title, lambda: train_phase(config, console, title))

    demo.train = phase  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        demo.run(Path(folder) / "demo", given.seed, Console(file=io.StringIO()))


def run_model(checks: Checks, given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = write_task(folder, given)
        if given.turns:
            _take_turns(checks)
        trainer = measured(checks, "random model", lambda: train(load_config(config), Console(file=io.StringIO())))
        if given.turns:
            _compare_turns(lines_of(trainer)[given.warm_up :])


def write_task(folder: Path, given: argparse.Namespace) -> Path:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_model(folder / "model", given, device=device)
    make_tokenizer(folder / "model", [f"w{number}" for number in range(1000)])
    prompts = [
        {"id": str(number), "prompt": " ".join(f"w{(number * 7 + at) % 1000}" for at in range(given.prompt))}
        for number in range(given.documents)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "checks_reward.py").write_text(REWARD)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    half = device == "cuda"
    config = {
        "model": {
            "path": str(folder / "model"),
            "dtype": "bfloat16" if half else "float32",
            "head": {"fp32_lm_head": True},
            "compile": half and not given.plain,
        },
        "loss": {"type": "grpo", "metrics": given.metrics},
        "data": {"group_size": 8, "tokens_per_microbatch": given.tokens},
        "sampler": {"prompts": "prompts.jsonl", "reward": "checks_reward:reward", "max_new_tokens": given.new},
        "schedule": {"docs_per_step": given.documents, "steps": given.steps},
        "optimizer": {"learning_rate": 1e-6},
        "checkpoint": {"directory": str(folder / "run")},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def _take_turns(checks: Checks) -> None:
    """Switch the checks off in every second step."""
    make_step = Trainer._train

    def step(trainer: Trainer, *arguments: Any) -> None:
        checks.off = trainer.step % 2 == 1
        make_step(trainer, *arguments)

    Trainer._train = step  # type: ignore[method-assign]


def _compare_turns(lines: list[dict[str, Any]]) -> None:
    """Compare the training part of steps, since sampling and its wait have no check."""
    kinds: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        kinds[line["step"] % 2 == 1].append(line["step_time"] - line["data_wait_time"])
    steps = statistics.median(line["step_time"] for line in lines)
    with_checks, without = (statistics.median(kinds[kind]) for kind in (True, False))
    print(
        f"  by turns, without sampling: {with_checks:.4f} s with checks, {without:.4f} s without, {len(lines)} steps: "
        f"{with_checks / without - 1:+.2%}; of a whole step {(with_checks - without) / steps:+.2%}"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    parser.add_argument("--model", action="store_true", help="a random model in place of the demo")
    parser.add_argument("--turns", action="store_true", help="switch the checks off in every second step")
    add_shape(parser)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--documents", type=int, default=256, help="of a step")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that --turns leaves out")
    parser.add_argument("--metrics", choices=["none", "basic", "full"], default="basic", help="loss.metrics")
    parser.add_argument("--plain", action="store_true", help="do not compile the layers")
    return parser.parse_args()


def main() -> None:
    given = options()
    checks = watched()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}")
    (run_model if given.model else run_demo)(checks, given)


if __name__ == "__main__":
    main()
