"""A program that autotunes a kernel for Hopper where there is no GPU, and prints what was compiled before the first
candidate was timed, and whether in threads. With `plain` Triton's autotuner is as it comes."""

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from truestep.gpu.autotune import compile_candidates_in_threads

driver.set_active(  # type: ignore[arg-type]
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)
compiled: list[bool] = []  # whether another thread did so
timed: list[tuple[int, int]] = []  # compilations before and after each candidate


def compile_noted(*args: Any, **kwargs: Any) -> Any:
    compiled.append(threading.current_thread() is not threading.main_thread())
    return compile_one(*args, **kwargs)


compile_one, triton.compiler.compile = triton.compiler.compile, compile_noted  # type: ignore[attr-defined]


def do_bench(kernel_call: Any, quantiles: Any) -> list[float]:
    before = len(compiled)
    kernel_call()
    timed.append((before, len(compiled)))
    return [float(len(timed) != 3)] * 3


@triton.autotune(
    [triton.Config({"B": size}, num_warps=warps) for size in (32, 64, 128, 16) for warps in (1, 4)],
    key=["count"],
    do_bench=do_bench,
)
@triton.heuristics({"twice": lambda given: given["B"] > 32})
@triton.jit
def double(source, target, count, B: tl.constexpr, twice: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(B != 16)
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(target + place, tl.load(source + place, place < count) * (1 + twice), place < count)


if __name__ == "__main__":
    if sys.argv[1] != "plain":
        compile_candidates_in_threads()
        compile_candidates_in_threads()  # a second call changes nothing
    given = torch.ones(100)
    for count in (100, 100, 50):
        double.run(given, given, count, grid=(1,), warmup=True)
    print(json.dumps({"timed": timed, "compiled": compiled, "best": str(double.best_config)}))
