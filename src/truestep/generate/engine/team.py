"""The ranks that sample the same completions together: tensor ranks, which have slices of the same layers.

All run one schedule in lock step. The same requests come to each, in the same order; whatever else decides about a step
is made the same here: how much fits, which code serves, and which tokens were drawn. One process is a team of one.

Dimensions: R rows of a step.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from truestep.errors import TruestepError
from truestep.generate.engine.draw import Slice
from truestep.head.vocab_parallel import VocabularyShard
from truestep.model.policy import Policy
from truestep.ranks.axes import largest_slice, slice_at
from truestep.ranks.exchange import TokenExchange, least

_OTHERS = -1  # stands for a token that not all ranks drew


class DisagreementError(TruestepError):
    pass


@dataclass(frozen=True)
class Team:
    exchange: TokenExchange | None
    place: torch.device
    size: int
    number: int  # of this rank

    @staticmethod
    def of(policy: Policy) -> "Team":
        ranks = policy.weights.ranks
        return Team(policy.exchange, policy.device, ranks.tensor, ranks.place_on("tensor"))

    def slice(self, vocabulary: int) -> Slice | None:
        """Describe this rank's slice of a vocabulary, whose logits `Policy.own_logits` gives; None: it is all of it."""
        if self.exchange is None:
            return None
        shard = VocabularyShard(self.exchange.group, *slice_at(vocabulary, self.size, self.number))
        most = largest_slice(vocabulary, self.size)
        whole = partial(shard.whole, vocabulary=vocabulary)
        return Slice(shard.first, shard.size, most, vocabulary, self.exchange.gather_parts, whole)

    def least(self, value: int) -> int:
        """Find the least of the ranks' values."""
        return value if self.exchange is None else least(value, self.place, self.exchange.group)

    def all(self, value: bool) -> bool:
        """Tell whether it is true on every rank."""
        return bool(self.least(int(value)))

    def agree_(self, tokens: torch.Tensor) -> None:  # [R]
        """Mark, in place, tokens that not all ranks drew. All draw from the same logits: it is a fault, for `check`,
        which may come later, when the host learns of it."""
        if self.exchange is not None:
            drawn = self.exchange.gather_parts(tokens)
            tokens.masked_fill_((drawn != drawn[0]).any(0), _OTHERS)


def check(tokens: Collection[int]) -> None:
    """Raise an error, on every rank, where ranks drew different tokens."""
    if _OTHERS in tokens:
        raise DisagreementError(
            "parallel.tensor: ranks that sample together drew different tokens from the same logits: a GPU or a "
            "library of one of them computes something else; give all ranks the same ones, or sample by servers "
            "(sampler.type: server)"
        )
