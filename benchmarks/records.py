"""What `logging.rollouts.documents: all` costs a step on a GPU: digests of weights and documents, and whole records.

    python benchmarks/records.py [--seconds 40] [--documents 32] [--compile] [--kinds records]

A run trains a random model of Qwen3's shape (1.72B parameters) on rollout files of 1,000 tokens a document, of which
750 are labels. Its steps take turns: as a run makes them that keeps 16 rollouts a step, then with digests, then with
whole records. Of each two equal steps in a row the second counts, since the work for a step goes on in the next one.

`added` is the median of the differences between such a step and the mean of the plain ones before and after it, with
its standard error. `direct` adds up what was
measured by itself: the GPU's time, and the milliseconds for which the training thread launched no kernel. The digests
of documents are computed while a GPU ends its backward pass, which hides them: they have a figure of their own.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import qwen
import torch
from rich.console import Console

from truestep.config.schema import Config
from truestep.metrics.observers import Observer
from truestep.rollouts.kept.keeper import RecordKeeper
from truestep.run.checkpoint.saves import SaveRule
from truestep.run.train import make_trainer
from truestep.run.trainer import Trainer
from truestep.run.weight_lines import WeightLines
from truestep.types import Rollout
from truestep.weights.digests import Squares

KINDS = ("digests", "records")
TOKENS, LABELS, GROUP = 1000, 750, 8
BATCHES = 8  # other documents in as many steps; then they come again
WARM = 4  # steps before those that are timed


class Turns(Observer):
    """Switches digests and records on and off, and times the steps and what they add."""

    def __init__(self, trainer: Trainer, seconds: float, kinds: Sequence[str]):
        self.trainer, self.seconds, self._kinds = trainer, seconds, ("plain", *kinds)
        self.steps: list[tuple[str, float]] = []
        self.host: dict[str, list[float]] = defaultdict(list)  # milliseconds of the training thread
        self.events: list[tuple[Any, Any]] = []  # before and after the digests of weights
        self._trace, self._kind, self._made = trainer.learner.trace, "plain", 0
        self._begun = self._last = 0.0
        assert self._trace is not None
        self._ask, self._trace.ask = self._trace.ask, self._asked  # type: ignore[method-assign]
        lines, keeper = trainer.observers.of(WeightLines), trainer.observers.of(RecordKeeper)
        events = ((lines, "updated", "digests"), (keeper, "computing", "records"), (keeper, "trained", "records"))
        for who, name, kinds in events:
            setattr(who, name, self._switched(f"{kinds}: {name}", getattr(who, name), kinds))
        trainer._digests = self._switched("documents", trainer._digests, None)  # type: ignore[method-assign]

    def _switched(self, what: str, call: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if kind not in (None, self._kind):
                return None
            begun = time.perf_counter()
            result = call(*arguments)
            self.host[what if kind else f"{what}, {self._kind}"].append(1000 * (time.perf_counter() - begun))
            return result

        return timed

    def _asked(self, squares: Squares | None = None) -> None:
        begun = time.perf_counter()
        if torch.cuda.is_available():
            self.events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self.events[-1][0].record()
        self._ask(squares)
        if torch.cuda.is_available():
            self.events[-1][1].record()
        self.host["launching the digests of weights"].append(1000 * (time.perf_counter() - begun))

    def rollouts(self, documents: Sequence[Rollout]) -> None:
        self._kind = self._kinds[self._made // 2 % len(self._kinds)]
        self.trainer.learner.trace = self._trace if self._kind == "digests" else None

    def step(self, line: Mapping[str, Any]) -> None:
        now, self._made = time.perf_counter(), self._made + 1
        if self._made == WARM:
            self._begun = now
            self.host.clear()
            self.events.clear()
        elif self._made > WARM and self._made % 2 == 0:
            self.steps.append((self._kind, 1000 * (now - self._last)))
        self._last = now
        if self._begun and now - self._begun > self.seconds and self._made % (2 * len(self._kinds)) == 0:
            self.trainer.ask_to_stop(15)


def write_rollouts(file: Path, given: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    with file.open("w") as lines:
        for number in range(given.documents * BATCHES):
            record = {
                "id": f"d{number}",
                "input_ids": rng.integers(0, given.vocabulary, TOKENS).tolist(),
                "prompt_length": TOKENS - LABELS,
                "logprobs": np.float32(-rng.exponential(0.5, LABELS)).tolist(),
                "reward": float(rng.random()),
                "group_id": f"g{number // GROUP}",
                "model_version": 0,
            }
            lines.write(json.dumps(record) + "\n")


def run(folder: Path, given: argparse.Namespace) -> tuple[Turns, dict[str, float]]:
    write_rollouts(folder / "rollouts.jsonl", given)
    config = Config.model_validate(
        {
            "model": {
                "path": str(folder / "model"),
                "dtype": "bfloat16",
                "head": {"fp32_lm_head": True},
                "compile": given.compile,
            },
            "loss": {"type": "grpo"},
            "data": {
                "path": str(folder / "rollouts.jsonl"),
                "group_size": GROUP,
                "epochs": 1000,
                "tokens_per_microbatch": given.tokens,
            },
            "schedule": {"docs_per_step": given.documents},
            "optimizer": {"learning_rate": 1e-7},
            "checkpoint": {"directory": str(folder / "run")},
            "logging": {"rollouts": {"documents": "all"}},
        }
    )
    trainer = make_trainer(config, Console(file=io.StringIO()))
    trainer.save_rule = SaveRule(never=True)
    turns = Turns(trainer, given.seconds, given.kinds)
    trainer.observers.add(turns)
    trainer.run()
    written = sum(file.stat().st_size for file in (folder / "run" / "records").iterdir())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    kinds = ("plain", *given.kinds)
    kept = sum(line["num_tokens"] for place, line in enumerate(lines) if kinds[place // 2 % len(kinds)] == "records")
    sizes = {"bytes a token": written / max(1, kept)}
    if "digests" in given.kinds:
        sizes["bytes a step of weights.jsonl"] = len((folder / "run" / "weights.jsonl").read_text().splitlines()[-1])
    return turns, sizes


def differences(steps: Sequence[tuple[str, float]], kind: str) -> list[float]:
    """Compare the steps of a kind with the plain ones around them."""
    found = []
    for place, (which, took) in enumerate(steps):
        before = next((time for other, time in reversed(steps[:place]) if other == "plain"), None)
        after = next((time for other, time in steps[place:] if other == "plain"), None)
        if which == kind and before is not None and after is not None:
            found.append(took - (before + after) / 2)
    return found


def report(turns: Turns, sizes: Mapping[str, float], given: argparse.Namespace) -> None:
    middle = {what: statistics.median(times) for what, times in turns.host.items()}
    on_gpu = 0.0
    if turns.events:
        torch.cuda.synchronize()
        on_gpu = statistics.median(first.elapsed_time(second) for first, second in turns.events)
    plain = statistics.median(took for kind, took in turns.steps if kind == "plain")
    direct = dict.fromkeys(given.kinds, 0.0)
    if "digests" in direct:
        launched = max(0.0, middle["launching the digests of weights"] - on_gpu)  # beyond what the GPU hides of it
        exposed = 0.0 if turns.events else middle["documents, digests"]
        direct["digests"] = on_gpu + launched + middle["digests: updated"] + exposed
    if "records" in direct:
        direct["records"] = middle["records: computing"] + middle["records: trained"]
    tokens = given.documents * TOKENS
    speed = f"{tokens / plain * 1000:,.0f} tokens/s"
    print(f"a step of {given.documents} documents, {tokens:,} tokens: {plain:.1f} ms, {speed}")
    print(f"{'':>8} {'added ms':>16} {'of a step':>10} {'direct ms':>10} {'of a step':>10}   steps")
    for kind in given.kinds:
        times = differences(turns.steps, kind)
        added = statistics.median(times)
        error = 1.2533 * spread(times) / len(times) ** 0.5
        print(
            f"{kind:>8} {added:>8.2f} ± {error:<5.2f} {added / plain:>10.2%} {direct[kind]:>10.2f} "
            f"{direct[kind] / plain:>10.2%}   {len(times)}"
        )
    if "digests" in direct:
        print(f"digests: on the GPU {on_gpu:.2f} ms; of the training thread, ms: " + named(middle, "dig", "launch"))
        hidden = " while the GPU ends its backward pass, so not in `direct`" if turns.events else ""
        print(f"  digests of documents {middle['documents, digests']:.2f}{hidden}")
    if "records" in direct:
        print("records: of the training thread, ms: " + named(middle, "records"))
    print("; ".join(f"{value:.2f} {name}" for name, value in sizes.items()))


def spread(times: Sequence[float]) -> float:
    """The standard deviation, by the distances from the median, so that one slow step does not count."""
    return 1.4826 * statistics.median(abs(one - statistics.median(times)) for one in times)


def named(middle: Mapping[str, float], *begins: str) -> str:
    return ", ".join(f"{what} {time:.2f}" for what, time in middle.items() if what.startswith(begins))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="of timed steps")
    qwen.add_shape(parser)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--documents", type=int, default=32, help="of a step")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        qwen.write_model(folder / "model", given, device="cuda" if torch.cuda.is_available() else "cpu")
        torch.cuda.empty_cache()
        turns, sizes = run(folder, given)
    report(turns, sizes, given)
    print(f"the command took {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
