"""What the head's kernels would be compiled for, as their launcher tells calls apart, on a machine without a GPU."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from truestep.head import hopper_product as product
from truestep.head import kernels, numerator_kernels
from truestep.types import Coefficients

VOCABULARY, HIDDEN = 1000, 64
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
found: dict[str, set[str]] = defaultdict(set)


def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    bind = jit.create_function_from_signature(self.signature, self.params, BACKEND)
    found[self.fn.__name__].add(str(bind(*arguments, **options)[1]))


def rows_of(count: int, first: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A chunk's part of numbers of all rows, of which `first` are before it."""
    return torch.zeros(first + count, dtype=dtype)[first:]


def launch_all(count: int, first: int) -> None:
    label_ids = rows_of(count, first, torch.int64)
    hidden = torch.zeros(first + count, HIDDEN, dtype=torch.bfloat16)[first:]
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    own = [rows_of(count, first) for _ in range(5)]
    kernels.row_statistics(torch.zeros(count, VOCABULARY), label_ids, own[0], None)
    coefficients = Coefficients(own[1], own[2], own[3])
    raw = torch.zeros(count, VOCABULARY)
    kernels.logits_gradient_(raw, own[0], label_ids, own[4], coefficients, None, torch.bfloat16)
    numerator_kernels.label_logits(hidden, weight, label_ids)
    for keep in (False, True):
        parts = product.multiply(hidden, weight, label_ids, own[0], own[1], keep)
        base, statistics = numerator_kernels.join_parts_(parts, own[1])
    assert parts.values is not None
    numerator_kernels.numerators_gradient_(parts.values, own[0], base, coefficients)
    numerator_kernels.scaled_rows(hidden, statistics.logprobs)
    numerator_kernels.scale_and_subtract_label_(torch.zeros(count, HIDDEN), own[0], weight, label_ids, own[1])
    numerator_kernels.subtract_labels_(torch.zeros(VOCABULARY, HIDDEN), hidden, label_ids, own[2])


if __name__ == "__main__":
    jit.JITFunction.run = run
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment,misc]
    for count, first in ((4096, 0), (4097, 0), (1, 0), (37, 3), (4096, 5), (48, 1), (1500, 2)):
        launch_all(count, first)
    print({name: len(kinds) for name, kinds in sorted(found.items())})
