"""Every preset and every block of GGUF, both ways, next to a copy of as many bytes: `kernels.py --all`.

Codes and values of a few rows are compared with the reference first. "of copy" is the bandwidth of a call
that allocates its result over that of a copy into new memory, from the same rounds; a star marks one below a
quarter.
"""

from __future__ import annotations

import cases as c
import torch
from facts import fail
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import zeropoint as zp
from zeropoint.bench.timing import Copies, in_turns
from zeropoint.codecs.gguf import BLOCKS
from zeropoint.schemes import PRESETS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MORE = ("int8:tensor", "table4:channel", "vector2[higgs16]:g16", "int4:g32:offset=float32")
FLOOR = 0.25


def compared(scheme: str, x: torch.Tensor) -> None:
    """End the run where codes, parameters or values of ``x`` differ from the reference's."""
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
        values = expected.dequantize()
    q = zp.quantize(x, scheme)
    if not (c.same_bytes(q.data, expected.data) and q.params == expected.params):
        fail(f"{scheme} of {x.dtype}: codes or parameters differ from the reference")
    if not c.same_bytes(q.dequantize(), values):
        fail(f"{scheme} of {x.dtype}: values differ from the reference")


def shares(scheme: str, x: torch.Tensor, copies: Copies, rounds: int) -> list[float]:
    """Return bandwidth over that of a copy: of quantizing, and of dequantizing."""
    q = zp.quantize(x, scheme)
    copy = copies.into_new_memory(x.nbytes + q.nbytes)
    work = {"quantize": lambda: zp.quantize(x, scheme), "dequantize": q.dequantize, "copy": copy}
    seconds = {name: min(found) for name, found in in_turns(work, rounds).items()}
    return [seconds["copy"] / seconds[name] for name in ("quantize", "dequantize")]


def block_shares(name: str, x: torch.Tensor, copies: Copies, rounds: int) -> list[float]:
    """Return the same of putting blocks of a type of GGUF together, and of taking them apart."""
    codec = BLOCKS[name]
    q = zp.quantize(x, codec.scheme)
    blocks = codec.encode(q)
    work = {
        "encode": lambda: codec.encode(q),
        "decode": lambda: codec.decode(blocks, q.scheme, (q.shape[0], q.shape[1]), q.dtype),
        "copy": copies.into_new_memory(2 * q.nbytes),
    }
    seconds = {name: min(found) for name, found in in_turns(work, rounds).items()}
    return [seconds["copy"] / seconds[name] for name in ("encode", "decode")]


def measured(x: torch.Tensor, rounds: int, only: str) -> Table:
    """Return the table of all schemes that hold ``only`` in their names."""
    copies = Copies(3 * x.nbytes)
    out = Table(title=f"{torch.get_num_threads()} threads, of copy", title_justify="left")
    out.add_column("scheme", no_wrap=True)
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        out.add_column(f"{short}, quantize", justify="right")
        out.add_column("dequantize", justify="right")

    def row(name: str, found: list[float]) -> None:
        out.add_row(escape(name), *(f"{share:.2f}{'*' * (share < FLOOR)}" for share in found))

    for scheme in (each for each in (*PRESETS, *MORE) if only in each):
        found: list[float] = []
        for dtype in DTYPES:
            source = x.to(dtype)
            compared(scheme, source[:19])
            found += shares(scheme, source, copies, rounds)
        row(scheme, found)
    for name in (each for each in BLOCKS if only in each):
        row(f"blocks of {name}", block_shares(name, x, copies, rounds))
    return out


def run(console: Console, *, side: int, rounds: int, only: str, threads: list[int]) -> None:
    """Print a table for each number of threads."""
    for count in threads:
        torch.set_num_threads(count)
        console.print(measured(c.weights(side, side), rounds, only))
