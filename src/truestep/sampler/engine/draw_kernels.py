"""The draw of `draw` in one pass over the logits, in Triton, for GPUs: log-sum-exp and the largest score together.

Each row is shared among a few programs, and a second kernel joins what they found. Where ranks have a slice of the
vocabulary each, it joins what the programs of all ranks found.

Dimensions: R rows, V vocabulary, N parts of a row, or of a rank's slice of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from truestep.head.logits import HeadSettings, scale_
from truestep.sampler.engine.draw import (
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

_MIX_FIRST, _MIX_SECOND = tl.constexpr(MIX_FIRST), tl.constexpr(MIX_SECOND)
_POSITION_STEP, _TOKEN_STEP = tl.constexpr(POSITION_STEP), tl.constexpr(TOKEN_STEP)
_SMALL = tl.constexpr(SMALL)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOBODY = tl.constexpr(2**31 - 1)
_BLOCK = 512
_PART, _MOST_PARTS = 16384, 64  # tokens of a program, where so many programs of a row are enough


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
def _exponential(counter, FAST: tl.constexpr):
    """Compute E of a token: see `draw.exponentials`."""
    bits = (_mix(counter) >> 32).to(tl.uint32)
    # In halves, since a GPU takes long to convert what may have 64 bits; the sum is rounded once, as all 32 bits are.
    high, low = (bits >> 16).to(tl.int32), (bits & 0xFFFF).to(tl.int32)
    v = (high.to(tl.float32) * 65536.0 + low.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    series = (((v * 0.25 + 0.3333333333333333) * v + 0.5) * v + 1.0) * v
    return tl.where(v < _SMALL, series, -libdevice.fast_logf(1 - v) if FAST else -tl.log(1 - v))


@triton.jit
def _p(z, base):
    return tl.exp2((z - base) * _LOG2_E)


@triton.jit
def _relative(highest, z0, z1, z2, z3):
    """Give each lane's largest logit now, what relates the one before to it, and what relates four logits to it."""
    higher = tl.maximum(highest, tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a lane that has seen nothing yet
    return higher, _p(highest, base), _p(z0, base), _p(z1, base), _p(z2, base), _p(z3, base)


@triton.jit
def _cut(p, z, token, floor, last):
    return tl.where((z > floor) | ((z == floor) & (token <= last)), p, 0.0)


@triton.jit
def _better(best, best_e, best_token, p, e, token):
    """Take tokens whose p / E is larger than that of the best ones before them."""
    better = p * best_e > best * e
    return tl.where(better, p, best), tl.where(better, e, best_e), tl.where(better, token, best_token)


@triton.jit
def _load_z(raw_row, token, end, factor, softcap, CAPPED: tl.constexpr):
    """Load some logits of a row, capped and scaled; -inf beyond its end."""
    z = tl.load(raw_row + token, mask=token < end, other=0.0).to(tl.float32)
    if CAPPED:
        shrunk = tl.exp(-2 * tl.abs(z / softcap))
        tanh = (1 - shrunk) / (1 + shrunk)
        z = tl.where(z < 0, -tanh, tanh) * softcap
    return tl.where(token < end, z * factor, float("-inf"))


@triton.jit
def _load_four(raw_line, token, end, factor, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Load the logits of a block of tokens, and of the three behind it."""
    z0 = _load_z(raw_line, token, end, factor, softcap, CAPPED)
    z1 = _load_z(raw_line, token + BLOCK, end, factor, softcap, CAPPED)
    z2 = _load_z(raw_line, token + 2 * BLOCK, end, factor, softcap, CAPPED)
    z3 = _load_z(raw_line, token + 3 * BLOCK, end, factor, softcap, CAPPED)
    return z0, z1, z2, z3


@triton.jit
def _likeliest_of_four(best, best_e, best_token, z0, z1, z2, z3, token, BLOCK: tl.constexpr):
    best, best_e, best_token = _better(best, best_e, best_token, z0, best_e, token)
    best, best_e, best_token = _better(best, best_e, best_token, z1, best_e, token + BLOCK)
    best, best_e, best_token = _better(best, best_e, best_token, z2, best_e, token + 2 * BLOCK)
    return _better(best, best_e, best_token, z3, best_e, token + 3 * BLOCK)


@triton.jit
def _drawn_of_four(
    best, best_e, best_token, p0, p1, p2, p3, token, counter, far, FAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    e0, e1 = _exponential(counter, FAST), _exponential(counter + far, FAST)
    best, best_e, best_token = _better(best, best_e, best_token, p0, e0, token)
    best, best_e, best_token = _better(best, best_e, best_token, p1, e1, token + BLOCK)
    e2, e3 = _exponential(counter + far * 2, FAST), _exponential(counter + far * 3, FAST)
    best, best_e, best_token = _better(best, best_e, best_token, p2, e2, token + 2 * BLOCK)
    return _better(best, best_e, best_token, p3, e3, token + 3 * BLOCK)


@triton.jit
def _choose(best_e, best_token, best_z, greedy):
    """Choose among the lanes' tokens: the token, its score and its logit."""
    score = tl.where(greedy, best_z, best_z - tl.log(best_e))
    winner = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == winner, best_token, _NOBODY), axis=0)  # of equal scores the lowest id
    return chosen.to(tl.int64), winner, tl.max(tl.where(best_token == chosen, best_z, float("-inf")), axis=0)


@triton.jit(do_not_specialize=["parts"])
def _draw_kernel(
    raw_pointer,  # [R, V]
    key_pointer,  # [R] int64
    position_pointer,  # [R] int64
    temperature_pointer,  # [R] float32 or float64; 0: the likeliest token
    floor_pointer,  # [R] with CUT: below it nothing is drawn
    last_pointer,  # [R] with CUT: int64
    highest_pointer, total_pointer, score_pointer,  # [R, N]
    z_pointer,  # [R, N] of the token with that score
    token_pointer,  # [R, N] int64
    raw_row, meta_row, temperature_row,  # strides
    vocabulary,  # tokens whose logits are here, from `first` on
    first,
    part,  # tokens of a program
    softcap, scale,
    parts,  # N
    CAPPED: tl.constexpr,
    CUT: tl.constexpr,  # the logits are capped and scaled already
    FAST: tl.constexpr,  # the GPU's own logarithm
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, number, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    row_key = _key_of(key_pointer + row * meta_row, position_pointer + row * meta_row)
    temperature = tl.load(temperature_pointer + row * temperature_row).to(tl.float32)
    greedy, raw_line = temperature == 0, raw_pointer + row * raw_row
    if CUT:
        factor, floor, last = 1.0, tl.load(floor_pointer + row), tl.load(last_pointer + row)
    else:  # torch divides so, too
        factor, floor, last = tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)) * scale, 0.0, 0
    highest, total = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    # What is drawn has the largest p / E, with p relative to a lane's largest. Greedily it has the largest logit.
    best, best_e, best_token = total + tl.where(greedy, float("-inf"), 0.0), total + 1.0, lane * 0 + _NOBODY
    begin, end = number * part, tl.minimum((number + 1) * part, vocabulary)
    far = tl.full((BLOCK,), BLOCK, tl.uint64) * _TOKEN_STEP  # of the numbers that E comes from, to the next block
    counter = row_key + (first + begin + lane + 1).to(tl.uint64) * _TOKEN_STEP
    for start in range(begin, end, 4 * BLOCK):
        token = start + lane
        z0, z1, z2, z3 = _load_four(raw_line, token, end, factor, softcap, CAPPED, BLOCK)
        highest, shrunk, p0, p1, p2, p3 = _relative(highest, z0, z1, z2, z3)
        total = total * shrunk + ((p0 + p1) + (p2 + p3))
        if greedy:
            best, best_e, best_token = _likeliest_of_four(best, best_e, best_token, z0, z1, z2, z3, token, BLOCK)
        else:
            if CUT:
                p0, p1 = _cut(p0, z0, token, floor, last), _cut(p1, z1, token + BLOCK, floor, last)
                p2, p3 = _cut(p2, z2, token + 2 * BLOCK, floor, last), _cut(p3, z3, token + 3 * BLOCK, floor, last)
            best, best_e, best_token = _drawn_of_four(
                best * shrunk, best_e, best_token, p0, p1, p2, p3, token, counter, far, FAST, BLOCK
            )
            counter += far * 4
    place, top = row * parts + number, tl.max(highest, axis=0)
    tl.store(highest_pointer + place, top)
    total *= tl.where(highest == float("-inf"), 0.0, tl.exp(highest - top))
    tl.store(total_pointer + place, tl.sum(total, axis=0))
    best_z = _load_z(raw_line, best_token, end, factor, softcap, CAPPED)  # -inf: a lane that has nobody
    chosen, score, z = _choose(best_e, best_token, best_z, greedy)
    tl.store(token_pointer + place, first + chosen)
    tl.store(score_pointer + place, score)
    tl.store(z_pointer + place, z)


# Where its rows begin in what the host gets depends on their number.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["logprob_pointer", "log_mass_pointer"])
def _join_kernel(
    highest_pointer,  # [R, N], as all of these for each rank
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
    rank_tokens,  # from one rank's tokens to the next one's
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
    # Logits that are no numbers choose nobody: the log-prob tells, and the token must be one all the same.
    tl.store(chosen_pointer + row, tl.minimum(chosen, vocabulary - 1))
    tl.store(logprob_pointer + row, (chosen_z - top) - tl.log(total))
    tl.store(log_mass_pointer + row, tl.load(mass_pointer + row) if CUT else 0.0)


def draw(raw: torch.Tensor, rows: DrawRows, settings: HeadSettings, part: Slice | None = None) -> Drawn:  # [R, V]
    """Draw as `draw.draw` does; rows of nothing that is cut off need no other pass, and no other rank's logits."""
    if part is not None and rows.truncation is not None:
        raw, part = part.whole(raw), None
    count, vocabulary = raw.shape
    softcap, log_mass = settings.softcap, None
    floor = last = rows.temperature
    if rows.truncation is not None:
        raw = scale_(raw, rows.divisor, settings)
        kept = keep(raw, raw.logsumexp(-1), rows.truncation)
        softcap, floor, last, log_mass = None, kept.floor, kept.last, torch.where(rows.greedy, 0.0, kept.log_mass)
    # By the vocabulary alone: a tie within rounding may depend on the parts, and must not depend on the batch.
    most = vocabulary if part is None else part.most
    each = max(_PART, -(-most // (_MOST_PARTS * _BLOCK)) * _BLOCK)
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
        BLOCK=_BLOCK,
        num_warps=4,
    )
    if part is None:
        return _join(found[None], vocabulary, log_mass)
    return _join(part.gather(found), part.vocabulary, log_mass)


def _join(found: torch.Tensor, vocabulary: int, log_mass: torch.Tensor | None) -> Drawn:  # [ranks, 3, R, N], _, [R]
    """Give the tokens, and their log-probs, that all parts of all ranks make together."""
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
    """Tell the tokens from the four numbers of float32 that lie behind them."""
    return found[0], found[1:].view(-1).view(torch.float32).view(4, *found.shape[1:])
