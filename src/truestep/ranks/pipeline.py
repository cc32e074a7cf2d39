"""The stages of a pipeline: their ranks, and the groups over which they send."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of ranks · per_rank stages; stage s is on rank s mod ranks. One process is a pipeline of one stage."""

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
    """Return the names of the groups over which the ranks of a pipeline send.

    A group runs its sends and receives in order, and a send ends with its receive. With one group for all, two ranks
    could each wait for the other's receive. So in each group a rank sends to or receives from one other rank, in one
    direction.
    """
    return tuple(f"{direction} {number}" for direction in ("forward", "backward") for number in range(2 + ranks % 2))


def wire(ranks: int, sender: int, forward: bool) -> str:
    """Return the name of the group for sends to the next rank of the pipeline, or to the previous one. After the last
    rank comes the first."""
    edge = sender if forward else (sender - 1) % ranks
    number = 2 if edge == ranks - 1 and ranks % 2 else edge % 2
    return f"{'forward' if forward else 'backward'} {number}"
