"""The table of dimensions gives the places and groups that are documented, for every product of up to eight ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from truestep.config.sections import ParallelConfig
from truestep.ranks.axes import AXES, GROUPS, MESH, WEIGHT_PARTS, RankError, RankLayout
from truestep.ranks.group import Ranks
from truestep.weights.pieces import WeightSlice


@dataclass(frozen=True)
class Place:
    """A rank's place, by the formula in docs/ranks.md."""

    rank: int
    stage: int
    replica: int
    part: int
    run: int
    slice: int


def products(most: int) -> Iterator[tuple[int, int, int, int, int]]:
    for counts in product(range(1, most + 1), repeat=5):
        pipeline, replicas, data_shard, context, tensor = counts
        if pipeline * replicas * data_shard * context * tensor <= most:
            yield counts


def places(pipeline: int, replicas: int, data_shard: int, context: int, tensor: int) -> list[Place]:
    every = product(range(pipeline), range(replicas), range(data_shard), range(context), range(tensor))
    return [
        Place(
            (((stage * replicas + replica) * data_shard + part) * context + run) * tensor + cut,
            stage,
            replica,
            part,
            run,
            cut,
        )
        for stage, replica, part, run, cut in every
    ]


def divided(everyone: list[Place], by: Callable[[Place], object]) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for place in everyone:
        found.setdefault(by(place), []).append(place.rank)
    return sorted(found.values())


# What the ranks of each group have in common.
COMMON: dict[str, Callable[[Place], object]] = {
    "pipeline": lambda place: (place.replica, place.part, place.run, place.slice),
    "replicate": lambda place: (place.stage, place.part, place.run, place.slice),
    "shard": lambda place: (place.stage, place.replica, place.slice),
    "context": lambda place: (place.stage, place.replica, place.part, place.slice),
    "tensor": lambda place: (place.stage, place.replica, place.part, place.run),
}


@pytest.mark.parametrize("size", range(1, 9))
def test_groups_and_places_of_every_product(size: int) -> None:
    layouts = [counts for counts in products(size) if len(places(*counts)) == size]
    for pipeline, replicas, data_shard, context, tensor in layouts:
        everyone = places(pipeline, replicas, data_shard, context, tensor)
        assert [place.rank for place in everyone] == list(range(size))
        layout = RankLayout(data_replicate=replicas, context=context, tensor=tensor, pipeline=pipeline).over(size)
        assert layout.by_name["data_shard"] == data_shard
        assert set(GROUPS) == set(COMMON)
        for name, axes in GROUPS.items():
            assert layout.groups(axes) == divided(everyone, COMMON[name]), name
        pipelines = divided(everyone, COMMON["pipeline"])
        speakers = [place.rank for place in everyone if place.stage == place.run == place.slice == 0]
        assert layout.groups(("data_replicate", "data_shard"))[0] == speakers
        for place in everyone:
            ranks = Ranks(place.rank, layout)
            own = (ranks.stage, ranks.place_on("context"), ranks.place_on("tensor"))
            assert own == (place.stage, place.run, place.slice)
            assert ranks.shard == place.part * context + place.run
            assert ranks.data_rank == place.replica * data_shard + place.part
            assert (ranks.size, ranks.data, ranks.shards) == (size, replicas * data_shard, data_shard * context)
            assert (ranks.token_share, ranks.size_of("data_replicate")) == (context * tensor, replicas)
            assert ranks.first_of_stage == (place.run == place.slice == 0)
            assert [ranks.of_stage(stage) for stage in range(pipeline)] in pipelines
            assert ranks.of_stage(place.stage) == layout.rank_at(layout.places(place.rank)) == place.rank


def test_the_mesh_numbers_ranks_as_the_formula_does() -> None:
    """Dimensions in one group are neighbours in a rank's number."""
    assert list(MESH) == ["pipeline", "replicate", "shard", "tensor"]
    in_order = [axis.group for axis in sorted(AXES, key=lambda axis: axis.order)]
    assert in_order == sorted(in_order, key=list(MESH).index)
    assert sorted(axis.order for axis in AXES) == list(range(len(AXES)))


def test_a_sum_over_all_weights_is_over_these_groups() -> None:
    assert WEIGHT_PARTS == ("shard", "tensor", "pipeline")


def test_every_dimension_is_an_option() -> None:
    for axis in AXES:
        assert ParallelConfig.model_fields[axis.name].default == axis.default


def test_what_is_no_dimension_is_no_layout() -> None:
    with pytest.raises(TypeError, match="no dimension expect"):
        RankLayout(expect=2)
    with pytest.raises(RankError, match=r"parallel\.tensor: 2 does not divide the 3 ranks"):
        RankLayout(tensor=2).over(3)


@pytest.mark.parametrize("size", range(1, 9))
def test_expert_ranks_are_neighbours_among_those_that_share_the_weights(size: int) -> None:
    layouts = [counts for counts in products(size) if len(places(*counts)) == size]
    for pipeline, replicas, data_shard, context, tensor in layouts:
        everyone = places(pipeline, replicas, data_shard, context, tensor)
        sharing = data_shard * context * tensor
        for many in (many for many in range(2, sharing + 1) if sharing % many == many % tensor == 0):
            given = {"data_replicate": replicas, "context": context, "tensor": tensor, "pipeline": pipeline}
            layout = RankLayout(**given, expert=many).over(size)
            assert layout.sizes == RankLayout(**given).over(size).sizes
            for place in everyone:
                ranks = Ranks(place.rank, layout)
                number = (place.part * context + place.run) * tensor + place.slice
                assert (ranks.expert, ranks.place_on("expert")) == (many, number % many)
                divided_by = WeightSlice(torch.Size([8 * many]), cut={"expert": 0})
                assert divided_by.shard_of(ranks) == (sharing // many, number // many)
                assert divided_by.is_cut("tensor") and divided_by.counted_on(ranks) is (place.stage == 0)
                assert WeightSlice(torch.Size([8])).shard_of(ranks) == (ranks.shards, ranks.shard)


@pytest.mark.parametrize(
    ("sizes", "ranks", "reason"),
    [
        ({"expert": 2}, 3, "parallel.expert: 2 does not divide the ranks that have parts of the weights: "
         "parallel.data_shard: 3"),
        ({"expert": 2, "data_shard": 1, "data_replicate": 2}, 2, "parallel.expert: 2 does not divide the ranks that "
         "have parts of the weights: parallel.data_shard: 1"),
        ({"expert": 2, "pipeline": 2}, 2, "parallel.data_shard: 1"),
        ({"expert": 8, "context": 2}, 4, "parallel.data_shard: 2 x parallel.context: 2"),
        ({"expert": 2, "tensor": 4}, 8, "parallel.expert: 2 is not a multiple of parallel.tensor: 4"),
    ],
)  # fmt: skip
def test_expert_ranks_that_are_none(sizes: dict[str, int], ranks: int, reason: str) -> None:
    with pytest.raises(RankError, match=reason):
        RankLayout(**sizes).over(ranks)
