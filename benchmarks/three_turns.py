"""A task of three turns with a tool, learned in process: held-out accuracy by step and by second.

    python benchmarks/three_turns.py [--documents 128] [--steps 200] [--seeds 0] [--device cuda] [--seconds 200]
        [--folder runs/three-turns] [--out three-turns.json]

Two digits are hidden. The policy asks for them by `1 =` and `2 =`, each in a turn of its own, and its third turn is
both, the smaller one first. The policy is the demo's tiny model, which first imitates demonstrations of which three
turns in four are good. Accuracy is the share of held-out episodes, drawn at temperature 1, whose third turn is right;
seconds are those of the steps, without evaluations. A seed ends at 90%, or when `--seconds` are over.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from truestep import Answer, Callback, End, Environment, Run
from truestep.config.load import config_of
from truestep.environments import sorting
from truestep.run.train import train
from truestep.tools.demo.model import make_model

PROMPT = "sort ="
GOOD = 0.75  # of the turns of a demonstration
GOAL = 0.9


class Asking(Environment):
    """The hidden digits are found by the prompt's id."""

    def start(self, row: Mapping[str, Any]) -> str:
        self.hidden = digits(random.Random(row["id"]), 2)
        self.asked = 0
        return PROMPT

    def step(self, answer: Answer) -> Any:
        words = answer.text.replace("=", "").split()
        if self.turns < 3:
            self.asked += words == [str(self.turns)]
            return told(self.hidden, words)
        return End({"asked": 0.25 * self.asked, "right": float(words == sorted(self.hidden))})


def digits(generator: random.Random, count: int) -> list[str]:
    return [str(generator.randint(0, 9)) for _ in range(count)]


def told(hidden: list[str], words: list[str]) -> str:
    return hidden[int(words[0]) - 1] + " =" if words in (["1"], ["2"]) else PROMPT


def demonstrations(tokenizer: Any, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield records for supervised training, each of whose turns goes wrong now and then."""
    generator = random.Random(seed)
    for number in range(count):
        hidden = digits(generator, 2)
        parts = [(PROMPT, 0)]
        for turn in "12":
            asks = [turn] if generator.random() < GOOD else digits(generator, 1)
            parts += [(f"{asks[0]} =", 1), (told(hidden, asks), 0)]
        parts.append((" ".join(sorted(hidden) if generator.random() < GOOD else digits(generator, 2)), 1))
        ids = [tokenizer(text)["input_ids"] for text, _ in parts]
        mask = [own for part, (_, own) in zip(ids, parts, strict=True) for _ in part]
        yield {
            "id": str(number),
            "input_ids": [*chain.from_iterable(ids), tokenizer.eos_token_id],
            "loss_mask": [*mask, 1],
        }


class Watch(Callback):
    """Keeps the curve as it comes, and ends the run at the goal or when the time is up."""

    def __init__(self, seed: int, given: argparse.Namespace):
        self.seed, self.given, self.spent = seed, given, 0.0
        self.points: list[dict[str, float]] = []
        self.until = time.monotonic() + given.seconds

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.spent += metrics["step_time"]
        if time.monotonic() > self.until:
            run.stop("the time is up")

    def on_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        point = {"step": evaluation["step"], "seconds": round(self.spent, 3), "accuracy": evaluation["pass@1"]}
        self.points.append(point)
        print(f"seed {self.seed}: {point}", flush=True)
        if self.given.out is not None:
            with self.given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seed": self.seed, **point}) + "\n")
        if evaluation["pass@1"] >= GOAL:
            run.stop("the goal is reached")


def write_prompts(file: Path, name: str, count: int) -> str:
    """Their text is the same; what is hidden depends on the id."""
    lines = (json.dumps({"id": f"{name}-{number}", "prompt": PROMPT}) + "\n" for number in range(count))
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def imitated(given: argparse.Namespace) -> Path:
    """Return the directory of a policy that has imitated the demonstrations."""
    model = make_model(given.folder / "model", sorting.WORDS, seed=0)
    lines = demonstrations(AutoTokenizer.from_pretrained(model), 128 * given.imitation, 1)
    corpus = given.folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = {
        "model": {"path": str(model), "dtype": "float32", "device": given.device},
        "loss": {"type": "cross_entropy"},
        "data": {"path": str(corpus), "tokens_per_microbatch": 4096},
        "schedule": {"docs_per_step": 128, "steps": given.imitation},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": min(10, given.imitation), "schedule": "linear"},
        "checkpoint": {"directory": str(given.folder / "imitation")},
        "logging": {"console": False},
    }
    train(config_of(config), Console(quiet=True))
    return max((given.folder / "imitation" / "checkpoints").iterdir())


def learned(policy: Path, seed: int, given: argparse.Namespace) -> Watch:
    config = {
        "model": {"path": str(policy), "dtype": "float32", "device": given.device, "head": {"fp32_lm_head": True}},
        "data": {"group_size": 8, "tokens_per_microbatch": 16384},
        "sampler": {
            "prompts": write_prompts(given.folder / "prompts.jsonl", "trained", 4000),
            "environment": {"class": Asking},
            "max_new_tokens": 6,
            "max_episode_tokens": 64,
            "stop": ["="],
            "batch_size": given.documents,
            "reward_workers": given.workers,
        },
        "evaluation": {
            "prompts": write_prompts(given.folder / "held-out.jsonl", "held-out", given.held_out),
            "every": given.every,
            "pass_reward": 1.0,
            "stop": ["="],
        },
        "schedule": {"docs_per_step": given.documents, "steps": given.steps},
        "optimizer": {"learning_rate": given.learning_rate, "warmup_steps": min(5, given.steps), "schedule": "linear"},
        "checkpoint": {"directory": str(given.folder / f"seed-{seed}"), "every": 0},
        "logging": {"console": False},
        "seed": seed,
    }
    watch = Watch(seed, given)
    train(config_of(config), Console(quiet=True), callbacks=[watch])
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--imitation", type=int, default=100, help="steps")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a seed")
    parser.add_argument("--folder", type=Path, default=Path("runs/three-turns"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    policy = imitated(given)
    print(f"imitation, {given.imitation} steps: {time.monotonic() - started:.1f} s", flush=True)
    for seed in given.seeds:
        last = learned(policy, seed, given).points[-1]
        print(
            f"seed {seed}: {last['accuracy']:.1%} after {last['step']} steps, {last['seconds']:.1f} s of steps; "
            f"{time.monotonic() - started:.1f} s since the start",
            flush=True,
        )


if __name__ == "__main__":
    main()
