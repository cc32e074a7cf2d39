"""Schedules of a pipeline, played through: every pass has what it needs, nobody waits for ever, memory is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.ranks.pipeline import Pipeline, wire, wires
from truestep.step.compute.schedule import Pass, PipelineSchedule, make_schedule, most_alive

_TIMES = {True: 1, False: 2}  # of a forward and a backward pass

pipelines = st.one_of(st.builds(Pipeline, st.integers(1, 9)), st.builds(Pipeline, st.integers(2, 6), st.integers(2, 4)))


class Played:
    """Each rank on its own: it sends as soon as a pass is done, and waits for what the next one needs. Messages of one
    sender to one receiver, in one direction of the pipeline, come in the order in which they were sent."""

    def __init__(self, schedule: PipelineSchedule):
        self.schedule, self.pipeline = schedule, schedule.pipeline
        self.wires: dict[tuple[int, int, bool], deque[tuple[Pass, int]]] = {}
        self.expected: dict[tuple[int, int, bool], deque[Pass]] = {}
        self.there: dict[Pass, int] = {}  # what was received, and when
        self.done: dict[Pass, int] = {}
        self.most_alive = [0] * self.pipeline.ranks
        self.ends = [0] * self.pipeline.ranks
        ranks = [self.play(rank) for rank in range(self.pipeline.ranks)]
        moving = True
        while moving:
            moving = [next(rank, None) for rank in ranks] != [None] * len(ranks)

    def play(self, rank: int) -> Iterator[str]:
        alive = 0
        for made in self.schedule.ranks[rank]:
            while not self.receive(rank, made):
                if all(self.stuck(other) for other in range(self.pipeline.ranks)):
                    return
                yield "waiting"
            own = Pass(made.stage, made.micro_batch, True)
            if not made.forward:
                assert own in self.done, "backward before forward"
            start = max(self.ends[rank], self.there.get(made, 0))
            self.ends[rank] = self.done[made] = start + _TIMES[made.forward]
            alive += 1 if made.forward else -1
            self.most_alive[rank] = max(self.most_alive[rank], alive)
            following = made.following
            if following.stage in range(self.pipeline.stages):
                wire = (rank, self.pipeline.rank_of(following.stage), made.forward)
                self.wires.setdefault(wire, deque()).append((following, self.ends[rank]))
            yield "done"

    def receive(self, rank: int, made: Pass) -> bool:
        """In the sender's order, up to what this pass needs."""
        if made.source not in range(self.pipeline.stages):
            return True
        sender = self.pipeline.rank_of(made.source)
        wire = self.wires.setdefault((sender, rank, made.forward), deque())
        expected = self.expected.setdefault(
            (sender, rank, made.forward), deque(self.schedule.received(sender, rank, made.forward))
        )
        while made not in self.there and wire:
            taken, when = wire.popleft()
            assert taken == expected.popleft(), "received in another order than was sent"
            self.there[taken] = when
        return made in self.there

    def stuck(self, rank: int) -> bool:
        passes = self.schedule.ranks[rank]
        left = [made for made in passes if made not in self.done]
        if not left:
            return True
        source = left[0].source
        wire = self.wires.get((self.pipeline.rank_of(source), rank, left[0].forward))
        return left[0] not in self.there and not wire and source in range(self.pipeline.stages)


def every_pass(pipeline: Pipeline, micro_batches: int) -> set[Pass]:
    return {
        Pass(stage, number, forward)
        for stage in range(pipeline.stages)
        for number in range(micro_batches)
        for forward in (True, False)
    }


@settings(deadline=None, max_examples=150)
@given(pipelines, st.integers(0, 30))
def test_every_pass_runs_once_on_its_rank_and_nobody_waits_for_ever(pipeline: Pipeline, micro_batches: int) -> None:
    schedule = make_schedule(pipeline, micro_batches)
    for rank, passes in enumerate(schedule.ranks):
        assert {pipeline.rank_of(made.stage) for made in passes} <= {rank}
    assert sum(len(passes) for passes in schedule.ranks) == 2 * pipeline.stages * micro_batches
    assert set(Played(schedule).done) == every_pass(pipeline, micro_batches)


@settings(deadline=None, max_examples=100)
@given(pipelines, st.integers(0, 30))
def test_no_rank_holds_more_activations_than_promised(pipeline: Pipeline, micro_batches: int) -> None:
    played = Played(make_schedule(pipeline, micro_batches))
    for rank, most in enumerate(played.most_alive):
        assert most <= most_alive(pipeline, rank)
        if micro_batches >= pipeline.ranks * 2:
            assert most == most_alive(pipeline, rank)


@settings(deadline=None, max_examples=60)
@given(pipelines, st.integers(0, 20))
def test_without_a_backward_pass(pipeline: Pipeline, micro_batches: int) -> None:
    played = Played(make_schedule(pipeline, micro_batches, backward=False))
    assert set(played.done) == {made for made in every_pass(pipeline, micro_batches) if made.forward}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 21])
def test_1f1b_idles_no_longer_than_filling_and_draining_takes(ranks: int, micro_batches: int) -> None:
    played = Played(make_schedule(Pipeline(ranks), micro_batches))
    assert max(played.ends) == 3 * (micro_batches + ranks - 1)


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 2), (2, 4), (4, 2), (4, 3), (8, 2)])
def test_interleaved_stages_fill_and_drain_in_one_stages_time(ranks: int, per_rank: int) -> None:
    """Times are of a stage: a rank's whole work takes `per_rank` of them."""
    played = Played(make_schedule(Pipeline(ranks, per_rank), 4 * ranks))
    assert max(played.ends) == 3 * (4 * ranks * per_rank + ranks - 1)


def test_one_process_takes_a_micro_batch_forward_and_backward_before_the_next() -> None:
    (passes,) = make_schedule(Pipeline(), 3).ranks
    assert [(made.micro_batch, made.forward) for made in passes] == [
        (0, True), (0, False), (1, True), (1, False), (2, True), (2, False),
    ]  # fmt: skip


@pytest.mark.long
def test_schedules_are_remembered_and_not_without_bound() -> None:
    make_schedule.cache_clear()
    assert make_schedule(Pipeline(4), 7) is make_schedule(Pipeline(4), 7)
    for number in range(500):
        make_schedule(Pipeline(2), number)
    assert make_schedule.cache_info().currsize <= 100


@pytest.mark.parametrize("ranks", range(2, 10))
def test_no_rank_shares_a_group_with_two_others_or_in_both_directions(ranks: int) -> None:
    ends: dict[tuple[int, str, str], int] = {}
    for sender in range(ranks):
        for forward in (True, False):
            receiver = (sender + (1 if forward else -1)) % ranks
            name = wire(ranks, sender, forward)
            assert name in wires(ranks)
            for end in ((sender, name, "sends"), (receiver, name, "receives")):
                assert end not in ends
                ends[end] = receiver
    for rank in range(ranks):
        for name in wires(ranks):
            assert not {(rank, name, "sends"), (rank, name, "receives")} <= set(ends)
