"""Check, then time, error feedback's products on a GPU: `python benchmarks/gpu_dense.py [--json FILE]`.

First Gram matrices, factors, feedback, solutions and descent of a small layer are compared with the reference
on the host; a difference ends the run with exit code 1. Then each call is timed by the GPU's clock, next to
torch's product of float32 without TF32 and its Cholesky factorization in float64.

TFLOP/s count a product of all columns with all, and a third of the cube of the columns for a factor, whatever
is computed of it; feedback is a product of each row with half of a square matrix.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zeropoint as zp
from zeropoint.kernels.triton import dense_launches
from zeropoint.ops import feedback
from zeropoint.ops.feedback import Grid

TOKENS, COLUMNS, ROWS, GROUP = 16384, 4096, 4096, 128
CHECKED_TOKENS, CHECKED_COLUMNS, CHECKED_ROWS = 520, 1024, 72
Results = dict[str, torch.Tensor]


def grid_of(weight: torch.Tensor) -> Grid:
    """Return the grid of int4 with a scale for each group of columns."""
    groups = weight.reshape(len(weight), -1, GROUP)
    return Grid(
        levels=torch.arange(-8, 8, dtype=torch.float64, device=weight.device),
        scale=groups.abs().amax(2) / 7.5,
        block_of=torch.arange(weight.shape[1], device=weight.device) // GROUP,
    )


def damped(h: torch.Tensor) -> torch.Tensor:
    """Return a matrix with a hundredth of the mean of its diagonal added to that."""
    found = h.clone()
    found.diagonal().add_(0.01 * float(h.diagonal().mean()))
    return found


def layer(tokens: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs with a common part and outliers, bfloat16, and a weight, float32, on the host."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=generator)
    x = x + x[:, :1]
    x[:, ::97] *= 30
    return x.bfloat16(), torch.randn(rows, columns, generator=generator)


def checked(x: torch.Tensor, weight: torch.Tensor, grid: Grid) -> Results:
    """Return results of all products, by their names."""
    found = {"gram": feedback.gram(x), "squares": feedback.squares(x)}
    found["gram of two"] = feedback.gram(x, x[:, :200])
    h = damped(found["gram"])
    found["m"], found["d"] = feedback.factor(h)
    found["values"], found["losses"] = feedback.feed_back(weight, found["m"], found["d"], None, grid)
    found["solution"] = feedback.solve(weight.double(), found["m"], found["d"])
    moved = feedback.descend(weight, found["values"], h, None, grid, sweeps=1)
    return found | dict(zip(("moved values", "moves"), moved, strict=True))


def compare() -> int:
    """Exit when bytes differ from those of the reference on the host; return the count of results."""
    x, weight = layer(CHECKED_TOKENS, CHECKED_ROWS, CHECKED_COLUMNS)
    grid = grid_of(weight)
    tensors = {name: getattr(grid, name).cuda() for name in ("levels", "scale", "block_of")}
    with zp.only_backend("triton"):
        here = checked(x.cuda(), weight.cuda(), replace(grid, **tensors))
    with zp.only_backend("reference"):
        there = checked(x, weight, grid)
    for name, expected in there.items():
        if not torch.equal(*(x.cpu().contiguous().view(torch.uint8) for x in (here[name], expected))):
            sys.exit(f"{name}: bytes differ from those of the host")
    return len(there)


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the least time of a call by the GPU's clock, after one that compiles."""
    call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return min(times)


def measure() -> list[dict[str, Any]]:
    """Return seconds and TFLOP/s of our products and of torch's."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(TOKENS, COLUMNS, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(ROWS, COLUMNS, device="cuda", generator=generator)
    wide, grid, h = x.float(), grid_of(weight), damped(feedback.gram(x))
    m, d = feedback.factor(h)
    values, _ = feedback.feed_back(weight, m, d, None, grid)
    product, cube = 2.0 * TOKENS * COLUMNS**2, COLUMNS**3 / 3
    fed = float(ROWS) * COLUMNS**2
    lower = torch.linalg.cholesky(h)
    calls: list[tuple[str, float, Callable[[], object]]] = [
        ("gram", product, lambda: feedback.gram(x)),
        ("gram of two", product, lambda: feedback.gram(x, x)),
        ("torch: x.T @ x, float32", product, lambda: wide.T @ wide),
        ("squares", 2.0 * TOKENS * COLUMNS, lambda: feedback.squares(x)),
        ("factor", cube, lambda: feedback.factor(h)),
        ("torch: cholesky, float64", cube, lambda: torch.linalg.cholesky(h)),
        ("feed_back, int4:g128", fed, lambda: feedback.feed_back(weight, m, d, None, grid)),
        ("solve", 2 * fed, lambda: feedback.solve(weight.double(), m, d)),
        ("torch: cholesky_solve, float64", 2 * fed, lambda: torch.cholesky_solve(weight.double().T, lower)),
        ("descend, a sweep", 4 * fed, lambda: feedback.descend(weight, values, h, None, grid, sweeps=1)),
    ]
    rows = []
    for name, operations, call in calls:
        took = seconds(call, 3)
        rows.append({"product": name, "ms": took * 1000, "TFLOP/s": operations / took / 1e12})
        print(f"| {name} | {took * 1000:,.2f} | {operations / took / 1e12:,.2f} |", flush=True)
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU; the kernels are tested in Triton's interpreter, which says nothing of speed")
    torch.backends.cuda.matmul.allow_tf32 = False
    count = compare()
    dots = dense_launches._dot_adds_in_order(torch.device("cuda"))
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{gpu}; {count} results have the bytes of the host; tl.dot adds tokens in order: {dots}\n")
    print(f"| {TOKENS} tokens, {ROWS} x {COLUMNS} | ms | TFLOP/s |\n| --- | --- | --- |")
    rows = measure()
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": gpu, "dot": dots, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
