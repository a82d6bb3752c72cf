"""Check, then time, linear layers on a GPU: `python benchmarks/gpu_linear.py [--tiles] [--json FILE]`.

First outputs are compared on the host: those of integer codes byte for byte with scaled exact sums, those of
values of the weight with sums in float64, within the rounding of float32 sums and of the output. A difference
ends the run with exit code 1. Then layers without bias are timed next to torch's in bfloat16, over weights
that together exceed the second-level cache, in CUDA graphs: the median of the replays. GB/s counts the bytes
of the weight, its scales included, next to a copy.

A layer on codes (`int8:token` inputs) quantizes its input; that it waits for the device is not timed.
`--tiles` times other tiles too, and from how many tokens dequantizing pays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zeropoint as zp
from zeropoint.kernels.triton import linear_tiles
from zeropoint.kernels.triton.linear_launch import LinearValues
from zeropoint.kernels.triton.starts import Start, bits
from zeropoint.ops import library
from zeropoint.ops.registry import Op, Request, kernel_of

VALUES = ("int4:g128", "float8_e4m3fn:channel", "mxfp4", "nvfp4", "nf4:g64")
CODES = ("int8:channel", "int4:g128")
CHECKED = (*VALUES, "int8:channel", "uint4:g32:asym", "int3:g32", "mxfp6_e2m3", "float8_e4m3fn:block128x128")
SHAPES = ((4096, 4096), (14336, 4096))
TOKENS = (1, 16, 256, 4096)
CACHE = 256 << 20
"""Bytes that the weights of a graph exceed: several times a second-level cache."""
REPLAYS = 9
FEW_TILES = tuple(itertools.product((16, 32), (4, 8), (64, 128)))
"""Rows of a program, slices, and their width."""
TILES = ((64, 64, 64, 4), (64, 128, 64, 4), (64, 128, 64, 8), (128, 64, 64, 4), (128, 128, 64, 8))
"""Rows, tokens, columns of a step, and warps."""
DTYPE = torch.bfloat16
Row = dict[str, Any]
Calls = list[Callable[[], object]]


def weight_of(shape: tuple[int, int], scheme: str) -> zp.QuantizedTensor:
    """Return a quantized random weight."""
    return zp.quantize(torch.randn(shape, device="cuda", dtype=DTYPE), scheme)


def asked(op: Op, q: zp.QuantizedTensor, dtype: torch.dtype = DTYPE) -> Request:
    """Return the request of a layer; inputs on codes are int8 with a scale for each token."""
    source = zp.Scheme.parse("int8:token") if op is Op.LINEAR else None
    return Request(
        op=op, scheme=q.scheme, shape=tuple(q.shape), dtype=dtype, own_dtype=q.dtype, device=q.data.device,
        source=source,
    )  # fmt: skip


def check_values(scheme: str, dtype: torch.dtype) -> None:
    """Exit where a product with values of the weight is further from the exact one than roundings are."""
    for (rows, cols), tokens in itertools.product(((208, 4096), (70, 300)), (1, 16, 40, 100, 300)):
        if cols == 300 and zp.Scheme.parse(scheme).granularity.extents:
            continue
        q, x = weight_of((rows, cols), scheme), torch.randn((tokens, cols), device="cuda").to(dtype)
        bias = torch.randn(rows, device="cuda").to(dtype)
        with zp.only_backend("triton"):
            found = library.linear_values(x, q.data, list(q.params.stored), bias, str(q.scheme), q.dtype)
        with zp.only_backend("reference"):
            values = q.to("cpu").dequantize(dtype).double()
        exact = x.cpu().double() @ values.T + bias.cpu().double()
        size = x.cpu().double().abs() @ values.abs().T + bias.cpu().double().abs()
        bound = cols * 2.0**-24 * size + torch.finfo(dtype).eps * exact.abs() / 2
        if not bool(((found.cpu().double() - exact).abs() <= bound).all()):
            sys.exit(f"products with values of {scheme} {(rows, cols)}, {dtype}, {tokens} tokens are wrong")


def check_codes(scheme: str, source: str, dtype: torch.dtype) -> None:
    """Exit where a product of codes differs: in its bytes, or, of groups, by more than roundings do."""
    for tokens in (1, 16, 40, 300):
        q, x = weight_of((208, 4096), scheme), torch.randn((tokens, 4096), device="cuda").to(dtype)
        bias = torch.randn(208, device="cuda").to(dtype)
        with zp.only_backend("triton"):
            found = library.linear(
                x, [], q.data, list(q.params.stored), bias, source, str(q.scheme), q.dtype
            ).cpu()
        with zp.only_backend("reference"):
            given, weight = zp.quantize(x.cpu(), source), q.to("cpu")
        codes = given.codes.double() - (0 if given.zero_point is None else given.zero_point)
        factors = weight.scales[0].float()
        groups = factors.shape[1]
        parts = codes.reshape(tokens, groups, -1), weight.codes.double().reshape(208, groups, -1)
        sums = torch.einsum("mgk,ngk->mng", *parts).float() * factors
        expected = sums.sum(-1) * given.scales[0].float() + bias.cpu().float()
        if groups == 1 and not torch.equal(found, expected.to(dtype)):
            sys.exit(f"bytes of products of {scheme} codes and {source} differ, {dtype}, {tokens} tokens")
        if not torch.allclose(found.float(), expected, rtol=torch.finfo(dtype).eps, atol=2e-3):
            sys.exit(f"products of {scheme} codes and {source}, {dtype}, {tokens} tokens are wrong")


def seconds(calls: Calls) -> float:
    """Return the median time of a call, of all of them in turns, in a graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(found)


def copy_rate() -> float:
    """Return the GB/s of a copy, read and written."""
    source = torch.randn(1 << 28, device="cuda", dtype=DTYPE)
    out = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: out.copy_(source)]) / 1e9


def copies(q: zp.QuantizedTensor, nbytes: int) -> list[zp.QuantizedTensor]:
    """Return weights that together exceed the cache, of other places."""
    count = max(2, -(-CACHE // nbytes))
    return [replace(q, data=q.data.clone()) for _ in range(count)]


def size_of(q: zp.QuantizedTensor) -> int:
    """Return the bytes of codes and parameters."""
    return int(q.data.nbytes + sum(each.nbytes for each in q.params.stored))


def value_calls(q: zp.QuantizedTensor, x: torch.Tensor, only: str) -> Calls:
    """Return calls of layers on values, each with a weight of its own."""
    kernel = kernel_of(asked(Op.LINEAR_VALUES, q), only)
    layers = [kernel.run(each.data, list(q.params.stored), None) for each in copies(q, size_of(q))]
    return [lambda layer=layer: layer(x, None) for layer in layers]


def code_calls(q: zp.QuantizedTensor, x: torch.Tensor) -> Calls:
    """Return calls of layers on codes, which do not wait for the device."""
    launch = kernel_of(asked(Op.LINEAR, q), "triton").launch  # type: ignore[attr-defined]
    params, out = list(q.params.stored), x.new_empty((len(x), q.shape[0]))
    weights = [(each.data, params, None) for each in copies(q, size_of(q))]
    return [lambda w=w: launch.multiply(x, None, w, out) for w in weights]


def measure(shape: tuple[int, int], tokens: int, backends: list[str]) -> list[Row]:
    """Return the microseconds of all layers of a shape."""
    x = torch.randn((tokens, shape[1]), device="cuda", dtype=DTYPE)
    plain = [
        torch.randn(shape, device="cuda", dtype=DTYPE) for _ in range(-(-CACHE // (2 * shape[0] * shape[1])))
    ]
    torchs = seconds([lambda w=w: torch.nn.functional.linear(x, w) for w in plain]) * 1e6
    del plain
    rows: list[Row] = []

    def add(name: str, nbytes: int, calls: Calls) -> None:
        took = seconds(calls) * 1e6
        row: Row = {"layer": name, "shape": shape, "tokens": tokens, "us": took, "bfloat16_us": torchs}
        row["gb_per_s"] = nbytes / took / 1e3
        rows.append(row)
        rate = f"{row['gb_per_s']:,.0f}" if tokens == 1 else ""
        print(
            f"| {name} | {shape[0]}x{shape[1]} | {tokens} | {took:.1f} | {torchs:.1f} | {rate} |", flush=True
        )

    for scheme in CODES:
        q = weight_of(shape, scheme)
        add(f"{scheme}, int8:token", size_of(q), code_calls(q, x))
    for scheme, only in itertools.product(VALUES, backends):
        q = weight_of(shape, scheme)
        if only == "triton" or not kernel_refusal(q, only):
            add(f"{scheme}, {only}", size_of(q), value_calls(q, x, only))
    return rows


def kernel_refusal(q: zp.QuantizedTensor, only: str) -> str | None:
    """Return why a backend does not run layers on values of a weight, or None."""
    try:
        kernel_of(asked(Op.LINEAR_VALUES, q), only)
    except zp.UnsupportedError as error:
        return str(error)
    return None


def tile_calls(q: zp.QuantizedTensor, x: torch.Tensor, shape: linear_tiles.Shape) -> Calls:
    """Return calls of the kernel that decodes tiles of a given shape."""
    request = asked(Op.LINEAR_VALUES, q)
    launch = LinearValues(request)
    cut = linear_tiles.tiles_of(request, len(x), shape, bias=False)
    start = Start("value_products.multiply_values", cut, launch.weight.given._replace(cut=cut.shape))
    given, out = launch.weight.scales(list(q.params.stored)), x.new_empty((len(x), q.shape[0]))
    return [
        lambda data=each.data: start(bits(x), data, *given, launch.values, given[0], out)
        for each in copies(q, size_of(q))
    ]


def whole_calls(q: zp.QuantizedTensor, x: torch.Tensor) -> Calls:
    """Return calls that dequantize the whole weight, and multiply with torch."""
    kernel = kernel_of(replace(asked(Op.LINEAR_VALUES, q), op=Op.DEQUANTIZE), "triton")
    params = list(q.params.stored)
    return [
        lambda data=each.data: torch.nn.functional.linear(x, kernel.run(data, params))
        for each in copies(q, size_of(q))
    ]


def try_tiles() -> None:
    """Print the microseconds of other tiles, and those of dequantizing the weight whole."""
    print("\n| weight 4096x4096 | tokens | rows, tokens, slices, width, warps: us |\n| --- | --- | --- |")
    for scheme in ("int4:g128", "nvfp4", "float8_e4m3fn:channel"):
        q = weight_of((4096, 4096), scheme)
        for tokens in (1, 16):
            x = torch.randn((tokens, 4096), device="cuda", dtype=DTYPE)
            tried = [linear_tiles.Shape(r, 16, s, w, s) for r, s, w in FEW_TILES]
            show(scheme, tokens, {tuple(t): tile_calls(q, x, t) for t in tried})
        for tokens in (64, 128, 256):
            x = torch.randn((tokens, 4096), device="cuda", dtype=DTYPE)
            tried = [linear_tiles.Shape(r, t, 1, w, warps) for r, t, w, warps in TILES if t <= tokens]
            calls: dict[Any, Calls] = {tuple(t): tile_calls(q, x, t) for t in tried}
            calls["whole"] = whole_calls(q, x)
            show(scheme, tokens, calls)


def show(scheme: str, tokens: int, calls: dict[Any, Calls]) -> None:
    """Print the microseconds of calls by name."""
    found = {name: seconds(each) * 1e6 for name, each in calls.items()}
    cells = "; ".join(f"{name}: {took:.1f}" for name, took in sorted(found.items(), key=lambda pair: pair[1]))
    print(f"| {scheme} | {tokens} | {cells} |", flush=True)


def torchs_products() -> Row:
    """Return what torch's own products of 8 bits take, and how far those of fp8 are from exact sums.

    fp8: the largest error over the sum of magnitudes, in units of 2**-24, of products of 4,096 numbers.
    """
    row: Row = {}
    a, b = (torch.randn((4096, 4096), device="cuda") for _ in range(2))
    codes = [(t.clamp(-3, 3) * 40).to(torch.int8) for t in (a, b)]
    row["int_mm us"] = seconds([lambda: torch._int_mm(codes[0], codes[1].t())]) * 1e6
    low = [t.to(torch.float8_e4m3fn) for t in (a[:64], b[:64])]
    one = torch.ones((), device="cuda")
    exact, size = (x[0] @ x[1].T for x in ([t.double() for t in low], [t.double().abs() for t in low]))
    for fast in (False, True):
        found = torch._scaled_mm(
            low[0], low[1].t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast
        )
        row[f"fp8 error, fast={fast}"] = float(((found.double() - exact).abs() / size).max() * 2**24)
    plain = low[0].float() @ low[1].float().T
    row["float32 error"] = float(((plain.double() - exact).abs() / size).max() * 2**24)
    return row


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="time other tiles, too")
    parser.add_argument("--backends", nargs="+", default=["triton"], help="of products with values")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.manual_seed(0)
    for scheme in CHECKED:
        check_values(scheme, DTYPE)
    for dtype in (torch.float16, torch.float32):
        check_values("int4:g128", dtype)
    for scheme, source in itertools.product(CODES, ("int8:token", "uint8:token:asym")):
        check_codes(scheme, source, DTYPE)
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; layers are checked; copy {copy_rate():,.0f} GB/s")
    products = torchs_products()
    print(products)
    print("\n| layer | weight | tokens | us | torch bfloat16 us | GB/s |\n|" + " --- |" * 6)
    rows = [
        row
        for shape, tokens in itertools.product(SHAPES, TOKENS)
        for row in measure(shape, tokens, given.backends)
    ]
    if given.tiles:
        try_tiles()
    if given.json:
        given.json.write_text(json.dumps({"gpu": gpu, "rows": rows, "torch": products}, indent=1) + "\n")


if __name__ == "__main__":
    main()
