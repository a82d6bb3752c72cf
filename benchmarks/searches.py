"""Time the searches of llama.cpp, ours and its own, on one thread, after their bytes were found equal.

    python benchmarks/searches.py LIBRARY

LIBRARY is libggml-base.so, as benchmarks/peers.sh builds it. Times are those of the thread, so that neighbors
on the machine count less, the best of five rounds in turns. "With blocks" includes the layout of GGUF.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from facts import fail, machine
from ggml_peer import Ggml

import zeropoint as zp
from zeropoint.codecs.gguf import BLOCKS
from zeropoint.ops import library
from zeropoint.ops.registry import Op
from zeropoint.ops.threads import thread_limit

ROWS, COLUMNS, ROUNDS = 512, 4096, 5


def seconds(calls: list[Callable[[], object]]) -> list[float]:
    """Return the best time of each call, taken in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(1 + ROUNDS):
        for n, call in enumerate(calls):
            begin = time.thread_time()
            call()
            best[n] = min(best[n], time.thread_time() - begin)
    return best


def row(name: str, ggml: Ggml, x: torch.Tensor, importance: torch.Tensor | None) -> str:
    """Return the speeds of one type as a line of a table; exits where bytes differ."""
    scheme = zp.Scheme.parse("tq2_0") if name == "TQ2_0" else BLOCKS[name].scheme
    kernel = library.kernel_for(Op.SEARCH, x, scheme)

    def blocks() -> torch.Tensor:
        data, params = kernel.run(x, importance)
        made = zp.QuantizationParams.of(scheme, tuple(x.shape), x.dtype, params)
        q = zp.QuantizedTensor(data=data, params=made, shape=tuple(x.shape), dtype=x.dtype)
        return BLOCKS[name].encode(q)

    theirs = ggml.blocks(name, x, importance)
    if not torch.equal(blocks(), theirs):
        fail(f"{name}: our blocks are not those of llama.cpp")
    ours, laid_out, rival = seconds(
        [lambda: kernel.run(x, importance), blocks, lambda: ggml.blocks(name, x, importance)]
    )
    speeds = " | ".join(f"{x.numel() / t / 1e6:.0f}" for t in (ours, laid_out, rival))
    kind = "no" if importance is None else "yes"
    return f"| {name} | {kind} | {speeds} | {rival / ours:.1f} |"


def main() -> None:
    """Print the table."""
    ggml = Ggml(Path(sys.argv[1]))
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    importance = torch.randn(COLUMNS, generator=generator).square()
    print(machine())
    print("| type | importance | ours, Melem/s | with blocks | llama.cpp | ratio |")
    print("|---|---|---|---|---|---|")
    with thread_limit(1):
        for name in BLOCKS:
            for given in (None, importance):
                print(row(name, ggml, x, given), flush=True)


if __name__ == "__main__":
    main()
