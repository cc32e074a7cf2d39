"""Draws each row's next token, in plain torch and on any device.

The largest of z - log E, where the E are independent exponential numbers, is a draw from softmax(z) (the Gumbel trick).
So a block of tokens is drawn, whose z is the log-sum-exp of theirs, and then one of its tokens. Nothing has to be
sorted, and tokens that are cut off need only be left out. Each E comes from a counter: it is a function of the
completion's key, the token's position in the completion and the block's or the token's id. So a draw depends on neither
the batch nor what was drawn before, and on the device only where rounding decides a tie.

Dimensions: R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from truestep.head.logits import HeadSettings, scale_

# SplitMix64 (Steele, Lea and Flood, 2014): its increment and the two factors of its mixing function.
POSITION_STEP, TOKEN_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
MIX_FIRST, MIX_SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BLOCK = 16  # tokens whose ids follow one another
SMALL = 1 / 64  # below it -log(1 - v) is a series: 1 - v would lose what tells small numbers apart


@dataclass(frozen=True)
class DrawRows:
    """How each row is drawn."""

    key: torch.Tensor  # [R] int64 of the completion
    position: torch.Tensor  # [R] int64 of the new token in the completion, from 0
    temperature: torch.Tensor  # [R] float32, or float64 that is rounded to it; 0: the likeliest token
    truncation: "Truncation | None" = None  # None: no row has one

    @property
    def greedy(self) -> torch.Tensor:  # [R]
        return self.temperature.float() == 0

    @property
    def divisor(self) -> torch.Tensor:  # [R] of the logits; 1 for greedy rows
        return torch.where(self.greedy, 1.0, self.temperature.float())


@dataclass(frozen=True)
class Truncation:
    top_p: torch.Tensor  # [R] float32; 1: off
    top_k: torch.Tensor  # [R] int64; 0: off
    min_p: torch.Tensor  # [R] float32; 0: off


@dataclass(frozen=True)
class Kept:
    """The tokens that a row may draw: those above `floor`, and of those at it, ids up to `last`."""

    floor: torch.Tensor  # [R] float32
    last: torch.Tensor  # [R] int64
    log_mass: torch.Tensor  # [R] float32: the log of their probability


@dataclass(frozen=True)
class Slice:
    """The part of the vocabulary whose logits this rank has, where several ranks draw together."""

    first: int
    size: int
    most: int  # tokens of the largest slice
    vocabulary: int
    gather: Callable[[torch.Tensor], torch.Tensor]  # [...] -> [ranks, ...]
    whole: Callable[[torch.Tensor], torch.Tensor]  # [R, tokens of the slice] -> [R, V]

    def suffices(self, cut: bool) -> bool:
        """Tell whether a rank can draw from its own logits: nothing is cut off, and no block of tokens lies in two
        slices."""
        return not cut and self.most % BLOCK == 0


@dataclass(frozen=True)
class Drawn:
    """What rows drew, as the host gets it."""

    packed: torch.Tensor  # [3, R] int64, of which two are float64 in truth

    @staticmethod
    def of(tokens: torch.Tensor, logprobs: torch.Tensor, log_mass: torch.Tensor) -> "Drawn":
        floats = (numbers.double().view(torch.int64) for numbers in (logprobs, log_mass))
        return Drawn(torch.stack([tokens, *floats]))

    @property
    def tokens(self) -> torch.Tensor:  # [R]
        return self.packed[0]

    @property
    def logprobs(self) -> torch.Tensor:  # [R] of the whole distribution
        return self.packed[1].view(torch.float64)

    @property
    def log_mass(self) -> torch.Tensor:  # [R] of what could be drawn; 0: everything
        return self.packed[2].view(torch.float64)


def key_of(seed: Sequence[int]) -> int:
    """Give the key of a completion, as a signed number of 64 bits."""
    # NumPy takes numbers of 32 bits as they are. A list it would take apart number by number, with the same result.
    words = np.array(seed, np.uint32) if max(seed, default=2**32) < 2**32 and min(seed) >= 0 else list(seed)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0].astype(np.int64))


def draw(raw: torch.Tensor, rows: DrawRows, settings: HeadSettings, part: Slice | None = None) -> Drawn:  # [R, V]
    """Draw from raw logits, over whose memory this may write. `part`: they are of this slice of the vocabulary."""
    if part is not None:
        raw = part.whole(raw)
    greedy, z = rows.greedy, scale_(raw, rows.divisor, settings)
    logsumexp = z.logsumexp(-1)
    if z.device.type == "cpu" and bool(greedy.all()):  # elsewhere the host would wait for the answer
        tokens = z.argmax(-1)
        return Drawn.of(tokens, z.gather(-1, tokens[:, None]).squeeze(-1) - logsumexp, torch.zeros_like(logsumexp))
    left, log_mass = z, torch.zeros_like(logsumexp)
    if rows.truncation is not None:
        kept = keep(z, logsumexp, rows.truncation)
        ids = torch.arange(z.shape[-1], device=z.device)
        floor = kept.floor[:, None]
        left = z.masked_fill((z < floor) | ((z == floor) & (ids > kept.last[:, None])), -torch.inf)
        log_mass = torch.where(greedy, 0.0, kept.log_mass)
    tokens = torch.where(greedy, z.argmax(-1), _choose(left, rows))
    return Drawn.of(tokens, z.gather(-1, tokens[:, None]).squeeze(-1) - logsumexp, log_mass)


def _choose(z: torch.Tensor, rows: DrawRows) -> torch.Tensor:  # [R, V] -> [R]
    """Choose a block, and a token of it."""
    vocabulary, row = z.shape[-1], _mix((rows.position + 1).mul_(_signed(POSITION_STEP)).add_(rows.key))
    blocks = torch.nn.functional.pad(z, (0, -vocabulary % BLOCK), value=-torch.inf).unflatten(-1, (-1, BLOCK))
    numbers = torch.arange(blocks.shape[1], device=z.device)
    block = (blocks.logsumexp(-1) - exponentials(row, -1 - numbers, z.dtype).log_()).argmax(-1)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=z.device)
    score = blocks[torch.arange(len(z), device=z.device), block] - exponentials(row, ids + 1, z.dtype).log_()
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def keep(z: torch.Tensor, logsumexp: torch.Tensor, truncation: Truncation) -> Kept:  # [R, V], [R]
    """Find what top_k leaves, of that what top_p leaves, and of that what min_p leaves.

    They take the likeliest tokens first; of equally likely ones the one with the lower id."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    p = (ordered - logsumexp[:, None]).double().exp_()
    rank = torch.arange(z.shape[-1], device=z.device)
    top_k = torch.where(truncation.top_k > 0, truncation.top_k, z.shape[-1])
    p = torch.where(rank < top_k[:, None], p, 0)
    cumulative = p.cumsum(-1)
    # The smallest set that reaches top_p, the token that crosses it included.
    inside = cumulative - p < truncation.top_p[:, None] * cumulative[:, -1:]
    inside &= p >= truncation.min_p[:, None] * p[:, :1]
    inside &= p > 0
    count = inside.sum(-1, keepdim=True).clamp_(min=1)
    at = count - 1
    log_mass = cumulative.gather(-1, at).clamp_(max=1).log_().squeeze(-1)
    return Kept(ordered.gather(-1, at).squeeze(-1), order.gather(-1, at).squeeze(-1), log_mass.to(z.dtype))


def exponentials(row: torch.Tensor, counter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Give the exponential numbers of rows' counters: [R], [N] or [R, N] -> [R, N]."""
    bits = _shift(_mix(row[:, None] + counter * _signed(TOKEN_STEP)), 32)
    # Rounded to 1 it would make an infinite number, and a token that is cut off could be drawn.
    v = bits.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=1 - torch.finfo(dtype).eps / 2)
    series = (((v * 0.25).add_(1 / 3).mul_(v)).add_(0.5).mul_(v)).add_(1.0).mul_(v)
    return torch.where(v < SMALL, series, (1 - v).log_().neg_())


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)).mul_(_signed(MIX_FIRST))
    x = (x ^ _shift(x, 27)).mul_(_signed(MIX_SECOND))
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right without the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
