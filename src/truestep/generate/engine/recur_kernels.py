"""Decode steps of recurrent operations, in Triton: states are read and written in place, once each.

A program handles a part of one head (or of the channels) of a row. A CUDA graph is used in several phases of sampling,
but the memory of states is new in each phase. So kernels read the address of an operation's states from memory.
Operations without an entry in `KERNELS` are computed in plain torch.

Dimensions: R rows; H heads, in G groups; K, V head sizes of queries or keys and of values; C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from truestep.generate.engine.attend_kernels import TYPES, pool_of
from truestep.generate.engine.recur import States, in_torch
from truestep.model.mixers.convolution import Convolution
from truestep.model.mixers.delta_rule import DeltaRule
from truestep.model.mixers.recurrence import Call, Recurrence
from truestep.model.mixers.state_space import Mamba2

_TILE = 4096  # the most numbers of a state that a program handles


@triton.jit
def _delta_kernel(
    address_pointer,  # [1] int64
    slot_pointer,  # [R] int64
    query_pointer,  # [R, G, K]
    key_pointer,  # [R, G, K]
    value_pointer,  # [R, H, V]
    decay_pointer,  # [R, H] or [R, H, K], logarithms
    rate_pointer,  # [R, H]
    output_pointer,  # [R, H, V]
    slot_row,  # strides
    query_row,
    key_row,
    value_row,
    decay_row,
    rate_row,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    NORMED: tl.constexpr,
):
    """S <- exp(g) S;  S <- S + beta k (v - k^T S)^T;  the output is q^T S."""
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    group = head // (HEADS // GROUPS)
    slot = tl.load(slot_pointer + row * slot_row)
    at = tl.arange(0, KEY_BLOCK)
    to = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    own, wanted = at < KEY_SIZE, to < VALUE_SIZE
    q = tl.load(query_pointer + row * query_row + group * KEY_SIZE + at, mask=own, other=0.0).to(tl.float32)
    k = tl.load(key_pointer + row * key_row + group * KEY_SIZE + at, mask=own, other=0.0).to(tl.float32)
    if NORMED:
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    v = tl.load(value_pointer + row * value_row + head * VALUE_SIZE + to, mask=wanted, other=0.0).to(tl.float32)
    rate = tl.load(rate_pointer + row * rate_row + head).to(tl.float32)
    inside = own[:, None] & wanted[None, :]
    place = pool_of(address_pointer, 0, tl.float32) + (slot * HEADS + head) * (KEY_SIZE * VALUE_SIZE)
    place = place + at[:, None] * VALUE_SIZE + to[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    if PER_CHANNEL:
        decay = tl.load(decay_pointer + row * decay_row + head * KEY_SIZE + at, mask=own, other=0.0).to(tl.float32)
        state = state * tl.exp(decay)[:, None]
    else:
        state = state * tl.exp(tl.load(decay_pointer + row * decay_row + head).to(tl.float32))
    change = (v - tl.sum(state * k[:, None], axis=0)) * rate
    state = state + k[:, None] * change[None, :]
    tl.store(place, state, mask=inside)
    output = tl.sum(state * q[:, None], axis=0) * scale
    target = output_pointer + (row * HEADS + head) * VALUE_SIZE + to
    tl.store(target, output.to(output_pointer.dtype.element_ty), mask=wanted)


@triton.jit
def _mamba2_kernel(
    address_pointer,  # [1] int64
    slot_pointer,  # [R] int64
    input_pointer,  # [R, H, V]
    step_pointer,  # [R, H]
    a_pointer,  # [H]
    b_pointer,  # [R, G, K]
    c_pointer,  # [R, G, K]
    d_pointer,  # [H]
    bias_pointer,  # [H]
    output_pointer,  # [R, H, V] float32
    slot_row,  # strides
    input_row,
    step_row,
    b_row,
    c_row,
    least,
    most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """S <- exp(dt A) S + dt x B^T;  the output is S C + D x."""
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    group = head // (HEADS // GROUPS)
    slot = tl.load(slot_pointer + row * slot_row)
    at = tl.arange(0, KEY_BLOCK)
    to = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    own, wanted = at < KEY_SIZE, to < VALUE_SIZE
    b = tl.load(b_pointer + row * b_row + group * KEY_SIZE + at, mask=own, other=0.0).to(tl.float32)
    c = tl.load(c_pointer + row * c_row + group * KEY_SIZE + at, mask=own, other=0.0).to(tl.float32)
    x = tl.load(input_pointer + row * input_row + head * VALUE_SIZE + to, mask=wanted, other=0.0).to(tl.float32)
    dt = tl.load(step_pointer + row * step_row + head).to(tl.float32)
    if HAS_BIAS:
        dt = dt + tl.load(bias_pointer + head).to(tl.float32)
    if SOFTPLUS:
        dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    dt = tl.minimum(tl.maximum(dt, least), most)
    decay = tl.exp(dt * tl.load(a_pointer + head).to(tl.float32))
    inside = wanted[:, None] & own[None, :]
    place = pool_of(address_pointer, 0, tl.float32) + (slot * HEADS + head) * (KEY_SIZE * VALUE_SIZE)
    place = place + to[:, None] * KEY_SIZE + at[None, :]
    state = tl.load(place, mask=inside, other=0.0) * decay + (x * dt)[:, None] * b[None, :]
    tl.store(place, state, mask=inside)
    output = tl.sum(state * c[None, :], axis=1)
    if HAS_D:
        output = output + tl.load(d_pointer + head).to(tl.float32) * x
    tl.store(output_pointer + (row * HEADS + head) * VALUE_SIZE + to, output, mask=wanted)


@triton.jit
def _convolution_kernel(
    address_pointer,  # [1] int64
    slot_pointer,  # [R] int64
    input_pointer,  # [R, C]
    weight_pointer,  # [C, W]
    bias_pointer,  # [C]
    output_pointer,  # [R, C]
    slot_row,  # strides
    input_row,
    input_channel,
    TYPE: tl.constexpr,  # of the states
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Compute each channel's next output, and move its last inputs on by one."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_pointer + row * slot_row)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    place = pool_of(address_pointer, 0, TYPE) + (slot * CHANNELS + channel) * (TAPS - 1)
    given = tl.load(input_pointer + row * input_row + channel * input_channel, mask=inside, other=0.0)
    output = given.to(tl.float32) * tl.load(weight_pointer + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(
        tl.float32
    )
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(place + tap, mask=inside, other=0.0)
        weight = tl.load(weight_pointer + channel * TAPS + tap, mask=inside, other=0.0)
        output += before.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            tl.store(place + tap - 1, before, mask=inside)
    tl.store(place + TAPS - 2, given.to(TYPE), mask=inside)
    if HAS_BIAS:
        output += tl.load(bias_pointer + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        output = output.to(weight_pointer.dtype.element_ty).to(tl.float32)  # rounded as the library's convolution
        output = output / (1.0 + tl.exp(-output))
    target = output_pointer + row * CHANNELS + channel
    tl.store(target, output.to(output_pointer.dtype.element_ty), mask=inside)


def _delta(call: Call, states: States, slots: torch.Tensor) -> Any:
    q, k, v, g, rate = (_in_rows(tensor[0]) for tensor in (call.query, call.key, call.value, call.g, call.beta))
    rows, heads, size = v.shape
    groups, key_size = k.shape[1:]
    output = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    key_block = triton.next_power_of_2(key_size)
    block = _block(size, key_block)
    _delta_kernel[(rows * heads, triton.cdiv(size, block))](
        states.place,
        slots,
        q,
        k,
        v,
        g,
        rate,
        output,
        slots.stride(0),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        rate.stride(0),
        key_size**-0.5,
        HEADS=heads,
        GROUPS=groups,
        KEY_SIZE=key_size,
        VALUE_SIZE=size,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=block,
        PER_CHANNEL=g.ndim == 3,
        NORMED=bool(call.use_qk_l2norm_in_kernel),
    )
    return output[None], None


def _mamba2(call: Call, states: States, slots: torch.Tensor) -> Any:
    x, dt, b, c = (_in_rows(tensor[0]) for tensor in (call.hidden_states, call.dt, call.B, call.C))
    rows, heads, size = x.shape
    groups, key_size = b.shape[1:]
    output = torch.empty(rows, heads, size, dtype=torch.float32, device=x.device)
    key_block = triton.next_power_of_2(key_size)
    block = _block(size, key_block)
    least, most = (float(limit) for limit in call.dt_limit)
    _mamba2_kernel[(rows * heads, triton.cdiv(size, block))](
        states.place,
        slots,
        x,
        dt,
        call.A,
        b,
        c,
        call.A if call.D is None else call.D,
        call.A if call.dt_bias is None else call.dt_bias,
        output,
        slots.stride(0),
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        least,
        most,
        HEADS=heads,
        GROUPS=groups,
        KEY_SIZE=key_size,
        VALUE_SIZE=size,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=block,
        HAS_D=call.D is not None,
        HAS_BIAS=call.dt_bias is not None,
        SOFTPLUS=bool(call.dt_softplus),
    )
    return output[None]


def _convolve(call: Call, states: States, slots: torch.Tensor) -> Any:
    given = call.hidden_states[0]  # [C, R]
    channels, rows = given.shape
    weight = call.weight.contiguous()
    output = torch.empty(rows, channels, dtype=given.dtype, device=given.device)
    block = min(512, triton.next_power_of_2(channels))
    _convolution_kernel[(rows, triton.cdiv(channels, block))](
        states.place,
        slots,
        given,
        weight,
        weight if call.bias is None else call.bias,
        output,
        slots.stride(0),
        given.stride(1),
        given.stride(0),
        TYPE=TYPES[states.pool.dtype],
        CHANNELS=channels,
        TAPS=weight.shape[1],
        BLOCK=block,
        HAS_BIAS=call.bias is not None,
        SILU=call.activation is not None,
    )
    return output.transpose(0, 1)[None]


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if the numbers of each row are contiguous in memory, else a copy."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _block(size: int, key_block: int) -> int:
    return min(triton.next_power_of_2(size), max(1, _TILE // key_block))


KERNELS: dict[type[Recurrence], Callable[[Call, States, torch.Tensor], Any]] = {
    DeltaRule: _delta,
    Mamba2: _mamba2,
    Convolution: _convolve,
}


def has_kernel(recurrence: Recurrence, call: Call) -> bool:
    if type(recurrence) is Convolution and call.activation not in (None, "silu", "swish"):
        return False
    return type(recurrence) in KERNELS and recurrence.state(call).dtype in TYPES


def in_place(recurrence: Recurrence, call: Call, states: States, slots: torch.Tensor) -> Any:
    """Compute one token of each row as `in_torch` does."""
    if not has_kernel(recurrence, call):
        return in_torch(recurrence, call, states, slots)
    return KERNELS[type(recurrence)](call, states, slots)
