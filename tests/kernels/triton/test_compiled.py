"""The kernels compile to machine code of a GPU, on any host, and contract or flush nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

QUICK = ("nvfp4", "uint4:g32:asym")
SLOW = ("int4:g128", "mxfp4", "nf4:g64", "int8:channel", "int3:g32")
CODE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropoint.kernels.triton import segments as kernels
from zeropoint.kernels.triton.specialization import constants_of
from zeropoint.kernels.triton.segmentation import Cut, segments_of
from zeropoint.ops.lowering import How
from zeropoint.ops.registry import Op, Request
from zeropoint.schemes import Scheme

FLOATS, BYTES, VALUES = "*fp32", "*u8", "*bf16"
for text in sys.argv[1:]:
    scheme, shape, dtype = Scheme.parse(text), (4096, 8192), torch.bfloat16
    cut = segments_of(scheme.granularity, shape, scheme.bits)
    request = Request(op=Op.QUANTIZE, scheme=scheme, shape=shape, dtype=dtype, own_dtype=dtype,
                      device=torch.device("cuda"))
    k = constants_of(request, cut, chosen=True)
    floats = k.rule.how in (How.LINEAR, How.AFFINE)
    pointers = {"x": VALUES, "out": VALUES, "data": BYTES, "bad": "*i32"}
    pointers["scales"] = FLOATS if floats else BYTES
    for name in ("quantize_blocks", "quantize_segments", "dequantize_segments", "fake_quantize_segments",
                 "segment_extremes"):
        kernel = getattr(kernels, name)
        signature = {arg: pointers.get(arg, FLOATS) for arg in kernel.arg_names}
        signature |= {"cut": Cut("i64", *["i32"] * 8), "k": "constexpr"}
        whole = {(place,): [["tt.divisibility", 16]] for place in range(len(kernel.arg_names) - 2)}
        source = ASTSource(fn=kernel, signature=signature, constexprs={"k": k}, attrs=whole)
        options = {"num_warps": cut.warps, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"], name
        assert ".ftz" not in made.asm["ptx"], (text, name)
        assert ".f64" not in made.asm["ptx"], (text, name)
        wide = "ld.global.v4" if name != "dequantize_segments" else "st.global.v4"
        assert wide in made.asm["ptx"], (text, name)
        divides = name.startswith(("quantize", "fake")) and not k.multiply
        assert ("fma.rn.f32" in made.asm["ptx"]) == (k.fused and divides), (text, name)
print("compiled")
"""


@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)])
def test_kernels_compile_for_a_gpu_to_wide_accesses_without_contraction(
    scheme: str, tmp_path: object
) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, "-c", CODE, scheme], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "compiled", ran.stderr[-2000:]
