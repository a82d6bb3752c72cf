"""Check, then time, stochastic rounding, statistics, K-quants, errors and layouts of codes on a GPU.

    python benchmarks/gpu_statistics.py [--megabytes 1024] [--json FILE]

First results for small tensors are compared with those of the reference on the host; a difference ends the
run with exit code 1. Then each call is timed by the GPU's clock, on inputs that take turns so that none is in
the cache, next to a copy on the same device. GB/s counts bytes read plus written once, scales counted; for
statistics and errors that is what they read, since they write almost nothing. Lines that begin with `torch`
are the same in plain torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from gpu_timing import in_turns, same_bytes

import zeropoint as zp
from zeropoint import stats
from zeropoint.codecs.gguf import BLOCKS, BlockType
from zeropoint.codecs.words import INTERLEAVED, rows_of_words, words_of_rows
from zeropoint.functional import row_errors
from zeropoint.kernels.triton.statistics_launch import COUNTER
from zeropoint.layout.runs import Runs
from zeropoint.layout.word_lines import WordLines
from zeropoint.ops.library import fake_quantize_backward
from zeropoint.ops.registry import Op, Request, kernel_of

ROUNDED = ("int8:channel", "mxfp4", "nvfp4")
OTHERS = ("float8_e4m3fn:channel:round=ceil",)
SEEDS = (1, 7, 32)
"""Seeds of the checks: a compiled kernel must know nothing of the first one, which is 1."""
GRANULARITIES = ("tensor", "channel1", "g128")
CHAINED = ("q4_k", "q6_k")
MEASURED = ("int8:channel", "nvfp4")
PACKED = ("Q4_K", "Q5_0")
ALONG = WordLines()
COLUMNS, FEW = 8192, 48
BEYOND_CACHE = 1 << 28
SECONDS = 0.12
"""Time for each figure, at most, after calls that are not counted."""
UINT4 = zp.Scheme.parse("uint4:g128")
Row = dict[str, float | str]
timed = functools.partial(in_turns, seconds=SECONDS, least=5, most=50)


def odd_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of normal numbers, ties, subnormal numbers and zeros of both signs."""
    x = torch.randn(FEW, columns)
    x[1], x[2, ::3], x[3] = 0.0, -0.0, 2.0**-140
    x[4:12] *= torch.logspace(-30, 30, 8)[:, None] if dtype is not torch.float16 else 1.0
    x[12] = torch.arange(columns) % 33 / 4 - 4
    return x.to(dtype)


def rounding_differences(scheme: str, x: torch.Tensor, device: str) -> Iterator[str]:
    """Yield what differs under a scheme."""
    parsed, far, grad = zp.Scheme.parse(scheme), x * 1.25, torch.randn(x.shape).to(x.dtype)
    with zp.only_backend("reference"):
        q = zp.quantize(x, parsed)
        expected = {
            "dynamic codes": q.data,
            "values of codes": q.dequantize(),
            "given codes": zp.quantize(far, q.params).data,
            "values": zp.fake_quantize(far, q.params),
            "gradients": fake_quantize_backward(grad, far, list(q.params.stored), scheme),
        }
    x, far, grad, params = x.to(device), far.to(device), grad.to(device), q.params.to(device)
    with zp.only_backend("triton"):
        found = {
            "dynamic codes": zp.quantize(x, parsed).data,
            "values of codes": q.to(device).dequantize(),
            "given codes": zp.quantize(far, params).data,
            "values": zp.fake_quantize(far, params),
            "gradients": fake_quantize_backward(grad, far, list(params.stored), scheme),
        }
    for name, result in expected.items():
        if not same_bytes(result, found[name]):
            wrong = result.view(torch.uint8) != found[name].cpu().view(torch.uint8)
            where = wrong.nonzero()[0].tolist()
            yield f"{int(wrong.sum())} bytes of {name} of {scheme}, {x.dtype}, first at {where}"


def statistic_differences(device: str) -> Iterator[str]:
    """Yield what differs of statistics."""
    x = torch.randn(256, 1024) * torch.exp(8 * torch.randn(256, 1024))
    x[3, 5], x[7] = -0.0, 1e-41
    for text in GRANULARITIES:
        granularity = zp.Scheme.parse(f"int8:{text}").granularity
        for kind in (stats.MinMax, stats.Histogram, stats.AbsoluteMean):
            for bad in (False, True):
                y = x.clone()
                if bad:
                    y[100, 100], y[9, 1] = torch.nan, -torch.inf
                found = kind(granularity=granularity, shape=tuple(y.shape))
                with zp.only_backend("reference"):
                    expected = found.measure(y.to(torch.bfloat16))
                with zp.only_backend("triton"):
                    state = found.measure(y.to(device, torch.bfloat16))
                for name, each in expected.items():
                    if not same_bytes(each, state[name]):
                        yield f"{name} of {kind.__name__} per {text}, {'NaN' if bad else 'finite'}"


def error_differences(device: str) -> Iterator[str]:
    """Yield what differs of measured errors."""
    x = odd_rows(COLUMNS, torch.bfloat16)
    far = x * 1.25
    for scheme in MEASURED:
        with zp.only_backend("reference"):
            q = zp.quantize(far, zp.quantize(x, scheme).params)
            expected = row_errors(far, q)
        with zp.only_backend("triton"):
            found = row_errors(far.to(device), q.to(device))
        for name in ("squares", "errors"):
            a, b = (torch.from_numpy(getattr(each, name)) for each in (found, expected))
            if not torch.allclose(a, b, rtol=1e-13, atol=0):
                yield f"{name} of {scheme} by {float(((a - b) / b).abs().nan_to_num().max())}"
        if found.clipped.tolist() != expected.clipped.tolist():
            yield f"clipped numbers of {scheme}"
        if found.largest.tolist() != expected.largest.tolist():
            yield f"largest errors of {scheme}"


def block_request(op: Op, kind: BlockType, shape: tuple[int, ...], device: str) -> Request:
    """Return what joins or splits blocks of a type."""
    place, dtype = torch.empty(0, device=device).device, torch.float32
    return Request(op=op, scheme=kind.scheme, shape=shape, dtype=dtype, own_dtype=dtype, device=place)


def layout_differences(device: str) -> Iterator[str]:
    """Yield what differs of blocks and words."""
    for name in PACKED:
        kind, shape = BLOCKS[name], (40, 8 * BLOCKS[name].block)
        lines = torch.randint(0, 256, (40, 8 * kind.struct.nbytes), dtype=torch.uint8)
        split = kernel_of(block_request(Op.SPLIT_BLOCKS, kind, shape, "cpu"), "reference")
        data, params = split.run(kind.struct, lines)
        split = kernel_of(block_request(Op.SPLIT_BLOCKS, kind, shape, device), "triton")
        here, levels = split.run(kind.struct, lines.to(device))
        if not all(map(same_bytes, (here, *levels), (data, *params))):
            yield f"codes or levels of {name}"
        join = kernel_of(block_request(Op.JOIN_BLOCKS, kind, shape, device), "triton")
        if not same_bytes(join.run(kind.struct, here, levels), lines):
            yield f"blocks of {name}"
    data = torch.randint(0, 256, (136, 132), dtype=torch.uint8)
    for order in (ALONG, INTERLEAVED, replace(INTERLEAVED, flip=0x89ABCDEF)):
        with zp.only_backend("reference"):
            expected = words_of_rows(data, UINT4, (136, 264), order)
        with zp.only_backend("triton"):
            found = words_of_rows(data.to(device), UINT4, (136, 264), order)
            back = rows_of_words(found, UINT4, (136, 264), order)
        if not same_bytes(found, expected) or not same_bytes(back, data):
            yield f"words of {order}"


def differences(device: str) -> Iterator[str]:
    """Yield what differs from the reference on the host, of all that is timed."""
    for scheme in ROUNDED:
        for seed in SEEDS:
            yield from rounding_differences(
                f"{scheme}:round=stochastic({seed})", odd_rows(COLUMNS, torch.bfloat16), device
            )
    yield from rounding_differences("int8:channel:round=stochastic(5)", torch.randn(33, 1001), device)
    for scheme in CHAINED:
        yield from rounding_differences(scheme, torch.randn(FEW, COLUMNS).to(torch.bfloat16), device)
    for scheme in OTHERS:
        yield from rounding_differences(scheme, odd_rows(COLUMNS, torch.bfloat16), device)
    yield from statistic_differences(device)
    yield from error_differences(device)
    yield from layout_differences(device)


class Table:
    """Figures, printed as they come."""

    def __init__(self, nbytes: int) -> None:
        turns = max(2, -(-BEYOND_CACHE // nbytes))
        shape = nbytes // (2 * COLUMNS), COLUMNS
        self.inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
        self.rows, out = list[Row](), torch.empty_like(self.inputs[0])
        calls: list[Callable[[], object]] = [lambda x=x: out.copy_(x) for x in self.inputs]
        self.copy = 2 * nbytes / timed(calls)
        print("| call | GB/s | of copy |\n| --- | --- | --- |")
        print(f"| copy | {self.copy / 1e9:,.0f} | 1.00 |", flush=True)

    def add(self, name: str, nbytes: int, calls: list[Callable[[], object]]) -> None:
        """Time the calls, which move ``nbytes`` each."""
        rate = nbytes / timed(calls)
        self.rows.append({"call": name, "gb_per_s": rate / 1e9, "of_copy": rate / self.copy})
        print(f"| {name} | {rate / 1e9:,.0f} | {rate / self.copy:.2f} |", flush=True)


def rounding_figures(table: Table) -> None:
    """Time quantization under given scales, to nearest and stochastic."""
    x = table.inputs[0]
    for scheme in ROUNDED:
        for rounding in ("half_even", "stochastic(7)"):
            params = zp.choose_params(x, f"{scheme}:round={rounding}")
            plan = zp.plan("quantize", params, tuple(x.shape), x.dtype, device="cuda")
            outs = [plan.empty() for _ in table.inputs]
            moved = x.nbytes + outs[0].data.nbytes + sum(level.nbytes for level in params.scales)
            pairs = list(zip(table.inputs, outs, strict=True))
            table.add(
                f"quantize {scheme} {rounding}",
                moved,
                [lambda p=p, plan=plan: plan.run(p[0], out=p[1]) for p in pairs],
            )
    for rounding in ("half_even", "stochastic(7)"):
        params = zp.choose_params(x, f"mxfp4:round={rounding}")
        fake = zp.plan("fake_quantize", params, tuple(x.shape), x.dtype, device="cuda")
        values = [torch.empty_like(y) for y in table.inputs]
        both = list(zip(table.inputs, values, strict=True))
        moved = 2 * x.nbytes
        table.add(
            f"fake_quantize mxfp4 {rounding}",
            moved,
            [lambda p=p, fake=fake: fake.run(p[0], out=p[1]) for p in both],
        )


def statistic_figures(table: Table) -> None:
    """Time statistics, which read all numbers once."""
    x = table.inputs[0]
    cuts = {
        "tensor": Runs(1, 1, x.numel()), "channel": Runs(1, *x.shape), "channel1": Runs(len(x), COLUMNS, 1),
        "g128": Runs(1, x.numel() // 128, 128),
    }  # fmt: skip
    for name, runs in cuts.items():
        table.add(
            f"extremes {name}", x.nbytes, [lambda x=x, r=runs: COUNTER.extremes(x, r) for x in table.inputs]
        )
        table.add(f"sums {name}", x.nbytes, [lambda x=x, r=runs: COUNTER.sums(x, r) for x in table.inputs])
        if runs.blocks == 1:
            calls: list[Callable[[], object]] = [
                lambda x=x, r=runs: COUNTER.bins(x, r, 5) for x in table.inputs
            ]
            table.add(f"bins {name}", x.nbytes, calls)
    few = x[: (1 << 26) // (2 * COLUMNS)]
    with zp.only_backend("reference"):
        for kind in (stats.MinMax(), stats.Histogram(), stats.AbsoluteMean()):
            table.add(f"torch {type(kind).__name__} tensor", few.nbytes, [lambda k=kind: k.measure(few)])


def chained_figures(table: Table) -> None:
    """Time K-quants: levels and codes of numbers, and their values."""
    x = table.inputs[0]
    for scheme in CHAINED:
        q = zp.quantize(x, scheme)
        moved = x.nbytes + q.data.nbytes + sum(level.nbytes for level in q.params.levels)
        calls: list[Callable[[], object]] = [lambda x=x, s=scheme: zp.quantize(x, s) for x in table.inputs]
        table.add(f"quantize {scheme}", moved, calls)
        table.add(f"dequantize {scheme}", moved, [lambda q=q: q.dequantize()])


def error_figures(table: Table) -> None:
    """Time errors of codes."""
    for scheme in MEASURED:
        codes = [zp.quantize(x, scheme) for x in table.inputs]
        q = codes[0]
        moved = table.inputs[0].nbytes + q.data.nbytes + sum(level.nbytes for level in q.scales)
        pairs = list(zip(table.inputs, codes, strict=True))
        table.add(f"errors {scheme}", moved, [lambda p=p: row_errors(*p) for p in pairs])


def layout_figures(table: Table, device: str = "cuda") -> None:
    """Time blocks and words of 256 MiB, of random bytes."""
    for name in PACKED:
        kind, blocks = BLOCKS[name], 128
        rows = BEYOND_CACHE // (blocks * BLOCKS[name].struct.nbytes)
        shape = rows, blocks * kind.block
        lines = torch.randint(0, 256, (rows, blocks * kind.struct.nbytes), dtype=torch.uint8, device=device)
        split = kernel_of(block_request(Op.SPLIT_BLOCKS, kind, shape, device))
        join = kernel_of(block_request(Op.JOIN_BLOCKS, kind, shape, device))
        data, params = split.run(kind.struct, lines)
        moved = lines.nbytes + data.nbytes + sum(level.nbytes for level in params)
        table.add(f"split {name}", moved, [lambda s=split, k=kind, ls=lines: s.run(k.struct, ls)])
        table.add(f"join {name}", moved, [lambda j=join, k=kind, d=data, p=params: j.run(k.struct, d, p)])
    data = torch.randint(0, 256, (BEYOND_CACHE // COLUMNS, COLUMNS), dtype=torch.uint8, device=device)
    shape = len(data), 2 * COLUMNS
    for name, order in (("GPTQ", ALONG), ("AWQ", INTERLEAVED)):
        words = words_of_rows(data, UINT4, shape, order)
        table.add(
            f"to words of {name}", 2 * data.nbytes, [lambda o=order: words_of_rows(data, UINT4, shape, o)]
        )
        table.add(
            f"from words of {name}",
            2 * data.nbytes,
            [lambda o=order, w=words: rows_of_words(w, UINT4, shape, o)],
        )
        with zp.only_backend("reference"):
            table.add(
                f"torch to words of {name}",
                2 * data.nbytes,
                [lambda o=order: words_of_rows(data, UINT4, shape, o)],
            )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="of bfloat16 numbers")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.manual_seed(0)
    start = time.perf_counter()
    found = list(differences("cuda"))
    if found:
        print("\n".join(found))
        sys.exit("these differ from the reference")
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; all results are the reference's, {time.perf_counter() - start:.0f} s\n")
    table = Table(asked.megabytes << 20)
    rounding_figures(table)
    chained_figures(table)
    statistic_figures(table)
    error_figures(table)
    layout_figures(table)
    print(f"\n{time.perf_counter() - start:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": gpu, "rows": table.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
