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

from ..machine.intrinsics import (
    ANY,
    F32,
    I8,
    I32,
    I64,
    INDEX,
    address,
    instruction,
    load_from,
    store_at,
    tools,
)
from ..machine.vector import in_all_lanes
from .products import HIGH, QUADS, SHIFT, add_product, add_quads, shuffled, sums_of_lanes, zeroed

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


def columns_at(builder: Any, array: Any, at: tuple[Any, Any], kind: Any) -> list[Any]:
    """Return the columns of 16 rows of a vector each.

    at: where the first row begins, and how far from it the next one.
    """
    places = [builder.add(at[0], builder.mul(at[1], I64(n))) for n in range(LANES)]
    return _transposed(builder, [load_from(builder, array, place, kind) for place in places])


@instruction(types.void, ANY, INDEX, INDEX, ANY, INDEX)
def pack_block(builder: Any, weight: Any, begin: Any, pitch: Any, panel: Any, place: Any) -> None:
    """Write 16 steps of 16 rows from ``panel[place]``, moved to unsigned codes.

    weight: bytes; row i begins at ``begin + i * pitch`` and has 64 of them.
    """
    shift = ir.Constant(_BYTES, [-SHIFT] * QUADS.lanes)
    for n, column in enumerate(columns_at(builder, weight, (begin, pitch), _SUMS)):
        codes = builder.xor(builder.bitcast(column, _BYTES), shift)
        store_at(builder, codes, panel, builder.add(place, I64(4 * PANEL * n)), 4)


class _Tile:
    """IR writer of code rows by a panel; arguments are the instructions'."""

    def __init__(self, builder: Any, codes: Any, panel: Any, starts: Any) -> None:
        self.builder, self._panel, self._starts = builder, panel, starts
        array, row, cols = codes
        firsts = [builder.add(row, builder.mul(cols, I64(r))) for r in range(HIGH)]
        self._codes = [address(builder, array, at, I32) for at in firsts]

    def variables(self, kind: Any) -> list[list[Any]]:
        """Return a variable, zero, for each row and vector."""
        return [zeroed(self.builder, kind, VECTORS) for _ in range(HIGH)]

    def add_group(self, group: Any, groups: Any, steps: Any) -> list[list[Any]]:
        """Variables with a group's sums of products, which begin as ``starts``."""
        builder, totals = self.builder, self.variables(_SUMS)
        array, top = self._starts
        begun = []
        for r in range(HIGH):
            at = builder.add(builder.mul(builder.add(top, I64(r)), groups), group)
            begun.append(load_from(builder, array, builder.mul(at, I64(LANES)), _SUMS, 4))
        begins = sums_of_lanes(builder, builder.add, begun)
        for r, row in enumerate(totals):
            begin = in_all_lanes(builder, builder.extract_element(begins, I32(r)), _SUMS)
            for total in row:
                builder.store(begin, total)
        first = builder.mul(group, steps)
        with tools.for_range(builder, steps) as loop:
            step = builder.add(first, loop.index)
            weights = [self._weight(step, v) for v in range(VECTORS)]
            for codes, row in zip(self._codes, totals, strict=True):
                number = load_from(builder, codes, step, I32)
                numbers = builder.bitcast(in_all_lanes(builder, number, _SUMS), _BYTES)
                for weight, total in zip(weights, row, strict=True):
                    builder.store(add_quads(builder, builder.load(total), weight, numbers), total)
        return totals

    def _weight(self, step: Any, vector: int) -> Any:
        at = self.builder.add(self.builder.mul(step, I64(4 * PANEL)), I64(4 * LANES * vector))
        return load_from(self.builder, self._panel, at, _BYTES, 4)

    def store(self, results: list[list[Any]], out: Any) -> None:
        """Store vectors to ``out``: array, place, and pitch of rows."""
        builder, (array, begin, pitch) = self.builder, out
        for r, row in enumerate(results):
            first = builder.add(begin, builder.mul(pitch, I64(r)))
            for v, result in enumerate(row):
                store_at(builder, builder.load(result), array, builder.add(first, I64(LANES * v)), 4)


@instruction(types.void, ANY, ANY, ANY, INDEX, ANY)
def multiply_panel(builder: Any, codes: Any, panel: Any, starts: Any, steps: Any, out: Any) -> None:
    """Write bits of the sums of products of four rows and panel.

    codes: (int8 array, row, cols); row r begins at ``row + r * cols``. starts: (int32 array, top), 16 lanes a
    row, from row ``top`` on. steps: in a row. out: (float32 array, place, pitch), of the sums
    ``array[place + r * pitch + n]``.
    """
    tile = _Tile(builder, codes, panel, starts)
    tile.store(tile.add_group(I64(0), I64(1), steps), out)


@instruction(types.void, ANY, ANY, ANY, INDEX, ANY, ANY, INDEX)
def multiply_panel_groups(
    builder: Any, codes: Any, panel: Any, starts: Any, steps: Any, out: Any, scales: Any, groups: Any
) -> None:
    """Write :func:`multiply_panel` results as sums of groups times their scales.

    starts: 16 lanes a row and group. steps: of a group. scales: float32, for each group those of the panel's
    rows.
    """
    tile = _Tile(builder, codes, panel, starts)
    results = tile.variables(_FLOATS)
    with tools.for_range(builder, groups) as group:
        totals = tile.add_group(group.index, groups, steps)
        at = builder.mul(group.index, I64(PANEL))
        for v in range(VECTORS):
            scale = load_from(builder, scales, builder.add(at, I64(LANES * v)), _FLOATS, 4)
            for total, result in zip(totals, results, strict=True):
                found = builder.sitofp(builder.load(total[v]), _FLOATS)
                builder.store(add_product(builder, builder.load(result[v]), found, scale), result[v])
    tile.store(results, out)
