"""Each optimizer on the demo's task, over seeds: the accuracy on held-out prompts that it ends with.

    python benchmarks/optimizers.py [--seeds 0 1 2] [--optimizers adamw adamw_8bit muon] [--out results.jsonl]

Both phases of the demo (warm-up and GRPO) are trained by the optimizer, with the demo's own learning rates. A run takes
about a minute of one CPU core. Lines that the file has are not made again; the table is of all its lines. The question
is whether moments in 8 bits end below the worst seed of float32 ones.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from truestep.config.schema import Config
from truestep.environments import sorting
from truestep.files.whole import read_json_lines
from truestep.run.train import train
from truestep.tools.demo import run as demo
from truestep.tools.demo.model import make_model

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw"},
    "adamw_8bit": {"type": "adamw_8bit"},
    "muon": {"type": "muon"},
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--optimizers", nargs="+", choices=[*OPTIMIZERS], default=[*OPTIMIZERS])
    parser.add_argument("--out", type=Path, default=Path("optimizers.jsonl"))
    return parser.parse_args()


def accuracy(seed: int, optimizer: dict[str, Any]) -> tuple[float, float]:
    """Run the demo by an optimizer, and give its sampled accuracy before and after GRPO."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        model = make_model(output / "model", sorting.WORDS, seed)
        demo._write_task(output, model, seed)
        for phase in demo.PHASES:
            config = demo.phase_config(phase, model, output, seed).model_dump(exclude_unset=True)
            config["optimizer"] = config["optimizer"] | optimizer
            config["logging"] = {"console": False}
            trained = train(Config.model_validate(config), Console(file=io.StringIO()))
            latest = trained.checkpoints.latest()
            assert latest is not None
            model = latest
        lines = read_json_lines(trained.directory.path / "evaluation.jsonl")
        return lines[0]["sampled_reward"], lines[-1]["sampled_reward"]


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    done = read_json_lines(given.out) if given.out.exists() else []
    made = {(line["seed"], line["optimizer"]) for line in done}
    for seed in given.seeds:
        for name in given.optimizers:
            if (seed, name) in made:
                continue
            start = time.perf_counter()
            before, after = accuracy(seed, OPTIMIZERS[name])
            line = {"seed": seed, "optimizer": name, "before": before, "after": after}
            done.append(line | {"seconds": round(time.perf_counter() - start, 1)})
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(json.dumps(done[-1]), flush=True)
    print(f"{'optimizer':<12} {'seeds':>5} {'worst':>7} {'mean':>7} {'best':>7}")
    for name in given.optimizers:
        found = [line["after"] for line in done if line["optimizer"] == name]
        mean = statistics.mean(found)
        print(f"{name:<12} {len(found):>5} {min(found):>7.1%} {mean:>7.1%} {max(found):>7.1%}")


if __name__ == "__main__":
    main()
