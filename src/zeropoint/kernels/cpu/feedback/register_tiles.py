"""Matrix product tiles with register sums, in one order.

A step of a tile adds the products of HIGH numbers of one operand with the lanes of another; steps follow one
another, so that each sum has the order of the steps on every processor, in blocks of any size. How many rows
and lanes are computed at once depends on the registers of the processor, and changes no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from ..linear.products import add_product
from ..machine.compilers import x86_has
from ..machine.intrinsics import ANY, F32, F64, I64, INDEX, address, instruction, load_from, store_at, tools
from ..machine.vector import in_all_lanes

HIGH = 8
"""Rows of a tile."""
WIDE = 16
"""Lanes of a tile of float64."""
PANEL = 32
"""Lanes of a tile of float32, and columns of a panel of them."""
_VECTORS = 2
"""Vectors of a row that are summed at once."""


class _Operand(NamedTuple):
    """An array, where its first step begins, and step distance."""

    array: Any
    begin: Any
    pitch: int


class _Tile:
    """IR writer of a tile."""

    def __init__(self, builder: Any, lane: Any) -> None:
        self.builder, self.lane = builder, lane
        register = 64 if x86_has("avx512f") else 32 if x86_has("avx") else 16
        self.lanes = register // (8 if lane == F64 else 4)
        self.kind = ir.VectorType(lane, self.lanes)
        # Sums of all rows fit the 32 registers of AVX-512, sums of half of the rows 16 registers.
        self.rows = HIGH if register == 64 else HIGH // 2

    def parts(self, wide: int) -> Iterator[tuple[int, int]]:
        """First row and lane of each part summed at once."""
        for row in range(0, HIGH, self.rows):
            for lane in range(0, wide, self.lanes * _VECTORS):
                yield row, lane

    def vectors_of(self, place: Any, row: int, lane: int) -> Iterator[tuple[int, int, Any]]:
        """Row and vector of a part, with its first lane's index.

        place: where the matrix begins, and its pitch.
        """
        builder, (begin, pitch) = self.builder, place
        for r in range(self.rows):
            first = builder.add(begin, builder.mul(pitch, I64(row + r)))
            for v in range(_VECTORS):
                yield r, v, builder.add(first, I64(lane + v * self.lanes))

    def variables(self) -> list[list[Any]]:
        """Register variables, one for each row and vector."""
        new = tools.alloca_once
        return [[new(self.builder, self.kind) for _ in range(_VECTORS)] for _ in range(self.rows)]

    def add_steps(
        self, totals: list[list[Any]], high: _Operand, wide: _Operand, count: Any, add: Callable[..., Any]
    ) -> None:
        """Add the products of ``count`` steps."""
        builder = self.builder
        with tools.for_range(builder, count) as loop:
            a = builder.add(high.begin, builder.mul(loop.index, I64(high.pitch)))
            b = builder.add(wide.begin, builder.mul(loop.index, I64(wide.pitch)))
            places = (builder.add(b, I64(v * self.lanes)) for v in range(_VECTORS))
            lanes = [load_from(builder, wide.array, place, self.kind, 4) for place in places]
            for r, row in enumerate(totals):
                place = address(builder, high.array, builder.add(a, I64(r)), self.lane)
                numbers = in_all_lanes(builder, builder.load(place), self.kind)
                for vector, total in zip(lanes, row, strict=True):
                    builder.store(add(builder, builder.load(total), numbers, vector), total)


def _rounded_twice(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b))


@instruction(types.void, ANY, ANY, ANY, INDEX)
def add_products(builder: Any, sums: Any, a: Any, b: Any, steps: Any) -> None:
    """Add ``steps`` products to sums, each rounded before it is added.

    sums: (array, place, pitch), of the sums ``array[place + r * pitch + n]``. a, b: (array, place), HIGH and
    WIDE numbers a step. All float64.
    """
    tile, (array, *place), (x, at), (y, begin) = _Tile(builder, F64), sums, a, b
    for row, lane in tile.parts(WIDE):
        totals = tile.variables()
        for r, v, index in tile.vectors_of(place, row, lane):
            builder.store(load_from(builder, array, index, tile.kind, 4), totals[r][v])
        high = _Operand(x, builder.add(at, I64(row)), HIGH)
        wide = _Operand(y, builder.add(begin, I64(lane)), WIDE)
        tile.add_steps(totals, high, wide, steps, _rounded_twice)
        for r, v, index in tile.vectors_of(place, row, lane):
            store_at(builder, builder.load(totals[r][v]), array, index, 4)


@instruction(types.void, ANY, ANY, ANY, INDEX)
def add_float32_sums(builder: Any, sums: Any, x: Any, y: Any, steps: Any) -> None:
    """Add float32 sums of ``steps`` products to float64 sums.

    Products must be exact in float32: then it does not matter whether they are rounded before they are added.
    sums: as of :func:`add_products`. x, y: (array, place), float32, PANEL numbers a step, of which HIGH and
    PANEL from the place on are read.
    """
    tile, (array, *place), (left, at), (right, begin) = _Tile(builder, F32), sums, x, y
    double = ir.VectorType(F64, tile.lanes)
    for row, lane in tile.parts(PANEL):
        totals = tile.variables()
        for variable in (variable for each in totals for variable in each):
            builder.store(ir.Constant(tile.kind, [0.0] * tile.lanes), variable)
        high = _Operand(left, builder.add(at, I64(row)), PANEL)
        wide = _Operand(right, builder.add(begin, I64(lane)), PANEL)
        tile.add_steps(totals, high, wide, steps, add_product)
        for r, v, index in tile.vectors_of(place, row, lane):
            found = builder.fpext(builder.load(totals[r][v]), double)
            before = load_from(builder, array, index, double, 4)
            store_at(builder, builder.fadd(before, found), array, index, 4)
