"""The bytes that each rank sends to others in a step, by what they are and by the ranks that exchange them.

Calculated from the model's shape and the layout. An all-gather or a reduce-scatter over n ranks sends (n - 1) / n of
the whole, an all-reduce twice as much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from truestep.config.schema import Config
from truestep.plan.memory import computed_size, copies_of_a_token, recomputes, reduces_each
from truestep.plan.shape import ModelShape
from truestep.ranks.axes import DERIVED, RankLayout


@dataclass(frozen=True)
class RankShare:
    """What volumes need to know of a rank's share of the work and of the model."""

    sizes: Mapping[str, int]  # sizes of the layout's axes
    micro_batches: int
    tokens: float  # tokens per step that its layers compute
    layers: float
    trained: float  # number of trained weights, before sharding
    whole: float  # number of all weights, before sharding
    gathered: float  # share of its weights that it all-gathers; of the experts, only those of its expert rank
    width: int  # numbers of a token's queries, in all heads

    @property
    def shards(self) -> int:
        return self.sizes["data_shard"] * self.sizes["context"]


@dataclass(frozen=True)
class Volume:
    """An exchange of a step."""

    what: str
    axes: tuple[str, ...]  # of the ranks that exchange it
    sent: float  # bytes that a rank sends
    hidden: bool = False  # it overlaps with computation

    def ranks(self, layout: RankLayout) -> int:
        """The number of ranks that exchange it."""
        if self.axes[0] in DERIVED:
            return layout.every[self.axes[0]]
        return layout.count(self.axes)

    def crosses(self, layout: RankLayout, gpus: int) -> bool:
        """Tell whether ranks of several hosts exchange it, if each host has `gpus` ranks, numbered one after another."""
        if self.axes[0] in DERIVED:  # neighbours
            return layout.every[self.axes[0]] > gpus or gpus % layout.every[self.axes[0]] != 0
        return any(len({rank // gpus for rank in members}) > 1 for members in layout.groups(self.axes))


def volumes(config: Config, shape: ModelShape, rank: RankShare) -> list[Volume]:
    """Compute what a rank sends in a step; exchanges of one rank alone are left out."""
    sizes, size = rank.sizes, computed_size(config)
    tensor, context, replicas, shards = sizes["tensor"], sizes["context"], sizes["data_replicate"], rank.shards
    state = size * shape.hidden * rank.tokens  # bytes of the hidden states of this rank's tokens
    again = 1.5 if recomputes(config) in ("selective", "full") else 1.0
    gathers = (2 if config.parallel.reshard_after_forward else 1) * rank.micro_batches
    reductions = rank.micro_batches if reduces_each(config) else 1
    travels = copies_of_a_token(shape.config, sizes["expert"]) * (1 - 1 / sizes["expert"])  # copies to other ranks
    spread, part = ("data_shard", "context"), (shards - 1) / shards
    heads = rank.width / shape.hidden * (context - 1) / context**2
    found = [
        Volume("weights gathered", spread, size * rank.whole * rank.gathered * gathers * part, hidden=True),
        Volume("gradients reduced", spread, 4 * rank.trained * rank.gathered * reductions * part, hidden=True),
        Volume("gradients of replicas", ("data_replicate",), 8 * rank.trained / shards * (replicas - 1) / replicas),
        Volume("tokens of tensor ranks", ("tensor",), 8 * again * state * rank.layers * (tensor - 1) / tensor),
        Volume("heads of context ranks", ("context",), 8 * again * state * rank.layers * heads),
        Volume("tokens of experts", ("expert",), 4 * again * state * rank.layers * travels),
        Volume("tokens of pipeline stages", ("pipeline",), 2 * state if sizes["pipeline"] > 1 else 0.0),
    ]
    return [volume for volume in found if volume.sent]
