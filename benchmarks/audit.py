"""Seconds of `truestep audit` for a million tokens of rollouts, by the format of the dump.

    python benchmarks/audit.py [--tokens 1000000] [--short] [--threads 2] [--model models/smollm2]

The dumps are clean: tokens are drawn from one distribution over 8,000, with their exact log-probs and entropies. Each
is audited by the command as a user types it, the start of its process included. With `--model` it scores a sample of
20,000 tokens and tries the causes of a gap; that model did not sample the tokens, so it tries all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.rollouts.kept.records import FOLDER, encode
from truestep.types import Rollout

VOCABULARY, GROUP, END = 8000, 8, 1
LONG, SHORT = (200, 100, 1500), (10, 5, 25)  # tokens of a prompt, and bounds of those of a completion


def draw(tokens: int, sizes: tuple[int, int, int]) -> list[Rollout]:
    """Draw groups of completions, each with an end token."""
    asked, least, most = sizes
    random, rollouts = np.random.default_rng(0), list[Rollout]()
    odds = 1 / np.arange(1, VOCABULARY) ** 1.1
    odds[END] = 0.0  # drawn by the length
    odds, total = np.append(odds, odds[-1]) / (odds.sum() + odds[-1]), 0
    while total < tokens:
        prompt = random.integers(2, VOCABULARY, asked)
        rewards = random.integers(0, 2, GROUP).astype(float)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for member in range(GROUP):
            size = int(random.integers(least, most))
            drawn = random.choice(VOCABULARY, size, p=odds)
            ids, mask = np.append(prompt, drawn), np.arange(asked + size) >= asked
            logprobs = np.where(mask, np.log(np.maximum(odds[ids], 1e-9)), 0).astype(np.float32)
            ids[-1], logprobs[-1] = END, -0.5 - random.random()
            name = f"{len(rollouts) // GROUP}"
            rollouts.append(
                Rollout(
                    id=f"{name}-{member}", group_id=name, input_ids=ids, loss_mask=mask, logprobs=logprobs,
                    advantages=mask * np.float32(advantages[member]), reward=float(rewards[member]), truncated=False,
                    model_version=np.full(len(ids), len(rollouts) // 64),
                )
            )  # fmt: skip
            total += len(ids)
    return rollouts


def steps(rollouts: Sequence[Rollout]) -> list[Sequence[Rollout]]:
    return [rollouts[first : first + 64] for first in range(0, len(rollouts), 64)]


def kept(rollouts: Sequence[Rollout], folder: Path) -> None:
    (folder / FOLDER).mkdir()
    content = b"".join(encode(number, some) for number, some in enumerate(steps(rollouts), 1))
    (folder / FOLDER / "from-00000001.records").write_bytes(content)


def lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def listed(values: np.ndarray | None) -> list[Any]:
    assert values is not None
    return list(values.tolist())


def records(rollouts: Sequence[Rollout], folder: Path) -> None:
    lines(
        folder / "rollouts.jsonl",
        (
            {"id": one.id, "group_id": one.group_id, "input_ids": listed(one.input_ids), "reward": one.reward,
             "loss_mask": listed(one.loss_mask), "logprobs": listed(one.logprobs), "step": number,
             "advantage": float(listed(one.advantages)[-1]), "truncated": False}
            for number, some in enumerate(steps(rollouts)) for one in some
        ),
    )  # fmt: skip


def exports(rollouts: Sequence[Rollout], folder: Path) -> None:
    random = np.random.default_rng(1)
    odds = -np.sort(-1 / np.arange(1, VOCABULARY + 1) ** 1.1)
    odds /= odds.sum()
    uncertain = float(-(odds * np.log(odds)).sum())
    for number, some in enumerate(steps(rollouts)):
        made = []
        for place, one in enumerate(some):
            sampler, count = np.array(listed(one.logprobs)), len(one.input_ids)
            trainer = sampler + one.loss_mask * random.normal(0, 1e-3, count)
            ratio = trainer - sampler
            made.append(
                {"schema_version": 1, "step": number, "export_step": number, "export_sequence_idx": place,
                 "token_ids": listed(one.input_ids), "position_ids": list(range(count)),
                 "loss_mask": listed(one.loss_mask), "advantages": listed(one.advantages),
                 "rewards": [one.reward] * count, "inference_logprobs": listed(sampler),
                 "trainer_logprobs": listed(trainer), "entropy": [uncertain] * count,
                 "mismatch_kl": listed(np.expm1(ratio) - ratio), "log_importance_ratio": listed(ratio)}
            )  # fmt: skip
        lines(folder / f"token_exports/step_{number}/rank_0.jsonl", made)


def training_data(rollouts: Sequence[Rollout], folder: Path) -> None:
    for number, some in enumerate(steps(rollouts)):
        labels = [torch.tensor(one.logprobs)[torch.tensor(one.loss_mask)] for one in some]
        data = {
            "tokens": [torch.tensor(one.input_ids) for one in some],
            "response_lengths": [len(own) for own in labels],
            "total_lengths": [len(one.input_ids) for one in some],
            "loss_masks": [torch.ones(len(own), dtype=torch.int) for own in labels],
            "raw_reward": [one.reward for one in some],
            "truncated": [0 for _ in some],
            "weight_versions": [[str(number)] for _ in some],
            "rollout_log_probs": labels,
            "advantages": [torch.tensor(one.advantages)[torch.tensor(one.loss_mask)] for one in some],
        }
        torch.save({"rollout_id": number, "rank": 0, "rollout_data": data}, folder / f"train_{number}_0.pt")


DUMPS: dict[str, Callable[[Sequence[Rollout], Path], None]] = {
    "a run's whole records": kept,
    "records as JSON lines": records,
    "prime-rl's exports": exports,
    "slime's training data": training_data,
}


def audited(folder: Path, threads: int, more: Sequence[str]) -> str:
    """Audit a folder by the command, and say what it took."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "truestep", "audit", str(folder), *more]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 1), done.stderr
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{took:.1f} s, {processor:.1f} s of processors; {done.stdout.strip().splitlines()[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--short", action="store_true", help="samples of 24 tokens, and not of 1,000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a model that scores 20,000 of the tokens")
    options = parser.parse_args()
    rollouts = draw(options.tokens, SHORT if options.short else LONG)
    more = ["--model", options.model] if options.model else []
    for name, write in DUMPS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(rollouts, Path(folder))
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            print(f"{name}, {size / 1e6:.0f} MB: {audited(Path(folder), options.threads, more)}", flush=True)


if __name__ == "__main__":
    main()
