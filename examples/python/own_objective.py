"""A loss, advantages and a metric of one's own, given as objects; `verify` proves the loss before it is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from task import arguments, make_config

from truestep import LabelLoss, Labels, LabelTerm, Rollout, train, verify
from truestep.losses.measure import StepFacts
from truestep.metrics.types import Mean, Metric


@dataclass(frozen=True)
class Tanh(LabelLoss):
    """A clip without an edge: l = -A tanh(s (ρ - 1)) / s."""

    sharpness: float = 2.0

    def __call__(self, labels: Labels) -> LabelTerm:
        ratio = labels.log_ratio.clamp(-20, 20).exp()
        bent = (self.sharpness * (ratio - 1)).tanh()
        loss = -labels.advantages * bent / self.sharpness
        slope = -labels.advantages * (1 - bent**2) * ratio  # the loss's derivative in labels.logprobs
        return LabelTerm(loss, slope)


def against_the_median(group: Sequence[Rollout]) -> list[float]:
    """Give each rollout of one prompt its reward less the group's median."""
    rewards = sorted(rollout.reward or 0.0 for rollout in group)
    median = (rewards[(len(rewards) - 1) // 2] + rewards[len(rewards) // 2]) / 2
    return [(rollout.reward or 0.0) - median for rollout in group]


def surprise(labels: Labels, step: StepFacts) -> Mapping[str, Metric]:
    """Measure how unlikely labels are: a total and a count, which ranks and micro-batches add up."""
    return {"surprise": Mean(-labels.logprobs.double().sum(), labels.logprobs.new_tensor(len(labels.logprobs)))}


if __name__ == "__main__":
    given = arguments(__doc__)
    config = make_config(
        given,
        "own-objective",
        loss={"type": "custom", "function": Tanh, "options": {"sharpness": 3.0}},
        data={"advantages": against_the_median, "advantage_scale": "step"},
        logging={"custom_metrics": [surprise]},
    )
    proof = verify(config, given.directory / "proof", ranks=1, documents=6)
    print(f"{len(proof.verdicts)} layouts, all within bounds of float64: {proof.passed}")
    result = train(config)
    print(f"{result.ended}; surprise {result.metrics()[-1]['surprise']:.3f}")
