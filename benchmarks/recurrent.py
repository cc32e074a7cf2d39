"""Operations of recurrent layers on one GPU: the check of the kernels, their errors, and their times beside the bound.

    python benchmarks/recurrent.py [--tokens 16384] [--documents 1024 16384] [--rounds 5] [--only gated_delta_rule ...]
    python benchmarks/recurrent.py --tiny            # on a CPU, without kernels: the script itself

For each operation, at the sizes of Qwen3.5-4B's layers (gated delta rule, convolution), Kimi Linear's (KDA) and
Nemotron 3's (Mamba-2):

- check: what loading a model does before it uses a kernel (`linear_kernels.problem`): agreed, or why not;
- errors: relative norms against float64 in plain torch, of values and of the worst gradient, in bfloat16, for packed
  documents and for each document alone, by the kernel and by plain torch;
- times: forward and backward of `--tokens` tokens in documents of each length, by plain torch and by the kernel, and
  the peak of memory beyond the inputs. The bound is the larger of two: bytes of inputs, output and their gradients,
  each moved once, over the bandwidth that the same run measures; and products of the chunked algorithm over the rate of
  bfloat16 products that the same run measures.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from qwen import delta_rule_flops

from truestep.model.mixers import linear_kernels
from truestep.model.mixers.convolution import Convolution
from truestep.model.mixers.delta_rule import DeltaRule
from truestep.model.mixers.recurrence import Call, Recurrence, Spans
from truestep.model.mixers.state_space import Mamba2

CHUNK = 64
LENGTHS = (1, 190, 64, 700, 129, 2)  # of the documents whose errors are measured


@dataclass(frozen=True)
class Case:
    name: str
    recurrence: Recurrence
    call: Call  # one token
    products: float  # FLOPs of a token's forward pass in matrix products


def delta(name: str, heads: int, groups: int, size: int, per_channel: bool) -> Case:
    def function() -> None: ...

    function.__name__ = name
    arguments = {
        "query": torch.zeros(1, 1, groups, size),
        "key": torch.zeros(1, 1, groups, size),
        "value": torch.zeros(1, 1, heads, size),
        "g": torch.zeros(1, 1, heads, *((size,) if per_channel else ())),
        "beta": torch.zeros(1, 1, heads),
        "use_qk_l2norm_in_kernel": True,
    }
    return Case(name, DeltaRule(), Call(function, arguments), delta_rule_flops(heads, size))


def convolution(channels: int, taps: int) -> Case:
    def causal_conv1d_fn() -> None: ...

    arguments = {
        "hidden_states": torch.zeros(1, channels, 1),
        "weight": torch.zeros(channels, taps),
        "bias": None,
        "activation": "silu",
    }
    return Case("causal_conv1d_fn", Convolution(), Call(causal_conv1d_fn, arguments), 0.0)


def mamba2(heads: int, size: int, groups: int, state: int) -> Case:
    def mamba2_chunk_scan() -> None: ...

    arguments = {
        "hidden_states": torch.zeros(1, 1, heads, size),
        "dt": torch.zeros(1, 1, heads),
        "A": torch.zeros(heads),
        "B": torch.zeros(1, 1, groups, state),
        "C": torch.zeros(1, 1, groups, state),
        "D": torch.zeros(heads),
        "dt_bias": torch.zeros(heads),
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
    }
    products = groups * 2.0 * CHUNK * state + heads * (2.0 * CHUNK * size + 2.0 * size * state * 2)
    return Case("mamba2_chunk_scan", Mamba2(), Call(mamba2_chunk_scan, arguments), products)


def cases(tiny: bool) -> list[Case]:
    if tiny:
        return [
            convolution(24, 4),
            delta("torch_chunk_gated_delta_rule", 4, 2, 8, False),
            delta("chunk_kimi_delta_attention", 2, 2, 8, True),
            mamba2(4, 8, 2, 8),
        ]
    return [
        convolution(8192, 4),
        delta("torch_chunk_gated_delta_rule", 32, 16, 128, False),
        delta("chunk_kimi_delta_attention", 32, 32, 128, True),
        mamba2(64, 64, 8, 128),
    ]


def spans_of(lengths: tuple[int, ...]) -> Spans:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def error(got: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> str:
    off = {name: float((got[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in right.items()}
    values = off.pop("values")
    worst = max(off, key=lambda name: off[name])
    return f"values {values:.1e}, worst gradient {off[worst]:.1e} ({worst})"


def show_errors(case: Case, dtype: torch.dtype, place: torch.device, kernels: bool) -> None:
    recurrence, spans = case.recurrence, spans_of(LENGTHS)
    call = linear_kernels.random_call(recurrence, case.call, sum(LENGTHS), dtype, place)
    right = linear_kernels.results(recurrence, call, spans, wide=torch.float64)
    for name, used in (("torch", False), ("kernel", True)):
        if used and not kernels:
            continue
        packed = linear_kernels.results(recurrence, call, spans, kernels=used)
        alone: dict[str, torch.Tensor] = {}
        for span in spans:
            for key, value in linear_kernels.results(recurrence, call, spans, only=span, kernels=used).items():
                alone[key] = alone[key] + value if key in alone else value
        print(f"  {name:6} packed: {error(packed, right)}")
        print(f"  {name:6} alone:  {error(alone, right)}")


def timed(work: Callable[[], object], place: torch.device, rounds: int) -> float:  # milliseconds
    taken = []
    for number in range(rounds + 1):
        if place.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if place.type == "cuda":
            torch.cuda.synchronize()
        if number:  # the first compiles and tunes
            taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def rates(place: torch.device, tiny: bool) -> tuple[float, float]:
    """Measure the device's bytes and bfloat16 FLOPs per second."""
    size = 256 if tiny else 8192
    wide = torch.randn(size, size, device=place, dtype=torch.bfloat16)
    product = timed(lambda: wide @ wide, place, 5)
    many = torch.empty((1 << 20) if tiny else (1 << 30), device=place, dtype=torch.uint8)
    copy = timed(lambda: many.clone(), place, 5)
    return 2e3 * many.numel() / copy, 2e3 * size**3 / product


def show_times(
    case: Case,
    tokens: int,
    length: int,
    dtype: torch.dtype,
    place: torch.device,
    kernels: bool,
    rounds: int,
    speed: tuple[float, float],
) -> None:
    recurrence = case.recurrence
    call = linear_kernels.random_call(recurrence, case.call, tokens, dtype, place)
    lengths = (length,) * (tokens // length)
    spans = spans_of(lengths)
    bounds = torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32, device=place)
    inputs = {name: value.requires_grad_() for name, value in call.arguments.items() if torch.is_tensor(value)}
    moved = 2.0 * sum(value.nbytes for value in inputs.values())
    gradient = None

    def run(used: bool) -> None:
        nonlocal gradient
        given = dataclasses.replace(call.replaced(**inputs), kernels=used)
        output, _ = recurrence.packed(given, bounds, length, spans, None)
        output = output[0] if isinstance(output, tuple) else output
        if gradient is None:
            gradient = torch.randn_like(output)
        torch.autograd.grad(output, list(inputs.values()), gradient.to(output.dtype))

    shown = []
    for name, used in (("torch", False), ("kernel", True)):
        if used and not kernels:
            continue
        try:
            if place.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            taken = timed(lambda used=used: run(used), place, rounds)
            extra = (torch.cuda.max_memory_allocated() - before) / 2**30 if place.type == "cuda" else 0.0
            shown.append(f"{name} {taken:8.2f} ms, {extra:5.2f} GiB")
        except torch.OutOfMemoryError:
            shown.append(f"{name} out of memory")
    assert gradient is not None
    bytes_moved = moved + 2.0 * gradient.numel() * dtype.itemsize
    bound = 1e3 * max(bytes_moved / speed[0], 3 * case.products * tokens / speed[1])
    print(f"  {tokens} tokens in documents of {length}: bound {bound:.3f} ms; " + "; ".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--documents", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    place = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda", None)
    place = torch.empty(0, device=place).device
    dtype = torch.bfloat16
    if options.tiny:
        options.tokens, options.documents, options.rounds = 256, [64, 256], 1
    speed = rates(place, options.tiny)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {linear_kernels.PACKAGE} {linear_kernels.version()}: copies")
    print(f"{speed[0] / 1e9:,.0f} GB/s, products {speed[1] / 1e12:,.1f} TFLOP/s")
    for case in cases(options.tiny):
        if options.only and not any(name in case.name for name in options.only):
            continue
        start = time.perf_counter()
        why = linear_kernels.problem(case.recurrence, case.call, dtype, place)
        print(f"{case.name}: check: {why or 'agreed'} ({time.perf_counter() - start:.1f} s)")
        kernels = linear_kernels.version() is not None and place.type == "cuda"
        for what in (
            lambda case=case, kernels=kernels: show_errors(case, dtype, place, kernels),
            *(
                lambda case=case, kernels=kernels, length=length: show_times(
                    case, options.tokens, length, dtype, place, kernels, options.rounds, speed
                )
                for length in options.documents
            ),
        ):
            try:
                what()
            except RuntimeError as problem:  # a kernel that refuses this machine; the others are still measured
                print(f"  failed: {str(problem)[:500]}")


if __name__ == "__main__":
    main()
