"""Host side of dense products: transposed tensors, tiles, column blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...ops.feedback_grid import Grid, TriangularFactors, float32_exponent
from .backend import device_refusal
from .block_steps import (
    DESCEND,
    FEED,
    SOLVE,
    BlockSizes,
    BlockStep,
    Eliminated,
    Eliminating,
    GramSizes,
    GramTile,
    GridTensors,
    Lines,
    LineSizes,
    Tokens,
)
from .starts import bits, on_device, program

BLOCK = 64
"""Columns that are processed before their errors are added to all others; changes no result."""
_CHUNK = 64
_GRAM_TILE, _TILE = 128, 64
_LANES = 32
"""Rows of a program, one for each thread."""
_ROUNDED = 1 << 26
"""Numbers that are rounded at a time: 256 MiB."""
_MANY, _RUN = 1024, 16


class TritonDense:
    """The kernels as :class:`zeropoint.ops.registry.Dense`, for CUDA devices or Triton's interpreter."""

    def takes(self, x: torch.Tensor) -> bool:
        return device_refusal(x.device) is None

    def squares(self, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        sums, (tokens, columns) = into.clone(memory_format=torch.contiguous_format), x.shape
        args = bits(x), sums, Tokens(tokens, columns, columns), _LANES, _RUN
        _launch("column_products.square_columns", -(-columns // _LANES), args, warps=1)
        return sums

    def gram(self, x: torch.Tensor, y: torch.Tensor | None, into: torch.Tensor) -> torch.Tensor:
        left = _Columns(x)
        right = left if y is None else _Columns(y)
        plain = left.exponent == right.exponent == 0
        sums = into.clone(memory_format=torch.contiguous_format)
        if not plain:
            sums.zero_()
        _add_products(left, right, sums, dot=_dot_adds_in_order(x.device))
        return sums if plain else into + sums * 2.0**left.exponent * 2.0**right.exponent

    def factor(self, h: torch.Tensor) -> TriangularFactors:
        size, device, lanes = len(h), h.device, max(BLOCK, _LANES)
        matrix, d = _transposed(h), h.new_zeros(size)
        failed = torch.full((1,), -1, dtype=torch.int32, device=device)
        scratch = Eliminated(*h.new_empty((2, BLOCK, size)))
        tiles = _lower_tiles(-(-size // _TILE), device)
        for begin in range((size - 1) // BLOCK * BLOCK, -1, -BLOCK):
            sizes = Eliminating(size, begin, min(begin + BLOCK, size))
            args = matrix, d, failed, scratch, sizes
            _launch("blocked_feedback.eliminate_block", 1, (*args, True, lanes), warps=lanes // 32)
            _launch("blocked_feedback.eliminate_block", -(-begin // _LANES), (*args, False, _LANES), warps=1)
            lines = LineSizes(sizes.end - begin, begin, begin, size, size, size)
            _add_lines(matrix, scratch.kept, scratch.minus, tiles[: _triangle(-(-begin // _TILE))], lines)
        column, m = int(failed), matrix.T.contiguous()
        if column >= 0:
            return TriangularFactors(m=m, d=d, failed=column)
        m.triu_(1)
        m.diagonal().fill_(1.0)
        return TriangularFactors(m=m, d=d)

    def feed_back(
        self, weight: torch.Tensor, m: torch.Tensor, d: torch.Tensor, grid: Grid
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = _transposed(weight)
        rounding = _Rounding(FEED, grid)
        lines = _lines(own, own.clone(), torch.empty_like(own))
        _process(lines, m.contiguous(), d.contiguous(), rounding)
        return lines.found.T, lines.losses

    def substitute(self, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        numbers = _transposed(y)
        lines = _lines(numbers, numbers, torch.empty_like(numbers))
        _process(lines, m.contiguous(), lines.losses, _Rounding(SOLVE, None))
        return lines.found.T

    def descend(
        self, weight: torch.Tensor, values: torch.Tensor, h: torch.Tensor, grid: Grid, sweeps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, matrix, diagonal = _transposed(values), h.contiguous(), h.diagonal().contiguous()
        errors, moved = _transposed(weight) - found, torch.zeros(sweeps, dtype=torch.int64, device="cpu")
        columns, rows = found.shape
        lines = _lines(found, torch.zeros_like(found), found)
        tiles = _tiles(columns, rows, h.device)
        sizes = LineSizes(columns, columns, rows, rows, columns, rows)
        _add_lines(lines.numbers, matrix, errors, tiles, sizes)
        rounding = _Rounding(DESCEND, grid)
        for sweep in range(sweeps):
            before = found.clone()
            _process(lines, matrix, diagonal, rounding)
            moved[sweep] = int((before != found).sum())
            if not moved[sweep]:
                break
        return found.T, moved


DENSE = TritonDense()


def _launch(name: str, programs: int, args: tuple[Any, ...], *, warps: int, stages: int = 1) -> None:
    """Launch on the second argument's device; products are rounded before addition.

    stages: of loads ahead of their use, more than one only where a kernel reads nothing that it writes.
    """
    if programs:
        with on_device(args[1].device):
            program(name)[(programs,)](*args, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Return a copy, (columns, rows) float64."""
    return x.T.to(torch.float64, memory_format=torch.contiguous_format, copy=True)


def _tiles(height: int, width: int, device: torch.device) -> torch.Tensor:
    """Row and column of all tiles, (tiles, 2) int32, row-major."""
    down, right = (torch.arange(-(-size // _TILE), dtype=torch.int32) for size in (height, width))
    return torch.cartesian_prod(down, right).reshape(-1, 2).to(device)


def _lower_tiles(across: int, device: torch.device) -> torch.Tensor:
    """Row and column of a square's lower tiles, row-major."""
    return torch.tril_indices(across, across, dtype=torch.int32).T.contiguous().to(device)


def _triangle(across: int) -> int:
    """Return how many tiles of a square are not above its diagonal."""
    return across * (across + 1) // 2


class _Columns:
    """Summed columns in whole tiles, and the power of two dividing them."""

    def __init__(self, x: torch.Tensor) -> None:
        self.exponent, (self.tokens, self._columns) = float32_exponent(x), x.shape
        self.panels = -(-self._columns // _GRAM_TILE)
        self.pitch, self._factor = self.panels * _GRAM_TILE, 2.0**-self.exponent
        if x.dtype is torch.float64:
            x, self._factor = (x * self._factor).float(), 1.0
        self._numbers = bits(x)

    def rounded(self, start: int, end: int) -> torch.Tensor:
        """Return tokens ``start`` to ``end``, in whole chunks: see :mod:`.programs.column_products`."""
        chunks = -(-(end - start) // _CHUNK)
        made = torch.empty((chunks * _CHUNK, self.pitch), dtype=torch.float32, device=self._numbers.device)
        sizes = Tokens(end - start, self._columns, self.pitch)
        args = self._numbers[start:end], made, self._factor, sizes, _MANY
        _launch("column_products.round_columns", made.numel() // _MANY, args, warps=4)
        return made


def _add_products(left: _Columns, right: _Columns, sums: torch.Tensor, *, dot: bool) -> None:
    """Add the products of columns to their sums."""
    (height, width), mirrored, tile = sums.shape, left is right, GramTile(_GRAM_TILE, dot)
    if mirrored:
        tiles = _lower_tiles(left.panels, sums.device)
    else:
        tiles = _tiles(left.panels * _TILE, right.panels * _TILE, sums.device)
    most = max(1, _ROUNDED // (max(left.pitch, right.pitch, 1) * _CHUNK)) * _CHUNK
    for start in range(0, left.tokens, most):
        x = left.rounded(start, min(start + most, left.tokens))
        y = x if mirrored else right.rounded(start, min(start + most, left.tokens))
        args = x, y, tiles, sums, GramSizes(len(x), left.pitch, right.pitch, height, width), tile
        _launch("column_products.add_column_products", len(tiles), args, warps=8, stages=3)
    if mirrored:
        above = torch.ones_like(sums, dtype=torch.bool).triu(1)
        sums.copy_(torch.where(above, sums.T, sums))


@functools.cache
def _dot_adds_in_order(device: torch.device) -> bool:
    """Whether ``tl.dot`` adds products in token order; Triton promises nothing.

    Random sums of 64 products have other bytes in any other order. Where they have, each token is a step of
    its own, which takes several times as long. The interpreter's ``tl.dot`` is NumPy's, which has none.
    """
    if device.type != "cuda":
        return False
    x = torch.randn((_CHUNK, _GRAM_TILE), generator=torch.Generator().manual_seed(0)).to(device)
    columns = _Columns(x)
    found = x.new_zeros((2, _GRAM_TILE, _GRAM_TILE), dtype=torch.float64)
    for dot in (False, True):
        _add_products(columns, columns, found[int(dot)], dot=dot)
    return torch.equal(*found)


class _Rounding:
    """How numbers of columns are rounded: constants of compilation, and tensors."""

    def __init__(self, kind: int, grid: Grid | None) -> None:
        self.tensors: GridTensors | None = None
        self.step = BlockStep(kind, False, 0, False, _LANES)
        if grid is None:
            return
        bounds = grid.levels if grid.has_steps else grid.bounds
        last = len(grid.levels) - 1
        self.tensors = GridTensors(
            levels=grid.levels,
            last=last,
            bounds=bounds,
            scales=_transposed(grid.scale),
            offsets=_transposed(grid.all_offsets),
            zeros=_transposed(grid.all_zeros),
            block_of=grid.block_of.contiguous(),
        )
        narrow = grid.scale.dtype is torch.float32
        self.step = BlockStep(kind, grid.has_steps, last.bit_length(), narrow, _LANES)


def _lines(own: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> Lines:
    """Transposed rows, with memory for block errors, and zero losses."""
    rows = own.shape[1]
    return Lines(own, numbers, values, own.new_empty((BLOCK, rows)), own.new_zeros(rows))


def _process(lines: Lines, m: torch.Tensor, d: torch.Tensor, rounding: _Rounding) -> None:
    """Process all columns of rows; ``numbers``, ``values`` and ``losses`` are written to."""
    columns, rows = lines.numbers.shape
    descends = rounding.step.kind == DESCEND
    tiles = _tiles(columns, rows, m.device)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        args = lines, m, d, rounding.tensors, BlockSizes(rows, columns, begin, end), rounding.step
        _launch("blocked_feedback.process_block", -(-rows // _LANES), args, warps=1)
        first = 0 if descends else end
        height = columns - first
        sizes = LineSizes(end - begin, height, rows, rows, columns, rows)
        used = -(-height // _TILE) * -(-rows // _TILE)
        _add_lines(lines.numbers[first:], m[begin:end, first:], lines.errors, tiles[:used], sizes)


def _add_lines(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, tiles: torch.Tensor, sizes: LineSizes
) -> None:
    """Add products of lines to a target."""
    _launch("blocked_feedback.add_lines", len(tiles), (target, left, right, tiles, sizes, _TILE), warps=4)
