"""The draw of `draw` in Triton, with one pass over the logits that computes the log-sum-exp and the best block.

Several programs share each row, and a second kernel joins their results. With tensor ranks it joins the results of all
ranks, each of which reads its own slice of the vocabulary.

Dimensions: R rows, V vocabulary, N parts (programs) of a row, or of a rank's slice of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from truestep.generate.engine.draw import (
    BLOCK,
    MIX_FIRST,
    MIX_SECOND,
    POSITION_STEP,
    SMALL,
    TOKEN_STEP,
    Drawn,
    DrawRows,
    Slice,
    keep,
)
from truestep.head.logits import HeadSettings, scale_

_MIX_FIRST, _MIX_SECOND = tl.constexpr(MIX_FIRST), tl.constexpr(MIX_SECOND)
_POSITION_STEP, _TOKEN_STEP = tl.constexpr(POSITION_STEP), tl.constexpr(TOKEN_STEP)
_SMALL = tl.constexpr(SMALL)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOBODY = tl.constexpr(2**31 - 1)
_BLOCKS = 128  # blocks that a program reads at a time
_PART, _MOST_PARTS = 16384, 64  # least tokens of a program, most programs of a row


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_FIRST
    x = (x ^ (x >> 27)) * _MIX_SECOND
    return x ^ (x >> 31)


@triton.jit
def _key_of(key_pointer, position_pointer):
    """Mix a row's key with its position."""
    position = tl.load(position_pointer).to(tl.uint64)
    return _mix(tl.load(key_pointer).to(tl.uint64) + (position + 1) * _POSITION_STEP)


@triton.jit
def _log(x, FAST: tl.constexpr):
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@triton.jit
def _exponential(counter, FAST: tl.constexpr):
    """Compute the exponential number E of a token or block, as `draw.exponentials` does."""
    bits = (_mix(counter) >> 32).to(tl.uint32)
    # In two halves of 16 bits: converting int64 to float is slow. The sum is rounded once, like the whole number.
    high, low = (bits >> 16).to(tl.int32), (bits & 0xFFFF).to(tl.int32)
    v = (high.to(tl.float32) * 65536.0 + low.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    v = tl.minimum(v, 0.9999999403953552)  # 1 - 2 ** -24
    series = (((v * 0.25 + 0.3333333333333333) * v + 0.5) * v + 1.0) * v
    return tl.where(v < _SMALL, series, -_log(1 - v, FAST))


@triton.jit
def _finite(highest):
    """Replace -inf by 0, so that a difference with it is not NaN."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _load(raw_line, token, end, softcap, CAPPED: tl.constexpr):
    """Load logits of a row, with the softcap applied; -inf beyond its end."""
    y = tl.load(raw_line + token, mask=token < end, other=float("-inf")).to(tl.float32)
    if CAPPED:
        shrunk = tl.exp(-2 * tl.abs(y / softcap))
        tanh = (1 - shrunk) / (1 + shrunk)
        y = tl.where(token < end, tl.where(y < 0, -tanh, tanh) * softcap, float("-inf"))
    return y


@triton.jit
def _left(p, y, token, floor, last, CUT: tl.constexpr):
    """Replace `p` by 0 for truncated tokens."""
    return tl.where((y > floor) | ((y == floor) & (token <= last)), p, 0.0) if CUT else p


@triton.jit
def _score(z, p, counter, greedy, FAST: tl.constexpr):
    """Compute the score z + log p - log E of blocks or tokens; z for greedy rows."""
    return tl.where(greedy, z, z + _log(p / _exponential(counter, FAST), FAST))


@triton.jit
def _add(highest, total, top, mass, powers):
    """Merge two partial sums of exponentials, each relative to its own largest logit."""
    higher = tl.maximum(highest, top)
    base = _finite(higher)
    return higher, total * tl.exp2((highest - base) * powers) + mass * tl.exp2((top - base) * powers)


@triton.jit
def _first_best(score, token, y, begin):
    """Return the first token with the highest score, and its logit."""
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), token, _NOBODY), axis=0)
    chosen = tl.where(chosen == _NOBODY, begin, chosen)  # with NaN logits no score equals the highest
    return chosen, tl.max(tl.where(token == chosen, y, float("-inf")), axis=0)


@triton.jit(do_not_specialize=["parts"])
def _draw_kernel(
    raw_pointer,  # [R, V]
    key_pointer, position_pointer,  # [R] int64
    temperature_pointer,  # [R] float32 or float64; 0: the likeliest token
    floor_pointer,  # [R] with CUT, see `draw.Kept`
    last_pointer,  # [R] with CUT: int64
    highest_pointer, total_pointer, score_pointer,  # [R, N]
    z_pointer,  # [R, N] scaled logit of the token with that score
    token_pointer,  # [R, N] int64
    raw_row, meta_row, temperature_row,  # strides
    vocabulary,  # tokens of this rank's slice, from `first` on
    first,
    part,  # tokens of a program
    softcap, scale,
    parts,  # N
    CAPPED: tl.constexpr,
    CUT: tl.constexpr,  # with truncation; the logits are capped and scaled already
    FAST: tl.constexpr,  # use the GPU's fast logarithm
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,  # tokens of a block, and blocks that are read at a time
):  # fmt: skip
    row, number, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCKS)
    row_key = _key_of(key_pointer + row * meta_row, position_pointer + row * meta_row)
    temperature = tl.load(temperature_pointer + row * temperature_row).to(tl.float32)
    greedy, raw_line = temperature == 0, raw_pointer + row * raw_row
    if CUT:
        factor, floor, last = 1.0, tl.load(floor_pointer + row), tl.load(last_pointer + row)
    else:  # torch rounds the quotient in the same way
        factor, floor, last = tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)) * scale, 0.0, 0
    powers = factor * _LOG2_E  # exp(factor · y) is a power of 2
    highest, total = tl.full((BLOCKS,), float("-inf"), tl.float32), tl.zeros((BLOCKS,), tl.float32)
    begin, end = number * part, tl.minimum((number + 1) * part, vocabulary)
    best, best_block = highest, lane * 0 + begin // BLOCK
    far = tl.full((BLOCKS,), BLOCKS, tl.uint64) * _TOKEN_STEP
    counter = row_key - ((first + begin) // BLOCK + lane + 1).to(tl.uint64) * _TOKEN_STEP
    for start in range(begin, end, BLOCKS * BLOCK):
        block = start // BLOCK + lane
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        y = _load(raw_line, token, end, softcap, CAPPED)
        top = tl.max(y, axis=1)
        p = tl.exp2((y - _finite(top)[:, None]) * powers)
        highest, total = _add(highest, total, top, tl.sum(p, axis=1), powers)
        mass = tl.sum(_left(p, y, token, floor, last, CUT), axis=1)
        score = _score(top * factor, mass, counter, greedy, FAST)
        best, best_block = tl.where(score > best, score, best), tl.where(score > best, block, best_block)
        counter -= far
    place, top = row * parts + number, tl.max(highest, axis=0)
    tl.store(highest_pointer + place, top * factor)
    tl.store(total_pointer + place, tl.sum(total * tl.exp2((highest - _finite(top)) * powers), axis=0))
    score = tl.max(best, axis=0)
    tl.store(score_pointer + place, score)
    block = tl.min(tl.where(best == score, best_block, _NOBODY), axis=0)  # among equal scores the lowest block
    token = block * BLOCK + tl.arange(0, BLOCK)
    y = _load(raw_line, token, end, softcap, CAPPED)
    p = _left(tl.full((BLOCK,), 1.0, tl.float32), y, token, floor, last, CUT)
    counter = row_key + (first + token + 1).to(tl.uint64) * _TOKEN_STEP
    chosen, y = _first_best(_score(y * factor, p, counter, greedy, FAST), token, y, begin)
    tl.store(token_pointer + place, (first + chosen).to(tl.int64))
    tl.store(z_pointer + place, y * factor)


# The offsets of logprobs and log_mass in the packed result depend on the number of rows, so their alignment varies.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["logprob_pointer", "log_mass_pointer"])
def _join_kernel(
    highest_pointer,  # [R, N], for each rank, as the next four
    total_pointer,  # [R, N]
    score_pointer,  # [R, N]
    z_pointer,  # [R, N]
    token_pointer,  # [R, N] int64
    mass_pointer,  # [R] with CUT
    chosen_pointer,  # [R] int64
    logprob_pointer,  # [R] float64
    log_mass_pointer,  # [R] float64
    vocabulary,
    parts,
    ranks,
    rank_tokens,  # distance from one rank's tokens to those of the next
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < ranks * parts
    rank, number = lanes // parts, row * parts + lanes % parts
    place, token_place = rank * (2 * rank_tokens) + number, rank * rank_tokens + number
    highest = tl.load(highest_pointer + place, mask=inside, other=float("-inf"))
    total = tl.load(total_pointer + place, mask=inside, other=0.0)
    score = tl.load(score_pointer + place, mask=inside, other=float("-inf"))
    z = tl.load(z_pointer + place, mask=inside, other=float("-inf"))
    token = tl.load(token_pointer + token_place, mask=inside, other=_NOBODY)
    top = tl.max(highest, axis=0)
    total = tl.sum(tl.where(inside, total * tl.exp(highest - top), 0.0), axis=0)
    winner = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == winner, token, _NOBODY), axis=0)
    chosen_z = tl.max(tl.where(token == chosen, z, float("-inf")), axis=0)
    # With NaN logits no score equals the highest: the log-prob is not finite, and the token must still be a valid id.
    tl.store(chosen_pointer + row, tl.minimum(chosen, vocabulary - 1))
    tl.store(logprob_pointer + row, (chosen_z - top) - tl.log(total))
    tl.store(log_mass_pointer + row, tl.load(mass_pointer + row) if CUT else 0.0)


def draw(raw: torch.Tensor, rows: DrawRows, settings: HeadSettings, part: Slice | None = None) -> Drawn:  # [R, V]
    """Draw as `draw.draw` does. Truncation needs another pass over the logits. With tensor ranks, truncation, or a
    block that lies in two slices, needs the logits of all ranks."""
    if part is not None and not part.suffices(rows.truncation is not None):
        raw, part = part.whole(raw), None
    assert settings.scale > 0, "the kernel takes the largest logit for the largest before it is scaled"
    count, vocabulary = raw.shape
    softcap, log_mass = settings.softcap, None
    floor = last = rows.temperature
    if rows.truncation is not None:
        raw = scale_(raw, rows.divisor, settings)
        kept = keep(raw, raw.logsumexp(-1), rows.truncation)
        softcap, floor, last, log_mass = None, kept.floor, kept.last, torch.where(rows.greedy, 0.0, kept.log_mass)
    # The number of parts depends only on the vocabulary. If it depended on the batch, so would ties within rounding.
    most = vocabulary if part is None else part.most
    each = max(_PART, -(-most // (_MOST_PARTS * BLOCK)) * BLOCK)
    parts = -(-most // each)
    found = torch.empty(3, count, parts, dtype=torch.int64, device=raw.device)
    tokens, floats = _of(found)
    assert rows.key.stride() == rows.position.stride()
    _draw_kernel[(count, parts)](
        raw,
        rows.key,
        rows.position,
        rows.temperature,
        floor,
        last,
        *floats,
        tokens,
        raw.stride(0),
        rows.key.stride(0),
        rows.temperature.stride(0),
        vocabulary,
        0 if part is None else part.first,
        each,
        softcap or 1.0,
        settings.scale,
        parts,
        CAPPED=softcap is not None,
        CUT=rows.truncation is not None,
        FAST=not triton.knobs.runtime.interpret,
        BLOCK=BLOCK,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
    if part is None:
        return _join(found[None], vocabulary, log_mass)
    return _join(part.gather(found), part.vocabulary, log_mass)


def _join(found: torch.Tensor, vocabulary: int, log_mass: torch.Tensor | None) -> Drawn:  # [ranks, 3, R, N], _, [R]
    """Return the tokens and log-probs that result from all parts of all ranks."""
    ranks, _, count, parts = found.shape
    drawn = Drawn(torch.empty(3, count, dtype=torch.int64, device=found.device))
    tokens, floats = _of(found[0])
    _join_kernel[(count,)](
        *floats,
        tokens,
        floats if log_mass is None else log_mass,
        drawn.tokens,
        drawn.logprobs,
        drawn.log_mass,
        vocabulary,
        parts,
        ranks,
        found[0].numel(),
        CUT=log_mass is not None,
        BLOCK=max(_MOST_PARTS, triton.next_power_of_2(ranks * parts)),
        num_warps=1,
    )
    return drawn


def _of(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [3, R, N] -> [R, N], [4, R, N]
    """Split a part's results into the tokens and the four float32 numbers that follow them."""
    return found[0], found[1:].view(-1).view(torch.float32).view(4, *found.shape[1:])
