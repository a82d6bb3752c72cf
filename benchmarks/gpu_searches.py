"""Check, then time, searches of scales and the gradient of fake quantization on a GPU.

    python benchmarks/gpu_searches.py [--rows 16384] [--columns 8192] [--json FILE]

First scales and gradients of a part are compared with the reference on the host; a difference ends the run
with exit code 1. Then each call is timed by the GPU's clock, on inputs that take turns so that none is in the
cache, next to a copy on the same device. GB/s counts bytes read plus written once, scales counted.
`search` is the operator, from scales that are there; `quantize` is a plan that chooses these, searches, and
encodes, which reads the numbers three times, of NVFP4 four times. A call includes what it does on the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_timing import in_turns, same_bytes

import zeropoint as zp
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of
from zeropoint.params.tensors import Params

SEARCHED = {
    "nvfp4": "nvfp4:scale=search", "nvfp4a16": "nvfp4a16:scale=search", "mxfp4": "mxfp4:scale=search",
    "mxfp8_e4m3": "mxfp8_e4m3:scale=search", "int4:g32:scale=ue4m3": "int4:g32:scale=search/ue4m3",
    "mxint8": "mxint8:scale=search", "int4:g128": "int4:g128:scale=search",
}  # fmt: skip
"""Schemes, and what quantizes under searched scales at once."""
MASKED = ("int8:channel", "int4:g128", "uint4:g32:asym", "float8_e4m3fn:channel", "mxfp4", "nvfp4", "nf4:g64")
CHECKED_ROWS = 16
BEYOND_CACHE = 1 << 28
"""Bytes of the inputs that take turns, at least: several times the largest cache."""
SECONDS = 0.25
"""Time for each figure, at most, after calls that are not counted."""
Row = dict[str, float | str]
timed = functools.partial(in_turns, seconds=SECONDS, least=20, most=100)


def start_of(x: torch.Tensor, scheme: str) -> Params:
    """Return the parameters that the rule of the scheme gives."""
    return list(zp.choose_params(x, scheme).stored)


def searched(x: torch.Tensor, params: Params, scheme: str, only: str = "triton") -> Params:
    """Return the parameters of least squared error."""
    found: Params = kernel_of(request(Op.SEARCH_PARAMS, x, zp.Scheme.parse(scheme)), only).run(x, params)
    return found


def planned(x: torch.Tensor, rule: str) -> zp.prepared.Plan:
    """Return a plan that quantizes tensors such as ``x`` under searched scales."""
    return zp.plan("quantize", rule, tuple(x.shape), x.dtype, device=x.device)


def masked(
    pair: tuple[torch.Tensor, torch.Tensor], params: Params, scheme: str, only: str = "triton"
) -> torch.Tensor:
    """Return the first of a pair, a gradient, where the second is not clipped."""
    asked = request(Op.FAKE_QUANTIZE_BACKWARD, pair[1], zp.Scheme.parse(scheme))
    kept: torch.Tensor = kernel_of(asked, only).run(*pair, params)
    return kept


def differences(x: torch.Tensor) -> list[str]:
    """Return what differs from the reference on the host, of all that is timed."""
    part, found = x.cpu(), []
    for scheme, rule in SEARCHED.items():
        with zp.only_backend("reference"):
            start = start_of(part, scheme)
            expected = searched(part, start, scheme, "reference")
            whole = zp.quantize(part, rule)
        levels, plan = searched(x, start_of(x, scheme), scheme), planned(x, rule)
        made = plan.run(x)
        plan.synchronize()
        if not all(map(same_bytes, levels, expected)):
            found.append(f"searched scales of {scheme}")
        pairs = zip((made.data, *made.params.stored), (whole.data, *whole.params.stored), strict=True)
        if not all(same_bytes(*pair) for pair in pairs):
            found.append(f"codes of {rule}")
    grad = torch.randn(x.shape).to(x.dtype)
    for scheme in MASKED:
        with zp.only_backend("reference"):
            params = start_of(part, scheme)
        there = masked((grad, part * 1.25), params, scheme, "reference")
        moved = [level.to(x.device) for level in params]
        if not same_bytes(masked((grad.to(x.device), x * 1.25), moved, scheme), there):
            found.append(f"gradients of {scheme}")
    return found


def figures(inputs: list[torch.Tensor]) -> list[Row]:
    """Return and print GB/s of each call, and its share of a copy's."""
    x, rows = inputs[0], list[Row]()
    out = torch.empty_like(x)
    copy = 2 * x.nbytes / timed([lambda x=x: out.copy_(x) for x in inputs])
    print(f"| call | GB/s | of copy |\n| --- | --- | --- |\n| copy | {copy / 1e9:,.0f} | 1.00 |", flush=True)

    def add(name: str, nbytes: int, calls: list[Callable[[], object]]) -> None:
        rate = nbytes / timed(calls)
        rows.append({"call": name, "gb_per_s": rate / 1e9, "of_copy": rate / copy})
        print(f"| {name} | {rate / 1e9:,.0f} | {rate / copy:.2f} |", flush=True)

    for scheme, rule in SEARCHED.items():
        starts = [start_of(x, scheme) for x in inputs]
        levels, codes = sum(level.nbytes for level in starts[0]), zp.quantize(x, rule).data.nbytes
        pairs = list(zip(inputs, starts, strict=True))
        add(f"search {scheme}", x.nbytes + 2 * levels, [lambda p=p, s=scheme: searched(*p, s) for p in pairs])
        plan, out_q = planned(x, rule), planned(x, rule).empty()
        calls: list[Callable[[], object]] = [lambda x=x, p=plan, q=out_q: p.run(x, out=q) for x in inputs]
        add(f"quantize {rule}", x.nbytes + codes + levels, calls)
    both = list(zip([torch.randn_like(x) for x in inputs], inputs, strict=True))
    for scheme in MASKED:
        params = start_of(x, scheme)
        levels = sum(level.nbytes for level in params)
        calls = [lambda b=b, p=params, s=scheme: masked(b, p, s) for b in both]
        add(f"backward {scheme}", 3 * x.nbytes + levels, calls)
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=8192, help="columns of bfloat16 numbers")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.manual_seed(0)
    shape = asked.rows, asked.columns
    turns = max(2, -(-BEYOND_CACHE // (2 * asked.rows * asked.columns)))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
    found = differences(inputs[0][:CHECKED_ROWS])
    if found:
        sys.exit(f"bytes differ from those of the reference: {', '.join(found)}")
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; searches and gradients have the reference's bytes\n")
    rows = figures(inputs)
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": gpu, "shape": shape, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
