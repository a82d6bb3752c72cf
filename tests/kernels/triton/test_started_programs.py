"""Programs compile for a GPU as they are started: with the dtypes of the tensors that launches give them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotating

CODE = """
import importlib, json, sys
from dataclasses import replace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import zeropoint as zp
from zeropoint.kernels.triton import backend, specialization, starts
from zeropoint.ops.registry import Op, Request

asked = json.loads(sys.argv[1])
GPU = torch.device("cuda")
TYPES = {torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8",
         torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
made = specialization.constants_of
native = lambda request, *given, **named: made(replace(request, device=GPU), *given, **named)
for module in list(sys.modules.values()):
    if getattr(module, "constants_of", None) is made:
        module.constants_of = native
compiled = []

def whole(part, types):
    return type(part)(*types) if hasattr(part, "_fields") else types[0]

def compile_in_its_place(self, *tensors, numbers=()):
    kernel, cut = starts.program(self._name), self._cut.cut
    names = kernel.arg_names
    signature = {name: TYPES[each.dtype] for name, each in zip(names, tensors)}
    signature |= {name: "i32" for name in names[len(tensors) : len(tensors) + len(numbers)]}
    fields = cut if isinstance(cut, tuple) else (cut,)
    types = ["i64" if each >= 1 << 31 else "i32" for each in fields]
    signature[names[-2]] = type(cut)(*types) if isinstance(cut, tuple) else types[0]
    signature[names[-1]] = "constexpr"
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(tensors))}
    source = ASTSource(fn=kernel, signature=signature, constexprs={names[-1]: self.constants}, attrs=aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=self._options)
    compiled.append(self._name)

starts.Start.__call__ = compile_in_its_place
scheme, shape = zp.Scheme.parse(asked["scheme"]), (128, 1536)
x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
q = zp.quantize(x, scheme.start)
data, params = q.data, list(q.params.stored)

def run(op, *arguments):
    request = Request(op=op, scheme=scheme, shape=shape, dtype=x.dtype, own_dtype=x.dtype, device=x.device)
    if backend._scheme_refusal(request) is None:
        return getattr(backend._LAUNCHES[op](request), op.value)(*arguments)

if scheme.search is None:
    run(Op.QUANTIZE, x, params)
if asked["all"]:
    run(Op.QUANTIZE_DYNAMIC, x)
if asked["all"] and scheme.search is None:
    run(Op.DEQUANTIZE, data, params)
    run(Op.FAKE_QUANTIZE, x, params)
    run(Op.FAKE_QUANTIZE_BACKWARD, x, x, params)
    run(Op.QUANTIZE_DYNAMIC, x.t().contiguous().t())
    layer = run(Op.LINEAR_VALUES, data, params, None)
    for tokens in (1, 100) if layer else ():
        layer(x[:1].expand(tokens, -1).contiguous(), None)
print(json.dumps(sorted(set(compiled))))
"""
SCHEMES = {
    "mxfp4": {"small_blocks.quantize_small_blocks", "pieces.dequantize_pieces", "gradient_masks.pass_within"},
    "nvfp4": {"whole_tensors.tensor_amax", "whole_tensors.coarse_scale", "value_products.multiply_values"},
    "int8:channel": {"segments.quantize_blocks", "pieces.quantize_pieces"},
    "int8:tensor": {"whole_tensors.tensor_scale"}, "uint4:g32:asym": {"matrix_tiles.quantize_tiles"},
    "nf4:g64": {"pieces.fake_quantize_pieces"}, "mxfp8_e4m3:scale=search": {"scale_sweeps.sweep_nearly"},
    "nvfp4:scale=search": {"scale_sweeps.sweep_exactly", "whole_tensors.coarse_scale"},
    "float8_e4m3fn:block128x128": {"matrix_tiles.quantize_tiles"},
    "int4:g128:round=stochastic(3)": {"small_blocks.quantize_small_blocks"},
}  # fmt: skip
"""Schemes, and some of the programs that they must start."""


def started(scheme: str, folder: Path, *, every: bool) -> set[str]:
    """Return the programs that were compiled; raises AssertionError where one does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps({"scheme": scheme, "all": every})],
        env=environment | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return set(json.loads(ran.stdout))


def test_a_program_under_given_scales_compiles_as_it_is_started(tmp_path: Path) -> None:
    assert "small_blocks.quantize_small_blocks" in started("mxfp4", tmp_path, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_programs_compile_as_they_are_started(scheme: str, tmp_path: Path) -> None:
    assert SCHEMES[scheme] <= started(scheme, tmp_path, every=True)
