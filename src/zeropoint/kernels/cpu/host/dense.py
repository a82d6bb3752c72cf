"""Host side of dense products: arrays, panels, blocks, threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ....ops.feedback_grid import Grid, TriangularFactors, float32_exponent
from ....ops.threads import share
from ..feedback import elimination, grams, rows
from ..feedback.register_tiles import HIGH, PANEL, WIDE
from ..machine.named_records import pack
from ..statistics.column_squares import RUN, RowsOfColumns, square_columns
from . import memory
from .arrays import flat_array
from .views import KINDS

_PACKED = 1 << 22
"""Numbers of a matrix that are packed at a time: 16 MiB, half of a last cache."""
_ACROSS = 4
"""Panels of a tile's columns, which fit the first cache with the panels of its rows."""


class CpuDense:
    """The kernels as :class:`zeropoint.ops.registry.Dense`, for tensors of the host."""

    def takes(self, x: torch.Tensor) -> bool:
        return x.device.type == "cpu"

    def squares(self, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        sums, columns = into.clone(), x.shape[1]
        shape = RowsOfColumns(kind=KINDS[x.dtype], rows=len(x), columns=columns)
        args = flat_array(x), pack(shape), sums.numpy()
        share(square_columns, args, -(-columns // RUN), x.numel())
        return sums

    def gram(self, x: torch.Tensor, y: torch.Tensor | None, into: torch.Tensor) -> torch.Tensor:
        height, width = into.shape
        most = max(1, _PACKED // (max(height, width, PANEL) * grams.CHUNK)) * grams.CHUNK
        left = _Columns(x, most)
        right = left if y is None else _Columns(y, most)
        plain = left.exponent == right.exponent == 0
        sums = memory.empty((left.panels * PANEL, right.panels * PANEL), torch.float64).zero_()
        if plain:
            sums[:height, :width] = into
        for start in range(0, len(x), most):
            end = min(start + most, len(x))
            packed = left.pack(start, end)
            _add_tiles(
                (left, packed), (right, packed if y is None else right.pack(start, end)), end - start, sums
            )
        if y is None:
            args = flat_array(sums.view(torch.int64)).view(np.float64), np.uint64(left.panels)
            share(grams.mirror, args, left.panels, sums.numel())
        found = sums[:height, :width]
        return found.contiguous() if plain else into + found * 2.0**left.exponent * 2.0**right.exponent

    def factor(self, h: torch.Tensor) -> TriangularFactors:
        size, m = len(h), h.clone(memory_format=torch.contiguous_format)
        d = torch.zeros(size, dtype=torch.float64, device="cpu")
        flat, pivots = _doubles(m), _doubles(d)
        above = (size - 1) // elimination.BLOCK * elimination.BLOCK
        corner, minus, kept = (_aligned(n * elimination.BLOCK) for n in (elimination.BLOCK, above, above))
        for begin in range(above, -1, -elimination.BLOCK):
            end = min(begin + elimination.BLOCK, size)
            sizes = pack(elimination.EliminatedBlock(columns=size, begin=begin, end=end))
            failed = share(elimination.factor_diagonal, (flat, sizes, pivots, corner), 1, 1)
            if failed:
                return TriangularFactors(m=m, d=d, failed=failed - 1)
            if begin:
                args, work = (flat, sizes, pivots, corner, minus, kept), begin * elimination.BLOCK**2 // 2
                share(elimination.factor_rows, args, begin // WIDE, work)
                pairs = -(-begin // (2 * elimination.ROWS))
                share(elimination.factor_rest, (flat, sizes, minus, kept), pairs, begin * work)
        m.triu_(1)
        m.diagonal().fill_(1.0)
        return TriangularFactors(m=m, d=d)

    def feed_back(
        self, weight: torch.Tensor, m: torch.Tensor, d: torch.Tensor, grid: Grid
    ) -> tuple[torch.Tensor, torch.Tensor]:
        panels = _panels(weight)
        found, losses = _fed(panels, panels.clone(), (m, d), _Rounding(grid))
        return _from_panels(found, weight), losses[: len(weight)]

    def substitute(self, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        numbers = _panels(y)
        found, _ = _fed(torch.zeros_like(numbers), numbers, (m, y.new_zeros(len(m))), _Rounding(None))
        return _from_panels(found, y)

    def descend(
        self, weight: torch.Tensor, values: torch.Tensor, h: torch.Tensor, grid: Grid, sweeps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, found = _panels(weight), _panels(values)
        products, rounding, count = torch.zeros_like(own), _Rounding(grid), len(own)
        work, diagonal = own.numel() * rows.BLOCK, h.diagonal().contiguous()
        for sizes, packed in _blocks(h):
            args = _doubles(own), _doubles(found), packed, sizes, _doubles(products)
            share(rows.add_errors, args, count, work)
        moved = torch.zeros(sweeps, dtype=torch.int64, device="cpu")
        for sweep in range(sweeps):
            counts = np.zeros(count, np.uint64)
            for sizes, packed in _blocks(h):
                arrays = rows.MoveArrays(
                    products=_doubles(products),
                    values=_doubles(found),
                    counts=counts,
                    packed=packed,
                    diagonal=_doubles(diagonal),
                )
                share(rows.move_rows, (sizes, *rounding.arrays, *arrays), count, work)
            moved[sweep] = int(counts.sum())
            if not moved[sweep]:
                break
        return _from_panels(found, weight), moved


DENSE = CpuDense()


def _doubles(x: torch.Tensor) -> Any:
    """Return the memory of a contiguous float64 tensor as a flat array."""
    return flat_array(x).view(np.float64)


def _aligned(count: int) -> Any:
    """Return uninitialized float64 in which no vector lies in two cache lines."""
    return memory.empty((count,), torch.float64).numpy()


class _Columns:
    """Summed columns for kernels, and the power of two dividing them.

    most: tokens that are packed at once, in whole chunks.
    """

    def __init__(self, x: torch.Tensor, most: int) -> None:
        self.exponent, self._columns = float32_exponent(x), x.shape[1]
        self.panels = -(-self._columns // PANEL)
        factor = 2.0**-self.exponent
        if x.dtype not in KINDS:
            x, factor = (x * factor).float(), 1.0
        self._flat, self._kind, self._factor = flat_array(x), KINDS[x.dtype], factor
        tokens = min(most, -(-len(x) // grams.CHUNK) * grams.CHUNK)
        self._packed = memory.empty((tokens * self.panels * PANEL,), torch.float32).numpy()

    def pack(self, start: int, end: int) -> Any:
        """Pack tokens ``start`` to ``end`` as panels, in reused memory."""
        tokens, chunks = (
            grams.TokenChunks(
                kind=self._kind, start=start, end=end, columns=self._columns, factor=self._factor
            ),
            -(-(end - start) // grams.CHUNK),
        )
        args = self._flat, pack(tokens), self._packed
        share(grams.pack_columns, args, chunks, (end - start) * self._columns)
        return self._packed


def _add_tiles(
    left: tuple[_Columns, Any], right: tuple[_Columns, Any], tokens: int, sums: torch.Tensor
) -> None:
    """Add the products of packed tokens to sums, tiles across threads."""
    (x, packed), (y, other), same = left, right, left[0] is right[0]
    across = _ACROSS if y.panels * x.panels > 4 * _ACROSS**2 else 1
    places = [
        (top, panel)
        for panel in range(0, y.panels, across)
        for top in range(0, x.panels * PANEL, grams.ROWS)
        if not same or top < min(panel + across, y.panels) * PANEL
    ]
    tiles = grams.GramTiles(tokens=tokens, x_panels=x.panels, y_panels=y.panels, across=across, same=same)
    args = packed, other, pack(tiles), np.array(places, np.uint64).reshape(-1), _doubles(sums)
    share(grams.add_tiles, args, len(places), tokens * sums.numel() // 2)


def _panels(x: torch.Tensor) -> torch.Tensor:
    """Rows as transposed panels, (panels, whole-tile columns, WIDE) float64, zero-padded."""
    count, columns = x.shape
    shape = -(-count // WIDE), -(-columns // HIGH) * HIGH, WIDE
    made = torch.zeros(shape, dtype=torch.float64, device="cpu")
    whole = count // WIDE
    made[:whole, :columns] = x[: whole * WIDE].reshape(whole, WIDE, columns).transpose(1, 2)
    if count % WIDE:
        made[whole, :columns, : count % WIDE] = x[whole * WIDE :].T
    return made


def _from_panels(panels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return transposed panels as rows, float64, of the shape of ``like``."""
    count, columns = like.shape
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:count, :columns]


class _Rounding:
    """Rounding for kernels: numbers, tables, and the block of each column."""

    def __init__(self, grid: Grid | None) -> None:
        if grid is None:
            rounding = rows.GridRounding(kind=int(rows.VALUES))
        else:
            scales, offsets, zeros = (
                _doubles(_blocks_in_panels(each)) for each in (grid.scale, grid.all_offsets, grid.all_zeros)
            )
            rounding = rows.GridRounding(
                kind=int(rows.STEPS if grid.has_steps else rows.TABLE),
                narrow=grid.scale.dtype is torch.float32,
                top=1 << (len(grid.levels).bit_length() - 1),
                blocks=grid.scale.shape[1],
                levels=_doubles(grid.levels),
                bounds=rows.NOTHING if grid.has_steps else _doubles(grid.bounds),
                scales=scales,
                offsets=offsets,
                zeros=zeros,
                block_of=flat_array(grid.block_of).view(np.int64).astype(np.uint64),
            )
        self.arrays = pack(rounding), (*rounding[4:],)


def _blocks_in_panels(x: torch.Tensor) -> torch.Tensor:
    """Block numbers, (rows, blocks), as (panels, blocks, WIDE) float64, zero-padded."""
    count, blocks = x.shape
    full = torch.zeros(-(-count // WIDE) * WIDE, blocks, dtype=torch.float64, device="cpu")
    full[:count] = x
    return full.view(-1, WIDE, blocks).transpose(1, 2).contiguous()


def _blocks(m: torch.Tensor, *, upper: bool = False) -> Iterator[tuple[Any, Any]]:
    """Sizes and packed rows of each row block; upper: tiles right only."""
    columns, tiles = len(m), -(-len(m) // HIGH)
    flat, packed = _doubles(m), _aligned(tiles * HIGH * rows.BLOCK)
    for begin in range(0, columns, rows.BLOCK):
        end, skipped = min(begin + rows.BLOCK, columns), begin // HIGH if upper else 0
        block = rows.ColumnBlock(columns=columns, begin=begin, end=end, pitch=tiles * HIGH, skipped=skipped)
        sizes = pack(block)
        share(rows.pack_rows, (flat, sizes, packed), tiles - skipped, (end - begin) * columns)
        yield sizes, packed


def _fed(
    weight: torch.Tensor, numbers: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], how: _Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and row losses of panels after feedback; ``numbers`` change."""
    m, d = factors
    values, losses = torch.zeros_like(numbers), numbers.new_zeros(len(numbers) * WIDE)
    for sizes, packed in _blocks(m, upper=True):
        arrays = rows.FeedArrays(
            weight=_doubles(weight),
            numbers=_doubles(numbers),
            values=_doubles(values),
            losses=_doubles(losses),
            packed=packed,
            d=_doubles(d),
        )
        share(
            rows.feed_rows,
            (sizes, *how.arrays, *arrays),
            len(numbers),
            math.prod(numbers.shape) * rows.BLOCK,
        )
    return values, losses
