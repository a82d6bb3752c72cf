"""Host side of statistics: lines of one block's numbers, and programs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ...layout.runs import Runs
from ...ops.registry import Extremes
from .backend import device_refusal
from .piece_cuts import covering_power
from .starts import bits, on_device, program

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = -(1 << 31)
_EACH, _EACH_OF_SUMS = 32, 16
"""Numbers of a tile that a thread has; 4 warps have a tile."""
_COLUMNS = 64
"""Neighboring columns of a program: whole sectors of memory."""
_PROGRAMS = 132 * 16
"""Programs after which each has more tiles instead: several for each multiprocessor."""
_MOST_TURNS = 64
_COPIES, _COPIED = 64, 1 << 20
"""Most copies of results, and numbers of all: programs that write to one place wait for each other."""
_ENDS = 128
LIMBS = 10


class LineCut(NamedTuple):
    """What kernels take at run time.

    lines, length: of the tensor, and numbers of each. blocks: line ``i`` is of block ``i % blocks``. parts:
    programs of a line.
    """

    lines: int
    length: int
    blocks: int
    parts: int


class LineShape(NamedTuple):
    """What kernels are compiled for.

    many, size: lines of a tile, and numbers of each. turns: tiles of a program. across: whether lines lie
    side by side, as columns. copies: of results.
    """

    many: int
    size: int
    turns: int
    across: bool
    copies: int


class StatisticLines(NamedTuple):
    """A tensor as lines, and the programs that take them."""

    cut: LineCut
    shape: LineShape
    programs: int
    warps: int


@functools.lru_cache(maxsize=1024)
def lines_of(runs: Runs, width: int = 1, each: int = _EACH) -> StatisticLines:
    """Return the lines of a tensor that is not empty.

    width: numbers of the result of a block. each: numbers of a tile that a thread has.
    """
    tile = 128 * each
    across = runs.inner == 1 and runs.blocks > 1
    lines, length = (runs.blocks, runs.outer) if across else (runs.outer * runs.blocks, runs.inner)
    many = min(covering_power(lines), _COLUMNS) if across else 1
    size = min(covering_power(length), tile // many)
    many = min(covering_power(lines), tile // size)
    groups, tiles = -(-lines // many), -(-length // size)
    turns = min(tiles, _MOST_TURNS, max(1, groups * tiles // _PROGRAMS))
    turns = 1 << (turns.bit_length() - 1)
    parts = -(-tiles // turns)
    copies = max(1, min(_COPIES, _COPIED // covering_power(width)) // covering_power(runs.blocks))
    copies = min(copies, covering_power(groups * parts))
    return StatisticLines(
        cut=LineCut(lines, length, runs.blocks, parts),
        shape=LineShape(many=many, size=size, turns=turns, across=across, copies=copies),
        programs=groups * parts,
        warps=max(1, many * size // (32 * each)),
    )


class TritonCounter:
    """The kernels as :class:`zeropoint.ops.registry.Counter`, on CUDA devices or in Triton's interpreter."""

    def takes(self, x: torch.Tensor) -> bool:
        return x.dtype in _DTYPES and device_refusal(x.device) is None

    def extremes(self, x: torch.Tensor, runs: Runs) -> Extremes:
        return _run("line_extremes", x, lines_of(runs))

    def bins(self, x: torch.Tensor, runs: Runs, mantissa_bits: int) -> tuple[Extremes, torch.Tensor]:
        width = 2 * (255 << mantissa_bits)
        lines = lines_of(runs, width)
        short = lines.shape.copies > 1 and x.numel() < 1 << 31
        counts = _zeros(x, lines, width, torch.int32 if short else torch.int64)
        found = _run("line_bins", x, lines, counts, constants=(mantissa_bits,))
        return found, counts.sum(0) if lines.shape.copies > 1 else counts[0]

    def sums(self, x: torch.Tensor, runs: Runs) -> tuple[Extremes, torch.Tensor, torch.Tensor]:
        lines = lines_of(runs, LIMBS, _EACH_OF_SUMS)
        limbs, counts = _zeros(x, lines, LIMBS), _zeros(x, lines, 1)
        reach = 63 - 24 - (lines.shape.size.bit_length() - 1)
        found = _run("line_sums", x, lines, limbs, counts, constants=(reach,))
        return found, limbs.sum(0), counts.sum(0)


COUNTER = TritonCounter()


def _zeros(
    x: torch.Tensor, lines: StatisticLines, width: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    return torch.zeros((lines.shape.copies, lines.cut.blocks, width), dtype=dtype, device=x.device)


def _run(
    name: str, x: torch.Tensor, lines: StatisticLines, *results: torch.Tensor, constants: tuple[int, ...] = ()
) -> Extremes:
    """Launch a kernel that adds to results; return block extremes."""
    copies, blocks = lines.shape.copies, lines.cut.blocks
    ends = torch.full((copies, 2, blocks), _LEAST, dtype=torch.int32, device=x.device)
    values = torch.empty((2, blocks), dtype=torch.float64, device=x.device)
    args: tuple[Any, ...] = bits(x), ends, *results, lines.cut, lines.shape, *constants
    with on_device(x.device):
        program(f"line_statistics.{name}")[(lines.programs,)](*args, num_warps=lines.warps)
        program("line_statistics.end_values")[(-(-blocks // _ENDS),)](
            ends, values, blocks, copies, _ENDS, num_warps=1
        )
    return values[0], values[1]
