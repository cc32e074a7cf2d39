"""Runs the recipes of examples/recipes over several seeds, and draws their held-out accuracy by step and by second.

    python benchmarks/recipes.py --model models/smollm2 --folder runs/recipes-study [--seeds 0 1 2] [--jobs 6]
        [--device cuda] [--only sums calculator] [--seconds 480] [--set schedule.steps=2 ...] [--out recipes]
    python benchmarks/recipes.py --read recipes.json [more.json ...] --out recipes

The commands are those of examples/recipes/README.md. The last one of a recipe is run once for each seed, those before
it (a warm-up) once, in FOLDER, which is a new one. `jobs` processes share the GPU or the cores, so seconds are those of
a shared machine; with `--jobs 1` they are those of a run alone. Accuracy is the share of sampled answers (temperature
1) that have the full reward: `pass@1` of evaluation.jsonl. Seconds are those of the steps, without evaluations. Runs
that are not done after `--seconds` are stopped, and count as far as they got. `--set` gives options to the trainings by
rewards, `--before` to warm-ups.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import accumulate
from pathlib import Path
from typing import Any

from recipes_figure import figure

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
SECTION = re.compile(r"^## (\S+)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# They change speed and memory, and no result: little of a machine that other runs use too.
SMALL = ("--model.head.logits_chunk_size", "4096", "--sampler.batch_size", "128", "--sampler.reward_workers", "4")
QUIET = ("--checkpoint.every", "0", "--logging.console", "false")

Run = dict[str, Any]  # recipe and seed; its evaluations' steps, accuracy, greedy and seconds; whether it is done


def commands_of(page: str) -> dict[str, list[list[str]]]:
    """Return each recipe's commands, by its name, which is a heading of the page; the last one trains by rewards."""
    found = {}
    for name, text in SECTION.findall(page):
        lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        commands = [shlex.split(line, comments=True) for line in lines if line.strip()]
        if commands and commands[-1][:2] == ["truestep", "train"]:
            found[name] = commands
    return found


class Study:
    """The processes of a study, in a folder in which the commands find what the repository's root has."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.folder = given, given.folder.resolve()
        self.until = time.monotonic() + given.seconds
        device = [f"model.device={given.device}"] if given.device else []
        self.before, self.options = ([f"--{option}" for option in device + some] for some in (given.before, given.set))

    def prepare(self) -> None:
        (self.folder / "models").mkdir(parents=True, exist_ok=True)
        for link, target in (("examples", ROOT / "examples"), ("models/smollm2", self.given.model.resolve())):
            (self.folder / link).unlink(missing_ok=True)
            (self.folder / link).symlink_to(target)
        self.call(["python", "-m", "examples.recipes.prepare"], "prepare")

    def call(self, command: Sequence[str], log: str) -> bool:
        """Run a command with what it prints in LOG.log. False: the time was up. Raises an error if it fails."""
        left = self.until - time.monotonic()
        if left <= 0:
            return False
        words = {"truestep": [sys.executable, "-m", "truestep"], "python": [sys.executable]}[command[0]]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.folder / f"{log}.log").open("wb") as file:
            process = subprocess.Popen(
                [*words, *command[1:]],
                cwd=self.folder,
                env={"OMP_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": path},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                process.kill()  # what it has written counts, and it need not save a checkpoint
                process.wait()
                return False
        if code:
            text = (self.folder / f"{log}.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{shlex.join(command)} ended with {code}:\n{text[-2000:]}")
        return True

    def warm_up(self, name: str, commands: Sequence[Sequence[str]]) -> bool:
        for number, command in enumerate(commands):
            trains = command[:2] == ["truestep", "train"]
            more = [*SMALL[:2], *QUIET, *self.before] if trains else []
            if not self.call([*command, *more], f"{name}-before-{number}"):
                return False
        return True

    def train(self, name: str, command: Sequence[str], seed: int) -> Run:
        directory = self.folder / "runs" / f"{name}-{seed}"
        more = ["--seed", str(seed), "--checkpoint.directory", str(directory), *SMALL, *QUIET, *self.options]
        done = self.call([*command, *more], f"{name}-{seed}")
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        return {"recipe": name, "seed": seed, "done": done, **curve_of(directory)}

    def all(self, recipes: Mapping[str, Sequence[Sequence[str]]]) -> list[Run]:
        """Run everything, as many processes at a time as there are jobs; a run begins when its warm-up is done."""
        runs: list[Run] = []
        with ThreadPoolExecutor(self.given.jobs) as pool:
            before = {name: pool.submit(self.warm_up, name, commands[:-1]) for name, commands in recipes.items()}
            started: list[Future[Run]] = []
            for name, warm in sorted(before.items(), key=lambda item: len(recipes[item[0]])):
                if _result(warm, name):
                    started += [pool.submit(self.train, name, recipes[name][-1], seed) for seed in self.given.seeds]
            for future in as_completed(started):
                if run := _result(future, "a run"):
                    runs.append(run)
                    print(told(run), flush=True)
                    keep(runs, self.given.out)  # what is done is kept, should a later run hang
        order = list(recipes)
        return sorted(runs, key=lambda run: (order.index(run["recipe"]), run["seed"]))


def _result(future: Future[Any], name: str) -> Any:
    try:
        return future.result()
    except RuntimeError as error:  # one recipe that fails does not take the others with it
        print(f"{name}: {error}", flush=True)
        return None


def curve_of(directory: Path) -> dict[str, list[float]]:
    """Read a run's evaluations: their steps, sampled and greedy accuracy, and the seconds of the steps before them."""
    times = {line["step"]: line["step_time"] for line in lines_of(directory / "metrics.jsonl")}
    spent = dict(zip([0, *times], accumulate(times.values(), initial=0.0), strict=True))
    lines = lines_of(directory / "evaluation.jsonl")
    evaluations = [line for line in lines if line["step"] in spent and "pass@1" in line]  # without: none was rated
    return {
        "steps": [line["step"] for line in evaluations],
        "accuracy": [line["pass@1"] for line in evaluations],
        "greedy": [line["greedy_reward"] for line in evaluations],
        "seconds": [spent[line["step"]] for line in evaluations],
    }


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def told(run: Run) -> str:
    values = " ".join(f"{value:.2f}" for value in run["accuracy"])
    return f"{run['recipe']} seed {run['seed']}{'' if run['done'] else ' (stopped)'}: {values}"


def table(runs: Sequence[Run]) -> str:
    """Give the mean and the standard deviation over seeds, at the first, the middle and the last evaluation."""
    rows = ["| recipe | seeds | steps | before | half way | after | greedy reward, after | seconds a step |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(run["recipe"] for run in runs):
        of = [run for run in runs if run["recipe"] == name and run["steps"]]
        if not of:
            continue
        count = min(len(run["steps"]) for run in of)
        shown = [spread([run["accuracy"][place] for run in of]) for place in (0, count // 2, count - 1)]
        shown.append(spread([run["greedy"][count - 1] for run in of]))
        steps = of[0]["steps"][count - 1]
        each = statistics.mean(run["seconds"][count - 1] / max(1, steps) for run in of)
        rows.append(f"| {name} | {len(of)} | {steps} | {' | '.join(shown)} | {each:.2f} |")
    return "\n".join(rows)


def spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1%}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1%}{deviation}"


def keep(runs: Sequence[Run], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")


def write(runs: Sequence[Run], out: Path) -> None:
    keep(runs, out)
    out.with_suffix(".svg").write_text(figure(runs), encoding="utf-8")
    print(table(runs), flush=True)


def chosen(recipes: Mapping[str, Any], only: Iterable[str]) -> dict[str, Any]:
    names = list(only) or list(recipes)
    if unknown := [name for name in names if name not in recipes]:
        raise SystemExit(f"no recipe {', '.join(unknown)}; there are {', '.join(recipes)}")
    return {name: recipes[name] for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes-study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--before", nargs="+", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--read", type=Path, nargs="+", help="draw these results again, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("recipes"))
    given = parser.parse_args()
    if given.read:
        write([run for file in given.read for run in json.loads(file.read_text())["runs"]], given.out)
        return 0
    recipes = chosen(commands_of((RECIPES / "README.md").read_text(encoding="utf-8")), given.only)
    study = Study(given)
    study.prepare()
    runs = study.all(recipes)
    write(runs, given.out)
    return int(len(runs) < len(recipes) * len(given.seeds))


if __name__ == "__main__":
    sys.exit(main())
