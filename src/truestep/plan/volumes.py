"""The bytes that each rank sends to others in a step, by what they are and by the ranks that exchange them.

Calculated from the model's shape and the layout. An all-gather or a reduce-scatter over n ranks sends (n - 1) / n of
the whole, an all-reduce twice as much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from truestep.config.schema import Config
from truestep.plan.memory import computed_size, copies_of_a_token, recomputes, reduces_each
from truestep.plan.shape import ModelShape, WeightGroup
from truestep.ranks.axes import DERIVED, RankLayout

_FLOAT32 = 4


@dataclass(frozen=True)
class Gathered:
    """Numbers of a rank's weights before sharding, by how often a micro-batch gathers them."""

    twice: float  # gathered again for the backward pass with `reshard_after_forward`
    once: float  # the head, or a tied embedding
    experts: float  # weights of the rank's own experts

    @staticmethod
    def of(group: WeightGroup, divided: WeightGroup, expert: int, tied: bool) -> "Gathered":
        """`group`: with all experts; `divided`: with those of one of `expert` ranks."""
        experts = (group.all - divided.all) / (expert - 1) if expert > 1 else 0.0
        once = group.head + (group.embedding if tied else 0)
        return Gathered(divided.all - experts - once, once, experts)


@dataclass(frozen=True)
class RankShare:
    """What volumes need to know of a rank's share of the work and of the model."""

    sizes: Mapping[str, int]  # sizes of the layout's axes
    micro_batches: int
    tokens: float  # tokens per step that its layers compute
    labels: float
    layers: float
    whole: Gathered
    trained: Gathered
    sent: int  # numbers that context ranks exchange of a token: queries, keys, values and attention's output

    @property
    def shards(self) -> int:
        return self.sizes["data_shard"] * self.sizes["context"]

    def over_shards(self, weights: Gathered, times: float) -> float:
        """Return the numbers that a rank sends if all weights are gathered, those of `twice` so many times."""
        experts = self.sizes["expert"]
        sharing = self.shards * self.sizes["tensor"] // experts if experts > 1 else 1  # ranks with the same experts
        both = (times * weights.twice + weights.once) * (self.shards - 1) / self.shards
        return both + times * weights.experts * (sharing - 1) / sharing


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
        """Tell whether ranks of several hosts exchange it, if each host has `gpus` ranks, one after another."""
        if self.axes[0] in DERIVED:  # neighbours
            return layout.every[self.axes[0]] > gpus or gpus % layout.every[self.axes[0]] != 0
        return any(len({rank // gpus for rank in members}) > 1 for members in layout.groups(self.axes))


def volumes(config: Config, shape: ModelShape, rank: RankShare) -> list[Volume]:
    """Compute what a rank sends in a step; exchanges of one rank alone are left out."""
    sizes, size, spread = rank.sizes, computed_size(config), ("data_shard", "context")
    tensor, context, replicas, stages = (sizes[name] for name in ("tensor", "context", "data_replicate", "pipeline"))
    of_tokens, of_labels = size * shape.hidden * rank.tokens, _FLOAT32 * shape.hidden * rank.labels  # hidden states
    again = 1.5 if recomputes(config) in ("selective", "full") else 1.0
    gathers = 2 if config.parallel.reshard_after_forward else 1
    weights = size * rank.over_shards(rank.whole, gathers) * rank.micro_batches
    gradients = _FLOAT32 * rank.over_shards(rank.trained, 1) * (rank.micro_batches if reduces_each(config) else 1)
    own = _FLOAT32 * (rank.trained.twice + rank.trained.once + rank.trained.experts) / rank.shards
    # In a layer, two gathers and two reduce-scatters forward, and as many backward; the embedding and the head beside.
    layers = (8 * again * rank.layers + 3 / stages) * of_tokens + 2 * of_labels
    heads = 2 * again * size * rank.sent * rank.tokens * rank.layers + 2 * of_labels
    travels = copies_of_a_token(shape.config, sizes["expert"]) * (1 - 1 / sizes["expert"])  # copies to other ranks
    sends = 2 * config.parallel.stages_per_rank - (stages == 2)  # with two stages, each is an end of the pipeline
    found = [
        Volume("weights gathered", spread, weights, hidden=True),
        Volume("gradients reduced", spread, gradients, hidden=True),
        Volume("gradients of replicas", ("data_replicate",), 2 * own * (replicas - 1) / replicas),
        Volume("tokens of tensor ranks", ("tensor",), layers * (tensor - 1) / tensor),
        Volume("heads of context ranks", ("context",), heads * (context - 1) / context),
        Volume("tokens of experts", ("expert",), 4 * again * of_tokens * rank.layers * travels),
        Volume("tokens of pipeline stages", ("pipeline",), sends * of_tokens if stages > 1 else 0.0),
    ]
    return [volume for volume in found if volume.sent]
