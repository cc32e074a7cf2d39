"""Chooses the sampler's kernels for a GPU: each is compared with plain torch on this machine before its first use. If
it fails, plain torch is used."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from truestep.generate.engine.attend import Rows, attend_rows, see_earlier
from truestep.generate.engine.cache import LayerShape, PagedCache
from truestep.generate.engine.device import Device
from truestep.generate.engine.draw import DrawRows, Slice, Truncation, draw
from truestep.generate.engine.forward import compiled_layers, probe, run_many, try_tokens
from truestep.generate.engine.recur import States, in_torch
from truestep.generate.engine.team import Team
from truestep.gpu.self_test import serves
from truestep.head.logits import HeadSettings
from truestep.model.fast.fused_products import noting
from truestep.model.mixers import attention
from truestep.model.mixers.attention import attend_to_past
from truestep.model.mixers.linear_kernels import random_call
from truestep.model.mixers.recurrence import Call, Recurrence
from truestep.model.policy import Policy

_LENGTHS = (1, 63, 64, 65, 700, 1500)
_VOCABULARY = 9087  # slices of 2, 4 and 8 ranks end at whole blocks, and the last slice is smaller


def serve_with_kernels(
    device: Device, policy: Policy, layers: list[LayerShape], compiled: dict[Any, Any] | None
) -> Device:
    """Return `device` with all kernels that work on it and on its tensor ranks' devices. `compiled`: a cache of
    compiled layers; None: layers are not compiled."""
    dtype, team = policy.weights.dtype, Team.of(policy)
    if team.all(_right("attention", lambda: check_attention(device.place, dtype, device.page_size, layers))):
        from truestep.generate.engine import attend_kernels

        fused = all(attention.is_fused(device.place, dtype, layer.softcap, layer.sinks) for layer in layers)
        past = fused and _right("chunks", lambda: check_past(device.place, dtype, layers))
        # Recurrent operations need the bounds of prompts on the host: prefill then has no CUDA graphs.
        fused = fused and not any(layer.states for layer in layers)
        device = replace(device, attend=attend_kernels.attend, store=attend_kernels.store, graphs=True)
        device = replace(device, fused=fused, past=past, gather=attend_kernels.gather)
    calls = [(recurrence, call) for _, recurrence, call in try_tokens(policy)[0].states.calls]
    if calls and team.all(_right("states", lambda: check_states(device.place, dtype, calls))):
        from truestep.generate.engine import recur_kernels

        addressed = all(recur_kernels.has_kernel(*each) for each in calls)
        device = replace(device, advance=recur_kernels.in_place, addressed=addressed)
    if policy.exchange is not None:
        policy.exchange.connect(device.place, dtype)
    if team.all(_right("draw", lambda: check_draw(device.place, policy.head, team.slice(_VOCABULARY)))):
        from truestep.generate.engine import draw_kernels

        device = replace(device, draw=draw_kernels.draw)
    if _right("copying", lambda: check_copies(device.place)):  # ranks may differ: copies are not collective
        from truestep.generate.engine import copy_kernels

        device = replace(device, copy=copy_kernels.copy)
    if compiled is None:
        return replace(device, compiles=False)

    def run_compiled() -> str | None:
        with compiled_layers(policy.model, compiled):
            with noting() as groups:
                run_many(policy, layers, device.page_size)
                probe(policy, layers, device.page_size)
            policy.weights.lay_together(groups)
            probe(policy, layers, device.page_size)
        return None

    return replace(device, compiles=team.all(_right("compiled layers", run_compiled)))


def _right(what: str, check: Callable[[], str | None]) -> bool:
    return serves(f"the sampler's {what}", "plain torch is used", check)


def check_attention(
    place: torch.device, dtype: torch.dtype, page_size: int, layers: Iterable[LayerShape]
) -> str | None:
    """Compare the attention kernels with plain torch. Return what is wrong for a layer, or None."""
    from truestep.generate.engine.attend_kernels import attend, gather

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(place, dtype)

    for layer in _attending(layers):
        width = -(-max(_LENGTHS) // page_size)
        pages = len(_LENGTHS) * width
        cache = PagedCache([random(pages + 1, layer.heads, page_size, layer.key_size)], [])
        cache.values.append(random(pages + 1, layer.heads, page_size, layer.value_size))
        cache.locate()
        lengths = torch.tensor(_LENGTHS, device=place)
        table = torch.randperm(pages, generator=generator).view(len(_LENGTHS), width).to(place)
        lines = torch.zeros(len(_LENGTHS), 3 + width, dtype=torch.int64, device=place)
        lines[:, 0] = table.gather(1, ((lengths - 1) // page_size)[:, None]).squeeze(1)
        lines[:, 1], lines[:, 2], lines[:, 3:] = (lengths - 1) % page_size, lengths, table
        rows = Rows(cache, lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3:], max(_LENGTHS), attend)
        q = random(len(_LENGTHS), layer.queries, layer.key_size)
        k = random(len(_LENGTHS), layer.heads, layer.key_size)
        v = random(len(_LENGTHS), layer.heads, layer.value_size)
        how = (layer.key_size**-0.5, layer.window, layer.softcap, random(layer.queries) if layer.sinks else None)
        found = attend(rows, 0, q, k, v, *how).float()
        stored = (cache.keys[0][rows.pages, :, rows.offsets], cache.values[0][rows.pages, :, rows.offsets])
        if not (torch.equal(stored[0], k) and torch.equal(stored[1], v)):
            return f"{layer}: new keys or values are not in their pages"
        if not all(map(torch.equal, gather(cache, 0, rows.pages.contiguous(), rows.offsets.contiguous()), (k, v))):
            return f"{layer}: keys or values are not those of their pages"
        expected = attend_rows(rows, 0, q, k, v, *how).float()
        worst = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)).max())
        if not worst <= (1e-4 if dtype == torch.float32 else 3e-2):
            return f"{layer}: off by {worst:.0e}"
    return None


def _attending(layers: Iterable[LayerShape]) -> list[LayerShape]:
    """Return the different shapes of the layers with attention."""
    return list(dict.fromkeys(replace(layer, states=()) for layer in layers if layer.heads))


def check_past(place: torch.device, dtype: torch.dtype, layers: Iterable[LayerShape]) -> str | None:
    """Compare the fused kernel with plain torch for chunks that follow earlier tokens. Return what is wrong for a
    layer, or None."""
    generator = torch.Generator().manual_seed(0)
    starts, counts = (64, 300, 1), (1, 150, 77)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    bounds = [torch.tensor([0, *each], device=place).cumsum(0, dtype=torch.int32) for each in (counts, lengths)]
    for layer in _attending(layers):
        q, k, v = (
            torch.randn(total, heads, size, generator=generator).to(place, dtype)
            for total, heads, size in (
                (sum(counts), layer.queries, layer.key_size),
                (sum(lengths), layer.heads, layer.key_size),
                (sum(lengths), layer.heads, layer.value_size),
            )
        )
        how = (layer.key_size**-0.5, layer.window)
        sinks = torch.randn(layer.queries, generator=generator).to(place, dtype) if layer.sinks else None
        found = attend_to_past(q, k, v, (bounds[0], bounds[1]), (max(counts), max(lengths)), *how, sinks).float()
        sizes = ((q, counts), (k, lengths), (v, lengths))
        parts = zip(*(each.transpose(0, 1).split(some, 1) for each, some in sizes), strict=True)
        alone = [see_earlier(a, b, c, start, *how, None, sinks) for (a, b, c), start in zip(parts, starts, strict=True)]
        expected = torch.cat(alone, dim=1).transpose(0, 1).float()
        worst = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)).max())
        if not worst <= 3e-2:
            return f"{layer}: off by {worst:.0e}"
    return None


def check_states(place: torch.device, dtype: torch.dtype, calls: Iterable[tuple[Recurrence, Call]]) -> str | None:
    """Compare the kernels of recurrent operations with plain torch, for a decode step. Return what is wrong, or
    None. `calls`: one of each operation of the model."""
    from truestep.generate.engine.recur_kernels import has_kernel, in_place

    generator = torch.Generator().manual_seed(0)
    lines = torch.tensor([[9, 3], [9, 5], [9, 0], [9, 6], [9, 1]], device=place)
    seen = set()
    for recurrence, one in calls:
        call = random_call(recurrence, one, len(lines), dtype, place)
        state = recurrence.state(call)
        if not has_kernel(recurrence, call) or (type(recurrence), state) in seen:
            continue
        seen.add((type(recurrence), state))
        pool = torch.randn(8, *state.shape, generator=generator).to(place, state.dtype)
        own = States(pool.clone(), None)
        found = in_place(
            recurrence, call, replace(own, place=torch.tensor([own.pool.data_ptr()], device=place)), lines[:, 1]
        )
        expected = in_torch(recurrence, call, States(pool, None), lines[:, 1])
        for name, mine, right in (("outputs", found, expected), ("states", own.pool, pool)):
            mine, right = (part[0] if isinstance(part, tuple) else part for part in (mine, right))
            worst = float((mine.float() - right.float()).norm() / right.float().norm().clamp(min=1e-6))
            allowed = 1e-5 if dtype == torch.float32 or name == "states" else 1e-2
            if mine.dtype != right.dtype or mine.shape != right.shape or not worst <= allowed:
                return f"{type(recurrence).__name__} with a state of {state.shape}: {name} are off by {worst:.0e}"
    return None


def check_copies(place: torch.device) -> str | None:
    """Check the copy kernel in both directions. Return what is wrong, or None."""
    from truestep.generate.engine.copy_kernels import copy

    for size in (3, 1600):
        sent = torch.arange(-size, size).view(2, size).pin_memory()
        there, back = torch.zeros_like(sent, device=place), torch.zeros_like(sent).pin_memory()
        copy(there, sent)
        copy(back, there)
        torch.cuda.synchronize(place)
        if not torch.equal(back, sent):
            return f"{2 * size} numbers are not what they were"
    return None


def check_draw(place: torch.device, settings: HeadSettings, part: Slice | None = None) -> str | None:
    """Compare the draw kernels with plain torch. Return what is wrong, or None. Tensor ranks call this together."""
    from truestep.generate.engine import draw_kernels

    generator = torch.Generator().manual_seed(0)
    raw = (3 * torch.randn(4, _VOCABULARY, generator=generator)).to(place)
    key = torch.tensor([5, -7, 2**62, 11], device=place)
    temperature = torch.tensor([[1.0, 9], [0.7, 9], [0.0, 9], [1.3, 9]], dtype=torch.float64, device=place)[:, 0]
    cut = Truncation(
        torch.tensor([0.9, 1.0, 0.5, 0.8], device=place),
        torch.tensor([0, 50, 3, 0], device=place),
        torch.tensor([0.0, 0.0, 0.0, 0.01], device=place),
    )
    for truncation in (None, cut):
        rows = DrawRows(key, torch.arange(4, device=place), temperature, truncation)
        own = raw if part is None else raw[:, part.first : part.first + part.size]
        found, expected = draw_kernels.draw(own.clone(), rows, settings, part), draw(raw.clone(), rows, settings)
        if not torch.equal(found.tokens, expected.tokens):
            return f"it draws {found.tokens.tolist()} and not {expected.tokens.tolist()}"
        for mine, right in ((found.logprobs, expected.logprobs), (found.log_mass, expected.log_mass)):
            if not torch.allclose(mine, right, rtol=0, atol=1e-4):
                return f"log-probs {mine.tolist()} and not {right.tolist()}"
    return None
