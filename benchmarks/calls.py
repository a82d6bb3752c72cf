"""Time calls on few numbers, where the call itself is what takes time: `python benchmarks/calls.py`.

First the bytes of every call are compared with the reference. Then the table: the microseconds of a call on
64 numbers, the best of many, with everything it touches in the caches: into new memory, into memory that is
there, under given parameters, and back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from facts import describe, fail, machine, record
from rich.console import Console
from rich.table import Table

import zeropoint as zp

SCHEMES = ("int8:channel", "int4:g32", "int4:g32:asym", "float8_e4m3fn:channel", "mxfp4", "nvfp4", "nf4:g32")
COUNT = 64
CALLS = 100
"""Calls of one measurement; the best of ``--rounds`` of these counts."""


def work(x: torch.Tensor, scheme: str) -> dict[str, Callable[[], object]]:
    """Return the calls for a scheme, after a comparison of their results."""
    q, y = zp.quantize(x, scheme), torch.empty_like(x)
    with zp.only_backend("reference"):
        wanted = zp.quantize(x, scheme)
    if not torch.equal(q.data, wanted.data) or q.params != wanted.params:
        fail(f"{scheme} differs from the reference")
    if not torch.equal(zp.quantize(x, wanted.params).data, wanted.data):
        fail(f"{scheme} under its own parameters differs from the reference")
    if not torch.equal(zp.dequantize(q), wanted.dequantize()):
        fail(f"{scheme} comes back otherwise than from the reference")
    return {
        "quantize": lambda: zp.quantize(x, scheme),
        "into memory": lambda: zp.quantize(x, scheme, out=q),
        "given": lambda: zp.quantize(x, wanted.params),
        "dequantize": lambda: zp.dequantize(q, out=y),
    }


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Return the time of one call."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / CALLS * 1e6


def main() -> None:
    """Check, measure, print."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args, console = parser.parse_args(), Console(width=120)
    torch.set_num_threads(1)
    facts = machine()
    console.print(describe(facts), highlight=False)
    x = torch.randn(1, COUNT, generator=torch.Generator().manual_seed(0))
    found = {
        scheme: {name: microseconds(call, args.rounds) for name, call in work(x, scheme).items()}
        for scheme in SCHEMES
    }
    table = Table(title=f"microseconds of a call on {COUNT} numbers of float32")
    table.add_column("scheme", no_wrap=True)
    for name in found[SCHEMES[0]]:
        table.add_column(name, justify="right")
    for scheme, times in found.items():
        table.add_row(scheme, *(f"{value:.0f}" for value in times.values()))
    console.print(table)
    record(args.json, facts, calls=found)


if __name__ == "__main__":
    main()
