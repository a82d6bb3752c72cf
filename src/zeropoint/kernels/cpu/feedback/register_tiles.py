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
from numba.core import cgutils

from ..linear.panels import spread
from ..linear.products import add_product
from ..machine.intrinsics import F32, F64, I64, address, flattened, primitive, x86_has

_tools: Any = cgutils  # has no types

HIGH = 8
"""Rows of a tile."""
WIDE = 16
"""Lanes of a tile of float64."""
PANEL = 32
"""Lanes of a tile of float32, and columns of a panel of them."""
_VECTORS = 2
"""Vectors of a row that are summed at once."""


class _Operand(NamedTuple):
    """An array argument, where its first step begins, and step distance."""

    which: int
    begin: Any
    pitch: int


def _register_bytes() -> int:
    return 64 if x86_has("avx512f") else 32 if x86_has("avx") else 16


class _Tile:
    """IR writer of a tile; arguments are the primitives'."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, lane: Any) -> None:
        self.context, self.builder = context, builder
        self.types, self.args = flattened(builder, signature, args)
        register = _register_bytes()
        self.lane, self.bytes = lane, 8 if lane == F64 else 4
        self.lanes = register // self.bytes
        self.kind = ir.VectorType(lane, self.lanes)
        # Sums of all rows fit the 32 registers of AVX-512, sums of half of the rows 16 registers.
        self.rows = HIGH if register == 64 else HIGH // 2

    def parts(self, wide: int) -> Iterator[tuple[int, int]]:
        """First row and lane of each part summed at once."""
        for row in range(0, HIGH, self.rows):
            for lane in range(0, wide, self.lanes * _VECTORS):
                yield row, lane

    def place(self, which: int, index: Any, kind: Any) -> Any:
        """Address of an element of an array argument."""
        return address(self.context, self.builder, self.types[which], self.args[which], index, kind)

    def load(self, which: int, index: Any, kind: Any) -> Any:
        """Load a vector of neighbors."""
        value = self.builder.load(self.place(which, index, kind))
        value.align = 4
        return value

    def store(self, which: int, index: Any, value: Any) -> None:
        """Store a vector of neighbors."""
        self.builder.store(value, self.place(which, index, value.type)).align = 4

    def vectors_of(self, begin: Any, pitch: Any, row: int, lane: int) -> Iterator[tuple[int, int, Any]]:
        """Row and vector of a part, with its first lane's index.

        The matrix begins at ``begin``.
        """
        builder = self.builder
        for r in range(self.rows):
            first = builder.add(begin, builder.mul(pitch, I64(row + r)))
            for v in range(_VECTORS):
                yield r, v, builder.add(first, I64(lane + v * self.lanes))

    def variables(self) -> list[list[Any]]:
        """Register variables, one for each row and vector."""
        new = _tools.alloca_once
        return [[new(self.builder, self.kind) for _ in range(_VECTORS)] for _ in range(self.rows)]

    def add_steps(
        self, totals: list[list[Any]], high: _Operand, wide: _Operand, count: Any, add: Callable[..., Any]
    ) -> None:
        """Add the products of ``count`` steps."""
        builder = self.builder
        with _tools.for_range(builder, count) as loop:
            a = builder.add(high.begin, builder.mul(loop.index, I64(high.pitch)))
            b = builder.add(wide.begin, builder.mul(loop.index, I64(wide.pitch)))
            places = (builder.add(b, I64(v * self.lanes)) for v in range(_VECTORS))
            lanes = [self.load(wide.which, place, self.kind) for place in places]
            for r, row in enumerate(totals):
                number = builder.load(self.place(high.which, builder.add(a, I64(r)), self.lane))
                numbers = spread(builder, number, self.kind)
                for vector, total in zip(lanes, row, strict=True):
                    builder.store(add(builder, builder.load(total), numbers, vector), total)


def _rounded_twice(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b))


@primitive
def add_products(typingctx: Any, sums: Any, a: Any, b: Any, steps: Any) -> Any:
    """Add ``steps`` products to sums, each rounded before it is added.

    sums: (array, place, pitch), of the sums ``array[place + r * pitch + n]``. a, b: (array, place), HIGH and
    WIDE numbers a step. All float64.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args, F64)
        _, place, pitch, _, at, _, begin, steps = tile.args
        for row, lane in tile.parts(WIDE):
            totals = tile.variables()
            for r, v, index in tile.vectors_of(place, pitch, row, lane):
                builder.store(tile.load(0, index, tile.kind), totals[r][v])
            high = _Operand(3, builder.add(at, I64(row)), HIGH)
            wide = _Operand(5, builder.add(begin, I64(lane)), WIDE)
            tile.add_steps(totals, high, wide, steps, _rounded_twice)
            for r, v, index in tile.vectors_of(place, pitch, row, lane):
                tile.store(0, index, builder.load(totals[r][v]))
        return context.get_dummy_value()

    return types.void(sums, a, b, types.uint64), codegen


@primitive
def add_float32_sums(typingctx: Any, sums: Any, x: Any, y: Any, steps: Any) -> Any:
    """Add float32 sums of ``steps`` products to float64 sums.

    Products must be exact in float32: then it does not matter whether they are rounded before they are added.
    sums: as of :func:`add_products`. x, y: (array, place), float32, PANEL numbers a step, of which HIGH and
    PANEL from the place on are read.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args, F32)
        _, place, pitch, _, at, _, begin, steps = tile.args
        double = ir.VectorType(F64, tile.lanes)
        for row, lane in tile.parts(PANEL):
            totals = tile.variables()
            for variable in (variable for each in totals for variable in each):
                builder.store(ir.Constant(tile.kind, [0.0] * tile.lanes), variable)
            high = _Operand(3, builder.add(at, I64(row)), PANEL)
            wide = _Operand(5, builder.add(begin, I64(lane)), PANEL)
            tile.add_steps(totals, high, wide, steps, add_product)
            for r, v, index in tile.vectors_of(place, pitch, row, lane):
                found = builder.fpext(builder.load(totals[r][v]), double)
                tile.store(0, index, builder.fadd(tile.load(0, index, double), found))
        return context.get_dummy_value()

    return types.void(sums, x, y, types.uint64), codegen
