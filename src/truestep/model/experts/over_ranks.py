"""The output of a mixture of experts when the experts are divided over ranks.

A token is sent once to each rank that has some of its experts, in the compute dtype, with the weights of these choices.
That rank computes the weighted sum of its experts and sends it back. The token's rank adds the sums of all ranks in
float32. A rank may send any number of tokens, or none. Gradients go the same ways in reverse.

The ranks exchange sizes and choices once, in an operator: activation checkpointing saves its results and does not run
it again.

Dimensions: T tokens of this rank, k experts of each, C copies of tokens that are sent, R choices, H hidden. The copies
and choices received from other ranks number C' and R'.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from truestep.gpu.operators import operator
from truestep.model.experts.mixture import Rows, Weight, in_order, of_rows
from truestep.model.experts.operators import ends_of
from truestep.ranks.exchange import transfer

ours = torch.ops.truestep

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, "ExpertRanks"] = weakref.WeakValueDictionary()


class ExpertRanks:
    """The ranks over which a model's experts are divided."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size = group, dist.get_world_size(group)
        self.number = next(_numbers)  # identifies these ranks in calls of the operator
        _known[self.number] = self

    def send(self, rows: torch.Tensor, sizes: Sequence[int], coming: Sequence[int]) -> torch.Tensor:
        """Send consecutive rows to each rank: `sizes[r]` rows to rank r, `coming[r]` rows from it. Gradients are sent
        back."""
        there = partial(_sent, group=self.group, sizes=list(sizes), coming=list(coming))
        back = partial(_sent, group=self.group, sizes=list(coming), coming=list(sizes))
        return transfer(rows, there, back)


def _sent(
    rows: torch.Tensor, *, group: dist.ProcessGroup, sizes: list[int], coming: list[int]
) -> torch.Tensor:  # [sum of sizes, ...] -> [sum of coming, ...]
    received = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), coming, sizes, group=group)
    return received


def _shapes(index: torch.Tensor, experts: int, ranks: int) -> tuple[torch.Tensor, ...]:
    raise NotImplementedError("experts that are divided over ranks are not traced")


@operator(
    "choices_over_ranks(Tensor index, int experts, int ranks) -> (Tensor, Tensor, Tensor, Tensor)",
    _shapes,
)
@torch.no_grad()
def choices_over_ranks(
    index: torch.Tensor, experts: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tell each rank which tokens and choices it gets. `experts` is the number of experts per rank. Return
    - the choices in the order in which they are sent, sorted by rank, then by token: [R];
    - the token of each copy, in the order in which copies are sent: [C];
    - on the host, the numbers of copies and choices sent to each rank, then those received from each: [4, ranks];
    - for each received choice, its expert (an index into this rank's experts) and its copy's index: [2, R'].
    """
    group = _known[ranks]
    rank, order = (index.flatten() // experts).sort(stable=True)
    token = order // index.shape[1]
    begins = torch.ones_like(order, dtype=torch.bool)  # true at the first choice of each copy
    begins[1:] = (rank[1:] != rank[:-1]) | (token[1:] != token[:-1])
    numbers = torch.arange(group.size, device=rank.device)
    choices = torch.searchsorted(rank, numbers, right=True).diff(prepend=numbers.new_zeros(1))
    total = torch.cat([numbers.new_zeros(1), begins.cumsum(0)])  # the number of copies before each choice
    ends = choices.cumsum(0)
    copies = total[ends] - total[ends - choices]
    going = torch.stack([copies, choices])
    coming = torch.empty_like(going.T.contiguous())
    dist.all_to_all_single(coming, going.T.contiguous(), group=group.group)
    coming = coming.T
    counts = torch.cat([going, coming]).cpu()
    # The index of a choice's copy among the copies for the same rank.
    copy = total[1:] - 1 - (copies.cumsum(0) - copies)[rank]
    told = torch.stack([index.flatten()[order] % experts, copy], 1)
    _, choices_to, _, choices_from = counts.tolist()
    arrived = _sent(told, group=group.group, sizes=choices_to, coming=choices_from).T.contiguous()
    # Received copies are ordered by the rank that sent them.
    before = coming[0].cumsum(0) - coming[0]
    arrived[1] += before.repeat_interleave(coming[1], output_size=arrived.shape[1])
    return order, token[begins], counts, arrived


@dataclass(frozen=True)
class _Travel:
    """How this rank's tokens travel: the numbers of copies and choices sent to and received from each rank, and the
    token of each copy."""

    ranks: ExpertRanks
    counts: list[list[int]]
    sent: torch.Tensor  # [C] the token of each copy
    runs: tuple[torch.Tensor, torch.Tensor]  # each token's copies, from `_runs_of`


def mixture_over_ranks(
    x: torch.Tensor,  # [T, H]
    index: torch.Tensor,  # [T, k], numbered over all experts
    weights: torch.Tensor,  # [T, k]
    first: Weight,  # this rank's experts
    last: Weight,
    activation: Callable[[torch.Tensor], torch.Tensor],
    ranks: ExpertRanks,
) -> torch.Tensor:  # [T, H]
    """Compute the output of experts for this rank's tokens. All ranks of the group call this together."""
    travel, copies, expert, scales, given = _send(x, index, weights, first.values.shape[0], ranks)
    return _give_back(of_rows(copies, Rows(*given), expert, scales, first, last, activation), travel)


@torch.compiler.disable  # not compiled, since sizes depend on routing; the experts themselves are compiled
def _send(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int, ranks: ExpertRanks
) -> tuple[_Travel, torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Send tokens to their experts. Return the received copies, each choice's expert and weight, and their rows."""
    order, sent, counts, arrived = torch.ops.truestep.choices_over_ranks(index, experts, ranks.number)
    travel = _Travel(ranks, counts.tolist(), sent, _runs_of(sent, len(x)))
    copies_to, choices_to, copies_from, choices_from = travel.counts
    copies = ranks.send(_Copied.apply(x, sent, *travel.runs), copies_to, copies_from)
    scales = ranks.send(in_order(weights, order, _inverse(order)), choices_to, choices_from)
    expert, copy = arrived
    return travel, copies, expert, scales, _rows_of(expert, copy, len(copies), experts).given


@torch.compiler.disable
def _give_back(parts: torch.Tensor, travel: _Travel) -> torch.Tensor:
    """Send the sums of this rank's experts back, and add up the sums received for this rank's tokens."""
    copies_to, _, copies_from, _ = travel.counts
    summed: torch.Tensor = _Summed.apply(travel.ranks.send(parts, copies_from, copies_to), travel.sent, *travel.runs)
    return summed


def _runs_of(token: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of copies sorted by token, and the start of each token's copies."""
    sorted_tokens, places = token.sort(stable=True)
    return places, torch.searchsorted(sorted_tokens, torch.arange(tokens, device=token.device))


def _rows_of(expert: torch.Tensor, copy: torch.Tensor, copies: int, experts: int) -> Rows:
    """Sort received choices by expert. The choices of a copy are consecutive."""
    chosen, order = expert.sort(stable=True)
    starts = torch.searchsorted(copy, torch.arange(copies, device=copy.device))
    return Rows(order, _inverse(order), ends_of(chosen, experts), 0, copy[order], starts)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


class _Copied(torch.autograd.Function):
    """Copies of tokens: [T, H] -> [C, H]."""

    @staticmethod
    def forward(saved: Any, x: torch.Tensor, token: Any, places: Any, starts: Any) -> torch.Tensor:
        saved.save_for_backward(places, starts)
        return x[token]

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        return ours.summed_runs(gradient.contiguous(), *saved.saved_tensors), None, None, None


class _Summed(torch.autograd.Function):
    """Sums of the results that came back, by token: [C, H] -> [T, H]."""

    @staticmethod
    def forward(saved: Any, parts: torch.Tensor, token: Any, places: Any, starts: Any) -> torch.Tensor:
        saved.save_for_backward(token)
        summed: torch.Tensor = ours.summed_runs(parts, places, starts)
        return summed

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        (token,) = saved.saved_tensors
        return gradient[token], None, None, None
