"""Check, then time, linear layers on a GPU: `python benchmarks/gpu_linear.py [--tiles] [--json FILE]`.

First outputs are compared on the host: those of integer codes byte for byte with scaled exact sums, those of
values of the weight with sums in float64, within the rounding of float32 sums and of the output. A difference
ends the run with exit code 1. Schemes are checked, and kernels compiled, in processes of their own. Then
layers without bias are timed next to torch's in bfloat16, over weights that together exceed the second-level
cache, in CUDA graphs: the median of the replays. GB/s counts the bytes of the weight, its scales included,
next to a copy.

A layer on codes (`int8:token` inputs) quantizes its input; that it waits for the device is not timed.
`--tiles` times other tiles too, and from how many tokens dequantizing pays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Calls, replayed

import zeropoint as zp
from zeropoint.kernels.triton import linear_tiles
from zeropoint.kernels.triton.linear_launch import LinearCodes, LinearValues
from zeropoint.kernels.triton.starts import Start, bits
from zeropoint.models import quantize_model
from zeropoint.ops import library
from zeropoint.ops.registry import Op, Request, kernel_of

VALUES = ("int4:g128:scale=bfloat16", "float8_e4m3fn:channel:scale=bfloat16", "mxfp4", "nvfp4", "nf4:g64")
CODES = ("int8:channel", "int4:g128")
CHECKED = (
    *VALUES,
    "int4:g128",
    "int8:channel",
    "uint4:g32:asym",
    "int3:g32",
    "mxfp6_e2m3",
    "float8_e4m3fn:block128x128",
)
SHAPES = ((4096, 4096), (14336, 4096))
TOKENS = (1, 16, 256, 4096)
CACHE = 256 << 20
"""Bytes that the weights of a graph exceed: several times a second-level cache."""
PROCESSES = 8
FEW_TILES = tuple(itertools.product((16, 32), (4, 8), (64, 128)))
"""Rows of a program, slices, and their width."""
TILES = ((64, 64, 64, 4), (64, 128, 64, 4), (64, 128, 64, 8), (128, 64, 64, 4), (128, 128, 64, 8))
"""Rows, tokens, columns of a step, and warps."""
CODE_TILES = ((64, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))
"""Rows, tokens, and warps of tiles of codes."""
DTYPE = torch.bfloat16
Row = dict[str, Any]


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


def wrong_values(scheme: str, dtype: torch.dtype) -> str | None:
    """Return which product with values is further from the exact one than roundings are, if any."""
    torch.manual_seed(0)
    for (rows, cols), tokens in itertools.product(((256, 4096), (70, 300)), (1, 16, 100, 300)):
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
        error = (found.cpu().double() - exact).abs()
        if not bool((error <= bound).all()):
            return (
                f"values of {scheme} {(rows, cols)}, {dtype}, {tokens} tokens: {(error / bound).max()} bounds"
            )
    return None


def wrong_codes(scheme: str, source: str) -> str | None:
    """Return which product of codes has other bytes, or of groups is further off than roundings, if any."""
    torch.manual_seed(0)
    for tokens in (1, 16, 40, 300):
        q, x = weight_of((208, 4096), scheme), torch.randn((tokens, 4096), device="cuda").to(DTYPE)
        bias = torch.randn(208, device="cuda").to(DTYPE)
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
        if groups == 1 and not torch.equal(found, expected.to(DTYPE)):
            return f"bytes of {scheme} codes and {source}, {tokens} tokens"
        # Both add scaled sums of groups in float32, in an order of their own, and the output is rounded.
        size = sums.abs().sum(-1) * given.scales[0].float() + bias.cpu().float().abs()
        bound = 2 * (groups + 4) * 2.0**-24 * size + torch.finfo(DTYPE).eps * expected.abs()
        if not bool(((found.float() - expected).abs() <= bound).all()):
            return f"{scheme} codes and {source}, {tokens} tokens"
    return None


def checked() -> list[str]:
    """Return what is wrong, of all schemes."""
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        asked = [pool.submit(wrong_values, scheme, DTYPE) for scheme in CHECKED]
        asked += [pool.submit(wrong_values, "int4:g128", dtype) for dtype in (torch.float16, torch.float32)]
        pairs = itertools.product(CODES, ("int8:token", "uint8:token:asym"))
        asked += [pool.submit(wrong_codes, *pair) for pair in pairs]
        return [wrong for each in asked if (wrong := each.result()) is not None]


def copy_rate() -> float:
    """Return the GB/s of a copy, read and written."""
    source = torch.randn(1 << 28, device="cuda", dtype=DTYPE)
    out = torch.empty_like(source)
    return 2 * source.nbytes / replayed([lambda: out.copy_(source)]) / 1e9


def copies(q: zp.QuantizedTensor) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return codes and parameters of the same weight in many places, which together exceed the cache."""
    count = max(2, -(-CACHE // size_of(q)))
    return [(q.data.clone(), [each.clone() for each in q.params.stored]) for _ in range(count)]


def size_of(q: zp.QuantizedTensor) -> int:
    """Return the bytes of codes and parameters."""
    return int(q.data.nbytes + sum(each.nbytes for each in q.params.stored))


def value_calls(q: zp.QuantizedTensor, x: torch.Tensor) -> Calls:
    """Return calls of layers on values, each with a weight of its own."""
    kernel = kernel_of(asked(Op.LINEAR_VALUES, q), "triton")
    layers = [kernel.run(*each, None) for each in copies(q)]
    return [lambda layer=layer: layer(x, None) for layer in layers]


def code_calls(q: zp.QuantizedTensor, x: torch.Tensor) -> Calls:
    """Return calls of layers on codes, which do not wait for the device."""
    launch = LinearCodes(asked(Op.LINEAR, q))
    out = x.new_empty((len(x), q.shape[0]))
    return [lambda each=each: launch.multiply(x, None, (*each, None), out) for each in copies(q)]


def measure(shape: tuple[int, int], tokens: int) -> list[Row]:
    """Return the microseconds of all layers of a shape."""
    x = torch.randn((tokens, shape[1]), device="cuda", dtype=DTYPE)
    plain = [
        torch.randn(shape, device="cuda", dtype=DTYPE) for _ in range(-(-CACHE // (2 * shape[0] * shape[1])))
    ]
    torchs = replayed([lambda w=w: torch.nn.functional.linear(x, w) for w in plain]) * 1e6
    del plain
    rows: list[Row] = []

    def add(name: str, nbytes: int, calls: Calls) -> None:
        took = replayed(calls) * 1e6
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
    for scheme in VALUES:
        q = weight_of(shape, scheme)
        add(scheme, size_of(q), value_calls(q, x))
    return rows


def explain() -> None:
    """Print how modules compute on the GPU."""
    for preset in ("w8a8", "w4a16", "fp8_dynamic", "nvfp4a16"):
        layer = quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 128)), preset).model.cuda()
        with torch.no_grad():
            layer(torch.randn((3, 256), device="cuda", dtype=DTYPE))
        print(f"{preset}: {layer[0].explain()}")


def tile_calls(q: zp.QuantizedTensor, x: torch.Tensor, shape: linear_tiles.Shape) -> Calls:
    """Return calls of the kernel that decodes tiles of a given shape."""
    request = asked(Op.LINEAR_VALUES, q)
    launch = LinearValues(request)
    paired = linear_tiles.value_tiles(request, len(x), bias=False).shape.paired
    cut = linear_tiles.layer_tiles(request, len(x), shape, bias=False, paired=paired)
    start = Start("value_products.multiply_values", cut, launch.weight.given._replace(cut=cut.shape))
    out = x.new_empty((len(x), q.shape[0]))

    def run(data: torch.Tensor, params: list[torch.Tensor]) -> None:
        given = launch.weight.scales(params)
        start(x.view(torch.int32) if paired else bits(x), data, *given, launch.values, given[0], bits(out))

    return [lambda each=each: run(*each) for each in copies(q)]


def code_tile_calls(q: zp.QuantizedTensor, x: torch.Tensor, shape: linear_tiles.Shape) -> Calls:
    """Return calls of the kernel that multiplies tiles of codes of a given shape."""

    def tiles(request: Request, tokens: int, *, bias: bool) -> linear_tiles.LayerTiles:
        return linear_tiles.layer_tiles(request, tokens, shape, bias=bias)

    launch, out = LinearCodes(asked(Op.LINEAR, q), tiles), x.new_empty((len(x), q.shape[0]))
    return [lambda each=each: launch.multiply(x, None, (*each, None), out) for each in copies(q)]


def whole_calls(q: zp.QuantizedTensor, x: torch.Tensor) -> Calls:
    """Return calls that dequantize the whole weight, and multiply with torch."""
    kernel = kernel_of(replace(asked(Op.LINEAR_VALUES, q), op=Op.DEQUANTIZE), "triton")
    return [lambda each=each: torch.nn.functional.linear(x, kernel.run(*each)) for each in copies(q)]


def tried(scheme: str, tokens: int) -> dict[str, Calls]:
    """Return calls by the tiles that they take, or by what else they do."""
    q, x = weight_of((4096, 4096), scheme), torch.randn((tokens, 4096), device="cuda", dtype=DTYPE)
    if scheme in CODES:
        shapes = [linear_tiles.Shape(r, t, 1, linear_tiles.WIDE, warps) for r, t, warps in CODE_TILES]
        return {str(tuple(shape)): code_tile_calls(q, x, shape) for shape in shapes}
    if tokens <= linear_tiles.FEW:
        shapes = [linear_tiles.Shape(r, linear_tiles.NARROW, s, w, s) for r, s, w in FEW_TILES]
    else:
        shapes = [linear_tiles.Shape(r, t, 1, w, warps) for r, t, w, warps in TILES if t <= tokens]
    found = {str(tuple(shape)): tile_calls(q, x, shape) for shape in shapes}
    return found | {"whole": whole_calls(q, x)}


def compile_tiles(scheme: str, tokens: int) -> None:
    """Call each of :func:`tried` once, which leaves what Triton compiles in its cache."""
    for calls in tried(scheme, tokens).values():
        calls[0]()


def try_tiles() -> None:
    """Print the microseconds of other tiles, and those of dequantizing the weight whole."""
    pairs = list(itertools.product((VALUES[0], "nvfp4", VALUES[1]), (1, 16, 64, 128, 256)))
    pairs += list(itertools.product(CODES, (256, 4096)))
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        list(pool.map(compile_tiles, *zip(*pairs, strict=True)))
    print("\n| weight 4096x4096 | tokens | rows, tokens, slices, width, warps: us |\n| --- | --- | --- |")
    for scheme, tokens in pairs:
        found = {name: replayed(calls) * 1e6 for name, calls in tried(scheme, tokens).items()}
        ordered = sorted(found.items(), key=lambda pair: pair[1])
        print(f"| {scheme} | {tokens} | {'; '.join(f'{n}: {t:.1f}' for n, t in ordered)} |", flush=True)


def torchs_products() -> Row:
    """Return what torch's own products of 8 bits take, and how far those of fp8 are from exact sums.

    fp8: the largest error over the sum of magnitudes, in units of 2**-24, of products of 4,096 numbers.
    """
    row: Row = {}
    a, b = (torch.randn((4096, 4096), device="cuda") for _ in range(2))
    codes = [(t.clamp(-3, 3) * 40).to(torch.int8) for t in (a, b)]
    row["int_mm us"] = replayed([lambda: torch._int_mm(codes[0], codes[1].t())]) * 1e6
    low = [t.to(torch.float8_e4m3fn) for t in (a[:64], b[:64])]
    one = torch.ones((), device="cuda")
    exact, size = (x[0] @ x[1].T for x in ([t.double() for t in low], [t.double().abs() for t in low]))
    found = {"float32": low[0].float() @ low[1].float().T}
    for fast in (False, True):
        try:
            found[f"fp8, fast={fast}"] = torch._scaled_mm(
                low[0], low[1].t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast
            )
        except RuntimeError as error:  # of a release that has no such product
            row[f"fp8, fast={fast}"] = str(error).splitlines()[0]
    return row | {name: float(((y.double() - exact).abs() / size).max() * 2**24) for name, y in found.items()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="time other tiles, too")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.manual_seed(0)
    wrong = checked()
    if wrong:
        sys.exit(f"wrong: {'; '.join(wrong)}")
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; layers are checked; copy {copy_rate():,.0f} GB/s")
    explain()
    print("\n| layer | weight | tokens | us | torch bfloat16 us | GB/s |\n|" + " --- |" * 6)
    rows = [row for shape, tokens in itertools.product(SHAPES, TOKENS) for row in measure(shape, tokens)]
    products = torchs_products()
    print(products)
    if given.tiles:
        try_tiles()
    if given.json:
        given.json.write_text(json.dumps({"gpu": gpu, "rows": rows, "torch": products}, indent=1) + "\n")


if __name__ == "__main__":
    main()
