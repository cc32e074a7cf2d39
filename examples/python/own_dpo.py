"""DPO as a function of log-probs: pairs of a right and a wrong answer, against the policy as it was."""

from collections.abc import Sequence

import torch
from task import arguments, make_config, tasks, written

from truestep import Rollout, Session

BETA = 0.1


def dpo(logprobs: Sequence[torch.Tensor], documents: Sequence[Rollout]) -> torch.Tensor:
    """Sum over pairs, the better document first."""
    gains = []
    for own, document in zip(logprobs, documents, strict=True):
        assert document.reference_logprobs is not None
        gains.append((own - torch.tensor(document.reference_logprobs[document.loss_mask])).sum())
    pairs = zip(gains[::2], gains[1::2], strict=True)
    return -torch.stack([torch.nn.functional.logsigmoid(BETA * (a - b)) for a, b in pairs]).sum()


if __name__ == "__main__":
    given = arguments(__doc__)
    with Session(make_config(given, "own-dpo")) as session:
        pairs = [
            written(session, task, answer)
            for task in tasks(given)[: 4 * given.steps]
            for answer in (task["answer"], task["answer"] + 1)
        ]
        for record, logprobs in zip(pairs, session.logprobs(pairs), strict=True):
            record["reference_logprobs"] = logprobs.tolist()
        for step in range(given.steps):
            some = [pairs[number % len(pairs)] for number in range(8 * step, 8 * step + 8)]
            session.forward_backward(some, dpo)
            made = session.step()
            print(f"step {made['step']}: {made['loss'] / 4:.3f} nats a pair")
        print(f"saved: {session.save(given.directory / 'own-dpo')}")
