"""Rollouts that a program of one's own makes while the run trains on them, and a sink of one's own for its numbers."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from task import arguments, make_config

from truestep import Config, train


def rollouts(start: int, *, count: int = 400, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Give records from number `start` on: a run that goes on after a stop asks for those that it has not had.

    A real one asks its own sampler. These four tokens are drawn at random, from a vocabulary of eight.
    """
    for number in range(start, count):
        draw = Random(f"{seed} {number}")
        completion = [draw.randrange(2, 8) for _ in range(4)]
        yield {
            "id": f"rollout-{number}",
            "group_id": f"prompt-{number // 4}",
            "input_ids": [1, 2, *completion],
            "prompt_length": 2,
            "logprobs": [-1.79] * len(completion),  # the sampler's own, of each completion token
            "reward": float(completion.count(7)),
        }


class Printer:
    """A sink: it gets the line of each step and of each evaluation."""

    def step(self, line: Mapping[str, Any]) -> None:
        print(f"{line['documents_seen']} documents, reward {line['reward']:.3f}, gradient {line['grad_norm']:.3g}")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        print(f"held out: {line}")

    def close(self) -> None:
        print("closed")


if __name__ == "__main__":
    given = arguments(__doc__)
    model = make_config(given, "unused").model
    config = Config(
        model=model,
        data={
            "source": {"type": "custom", "function": rollouts, "options": {"count": 32 * given.steps}},
            "group_size": 4,
            "tokens_per_microbatch": 512,
        },
        schedule={"docs_per_step": 32},
        optimizer={"learning_rate": 1e-3},
        checkpoint={"directory": given.directory / "own-source"},
        logging={"console": False},
    )
    print(train(config, sinks=[Printer()]).ended)
