"""Check, then time, the Triton kernels on a GPU: `python benchmarks/gpu.py [--only NAME] [--json FILE]`.

First codes, scales and values are compared with the reference on the host, of random numbers and of numbers
where arithmetic goes wrong; a difference ends the run with exit code 1. Then plans are captured in CUDA
graphs, over buffers that together exceed the second-level cache, and replayed next to a copy of the numbers
on the same device: the median of the replays. At last the host's time of a run, and that it allocates
nothing.

GB/s counts the bytes read plus written once, scales counted, though the scale of a whole tensor (nvfp4) takes
a second read. `transposed` quantizes `x.t()` where it lies. Checks run in processes of their own, which
compile what is timed, too. torchao, where it is installed, is timed by the same graphs: its MX and NVFP4
functions under torch.compile, its Triton kernel for fp8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_timing import replayed

import zeropoint as zp
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of

SCHEMES = (
    "int8:channel", "int8:tensor", "int4:g128", "uint4:g32:asym", "float8_e4m3fn:channel",
    "float8_e4m3fn:g128", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "nf4:g64",
)  # fmt: skip
BLOCKS = "float8_e4m3fn:block128x128", "float8_e4m3fn:block16x32", "int8:block32x1"
TRANSPOSED = (
    "int8:channel", "int8:tensor", "int4:g128", "float8_e4m3fn:g128", "mxfp8_e4m3", "mxfp4", "nvfp4",
    *BLOCKS,
)  # fmt: skip
COLUMNS = 8192
DTYPES = torch.bfloat16, torch.float32, torch.float16
CACHE = 256 << 20
"""Bytes that the buffers of a graph exceed: several times a second-level cache."""


def odd_rows(scheme: str) -> torch.Tensor:
    """Return rows where arithmetic goes wrong, float32: ties, subnormals, zeros, both ends of the range."""
    generator = torch.Generator().manual_seed(len(scheme))
    x = torch.randn(40, COLUMNS, generator=generator)
    x[1], x[2, ::3], x[3] = 0.0, -0.0, 2.0**-140
    x[4:12] *= torch.logspace(-37, 37, 8)[:, None]
    x[12] = torch.arange(COLUMNS) % 33 / 4 - 4
    x[13] = torch.nextafter(x[12], x[12] + 1)
    x[14:20] = torch.randint(-127, 128, (6, COLUMNS), generator=generator) / 2
    x[20:, ::16] = 0.0
    return x.abs() if zp.Scheme.parse(scheme).element.min >= 0 and "asym" not in scheme else x


def compare(scheme: str, x: torch.Tensor) -> None:
    """Exit when codes, scales or values differ from those of the reference on the host."""
    for part in (x, x[:, :-7].contiguous()):
        if part.shape[1] == COLUMNS or not zp.Scheme.parse(scheme).granularity.extents:
            compare_part(scheme, part.cuda())


def compare_transposed(scheme: str, x: torch.Tensor) -> None:
    """Do the same for transposed views; of bfloat16, also ragged ones with gaps, and several matrices."""
    square = x.reshape(5, -1, 256).cuda()
    flat = square.flatten(0, 1)
    views = [flat.t()]
    if x.dtype is torch.bfloat16:
        views += [flat[:-7, :-6].t()] + [square.transpose(1, 2)] * (scheme not in BLOCKS)
    for view in views:
        compare_part(scheme, view)


def compare_part(scheme: str, part: torch.Tensor) -> None:
    """Do the same for one tensor on the device."""
    here, host = zp.quantize(part, scheme), part.cpu().contiguous()
    with zp.only_backend("reference"):
        there = zp.quantize(host, scheme)
        values, far = there.dequantize(), zp.quantize(host * 1.25, there.params).data
        rounded = zp.fake_quantize(host * 1.25, there.params)
    pairs = [(here.data, there.data), (here.dequantize(), values)]
    pairs += zip(here.scales, there.scales, strict=True)
    pairs.append((zp.quantize(part * 1.25, here.params).data, far))
    pairs.append((zp.fake_quantize(part * 1.25, here.params), rounded))
    for place, (a, b) in enumerate(pairs):
        if not torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)):
            wrong = a.cpu().view(torch.uint8) != b.view(torch.uint8)
            where = torch.nonzero(wrong)[0].tolist()
            sys.exit(
                f"bytes of {scheme}, {part.dtype} {tuple(part.shape)}, strides {part.stride()} differ, "
                f"part {place}: {int(wrong.sum())}, first at {where}"
            )


def check(scheme: str, dtype: torch.dtype, only: tuple[str, ...], rows: int) -> None:
    """Compare one scheme's bytes with the reference, and compile what :func:`measure` times."""
    torch.set_num_threads(1)
    odd, small = odd_rows(scheme).to(dtype), torch.rand(16, COLUMNS).to(dtype)
    odd = torch.where(odd.abs() < torch.finfo(dtype).max / 2, odd, 1.0)
    if only != ("transposed",):
        compare(scheme, odd)
        compare(scheme, small)
    if scheme in TRANSPOSED and dtype is not torch.float16:
        compare_transposed(scheme, odd)
    if dtype is torch.bfloat16:
        measure(scheme, rows, only=only, timed=False)


def peers(scheme: str) -> Callable[[torch.Tensor], object] | None:
    """Return torchao's function for the format of ``scheme``, or None."""
    try:
        from torchao.prototype.blockwise_fp8_training import kernels as blockwise
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError:
        return None
    mx, nv = torch.compile(to_mx), torch.compile(nvfp4_quantize)
    scale = torch.tensor(4.0 / (448 * 6), device="cuda")
    return {
        "float8_e4m3fn:g128": lambda x: blockwise.triton_fp8_blockwise_act_quant_lhs(x, 128),
        "mxfp8_e4m3": lambda x: mx(x, torch.float8_e4m3fn, 32),
        "mxfp4": lambda x: mx(x, torch.float4_e2m1fn_x2, 32),
        "nvfp4": lambda x: nv(x, 16, scale),
    }.get(scheme)


def bytes_of(q: zp.QuantizedTensor) -> int:
    """Return the bytes of codes and scales."""
    return q.data.nbytes + sum(level.nbytes for level in q.scales)


def transposed(scheme: str, sets: list[torch.Tensor]) -> tuple[list[Callable[[], object]], int]:
    """Return calls that quantize transposed tensors where they lie, and the bytes of each."""
    views = [x.t() for x in sets]
    first = views[0]
    plan = zp.plan(
        "quantize", scheme, tuple(first.shape), first.dtype, strides=first.stride(), device=first.device
    )
    made = [plan.empty() for _ in views]
    calls = [lambda x=x, q=q: plan.run(x, out=q) for x, q in zip(views, made, strict=True)]
    return calls, first.nbytes + bytes_of(made[0])


def measure(scheme: str, rows: int, *, only: tuple[str, ...] = (), timed: bool = True) -> dict[str, Any]:
    """Return GB/s of the copy and of the operators, by name; timed: rather than run once each."""
    shape = rows, COLUMNS
    count = max(1, -(-CACHE // (rows * COLUMNS * 2))) if timed else 1
    sets = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    outs = [torch.empty_like(x) for x in sets]
    row: dict[str, Any] = {"scheme": scheme, "rows": rows}

    def note(name: str, calls: list[Callable[[], object]], moved: int) -> None:
        if not timed:
            calls[0]()
        elif not only or name in only:
            row[name] = moved / replayed(calls) / 1e9

    if timed:
        # A graph copies by another way, at two thirds of the speed.
        copies = [lambda x=x, o=o: o.copy_(x) for x, o in zip(sets, outs, strict=True)]
        row["copy"] = 2 * sets[0].nbytes / replayed(copies, graph=False) / 1e9
    if scheme in TRANSPOSED:
        note("transposed", *transposed(scheme, sets))
    if only == ("transposed",):
        return row
    codes = [zp.quantize(x, scheme) for x in sets]
    nbytes = sets[0].nbytes + bytes_of(codes[0])
    chosen = zp.plan("quantize", scheme, shape, torch.bfloat16, device="cuda")
    if chosen.allocates is None:
        made = [chosen.empty() for _ in sets]
        note(
            "quantize",
            [lambda x=x, q=q: chosen.run(x, out=q) for x, q in zip(sets, made, strict=True)],
            nbytes,
        )
    if chosen.allocates is None and len(codes[0].scales) > 1:
        launch = kernel_of(request(Op.QUANTIZE_DYNAMIC, sets[0], zp.Scheme.parse(scheme)), "triton").launch
        notes = torch.zeros(2, dtype=torch.int32, device="cuda")
        note("amax given", [
            lambda x=x, q=q: launch.choose_and_encode(x, (q.data, q.params.stored), notes, known=True)
            for x, q in zip(sets, made, strict=True)
        ], nbytes)  # fmt: skip
    given = codes[0].params
    encode = zp.plan("quantize", given, shape, torch.bfloat16, device="cuda")
    filled = [encode.empty() for _ in sets]
    note("given", [lambda x=x, q=q: encode.run(x, out=q) for x, q in zip(sets, filled, strict=True)], nbytes)
    decode = zp.plan("dequantize", given, shape, torch.bfloat16, device="cuda")
    note(
        "dequantize",
        [lambda q=q, o=o: decode.run(q, out=o) for q, o in zip(filled, outs, strict=True)],
        nbytes,
    )
    fake = zp.plan("fake_quantize", given, shape, torch.bfloat16, device="cuda")
    note(
        "fake",
        [lambda x=x, o=o: fake.run(x, out=o) for x, o in zip(sets, outs, strict=True)],
        2 * sets[0].nbytes,
    )
    peer = peers(scheme)
    if peer is not None:
        try:
            note("torchao", [lambda x=x: peer(x) for x in sets], nbytes)
        except Exception as error:  # noqa: BLE001 (a peer that fails has no figure, and says why)
            row["torchao"] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return row


NAMES = ("quantize", "transposed", "amax given", "given", "dequantize", "fake", "torchao")


def line(row: dict[str, Any]) -> str:
    """Return a row of the table: GB/s, and the share of the copy's."""
    copy = row["copy"]
    cells = [row.get(name, "") for name in NAMES]
    shown = [f"{cell:,.0f} ({cell / copy:.2f})" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"| `{row['scheme']}` | {copy:,.0f} | " + " | ".join(shown) + " |"


def host_time(scheme: str) -> dict[str, Any]:
    """Return the host's microseconds for a run of a plan, and for a replay, and what 100 runs allocate."""
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    plan = zp.plan("quantize", zp.quantize(x, scheme).params, tuple(x.shape), x.dtype, device="cuda")
    out, found = plan.empty(), {"scheme": scheme}
    plan.run(x, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            plan.run(x, out=out)
        times.append((time.perf_counter() - start) / 50)
        torch.cuda.synchronize()
    found["run"] = statistics.median(times) * 1e6
    found["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(x, out=out)
    expected = zp.quantize(x * 0.5, plan.signature.params).data
    x.mul_(0.5)
    start = time.perf_counter()
    graph.replay()
    found["replay"] = (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    found["equal"] = torch.equal(out.data, expected)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1024, 64], help="of bfloat16 numbers")
    parser.add_argument("--schemes", nargs="+", help="those to check and time")
    parser.add_argument("--only", nargs="+", default=(), choices=NAMES, help="columns to time; all of them")
    parser.add_argument("--dtypes", type=int, default=3, help="to check: bfloat16, float32, float16")
    parser.add_argument("--jobs", type=int, default=12, help="processes that check schemes")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.manual_seed(0)
    only = tuple(asked.only)
    asked.schemes = asked.schemes or (TRANSPOSED if only == ("transposed",) else (*SCHEMES, *BLOCKS))
    least = (min(asked.megabytes) << 20) // (2 * COLUMNS)
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as processes:
        pairs = itertools.product(DTYPES[: asked.dtypes], asked.schemes)
        for found in [processes.submit(check, scheme, dtype, only, least) for dtype, scheme in pairs]:
            found.result()
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; {len(asked.schemes)} schemes have the reference's bytes")
    rows = []
    for megabytes in asked.megabytes:
        print(
            f"\n| {megabytes} MB | copy | " + " | ".join(NAMES) + " |\n| --- | --- |" + " --- |" * len(NAMES)
        )
        for scheme in asked.schemes:
            rows.append(measure(scheme, (megabytes << 20) // (2 * COLUMNS), only=only))
            print(line(rows[-1]), flush=True)
    hosts = [
        host_time(each) for each in ("int8:channel", "mxfp4", "nvfp4") if each in asked.schemes and not only
    ]
    for found in hosts:
        print(found)
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": gpu, "rows": rows, "host": hosts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
