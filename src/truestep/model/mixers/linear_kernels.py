"""GPU kernels for recurrent layers, from the optional package flash-linear-attention (`fla-core`, truestep[hybrid]).

They take packed documents as cumulative lengths, in half precision, with states in float32. Before a kernel is used,
each operation of a model is compared on this machine with plain torch in float32: values and gradients, for packed
documents and for each document alone.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid, pad

from truestep.gpu.autotune import compile_candidates_in_threads
from truestep.model.mixers.recurrence import Call, Recurrence, Spans
from truestep.weights.errors import ModelError

PACKAGE = "fla-core"
_LENGTHS = (1, 190, 64, 700, 129, 2)  # document lengths in the comparison
# Relative errors of correct kernels in bfloat16 are about 4e-3. Those of wrong kernels are much larger.
_ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
_FACTOR = 1.5  # limit of the error of packed documents, as a multiple of the error of single documents


@dataclass(frozen=True)
class Kernels:
    """The operations that use kernels, by function name."""

    names: frozenset[str] = frozenset()
    instead: Mapping[str, str] = dataclasses.field(default_factory=dict)  # why other operations use plain torch

    @property
    def story(self) -> str:
        used = f"{PACKAGE} {version()} for {', '.join(sorted(self.names))}, which agreed with float32 on this machine"
        left = "; ".join(f"torch for {name}: {why}" for name, why in sorted(self.instead.items()))
        return "; ".join(part for part in (used if self.names else "", left) if part)


BY_TORCH = Kernels()


@functools.cache
def version() -> str | None:
    """Return the package's version; None if it is not installed."""
    try:
        found = importlib.util.find_spec("fla") is not None
        return importlib.metadata.version(PACKAGE) if found else None
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None


def convolve(
    call: Call, segments: torch.Tensor, spans: Spans, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.modules.causal_conv1d import causal_conv1d

    if initial is not None:
        # the package's states have as many columns as the convolution has taps, one more than ours
        initial = pad(initial, (1, 0))
    output, final = causal_conv1d(
        call.hidden_states.transpose(1, 2),
        call.weight,
        call.bias,
        initial_state=initial,
        output_final_state=True,
        activation=call.activation,
        cu_seqlens=segments,
        cu_seqlens_cpu=_on_host(spans),
    )
    return output.transpose(1, 2), final[..., 1:]


def apply_delta_rule(
    call: Call, segments: torch.Tensor, spans: Spans, initial: torch.Tensor | None
) -> tuple[Any, torch.Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    kernel = chunk_kda if call.g.ndim == call.query.ndim else chunk_gated_delta_rule
    output, final = kernel(
        *(tensor.contiguous() for tensor in (call.query, call.key, call.value, call.g.float(), call.beta)),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=call.use_qk_l2norm_in_kernel,
        cu_seqlens=segments,
        cu_seqlens_cpu=_on_host(spans),
    )
    return (output, None), final


def scan_heads(
    given: torch.Tensor,  # [T, H, P] inputs times steps
    decay: torch.Tensor,  # [T, H] log decays, float32
    b: torch.Tensor,  # [T, G, N]
    c: torch.Tensor,  # [T, G, N]
    segments: torch.Tensor,
    spans: Spans,
    initial: torch.Tensor | None,  # [D, H, P, N]
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, H, P], [D, H, P, N]
    """Compute Mamba-2's state-space scan as linear attention: queries are C, keys B, and values the inputs."""
    from fla.ops.simple_gla import chunk_simple_gla

    each = given.shape[1] // b.shape[1]
    k, q = (tensor.repeat_interleave(each, dim=1)[None] for tensor in (b, c))
    output, final = chunk_simple_gla(
        q,
        k,
        given[None],
        decay[None],
        scale=1.0,
        initial_state=None if initial is None else initial.transpose(2, 3).contiguous(),
        output_final_state=True,
        cu_seqlens=segments,
        cu_seqlens_cpu=_on_host(spans),
    )
    return output[0], final.transpose(2, 3)


@functools.lru_cache(maxsize=16)
def _on_host(spans: Spans) -> torch.Tensor:
    """Return cumulative lengths. The cache returns the same tensor for the same packing, because the package caches its
    preparations per tensor."""
    return torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32)


def choose(wanted: str, seen: Iterable[tuple[Recurrence, Call]], dtype: torch.dtype, place: torch.device) -> Kernels:
    """Choose kernels for the operations in the recorded calls. `wanted`: auto, flash or torch."""
    if wanted == "torch" or place.type != "cuda" or dtype not in _ALLOWED:
        return BY_TORCH
    names, instead = set(), {}
    for recurrence, call in seen:
        if recurrence.kernel:
            names.add(call.function.__name__)
            why = problem(recurrence, call, dtype, place)
            if why is not None:
                instead[call.function.__name__] = why
    if wanted == "flash" and instead:
        name, why = min(instead.items())
        raise ModelError(f"model.attention: flash cannot be used for {name}: {why}. model.attention: torch can")
    return Kernels(frozenset(names - instead.keys()), instead)


def problem(recurrence: Recurrence, call: Call, dtype: torch.dtype, place: torch.device) -> str | None:
    """Return why the kernel cannot be used for calls like this one; None if it can."""
    if place.type != "cuda":
        return "it needs a GPU"
    if dtype not in _ALLOWED:
        return "it needs model.dtype: bfloat16"
    if version() is None:
        return f"{PACKAGE} is not installed: pip install 'truestep[hybrid]'"
    shapes = tuple((name, tuple(value.shape)) for name, value in call.arguments.items() if torch.is_tensor(value))
    others = tuple(sorted((name, repr(value)) for name, value in call.arguments.items() if not torch.is_tensor(value)))
    key = call.function.__name__, shapes, others, dtype, place
    if key not in _compared:
        try:
            compile_candidates_in_threads()  # the package's kernels have hundreds
            _compared[key] = compare(recurrence, call, dtype, place)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the kernel compiler's errors have no common base class
            _compared[key] = f"it failed on this machine: {type(error).__name__}: {str(error)[:300]}"
    return _compared[key]


_compared: dict[Any, str | None] = {}


def compare(recurrence: Recurrence, call: Call, dtype: torch.dtype, place: torch.device) -> str | None:
    """Compare the kernel with plain torch in float32. Describe a result whose error is too large; None if there is
    none."""
    errors = measure(recurrence, call, dtype, place, _LENGTHS)
    for name, (packed, alone) in errors.items():
        if not packed <= _ALLOWED[dtype]:
            return f"its {name} are off by {packed:.1e}, of which {_ALLOWED[dtype]:.0e} is allowed"
        if not packed <= _FACTOR * alone + 1e-4:
            return f"its {name} are off by {packed:.1e} for packed documents and by {alone:.1e} for each alone"
    return None


def measure(
    recurrence: Recurrence, call: Call, dtype: torch.dtype, place: torch.device, lengths: tuple[int, ...]
) -> dict[str, tuple[float, float]]:
    """Return the relative errors of the kernel's values and gradients against plain torch in float32: for packed
    documents, and for each document alone."""
    given = random_call(recurrence, call, sum(lengths), dtype, place)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    exact = results(recurrence, given, spans, wide=torch.float32)
    packed = results(recurrence, given, spans, kernels=True)
    alone: dict[str, torch.Tensor] = {}
    for span in spans:
        for name, value in results(recurrence, given, spans, only=span, kernels=True).items():
            alone[name] = alone[name] + value if name in alone else value

    def off(other: torch.Tensor, right: torch.Tensor) -> float:
        return float((other - right).norm() / right.norm().clamp(min=1e-12))

    return {name: (off(packed[name], right), off(alone[name], right)) for name, right in exact.items()}


def random_call(recurrence: Recurrence, call: Call, tokens: int, dtype: torch.dtype, place: torch.device) -> Call:
    """Make a call like another one, with random values and another number of tokens. Inputs that are computed in
    float32 stay float32."""
    generator = torch.Generator().manual_seed(0)
    arguments = dict(call.arguments)
    for name, value in call.arguments.items():
        if torch.is_tensor(value):
            shape = list(value.shape)
            if name in recurrence.tokens:
                shape[recurrence.tokens[name]] = tokens
            drawn = torch.randn(shape, generator=generator)
            if name in ("g", "A"):
                drawn = logsigmoid(drawn + 2) if name == "g" else -drawn.exp()
            elif name == "beta":
                drawn = drawn.sigmoid()
            elif name in ("dt", "dt_bias"):
                drawn = drawn - 2
            arguments[name] = drawn.to(place, torch.float32 if name in recurrence.wide else dtype)
    return Call(call.function, arguments)


def results(
    recurrence: Recurrence,
    call: Call,
    spans: Spans,
    *,
    wide: torch.dtype | None = None,
    only: tuple[int, int] | None = None,
    kernels: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the output and all gradients of a call, in float32 or wider. `wide`: compute in this dtype. `only`:
    compute one document alone; results are 0 at the tokens of other documents."""
    inputs = {
        name: value.to(wide or value.dtype).detach().clone().requires_grad_()
        for name, value in call.arguments.items()
        if torch.is_tensor(value)
    }
    part = only or (0, spans[-1][1])
    cut = {
        name: value.narrow(at, part[0], part[1] - part[0]) if (at := recurrence.tokens.get(name)) is not None else value
        for name, value in inputs.items()
    }
    place = next(iter(inputs.values())).device
    spans = spans if only is None else ((0, part[1] - part[0]),)
    bounds = torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32, device=place)
    with torch.enable_grad():
        given = dataclasses.replace(call.replaced(**cut), kernels=kernels)
        output, _ = recurrence.packed(given, bounds, max(end - start for start, end in spans), spans, None)
        output = output[0] if isinstance(output, tuple) else output
        at = recurrence.output_tokens
        shape = [*output.shape[:at], *output.shape[at + 1 :]]
        tokens = next(
            value.shape[recurrence.tokens[name]] for name, value in inputs.items() if name in recurrence.tokens
        )
        weights = torch.randn(tokens, *shape, generator=torch.Generator().manual_seed(1)).movedim(0, at).to(place)
        weights = weights.narrow(at, part[0], part[1] - part[0])
        output.backward(weights.to(output.dtype))
    kept = torch.promote_types(torch.float32, wide or torch.float32)
    full = torch.zeros([tokens if i == at else size for i, size in enumerate(output.shape)], dtype=kept, device=place)
    full.narrow(at, part[0], part[1] - part[0]).copy_(output.detach())
    gradients = {f"d{name}": value.grad.to(kept) for name, value in inputs.items() if value.grad is not None}
    return {"values": full, **gradients}
