"""Compiles the candidates of an autotuned Triton kernel in threads.

Triton compiles and times one candidate after the other. The kernels of flash-linear-attention have hundreds, which
takes minutes. Here all candidates of a kernel are compiled before the first one is timed. The choice stays Triton's.
"""

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_MOST_THREADS = 32


@functools.cache
def compile_candidates_in_threads() -> None:
    """Change Triton's autotuner, for the rest of this process."""
    from triton.runtime.autotuner import Autotuner

    prune, time_one = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        self.to_compile = prune(self, kwargs)
        return list(self.to_compile)

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        candidates, self.to_compile = self.to_compile, []  # the first call compiles all of them
        if len(candidates) > 1:
            _compile(self.fn, args, meta, candidates)
        return time_one(self, *args, config=config, **meta)

    Autotuner.prune_configs, Autotuner._bench = prune_configs, bench


def _compile(kernel: Any, args: Sequence[Any], meta: Mapping[str, Any], candidates: Sequence[Any]) -> None:
    """Compile a kernel with each candidate. Errors are ignored: Triton raises them when it times a candidate."""
    import triton

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(candidates))
    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for candidate in candidates:
            if candidate.pre_hook is None:  # a hook would change the arguments
                kernel.run(*args, **{**meta, **candidate.all_kwargs(), "warmup": True})
