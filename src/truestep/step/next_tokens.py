"""The policy's next-token distributions after a few texts, by the forward pass of training.

It runs under every layout, and no rank needs more of the model than in a training step.

Dimensions: P texts, T of them in this rank's share, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from truestep.head.logits import scaled_logits
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack
from truestep.step.compute.label_shares import LabelShare, MicroBatch
from truestep.step.compute.passes import Passes
from truestep.types import Rollout

# The key of a part of the logits: the text's index, and the first token of the vocabulary slice.
_Place = tuple[int, int]


def next_token_logprobs(
    policy: Policy, texts: Sequence[Sequence[int]], temperatures: Sequence[float]
) -> list[np.ndarray]:  # [P, V] float32 for each temperature
    """Compute the log-probs of all next tokens after each text. Every rank calls this and gets all results."""
    ranks = policy.weights.ranks
    # Only data-parallel rank 0 has the texts; the others compute padding.
    documents = [_document(number, text) for number, text in enumerate(texts)] if ranks.data_rank == 0 else []
    parts: dict[_Place, list[np.ndarray]] = {}

    def head(micro_batch: MicroBatch, rows: torch.Tensor) -> None:
        shard, own = policy.vocabulary_shard, micro_batch.share.own
        first = 0 if shard is None else shard.first
        with policy.weights.head(policy.model) as (weight, _):
            logits = [
                scaled_logits(rows, weight, rows.new_full((len(rows),), value, dtype=torch.float32), policy.head)
                for value in temperatures
            ]
        for place in range(own.stop - own.start):
            parts[own.start + place, first] = [values[place].float().cpu().numpy() for values in logits]

    passes = Passes(policy, 1, lambda _: _packed(policy, documents), head, backward=False)
    passes.run()
    gathered = {place: values for part in ranks.gather(parts) for place, values in part.items()}
    passes.settle()
    return [
        np.stack([_logprobs(gathered, text, index) for text in range(len(texts))]) for index in range(len(temperatures))
    ]


def _logprobs(gathered: dict[_Place, list[np.ndarray]], text: int, index: int) -> np.ndarray:  # [V]
    slices = sorted(place for place in gathered if place[0] == text)
    z = np.concatenate([gathered[place][index] for place in slices]).astype(np.float64)
    z -= z.max()
    return (z - np.log(np.exp(z).sum())).astype(np.float32)


def _packed(policy: Policy, documents: Sequence[Rollout]) -> MicroBatch:
    batch = pack(documents, policy.weights.ranks.token_share)
    share = LabelShare.of(batch, policy.context).to(policy.device)
    batch = batch.to(policy.device)
    weight = torch.zeros(len(batch.labels), dtype=torch.float64, device=policy.device)
    return MicroBatch(tuple(range(len(documents))), (1,) * len(documents), batch.tokens, batch.labels, weight, share)


def _document(number: int, text: Sequence[int]) -> Rollout:
    """Append one label to the text. Any token will do, since the row that predicts it gives the next-token
    distribution."""
    ids = np.array([*text, text[-1]], dtype=np.int64)
    return Rollout(id=str(number), input_ids=ids, loss_mask=np.arange(len(ids)) == len(text))
