"""Tensor ranks that sample the same completions together, each with a slice of every layer.

Their schedulers run in lock step: each rank gets the same requests in the same order. This module makes the ranks agree
on all else that a step depends on: the number of pages, the kernels, and the drawn tokens. Without tensor parallelism a
team has one rank.

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

_OTHERS = -1  # replaces a token on which the ranks disagree


class DisagreementError(TruestepError):
    pass


@dataclass(frozen=True)
class Team:
    exchange: TokenExchange | None
    place: torch.device
    size: int
    number: int  # the number of this rank in the team

    @staticmethod
    def of(policy: Policy) -> "Team":
        ranks = policy.weights.ranks
        return Team(policy.exchange, policy.device, ranks.tensor, ranks.place_on("tensor"))

    def slice(self, vocabulary: int) -> Slice | None:
        """Return this rank's slice of the vocabulary, for the logits of `Policy.own_logits`. None: no slices."""
        if self.exchange is None:
            return None
        shard = VocabularyShard(self.exchange.group, *slice_at(vocabulary, self.size, self.number))
        most = largest_slice(vocabulary, self.size)
        whole = partial(shard.whole, vocabulary=vocabulary)
        return Slice(shard.first, shard.size, most, vocabulary, self.exchange.gather_parts, whole)

    def least(self, value: int) -> int:
        """Return the minimum of the ranks' values."""
        return value if self.exchange is None else least(value, self.place, self.exchange.group)

    def all(self, value: bool) -> bool:
        """Tell whether `value` is true on every rank."""
        return bool(self.least(int(value)))

    def agree_(self, tokens: torch.Tensor) -> None:  # [R]
        """Replace, in place, tokens on which the ranks disagree. All draw from the same logits, so that is an error;
        `check` raises it once the host reads the tokens."""
        if self.exchange is not None:
            drawn = self.exchange.gather_parts(tokens)
            tokens.masked_fill_((drawn != drawn[0]).any(0), _OTHERS)


def check(tokens: Collection[int]) -> None:
    """Raise an error, on every rank, if `agree_` found different tokens."""
    if _OTHERS in tokens:
        raise DisagreementError(
            "parallel.tensor: ranks that sample together drew different tokens from the same logits: a GPU or a "
            "library of one of them computes something else; give all ranks the same ones, or sample by servers "
            "(sampler.type: server)"
        )
