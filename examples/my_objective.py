"""A loss and advantages of your own, as docs/objectives.md explains them."""

from dataclasses import dataclass

from truestep.losses.label_losses import LabelLoss, LabelTerm


@dataclass(frozen=True)
class Tanh(LabelLoss):
    """A clip without an edge: l = -A tanh(s (ρ - 1)) / s."""

    sharpness: float = 2.0  # an option; its type is checked

    def __call__(self, labels):
        ratio = labels.log_ratio.clamp(-20, 20).exp()  # ρ of each label
        bent = (self.sharpness * (ratio - 1)).tanh()
        loss = -labels.advantages * bent / self.sharpness
        slope = -labels.advantages * (1 - bent**2) * ratio  # the loss's derivative in labels.logprobs
        return LabelTerm(loss, slope)


def against_the_median(group):
    """Give each rollout of one prompt its reward less the group's median."""
    rewards = sorted(rollout.reward for rollout in group)
    median = (rewards[(len(rewards) - 1) // 2] + rewards[len(rewards) // 2]) / 2
    return [rollout.reward - median for rollout in group]
