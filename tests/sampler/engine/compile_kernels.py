"""The sampler's kernels, compiled to machine code for a Hopper GPU on a machine without one."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

import triton
from triton.backends.compiler import GPUTarget

from truestep.sampler.engine import attend_kernels, draw_kernels

FLOATS = {"scale", "softcap"}
WIDE = {"addresses_pointer", "key_pointer", "position_pointer", "last_pointer", "token_pointer", "chosen_pointer"}
WIDE |= {"page_pointer", "offset_pointer", "length_pointer", "table_pointer"}


def compile_kernel(kernel: Any, constants: dict[str, Any], types: dict[str, str], **options: Any) -> Any:
    signature, attributes = {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = types[name]
        elif name.endswith("_pointer"):
            signature[name] = "*i64" if name in WIDE else "*fp32"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        # As at a launch: tensors and most strides are divisible by 16.
        if name.endswith(("_pointer", "_row", "_head")):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_attention(kind: str, size: int, group: int, page: int, window: int, capped: bool) -> None:
    value_type, tl_type = (f"*{kind}", {"bf16": "bfloat16", "fp32": "float32"}[kind])
    import torch

    dtype = attend_kernels.TYPES[getattr(torch, tl_type)]
    heads = 8
    shape = {"TYPE": dtype, "PAGE_SIZE": page, "VALUE_SIZE": size}
    typed = dict.fromkeys(("query_pointer", "output_pointer", "value_pointer"), value_type)
    compile_kernel(
        attend_kernels._store_kernel,
        shape | {"HEADS": heads, "KEY_SIZE": size, "HEAD_BLOCK": heads, "SIZE_BLOCK": size},
        typed | {"key_pointer": value_type},
    )
    shape |= {"WINDOW": window, "VALUE_BLOCK": size}
    compiled = compile_kernel(
        attend_kernels._attend_kernel,
        shape
        | {"HEADS": heads, "GROUP": group, "KEY_SIZE": size, "CAPPED": capped, "GROUP_BLOCK": 16, "KEY_BLOCK": size},
        typed,
        num_warps=4,
        num_stages=3 if size <= 128 and kind == "bf16" else 2,
    )
    assert compiled.metadata.shared <= 227 * 1024, "what a block of threads may have"
    if kind == "bf16":
        # Pages are fetched 16 bytes a thread, ahead of the products, which run on the tensor cores.
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"]
        assert "mma.sync" in compiled.asm["ptx"]
        assert compiled.asm["ptx"].count("cp.async.ca.shared.global") <= 4, (
            "more than the numbers of pages in small parts"
        )
    compile_kernel(attend_kernels._join_kernel, shape | {"QUERIES": heads * group}, typed, num_warps=1)


def compile_draw(kind: str, capped: bool, cut: bool) -> None:
    shape = {"CAPPED": capped, "CUT": cut, "BLOCK": draw_kernels._BLOCK}
    types = {"raw_pointer": f"*{kind}", "greedy_pointer": "*u8"}
    compile_kernel(draw_kernels._draw_kernel, shape, types, num_warps=4)
    compile_kernel(draw_kernels._join_kernel, {"BLOCK": draw_kernels._MOST_PARTS}, {}, num_warps=1)


def main(which: str) -> None:
    if which == "some":
        compile_draw("bf16", False, False)
        compile_attention("bf16", 128, 2, 64, 0, False)
        compile_attention("fp32", 64, 7, 64, 4096, True)
    else:
        for kind, capped, cut in itertools.product(("bf16", "fp32"), (False, True), (False, True)):
            compile_draw(kind, capped, cut)
        # What a block of threads holds depends on the size and the page alone; a group is one, odd, or a power of two.
        for size, page in itertools.product((64, 128, 256), (16, 64)):
            compile_attention("bf16", size, 8, page, 0, False)
        for group, page in itertools.product((1, 5), (16, 64)):
            compile_attention("bf16", 128, group, page, 0, False)
        for kind, capped in itertools.product(("bf16", "fp32"), (False, True)):
            compile_attention(kind, 256, 4, 64, 4096, capped)
    print("compiled")


if __name__ == "__main__":
    main(sys.argv[1])
