"""The dense products compile to machine code of a GPU: products in float64 are rounded, then added."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rotating

CODE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropoint.kernels.triton.programs import blocked_feedback, column_products
from zeropoint.kernels.triton.block_steps import *

def compiled(kernel, warps, stages, one, **types):
    # Sizes of one are constants of compilation, too; others are often divisible by 16.
    constants, attributes, signature = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        given = types[name]
        if name in ("sizes", "grid") and isinstance(given, tuple):
            named = enumerate(zip(given._fields, given))
            parts = [i for i, (field, part) in named if part == "i32" and field != "begin"]
            if one:
                constants |= {(place, i): 1 for i in parts}
                given = given._replace(**{given._fields[i]: "constexpr" for i in parts})
            else:
                attributes |= {(place, i): [["tt.divisibility", 16]] for i in parts}
        elif name == "k" or not isinstance(given, (tuple, str)):
            constants[name], given = given, "constexpr"
        if str(given).startswith("*"):
            attributes[place,] = [["tt.divisibility", 16]]
        signature[name] = given
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"], kernel
    ptx = made.asm["ptx"]
    assert ".ftz" not in ptx, kernel
    assert "fma.rn.f64" not in ptx, kernel
    return ptx

DOUBLES, FLOATS, PLACES = "*fp64", "*fp32", "*i32"
GRID = GridTensors(DOUBLES, "i32", DOUBLES, DOUBLES, DOUBLES, DOUBLES, "*i64")
for one in (False, True):
    for dot in (False, True):
        ptx = compiled(
            column_products.add_column_products, 8, 3, one, x=FLOATS, y=FLOATS, tiles=PLACES, sums=DOUBLES,
            sizes=GramSizes(*["i32"] * 5), k=GramTile(128, dot),
        )
        assert "fma.rn.f32" in ptx
        assert "mma.sync" not in ptx
        if dot and not one:
            assert "ld.shared.v4" in ptx
            assert "cp.async.cg" in ptx
            assert ptx.count("fma.rn.f32") > 5 * ptx.count("ld.shared"), "a load for few products"
    sizes = Tokens(*["i32"] * 3)
    compiled(column_products.round_columns, 4, 1, one, x="*bf16", rounded=FLOATS, factor="fp32", sizes=sizes,
             MANY=1024)
    compiled(column_products.square_columns, 1, 1, one, x="*bf16", sums=DOUBLES, sizes=sizes, LANES=32,
             RUN=16)
    ptx = compiled(
        blocked_feedback.add_lines, 4, 1, one, target=DOUBLES, left=DOUBLES, right=DOUBLES, tiles=PLACES,
        sizes=LineSizes(*["i32"] * 6), TILE=64,
    )
    assert ptx.count("mul.rn.f64") == ptx.count("add.rn.f64") == 32
    for corner in (False, True):
        ptx = compiled(
            blocked_feedback.eliminate_block, 2 if corner else 1, 1, one, h=DOUBLES, d=DOUBLES, failed=PLACES,
            scratch=Eliminated(DOUBLES, DOUBLES), sizes=Eliminating(*["i32"] * 3), CORNER=corner,
            LANES=64 if corner else 32,
        )
        assert ("bar.sync" in ptx) == corner
        assert "div.rn.f64" in ptx
    for kind in (FEED, SOLVE, DESCEND):
        for consecutive in (False, True):
            ptx = compiled(
                blocked_feedback.process_block, 1, 1, one, lines=Lines(*[DOUBLES] * 5), m=DOUBLES, d=DOUBLES,
                grid=None if kind == SOLVE else GRID, sizes=BlockSizes(*["i32"] * 4),
                k=BlockStep(kind, consecutive, 4, consecutive, 32),
            )
            assert ("div.rn.f64" in ptx) == (kind != SOLVE)
print("compiled")
"""


@pytest.mark.slow
def test_dense_products_compile_for_a_gpu_without_contraction(tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "compiled", ran.stderr[-2000:]
