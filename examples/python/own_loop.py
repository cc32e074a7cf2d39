"""GRPO as a loop of one's own: sample, rate, compute the gradient, update. It is what `train` does, bit for bit."""

import json
from pathlib import Path
from typing import Any

from task import arguments, make_config, reward

from truestep import Session


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    given = arguments(__doc__)
    config = make_config(given, "own-loop")
    prompts = read(given.directory / "task" / "prompts.jsonl")
    with Session(config) as session:
        for step in range(given.steps):
            tasks = prompts[4 * step : 4 * step + 4]
            records = []
            for task, samples in zip(tasks, session.sample([task["prompt"] for task in tasks], count=8), strict=True):
                for sample in samples:
                    rated = reward(task["prompt"], sample.text, answer=task["answer"])
                    records.append(sample.record(reward=rated, group_id=task["prompt"]))
            session.forward_backward(records, totals=session.totals(records))
            made = session.step()
            print(f"step {made['step']}: reward {made['reward']:.3f}, gradient {made['grad_norm']:.3g}")
        checkpoint = session.save(given.directory / "own-loop")
        print(f"saved: {checkpoint}")
