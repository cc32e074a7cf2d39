"""The stages of a pipeline: the rank of each, and the groups over which they send."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pipeline:
    """Stage s of ranks · per_rank is on rank s mod ranks. One process is a pipeline of one stage."""

    ranks: int = 1
    per_rank: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.per_rank

    @property
    def last(self) -> int:
        return self.stages - 1

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank, self.stages, self.ranks))


def wires(ranks: int) -> tuple[str, ...]:
    """Name the groups over which ranks of a pipeline send.

    A group does what it is given in order, and a send is done when its receive is. Were all in one group, two ranks
    could each wait for the other to receive. So no rank has two others in one group, nor both directions.
    """
    return tuple(f"{direction} {number}" for direction in ("forward", "backward") for number in range(2 + ranks % 2))


def wire(ranks: int, sender: int, forward: bool) -> str:
    """Name the group to the next rank of the pipeline, or back to the one before; behind the last comes the first."""
    edge = sender if forward else (sender - 1) % ranks
    number = 2 if edge == ranks - 1 and ranks % 2 else edge % 2
    return f"{'forward' if forward else 'backward'} {number}"
