"""Triton's kernels compiled to machine code of a GPU, on any host, in a process without its interpreter."""

import json
import os
import subprocess
import sys
from typing import Any

CODE = """
import functools, importlib, json, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropoint.kernels.triton.statistics_launch import lines_of
from zeropoint.kernels.triton.fit_launch import fit_of
from zeropoint.kernels.triton.linear_tiles import code_tiles, value_tiles
from zeropoint.kernels.triton.specialization import constants_of
from zeropoint.kernels.triton.piece_cuts import pieces_of, small_blocks_of
from zeropoint.kernels.triton.segmentation import segments_of
from zeropoint.kernels.triton.tile_cuts import contiguous_strides, tiles_of
from zeropoint.kernels.triton.sweep_launch import Blocks, sweep_of
from zeropoint.layout.runs import Runs
from zeropoint.ops.registry import Op, Request
from zeropoint.params.scale_windows import block_length
from zeropoint.schemes import Scheme

asked = json.loads(sys.argv[1])
scheme, shape, dtype = Scheme.parse(asked["scheme"]), (4096, 8192), torch.bfloat16
def tiled(strides, whole):
    return lambda *given: tiles_of(given[0], given[1], strides, given[2], dtype.itemsize, whole=whole)

request = Request(op=Op.QUANTIZE, scheme=scheme, shape=shape, dtype=dtype, own_dtype=dtype,
                  device=torch.device("cuda"))
def layered(tiles):
    return lambda *given: tiles(request, asked["tokens"], bias=True)

found = {"segments": segments_of, "pieces": pieces_of, "small blocks": small_blocks_of,
         "rows": functools.partial(pieces_of, joins=False, each=2),
         "tiles": tiled(contiguous_strides(shape), True), "transposed": tiled((1, shape[0]), True),
         "parts": tiled((1, shape[0]), False), "values": layered(value_tiles), "codes": layered(code_tiles)}
cut = found[asked["cut"]](scheme.granularity, shape, scheme.bits)
module = importlib.import_module("zeropoint.kernels.triton.programs." + asked["module"])
kernel = getattr(module, asked["kernel"])
signature = {name: asked["arguments"][name] for name in kernel.arg_names if name in asked["arguments"]}
signature = {name: tuple(kind) if isinstance(kind, list) else kind for name, kind in signature.items()}
signature |= {name: "constexpr" for name in kernel.arg_names if name not in signature}
if "cut" in kernel.arg_names:
    wide = isinstance(cut.cut, int)
    signature["cut"] = "i64" if wide else type(cut.cut)("i64", *["i32"] * (len(cut.cut) - 1))
if "sizes" in kernel.arg_names:
    signature["sizes"] = type(cut.cut)(*["i32"] * len(cut.cut))
constants = {name: tuple(value) if isinstance(value, list) else value
             for name, value in asked["constants"].items()}
compiled_in, sweep = cut.shape, constants.pop("sweep", None)
if sweep is not None:
    compiled_in = sweep_of(scheme, shape, dtype, weighted=False)._replace(**sweep)
    signature["cut"] = Blocks("i64", "i32", "i32") if asked["kernel"] == "sweep_exactly" else "i64"
if "k" in kernel.arg_names:
    constants["k"] = constants_of(request, compiled_in, chosen=asked["chosen"], dividing=sweep is not None)
if "lines" in kernel.arg_names:
    found = lines_of(Runs(*constants.pop("runs")), each=constants.pop("each", 32))
    constants["lines"], signature["cut"] = found.shape, type(found.cut)("i32", "i64", "i32", "i32")
    asked["warps"] = found.warps
if "f" in kernel.arg_names:
    constants["f"] = fit_of(scheme, block_length(scheme, shape))._replace(**constants.pop("fit"))
whole = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
         if str(signature[name]).startswith("*") or name == "count"}
if "lines" in kernel.arg_names:
    whole |= {(kernel.arg_names.index("cut"), place): [["tt.divisibility", 16]] for place in (0, 1)}
if asked["cut"] in ("tiles", "transposed", "parts"):  # as launches find it, for rows of whole vectors
    place = kernel.arg_names.index("cut")
    whole |= {(place, at): [["tt.divisibility", 16]] for at, each in enumerate(cut.cut) if each % 16 == 0}
if "sizes" in kernel.arg_names:
    place = kernel.arg_names.index("sizes")
    whole |= {(place, at): [["tt.divisibility", 16]] for at, each in enumerate(cut.cut) if each % 16 == 0}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=whole)
options = {"num_warps": asked["warps"] or cut.warps, "enable_fp_fusion": asked["fused"]}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "ptxas"
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "kernel.ptx"
    file.write_text(made.asm["ptx"])
    report = subprocess.run([tool, "-v", "-arch=sm_90a", file, "-o", Path(folder) / "kernel"],
                            capture_output=True, text=True, check=True).stderr
assert "0 bytes spill stores, 0 bytes spill loads" in report, report
print(made.asm["ptx"])
"""


def ptx_of(module: str, kernel: str, scheme: str, arguments: dict[str, str], **rest: Any) -> str:
    """Return the PTX of a kernel for bfloat16 under a scheme; raises AssertionError where it fails or spills.

    arguments: types of what is passed at run time. rest: warps, whether products and sums are fused, the cut,
    whether scales are chosen, tokens of a layer, what is replaced in ``sweep`` or ``fit``, and constants of
    compilation besides ``k`` and ``f``.
    """
    asked = {"module": module, "kernel": kernel, "scheme": scheme, "arguments": arguments}
    asked |= {"warps": rest.pop("warps", 1), "fused": rest.pop("fused", False)}
    asked |= {"cut": rest.pop("cut", "segments"), "chosen": rest.pop("chosen", False)}
    asked["tokens"] = rest.pop("tokens", 0)
    asked["constants"] = rest
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(asked)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
