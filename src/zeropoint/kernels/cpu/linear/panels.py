"""8-bit products with a panel: weight rows packed one per lane.

A sum along a row, as in :mod:`.products`, ends with the addition of the lanes of its vector, which takes as
long as some hundred products. In a panel step by step come the next four codes of every row, so that a lane
sums for one row; the codes of the input at a step are one number of 32 bits, the same for all lanes. Packing
costs a product or two for each code and pays when enough rows of the input read it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..machine.intrinsics import F32, I8, I32, I64, address, flattened, primitive
from .products import HIGH, QUADS, SHIFT, add_product, add_quads, shuffled, sums_of_lanes, zeroed

_tools: Any = cgutils  # has no types

VECTORS = 4
LANES = QUADS.sums
PANEL = VECTORS * LANES
"""Rows of the weight in a panel."""
_SUMS, _FLOATS, _BYTES = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES), ir.VectorType(I8, QUADS.lanes)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Columns of a square matrix of row vectors, by interleaving halves."""
    count = len(rows)
    low = [lane + own for lane in range(count // 2) for own in (0, count)]
    high = [lane + count // 2 for lane in low]
    for _ in range(count.bit_length() - 1):
        pairs = zip(rows[: count // 2], rows[count // 2 :], strict=True)
        rows = [shuffled(builder, u, v, half) for u, v in pairs for half in (low, high)]
    return rows


def spread(builder: Any, number: Any, kind: Any) -> Any:
    """Return a vector whose lanes are all ``number``."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
    return shuffled(builder, one, one, [0] * kind.count)


def columns_at(
    context: Any, builder: Any, array: tuple[Any, Any], at: tuple[Any, Any], kind: Any
) -> list[Any]:
    """Return the columns of 16 rows of a vector each.

    array: its type and value. at: where the first row begins, and how far from it the next one.
    """
    rows = []
    for n in range(LANES):
        place = builder.add(at[0], builder.mul(at[1], I64(n)))
        row = builder.load(address(context, builder, *array, place, kind))
        row.align = 1  # codes begin anywhere
        rows.append(row)
    return _transposed(builder, rows)


@primitive
def pack_block(typingctx: Any, weight: Any, begin: Any, pitch: Any, panel: Any, place: Any) -> Any:
    """Write 16 steps of 16 rows from ``panel[place]``, moved to unsigned codes.

    weight: bytes; row i begins at ``begin + i * pitch`` and has 64 of them.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        columns = columns_at(context, builder, (weight, args[0]), (args[1], args[2]), _SUMS)
        shift = ir.Constant(_BYTES, [-SHIFT] * QUADS.lanes)
        for n, column in enumerate(columns):
            place = builder.add(args[4], I64(4 * PANEL * n))
            target = address(context, builder, panel, args[3], place, _BYTES)
            builder.store(builder.xor(builder.bitcast(column, _BYTES), shift), target).align = 4
        return context.get_dummy_value()

    return types.void(weight, types.uint64, types.uint64, panel, types.uint64), codegen


class _Tile:
    """IR writer of code rows by a panel; arguments are the primitives'."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.context, self.builder = context, builder
        self.types, self.args = flattened(builder, signature, args)
        firsts = [builder.add(self.args[1], builder.mul(self.args[2], I64(r))) for r in range(HIGH)]
        self._codes = [self.place(0, at, I32) for at in firsts]

    def place(self, which: int, index: Any, lane: Any) -> Any:
        """Address of an element of an array argument."""
        return address(self.context, self.builder, self.types[which], self.args[which], index, lane)

    def variables(self, kind: Any) -> list[list[Any]]:
        """Return a variable, zero, for each row and vector."""
        return [zeroed(self.builder, kind, VECTORS) for _ in range(HIGH)]

    def add_group(self, group: Any, groups: Any, steps: Any) -> list[list[Any]]:
        """Variables with a group's sums of products, which begin as ``starts``."""
        builder, totals = self.builder, self.variables(_SUMS)
        begun = []
        for r in range(HIGH):
            at = builder.add(builder.mul(builder.add(self.args[5], I64(r)), groups), group)
            start = builder.load(self.place(4, builder.mul(at, I64(LANES)), _SUMS))
            start.align = 4
            begun.append(start)
        begins = sums_of_lanes(builder, builder.add, begun)
        for r, row in enumerate(totals):
            begin = spread(builder, builder.extract_element(begins, I32(r)), _SUMS)
            for total in row:
                builder.store(begin, total)
        first = builder.mul(group, steps)
        with _tools.for_range(builder, steps) as loop:
            step = builder.add(first, loop.index)
            weights = [self._weight(step, v) for v in range(VECTORS)]
            for codes, row in zip(self._codes, totals, strict=True):
                number = builder.load(builder.gep(codes, [step]))
                number.align = 1
                numbers = builder.bitcast(spread(builder, number, _SUMS), _BYTES)
                for weight, total in zip(weights, row, strict=True):
                    builder.store(add_quads(builder, builder.load(total), weight, numbers), total)
        return totals

    def _weight(self, step: Any, vector: int) -> Any:
        at = self.builder.add(self.builder.mul(step, I64(4 * PANEL)), I64(4 * LANES * vector))
        found = self.builder.load(self.place(3, at, _BYTES))
        found.align = 4
        return found

    def store(self, results: list[list[Any]], places: tuple[int, int, int]) -> None:
        """Store vectors to an array, a row each pitch further: three arguments."""
        builder, (out, begin, pitch) = self.builder, places
        for r, row in enumerate(results):
            first = builder.add(self.args[begin], builder.mul(self.args[pitch], I64(r)))
            for v, result in enumerate(row):
                value = builder.load(result)
                target = self.place(out, builder.add(first, I64(LANES * v)), value.type)
                builder.store(value, target).align = 4


@primitive
def multiply_panel(typingctx: Any, codes: Any, panel: Any, starts: Any, steps: Any, out: Any) -> Any:
    """Write bits of the sums of products of four rows and panel.

    codes: (int8 array, row, cols); row r begins at ``row + r * cols``. starts: (int32 array, top), 16 lanes a
    row, from row ``top`` on. steps: in a row. out: (float32 array, place, pitch), of the sums
    ``array[place + r * pitch + n]``.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        tile.store(tile.add_group(I64(0), I64(1), tile.args[6]), (7, 8, 9))
        return context.get_dummy_value()

    return types.void(codes, panel, starts, types.uint64, out), codegen


@primitive
def multiply_panel_groups(
    typingctx: Any, codes: Any, panel: Any, starts: Any, steps: Any, out: Any, scales: Any, groups: Any
) -> Any:
    """Write :func:`multiply_panel` results as sums of groups times their scales.

    starts: 16 lanes a row and group. steps: of a group. scales: float32, for each group those of the panel's
    rows.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        results = tile.variables(_FLOATS)
        with _tools.for_range(builder, tile.args[11]) as group:
            totals = tile.add_group(group.index, tile.args[11], tile.args[6])
            at = builder.mul(group.index, I64(PANEL))
            for v in range(VECTORS):
                scale = builder.load(tile.place(10, builder.add(at, I64(LANES * v)), _FLOATS))
                scale.align = 4
                for total, result in zip(totals, results, strict=True):
                    found = builder.sitofp(builder.load(total[v]), _FLOATS)
                    more = add_product(builder, builder.load(result[v]), found, scale)
                    builder.store(more, result[v])
        tile.store(results, (7, 8, 9))
        return context.get_dummy_value()

    return types.void(codes, panel, starts, types.uint64, out, scales, types.uint64), codegen
