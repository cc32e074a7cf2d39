"""The sampler's kernels, compiled to machine code for a Hopper GPU on a machine without one."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

import triton
from triton.backends.compiler import GPUTarget

from truestep.generate.engine import attend_kernels, copy_kernels, draw_kernels
from truestep.head import kernels as head_kernels
from truestep.model.fast import rms_norm_kernel as norm_kernel
from truestep.model.fast import rope_kernel
from truestep.numerics import attend_kernels as exact_attention
from truestep.numerics import kernels as exact_kernels
from truestep.ranks import peer_kernels
from truestep.step.update.optimizers import adamw_kernel
from truestep.weights import sum_kernel

FLOATS = {"scale", "softcap", "divisor"}
WIDE = {"addresses_pointer", "key_pointer", "position_pointer", "last_pointer", "token_pointer", "chosen_pointer"}
WIDE |= {"page_pointer", "offset_pointer", "length_pointer", "table_pointer"}
WIDE |= {"places_pointer", "tiles_pointer"}
DIVISIBLE = ("part", "size", "vocabulary", "_stride", "_pointer", "_row", "_head", "_page", "_token")


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
        if name.endswith(DIVISIBLE) and name != "table_row":
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
        num_warps=attend_kernels.warps(max(16, group), size),
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
    shape = {"CAPPED": capped, "CUT": cut, "FAST": True, "BLOCK": draw_kernels.BLOCK, "BLOCKS": draw_kernels._BLOCKS}
    types = {"raw_pointer": f"*{kind}", "temperature_pointer": "*fp64"}
    compile_kernel(draw_kernels._draw_kernel, shape, types, num_warps=4)
    types = dict.fromkeys(("logprob_pointer", "log_mass_pointer"), "*fp64")
    compile_kernel(draw_kernels._join_kernel, {"BLOCK": draw_kernels._MOST_PARTS, "CUT": cut}, types, num_warps=1)


def compile_exchange(kind: str, gathers: bool) -> None:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "i32": torch.int32}[kind]
    shape = {
        "TYPE": peer_kernels._TYPES[dtype],
        "GATHERS": gathers,
        "RANKS": 2,
        "ROOM": 2**16,
        "TILE": peer_kernels.TILE,
    }
    typed = dict.fromkeys(("part_pointer", "result_pointer"), f"*{kind}") | {"calls_pointer": "*i32"}
    typed |= dict.fromkeys(("buffers_pointer", "signals_pointer"), "*i64")
    compiled = compile_kernel(peer_kernels._exchange_kernel, shape, typed, num_warps=16)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "16 bytes a thread at a time"
    assert "sys.release" in ptx and "sys.acquire" in ptx, "what is written before a signal is there after it"


def compile_adamw(tensors: int, aligned: bool) -> None:
    import torch

    shape = {"TENSORS": tensors, "ROUNDED": adamw_kernel._TYPES[torch.bfloat16], "ALIGNED": aligned}
    typed = {"table_pointer": "*i64", "work_pointer": "*i32"}
    typed |= dict.fromkeys(adamw_kernel._update_kernel.arg_names[3:11], "fp32")
    compiled = compile_kernel(adamw_kernel._update_kernel, shape | {"BLOCK": adamw_kernel._BLOCK}, typed, num_warps=8)
    assert ("ld.global.v4" in compiled.asm["ptx"]) == aligned, "16 bytes a thread at a time"
    assert "sqrt.rn" in compiled.asm["ptx"] and "div.rn" in compiled.asm["ptx"], "rounded as torch's are"


def compile_norm(width: int) -> None:
    named = ("gradient", "x", "weight", "result")
    typed = {f"{name}_pointer": "*bf16" for name in named} | {"epsilon": "fp32", "offset": "fp32"}
    block = triton.next_power_of_2(width)
    shape = {"WIDTH": width, "BLOCK": block}
    compiled = compile_kernel(norm_kernel._backward_kernel, shape, typed, num_warps=norm_kernel.warps(block))
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4") >= 3 and "st.global.v4" in ptx, "16 bytes a thread at a time"
    shape = {"WIDTH": width, "ROWS": 64, "COLUMNS": sum_kernel._COLUMNS}
    compile_kernel(sum_kernel._sum_kernel, shape, {}, num_warps=4)


def compile_heads(heads: int, width: int, turns: bool) -> None:
    named = ("gradient", "x", "weight", "cosine", "sine", "result")
    typed = {f"{name}_pointer": "*bf16" for name in named} | {"epsilon": "fp32", "offset": "fp32"}
    shape, warps = norm_kernel.heads_shape(heads, width)
    shape |= {"HEADS": heads, "WIDTH": width, "STRIDE": 4096, "TURNS": turns}
    compiled = compile_kernel(norm_kernel._heads_kernel, shape, typed, num_warps=warps)
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4") >= 4 and ptx.count("st.global.v4") >= 2, "16 bytes a thread at a time"
    shape = {"WIDTH": 1024, "STRIDE": 4096, "BLOCK": 1024}
    compile_kernel(norm_kernel._lay_kernel, shape, {"source_pointer": "*bf16", "target_pointer": "*bf16"}, num_warps=4)


def compile_turns(first: int, heads: int, size: int, norms: bool) -> None:
    named = ("rows", "first", "second", "cosine", "sine", "result")
    typed = {f"{name}_pointer": "*bf16" for name in named}
    typed |= dict.fromkeys(("first_epsilon", "second_epsilon", "offset"), "fp32")
    shape = rope_kernel.shape_for(heads, size)[0] | {"FIRST": first, "HEADS": heads, "SIZE": size, "NORMS": norms}
    ptx = compile_kernel(rope_kernel._norm_rope_kernel, shape, typed, num_warps=4).asm["ptx"]
    assert ptx.count("ld.global.v4") >= 6 and ptx.count("st.global.v4") >= 2, "16 bytes a thread at a time"


def compile_copy() -> None:
    typed = dict.fromkeys(("target_pointer", "source_pointer"), "*i64")
    ptx = compile_kernel(copy_kernels._copy_kernel, {"BLOCK": copy_kernels._BLOCK}, typed, num_warps=4).asm["ptx"]
    assert "ld.global.v2" in ptx and "st.global.v2" in ptx, "16 bytes a thread at a time, of a size that allows it"


def compile_front() -> None:
    typed = {"values_pointer": "*bf16", "index_pointer": "*i64"}
    for rows, columns in head_kernels._FRONT_TILES:
        shape = {"ROWS": rows, "COLUMNS": columns}
        ptx = compile_kernel(head_kernels._to_front_kernel, shape, typed, num_warps=4).asm["ptx"]
        loads, barrier, stores = ptx.rindex("ld.global"), ptx.index("bar.sync"), ptx.index("st.global")
        assert loads < barrier < stores, "no row is written before all are read"
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "16 bytes a thread at a time"


def compile_exact_product(kind: str, even: bool, bias: bool) -> None:
    typed = dict.fromkeys(("a_pointer", "b_pointer", "bias_pointer", "c_pointer"), f"*{kind}")
    shapes = [exact_kernels._WIDE] if kind == "fp32" else [shape for _, shape in exact_kernels._TILES]
    for shape in shapes:
        tile = {name: size for name, size in shape.items() if name.startswith("BLOCK")}
        compiled = compile_kernel(
            exact_kernels._product_kernel,
            tile | {"BIAS": bias, "EVEN": even, "GROUP": exact_kernels._GROUP},
            typed,
            num_warps=shape["num_warps"],
            num_stages=shape["num_stages"],
        )
        assert compiled.metadata.shared <= 227 * 1024, "what a block of threads may have"
        if kind == "bf16":
            assert "wgmma" in compiled.asm["ptx"], "the tensor cores of a Hopper GPU at their full rate"


def compile_exact_rows(block: int) -> None:
    shape = {"ROWS": max(1, 1024 // block), "BLOCK": block}
    compile_kernel(exact_kernels._sum_kernel, shape, {"x_pointer": "*bf16"}, num_warps=4)
    compile_kernel(exact_kernels._part_kernel, {"PART": exact_kernels._PART, "BLOCK": 1024}, {}, num_warps=4)
    compile_kernel(exact_kernels._join_kernel, {"BLOCK": 32}, {}, num_warps=1)


def compile_exact_attention(kind: str, size: int, group: int, window: int, capped: bool) -> None:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    block = exact_attention.rows_of_tile(dtype, group)
    shape = {
        "TYPE": exact_attention._TYPES[dtype],
        "HEADS": 8,
        "GROUP": group,
        "TOKENS": block // group,
        "KEY_SIZE": size,
        "VALUE_SIZE": size,
    }
    shape |= {"PAGE_SIZE": 64, "WINDOW": window, "CAPPED": capped, "BLOCK_M": block}
    typed = dict.fromkeys(("query_pointer", "output_pointer"), f"*{kind}")
    compiled = compile_kernel(
        exact_attention._attend_kernel,
        shape | {"KEY_BLOCK": size, "VALUE_BLOCK": size},
        typed,
        num_warps=4,
        num_stages=2,
    )
    assert compiled.metadata.shared <= 227 * 1024
    if kind == "bf16":
        assert "wgmma" in compiled.asm["ptx"]


def main(which: str) -> None:
    if which == "some":
        compile_exact_product("bf16", True, False)
        compile_draw("bf16", False, False)
        compile_exchange("bf16", False)
        compile_adamw(5, True)
        compile_norm(2048)
        compile_heads(16, 128, True)
        compile_turns(16, 24, 128, True)
        compile_front()
        compile_copy()
        compile_attention("bf16", 128, 2, 32, 0, False)
        compile_attention("fp32", 64, 7, 32, 4096, True)
    else:
        for kind, even, bias in itertools.product(("bf16", "fp32"), (True, False), (True, False)):
            compile_exact_product(kind, even, bias)
        for kind, gathers in (("bf16", False), ("fp32", False), ("i32", True)):
            compile_exchange(kind, gathers)
        compile_front()
        compile_copy()
        for width in (2048, 3584):
            compile_norm(width)
        for heads, width, turns in ((8, 128, True), (32, 64, True), (12, 96, True), (1, 128, False)):
            compile_heads(heads, width, turns)
        for first, every, size, normed in ((16, 24, 128, True), (32, 40, 64, False), (7, 9, 128, True)):
            compile_turns(first, every, size, normed)
        for tensors, aligned in itertools.product((4, 5), (False, True)):
            compile_adamw(tensors, aligned)
        for block in (128, 2048):
            compile_exact_rows(block)
        for kind, size in itertools.product(("bf16", "fp32"), (64, 128, 256)):
            compile_exact_attention(kind, size, 5 if size == 64 else 2, 4096 if size == 256 else 0, size == 256)
        for kind, capped, cut in itertools.product(("bf16", "fp32"), (False, True), (False, True)):
            compile_draw(kind, capped, cut)
        # What a block of threads holds depends on the size and the page alone; a group is one, odd, or a power of two.
        for size, page in itertools.product((64, 128, 256), (16, 32)):
            compile_attention("bf16", size, 8, page, 0, False)
        for group, page in itertools.product((1, 5), (16, 32)):
            compile_attention("bf16", 128, group, page, 0, False)
        for kind, capped in itertools.product(("bf16", "fp32"), (False, True)):
            compile_attention(kind, 256, 4, 32, 4096, capped)
    print("compiled")


if __name__ == "__main__":
    main(sys.argv[1])
