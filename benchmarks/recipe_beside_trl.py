"""Our run of the tutorial's task beside TRL's GRPOTrainer: held-out accuracy over eight seeds, and seconds a step.

    python benchmarks/recipe_beside_trl.py --model models/smollm2 [--folder runs/beside-trl] [--seeds 0 1 2 3 4 5 6 7]
        [--steps 16] [--device cuda] [--dtype float32] [--jobs 4] [--seconds 300] [--out beside-trl]

Both take the same model, prompts, group size, documents, loss (GRPO, the mean over all labels, clipped at 0.2, no KL),
advantages, optimizer (AdamW at a constant rate, the gradient clipped at 1) and temperature. Both trained models are
judged by transformers' `generate` on held-out prompts: the likeliest answer, and eight drawn ones. `p` is the share of
all ways to part the results into two halves whose means are as far from each other. TRUESTEP_PEERS may name a folder of
TRL's packages. `jobs` processes share the machine; the seconds are of one more run of each, alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import recipe_task
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
GROUP_SIZE, MAX_NEW_TOKENS = 8, 6
WHO = ("truestep", "TRL")
DRAWN = 8  # answers to each held-out prompt
BATCH = 512  # answers that are drawn at a time


class Trial:
    def __init__(self, given: argparse.Namespace):
        self.given, self.folder = given, given.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = recipe_task.rows(given.held_out + 1000)
        self.held_out = rows[: given.held_out]
        self.prompts = self.folder / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows[given.held_out :]))

    def train(self, who: str, seed: int, name: str) -> dict[str, Any]:
        """Train in a process of its own; return the model's directory, the steps' seconds and their mean rewards."""
        model = self.folder / name
        steps = self.ours(seed, model) if who == "truestep" else self.trl(seed, model)
        print(f"{name}: rewards {' '.join(f'{reward:.2f}' for reward in steps['rewards'])}", flush=True)
        return {"who": who, "seed": seed, "model": model, **steps}

    def ours(self, seed: int, model: Path) -> dict[str, list[float]]:
        given, run = self.given, model.with_suffix(".run")
        config = {
            "seed": seed,
            "model": {"path": str(given.model.resolve()), "dtype": given.dtype, "head": {"fp32_lm_head": True}},
            "data": {"group_size": GROUP_SIZE},
            "sampler": {
                "prompts": str(self.prompts),
                "reward": "recipe_task:reward",
                "max_new_tokens": MAX_NEW_TOKENS,
                "batch_size": given.documents,
            },
            "schedule": {"docs_per_step": given.documents, "steps": given.steps},
            "optimizer": {"learning_rate": given.learning_rate},
            "checkpoint": {"directory": str(run), "every": 0},
            "logging": {"console": False},
        }
        config["model"]["device"] = given.device
        file = model.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(config))
        self.call(["-m", "truestep", "train", str(file)], model.name)
        export = ["export", str(run), "--output", str(model), "--dtype", "float32"]  # as TRL saves it; bfloat16 rounds
        self.call(["-m", "truestep", *export], f"{model.name}-export")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(run / "checkpoints")
        return {"seconds": [line["step_time"] for line in lines], "rewards": [line["reward"] for line in lines]}

    def trl(self, seed: int, model: Path) -> dict[str, list[float]]:
        given = self.given
        asked = {
            "model": str(given.model.resolve()),
            "prompts": str(self.prompts),
            "output": str(model),
            "seed": seed,
            "group_size": GROUP_SIZE,
            "max_new_tokens": MAX_NEW_TOKENS,
            **{name: getattr(given, name) for name in ("device", "dtype", "documents", "steps", "learning_rate")},
        }
        file = model.with_suffix(".json")
        file.write_text(json.dumps(asked))
        self.call([str(HERE / "recipe_trl.py"), str(file)], model.name)
        steps: dict[str, list[float]] = json.loads((model / "steps.json").read_text())
        return steps

    def call(self, words: Sequence[str], log: str) -> None:
        path = [str(HERE), str(HERE.parent / "src"), os.environ.get("TRUESTEP_PEERS"), os.environ.get("PYTHONPATH")]
        if words[0] == "-m":  # ours does not see TRL's packages
            path.pop(2)
        environment = {"OMP_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        with (self.folder / f"{log}.log").open("wb") as file:
            command = [sys.executable, *words]
            done = subprocess.run(
                command, cwd=HERE, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            text = (self.folder / f"{log}.log").read_text(errors="replace")
            raise RuntimeError(f"{log} ended with {done.returncode}:\n{text[-3000:]}")

    @torch.no_grad()
    def judge(self, model: Path) -> dict[str, float]:
        """Return the share of right answers to held-out prompts: the likeliest ones, and drawn ones."""
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.given.device)
        torch.manual_seed(0)

        def share(rows: Sequence[dict[str, str]], **options: Any) -> float:
            found = []
            for first in range(0, len(rows), BATCH):
                some = rows[first : first + BATCH]
                given = tokenizer([row["prompt"] for row in some], return_tensors="pt", padding=True).to(policy.device)
                ids = policy.generate(
                    **given, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **options
                )
                texts = tokenizer.batch_decode(ids[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
                found += [recipe_task.right(text, row["answer"]) for text, row in zip(texts, some, strict=True)]
            return statistics.mean(found)

        drawn = [row for row in self.held_out for _ in range(self.given.drawn)]
        return {
            "greedy": share(self.held_out, do_sample=False),
            "sampled": share(drawn, do_sample=True, temperature=1.0, top_k=0, top_p=1.0),
        }


def by_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the share of all ways to part the values whose means differ by as much as those of the two groups."""
    values, size = [*first, *second], len(first)
    seen = abs(statistics.mean(first) - statistics.mean(second)) - 1e-12
    parts = [sum(part) for part in itertools.combinations(values, size)]
    whole = sum(values)
    far = [abs(one / size - (whole - one) / (len(values) - size)) >= seen for one in parts]
    return statistics.mean(far)


def told(results: Sequence[dict[str, Any]], before: dict[str, float], alone: Sequence[dict[str, Any]]) -> str:
    rows = ["| | held out, greedy | held out, sampled | seconds a step, alone |", "| --- | --- | --- | --- |"]
    rows.append(f"| before | {before['greedy']:.1%} | {before['sampled']:.1%} | |")
    of = {who: [one for one in results if one["who"] == who] for who in WHO}
    for who, ones in of.items():
        cells = []
        for kind in ("greedy", "sampled"):
            values = [one[kind] for one in ones]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            each = " ".join(f"{100 * value:.0f}" for value in values)
            cells.append(f"{statistics.mean(values):.1%} ± {deviation:.1%} ({each})")
        seconds = [statistics.median(one["seconds"][1:] or one["seconds"]) for one in alone if one["who"] == who]
        rows.append(f"| {who} | {' | '.join(cells)} | {statistics.mean(seconds) if seconds else float('nan'):.3f} |")
    if all(len(ones) > 1 for ones in of.values()):
        chances = [by_chance(*([one[kind] for one in ones] for ones in of.values())) for kind in ("greedy", "sampled")]
        rows.append(f"| p | {chances[0]:.3f} | {chances[1]:.3f} | |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--folder", type=Path, default=Path("runs/beside-trl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--drawn", type=int, default=DRAWN)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run begins after so long")
    parser.add_argument("--out", type=Path, default=Path("beside-trl"))
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    trial = Trial(given)
    found: dict[str, Any] = {"before": trial.judge(given.model), "results": [], "alone": []}

    def keep() -> None:  # what is there counts, should a later run fail or the time end
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(found, indent=1, default=str) + "\n")

    def train(who: str, seed: int, name: str) -> dict[str, Any] | None:
        if time.monotonic() > until:
            return None
        try:
            return trial.train(who, seed, name)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            return None

    keep()
    with ThreadPoolExecutor(given.jobs) as pool:
        asked = [(who, seed, f"{who.lower()}-{seed}") for seed in given.seeds for who in WHO]
        for done in as_completed([pool.submit(train, *one) for one in asked]):
            if result := done.result():
                found["results"].append(result | trial.judge(result["model"]))
                shutil.rmtree(result["model"])
                keep()
    for who in WHO:
        if result := train(who, given.seeds[0], f"{who.lower()}-alone"):
            found["alone"].append(result)
            keep()
    if results := paired(found["results"]):
        print(told(results, found["before"], found["alone"]))


def paired(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the seeds with which both have trained, in the order of the seeds."""
    seeds = [{one["seed"] for one in results if one["who"] == who} for who in WHO]
    return sorted((one for one in results if one["seed"] in seeds[0] & seeds[1]), key=lambda one: one["seed"])


if __name__ == "__main__":
    main()
