"""PPO with a value model, a session of its own with a model, an optimizer and steps of its own. The value before a
token is how much likelier one of two tokens is than the other: linear in the hidden state."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from task import arguments, make_config, reward, tasks

from truestep import Rollout, Session

TOKENS = (1, 2)  # any two of the vocabulary
CLIPPED = {"type": "grpo", "normalize_by": "labels"}  # with advantages of tokens this is PPO's loss


def values(critic: Session, records: list[dict[str, Any]]) -> list[np.ndarray]:
    logprobs = critic.logprobs(critic.with_targets(records, TOKENS))
    return [one - other for one, other in zip(logprobs[::2], logprobs[1::2], strict=True)]


def gae(values: np.ndarray, reward: float, gamma: float = 1.0, decay: float = 0.95) -> np.ndarray:
    """Generalized advantage estimation, with the reward at the end."""
    advantages, following = np.zeros(len(values)), 0.0
    for at in reversed(range(len(values))):
        after = reward if at + 1 == len(values) else gamma * float(values[at + 1])
        following = after - float(values[at]) + gamma * decay * following
        advantages[at] = following
    return advantages


def fit(critic: Session, records: list[dict[str, Any]], returns: list[np.ndarray]) -> None:
    """Add the gradient of the squared errors, summed over labels."""

    def loss(logprobs: Sequence[torch.Tensor], documents: Sequence[Rollout]) -> torch.Tensor:
        made = [one - other for one, other in zip(logprobs[::2], logprobs[1::2], strict=True)]
        wanted = [torch.tensor(each, dtype=torch.float32) for each in returns]
        return 0.5 * (torch.cat(made) - torch.cat(wanted)).square().sum()

    critic.forward_backward(critic.with_targets(records, TOKENS), loss)


if __name__ == "__main__":
    given = arguments(__doc__)
    with Session(make_config(given, "own-ppo")) as policy, Session(make_config(given, "own-ppo")) as critic:
        prompts = tasks(given)
        for step in range(given.steps):
            some = [prompts[number % len(prompts)] for number in range(8 * step, 8 * step + 8)]
            drawn = zip(some, policy.sample([task["prompt"] for task in some], count=4), strict=True)
            records = [one.record(reward=reward(completion=one.text, **task)) for task, each in drawn for one in each]
            own = values(critic, records)
            advantages = [gae(each, record["reward"]) for each, record in zip(own, records, strict=True)]
            fit(critic, records, [value + each for value, each in zip(own, advantages, strict=True)])
            critic.step(1e-3, gradient_clip=1.0)
            trained = [{**record, "advantage": list(each)} for record, each in zip(records, advantages, strict=True)]
            policy.forward_backward(trained, CLIPPED)
            made = policy.step()
            print(f"step {made['step']}: reward {made['reward']:.3f}, value {np.concatenate(own).mean():.3f}")
        print(f"saved: {policy.save(given.directory / 'own-ppo')}")
