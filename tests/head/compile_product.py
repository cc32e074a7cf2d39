"""The head's product, compiled to machine code for a Hopper GPU on a machine without one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from truestep.head import hopper_product as product

LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def tile(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}],{LAYOUT!r}>"


def compile_product(keep: bool) -> None:
    rows, columns, depth = product.ROWS.value, product.COLUMNS.value, product.DEPTH.value
    signature = {"hidden": tile(rows, depth), "weight": tile(columns, depth), "values": tile(rows, columns)}
    floats = "factor", "reference", "shift", "total", "weighted", "label_y"
    types = {f"{name}_pointer": "*fp32" for name in floats} | {"label_pointer": "*i64", "holds_label_pointer": "*u8"}
    types |= {"row_count": "i32", "vocabulary": "i32", "hidden_size": "i32", "KEEP": "constexpr"}
    names = product._product_kernel.arg_names
    signature |= {name: types[name] for name in names if name in types}
    assert list(signature) == names
    source = GluonASTSource(product._product_kernel, signature, {(names.index("KEEP"),): keep})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    # Two groups of four products of depth 16 a step, and the fetches by the copy engine.
    assert compiled.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16") == 8
    assert compiled.metadata.shared <= 227 * 1024, "what a block of threads may have"
    assert len(compiled.asm["cubin"]) > 10_000


if __name__ == "__main__":
    compile_product(keep=True)
    compile_product(keep=False)
    print("compiled")
