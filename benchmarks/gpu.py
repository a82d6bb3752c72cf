"""Check, then time, the Triton kernels on a GPU: `python benchmarks/gpu.py [--rows N] [--json FILE]`.

First codes, scales and values of a part are compared with the reference on the host; a difference ends the
run with exit code 1. Then each call is timed by the GPU's clock next to a copy on the same device, and next
to torchao where it is installed: its MX and NVFP4 functions under torch.compile, its Triton kernel for fp8.

GB/s counts the bytes read plus written once, scales counted, though choosing scales of a whole tensor (nvfp4,
int8:tensor) reads the values twice. A call includes what it does on the host, such as the check for NaN.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zeropoint as zp

SCHEMES = (
    "int8:channel", "int8:tensor", "int4:g128", "uint4:g32:asym", "float8_e4m3fn:channel",
    "float8_e4m3fn:g128", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4:g64",
)  # fmt: skip
COLUMNS = 16384
CHECKED_ROWS = 48


def compare(scheme: str, x: torch.Tensor) -> None:
    """Exit when codes, scales or values differ from those of the reference on the host."""
    here, part = zp.quantize(x, scheme), x.cpu()
    with zp.only_backend("reference"):
        there = zp.quantize(part, scheme)
        values = there.dequantize()
    pairs = [
        (here.data, there.data),
        (here.dequantize(), values),
        *zip(here.scales, there.scales, strict=True),
    ]
    pairs.append((zp.fake_quantize(x, here.params), values))
    if not all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        sys.exit(f"bytes of {scheme} differ from those of the reference")


def peers(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls of torchao that quantize ``x``, by our scheme for the same format."""
    try:
        from torchao.prototype.blockwise_fp8_training import kernels as blockwise
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError:
        return {}
    mx, nv = torch.compile(to_mx), torch.compile(nvfp4_quantize)
    scale = x.float().abs().amax() / (448 * 6)
    return {
        "float8_e4m3fn:g128": lambda: blockwise.triton_fp8_blockwise_act_quant_lhs(x, 128),
        "mxfp8_e4m3": lambda: mx(x, torch.float8_e4m3fn, 32),
        "mxfp4": lambda: mx(x, torch.float4_e2m1fn_x2, 32),
        "nvfp4": lambda: nv(x, 16, scale),
    }


def measure(x: torch.Tensor) -> list[dict[str, Any]]:
    """Return GB/s of all operators, of the copy, and of peers."""
    from triton.testing import do_bench

    def rate(call: Callable[[], object], nbytes: int) -> float:
        return nbytes / do_bench(call, warmup=20, rep=80) / 1e6

    target, rows = torch.empty_like(x), []
    others = peers(x)
    for scheme in SCHEMES:
        q = zp.quantize(x, scheme)
        nbytes = x.nbytes + q.data.nbytes + sum(level.nbytes for level in q.scales)
        row: dict[str, Any] = {"scheme": scheme, "copy": rate(lambda: target.copy_(x), 2 * x.nbytes)}
        row["quantize"] = rate(lambda s=scheme: zp.quantize(x, s), nbytes)
        row["quantize, given scales"] = rate(lambda p=q.params: zp.quantize(x, p), nbytes)
        row["dequantize"] = rate(q.dequantize, nbytes)
        row["fake_quantize, given scales"] = rate(lambda p=q.params: zp.fake_quantize(x, p), 2 * x.nbytes)
        if scheme in others:
            try:
                row["torchao"] = rate(others[scheme], nbytes)
            except Exception as error:  # noqa: BLE001 (a peer that fails has no figure, and says why)
                row["torchao"] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row of the table: GB/s, and the share of the copy's."""
    scheme, copy, *cells = row.values()
    shown = [f"{cell:,.0f} ({cell / copy:.2f})" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"| {scheme} | {copy:,.0f} | " + " | ".join(shown) + " |"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=65536, help=f"rows of {COLUMNS} bfloat16 numbers")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.manual_seed(0)
    x = torch.randn(asked.rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
    for scheme in SCHEMES:
        compare(scheme, x[:CHECKED_ROWS])
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; {len(SCHEMES)} schemes have the reference's bytes\n")
    print("| scheme | copy | quantize | given scales | dequantize | fake_quantize | torchao |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = measure(x)
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": gpu, "shape": list(x.shape), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
