"""Draws each row's next token, in plain torch on any device.

With independent exponential numbers E, the argmax of z - log E is a draw from softmax(z) (the Gumbel-max trick). First
a block of tokens is drawn, whose z is the log-sum-exp of its tokens, and then a token of the block. This needs no sort,
and truncated tokens are simply left out. E comes from a counter-based generator: a hash of the completion's key, the
token's position in the completion, and the id of the block or token. So a draw does not depend on the batch or on
earlier draws. It depends on the device only if rounding decides a tie.

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
BLOCK = 16  # tokens with consecutive ids
SMALL = 1 / 64  # for v below this, -log(1 - v) is computed as a series: 1 - v would lose precision


@dataclass(frozen=True)
class DrawRows:
    """The sampling parameters of each row."""

    key: torch.Tensor  # [R] int64 key of the completion, see `key_of`
    position: torch.Tensor  # [R] int64 index of the new token in the completion, from 0
    temperature: torch.Tensor  # [R] float32, or float64 that is rounded to float32; 0: greedy
    truncation: "Truncation | None" = None  # None: no row is truncated

    @property
    def greedy(self) -> torch.Tensor:  # [R]
        return self.temperature.float() == 0

    @property
    def divisor(self) -> torch.Tensor:  # [R] the temperature; 1 for greedy rows
        return torch.where(self.greedy, 1.0, self.temperature.float())


@dataclass(frozen=True)
class Truncation:
    """Options that restrict the tokens that each row may draw."""

    top_p: torch.Tensor  # [R] float32; 1: off
    top_k: torch.Tensor  # [R] int64; 0: off
    min_p: torch.Tensor  # [R] float32; 0: off


@dataclass(frozen=True)
class Kept:
    """The tokens that truncation leaves: scaled logits above `floor`, and at `floor` those with ids up to `last`."""

    floor: torch.Tensor  # [R] float32
    last: torch.Tensor  # [R] int64
    log_mass: torch.Tensor  # [R] float32: log of their total probability


@dataclass(frozen=True)
class Slice:
    """This rank's slice of the vocabulary, for tensor ranks that draw together."""

    first: int  # its first token
    size: int
    most: int  # size of the largest slice
    vocabulary: int
    gather: Callable[[torch.Tensor], torch.Tensor]  # [...] -> [ranks, ...]
    whole: Callable[[torch.Tensor], torch.Tensor]  # [R, tokens of the slice] -> [R, V]

    def suffices(self, cut: bool) -> bool:
        """Tell whether a rank can draw from its own logits. It cannot with truncation (`cut`), or if a block of tokens
        lies in two slices."""
        return not cut and self.most % BLOCK == 0


@dataclass(frozen=True)
class Drawn:
    """The drawn tokens and their log-probs, packed for one copy to the host."""

    packed: torch.Tensor  # [3, R] int64: tokens, and log-probs and log-masses as the bits of float64 numbers

    @staticmethod
    def of(tokens: torch.Tensor, logprobs: torch.Tensor, log_mass: torch.Tensor) -> "Drawn":
        floats = (numbers.double().view(torch.int64) for numbers in (logprobs, log_mass))
        return Drawn(torch.stack([tokens, *floats]))

    @property
    def tokens(self) -> torch.Tensor:  # [R]
        return self.packed[0]

    @property
    def logprobs(self) -> torch.Tensor:  # [R] before truncation
        return self.packed[1].view(torch.float64)

    @property
    def log_mass(self) -> torch.Tensor:  # [R] log of the probability that truncation leaves; 0: no truncation
        return self.packed[2].view(torch.float64)


def key_of(seed: Sequence[int]) -> int:
    """Return the key of a completion's draws, an int64."""
    # An array of uint32 gives the same result as a list, which NumPy would convert number by number.
    words = np.array(seed, np.uint32) if max(seed, default=2**32) < 2**32 and min(seed) >= 0 else list(seed)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0].astype(np.int64))


def draw(raw: torch.Tensor, rows: DrawRows, settings: HeadSettings, part: Slice | None = None) -> Drawn:  # [R, V]
    """Draw a token of each row from its raw logits, which may be overwritten. `part`: the slice of the vocabulary to
    which the logits belong; None: all of it."""
    if part is not None:
        raw = part.whole(raw)
    greedy, z = rows.greedy, scale_(raw, rows.divisor, settings)
    logsumexp = z.logsumexp(-1)
    if z.device.type == "cpu" and bool(greedy.all()):  # on a GPU this would synchronise
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
    """Draw a block, and then a token of the block."""
    vocabulary, row = z.shape[-1], _mix((rows.position + 1).mul_(_signed(POSITION_STEP)).add_(rows.key))
    blocks = torch.nn.functional.pad(z, (0, -vocabulary % BLOCK), value=-torch.inf).unflatten(-1, (-1, BLOCK))
    numbers = torch.arange(blocks.shape[1], device=z.device)
    block = (blocks.logsumexp(-1) - exponentials(row, -1 - numbers, z.dtype).log_()).argmax(-1)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=z.device)
    score = blocks[torch.arange(len(z), device=z.device), block] - exponentials(row, ids + 1, z.dtype).log_()
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def keep(z: torch.Tensor, logsumexp: torch.Tensor, truncation: Truncation) -> Kept:  # [R, V], [R]
    """Apply top_k, then top_p, then min_p. Among equally likely tokens, lower ids are kept first."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    p = (ordered - logsumexp[:, None]).double().exp_()
    rank = torch.arange(z.shape[-1], device=z.device)
    top_k = torch.where(truncation.top_k > 0, truncation.top_k, z.shape[-1])
    p = torch.where(rank < top_k[:, None], p, 0)
    cumulative = p.cumsum(-1)
    # The smallest set that reaches top_p, including the token that crosses it.
    inside = cumulative - p < truncation.top_p[:, None] * cumulative[:, -1:]
    inside &= p >= truncation.min_p[:, None] * p[:, :1]
    inside &= p > 0
    count = inside.sum(-1, keepdim=True).clamp_(min=1)
    at = count - 1
    log_mass = cumulative.gather(-1, at).clamp_(max=1).log_().squeeze(-1)
    return Kept(ordered.gather(-1, at).squeeze(-1), order.gather(-1, at).squeeze(-1), log_mass.to(z.dtype))


def exponentials(row: torch.Tensor, counter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the exponential number of each row and counter: [R], [N] or [R, N] -> [R, N]."""
    bits = _shift(_mix(row[:, None] + counter * _signed(TOKEN_STEP)), 32)
    # If v were rounded to 1, the result would be infinite, and a truncated token could be drawn.
    v = bits.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=1 - torch.finfo(dtype).eps / 2)
    series = (((v * 0.25).add_(1 / 3).mul_(v)).add_(0.5).mul_(v)).add_(1.0).mul_(v)
    return torch.where(v < SMALL, series, (1 - v).log_().neg_())


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)).mul_(_signed(MIX_FIRST))
    x = (x ^ _shift(x, 27)).mul_(_signed(MIX_SECOND))
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right, logically."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
