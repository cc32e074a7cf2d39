"""Stop a run once its reward is good enough, and halve the learning rate where it has stood still."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from task import arguments, make_config

from truestep import Callback, Rollout, Run, train


class HalveOnPlateau(Callback):
    """Halve the learning rate where the reward has not risen for so many steps."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.since = patience, float("-inf"), 0

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.since += 1
        if metrics["reward"] > self.best:
            self.best, self.since = metrics["reward"], 0
        elif self.since == self.patience:
            run.multiply_learning_rate(0.5)
            self.since = 0

    # A checkpoint holds these, so a run that was stopped goes on as if it had not been.
    def state(self) -> dict[str, float]:
        return {"best": self.best, "since": self.since} if self.best > float("-inf") else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.since = state.get("best", self.best), state.get("since", 0)


class StopWhenGood(Callback):
    """Stop where held-out prompts are answered well enough, and print the best completion of every step."""

    def __init__(self, enough: float) -> None:
        self.enough = enough

    def on_rollouts(self, run: Run, rollouts: Sequence[Rollout]) -> None:
        best = max(rollouts, key=lambda rollout: rollout.reward or 0.0)
        print(f"step {run.step + 1}: the best of {len(rollouts)} completions has reward {best.reward}")

    def on_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        if evaluation["greedy_reward"] >= self.enough:
            run.stop(f"held-out reward {evaluation['greedy_reward']:.2f}")

    def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
        print(f"a checkpoint: {checkpoint}")


if __name__ == "__main__":
    config = make_config(arguments(__doc__), "with-callbacks")
    result = train(config, callbacks=[HalveOnPlateau(patience=3), StopWhenGood(enough=0.9)])
    print(f"{result.ended}; learning rate {result.metrics()[-1]['learning_rate']:g}")
