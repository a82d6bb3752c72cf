"""Linear layer on values: weight panels are dequantized, then multiplied.

    y[m, n] = sum over k of x[m, k] * value(w[n, k]) + bias[n]

For any scheme that :mod:`..decode.rows` reads. A panel is PANEL rows of the weight, transposed, so that each
lane of a vector sums for a row of its own (see :mod:`.panels`); only a panel of values is ever in memory. The
products of DEPTH neighbors are summed in float32, and these sums added in order: neither threads nor other
rows of the input change a result.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from ....ops.lowering import UInt64
from ..decode.rows import DequantizeArrays, dequantize_rows
from ..machine.compilers import x86_has
from ..machine.descriptor import unpack
from ..machine.intrinsics import (
    ANY,
    F32,
    I64,
    INDEX,
    address,
    device,
    instruction,
    load_from,
    store_at,
    tools,
)
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.vector import in_all_lanes, load_lanes, store_lanes
from .panels import LANES, PANEL, VECTORS, columns_at
from .products import HIGH, add_product, zeroed

_FLOATS = ir.VectorType(F32, LANES)

DEPTH = np.uint64(256)
"""Products that are summed in registers; a panel's fit the second cache."""
BLOCK = np.uint64(64)
"""Rows of the input whose sums are kept at a time."""
WIDE, STEP = np.uint64(PANEL), np.uint64(LANES)
ZERO, ONE, FOUR = np.uint64(0), np.uint64(1), np.uint64(HIGH)


class PackedValues(NamedTuple):
    """Packed weight: descriptor, and arrays of :class:`..decode.rows.DequantizeArrays` but for the output."""

    desc: Any
    source: Any
    table: Any
    scales: Any
    scale_codes: Any
    zeros: Any


class Panels(NamedTuple):
    """Layer shape: rows of input; columns, rows, panels of weight; slots."""

    input_rows: UInt64
    cols: UInt64
    rows: UInt64
    panels: UInt64
    slots: UInt64


unpack_panels = unpacker(Panels)


def work_floats(cols: int) -> int:
    """Return the numbers of workspace of a slot: rows, a panel, sums."""
    return (LANES + PANEL) * cols + int(BLOCK) * PANEL


def _at_once() -> int:
    """Panel vectors summed at once: sums of four rows fit registers."""
    return VECTORS if x86_has("avx512f") else 1


@instruction(types.void, ANY, INDEX, INDEX, ANY, INDEX)
def pack_values(builder: Any, values: Any, begin: Any, pitch: Any, panel: Any, place: Any) -> None:
    """Write 16 numbers of 16 rows of a panel from ``panel[place]`` on.

    values: float32; row i begins at ``begin + i * pitch``.
    """
    for n, column in enumerate(columns_at(builder, values, (begin, pitch), _FLOATS)):
        store_at(builder, column, panel, builder.add(place, I64(PANEL * n)), 4)


@instruction(types.void, ANY, ANY, ANY, INDEX, INDEX, ANY, INDEX)
def add_panel(
    builder: Any, x: Any, rows: Any, panel: Any, begin: Any, steps: Any, sums: Any, place: Any
) -> None:
    """Add products of ``steps`` numbers of each row with a panel's.

    To ``sums[place + r * PANEL + n]``. x: float32; row r begins at ``rows[r]``. panel: float32, those of step
    k from ``begin + k * PANEL`` on.
    """
    firsts = [address(builder, x, row, F32) for row in rows]
    for start in range(0, VECTORS, _at_once()):
        vectors = range(start, start + _at_once())
        totals = [zeroed(builder, _FLOATS, len(vectors)) for _ in rows]
        with tools.for_range(builder, steps) as loop:
            at = builder.add(begin, builder.mul(loop.index, I64(PANEL)))
            places = [builder.add(at, I64(LANES * v)) for v in vectors]
            weights = [load_from(builder, panel, index, _FLOATS, 4) for index in places]
            for first, row in zip(firsts, totals, strict=True):
                numbers = in_all_lanes(builder, builder.load(builder.gep(first, [loop.index])), _FLOATS)
                for weight, total in zip(weights, row, strict=True):
                    builder.store(add_product(builder, builder.load(total), numbers, weight), total)
        for r, row in enumerate(totals):
            for v, total in zip(vectors, row, strict=True):
                target = builder.add(place, I64(PANEL * r + LANES * v))
                before = load_from(builder, sums, target, _FLOATS, 4)
                store_at(builder, builder.fadd(before, builder.load(total)), sums, target, 4)


@device
def fill_panel(weight: Any, cols: Any, first: Any, last: Any, values: Any, panel: Any) -> None:
    """Write values of weight rows to a panel; lanes behind are zero.

    values: (16 * cols,), scratch. panel: (cols * PANEL,).
    """
    whole = cols - cols % STEP
    for lane in range(ZERO, WIDE, STEP):
        begin = first + lane
        end = max(begin, min(begin + STEP, last))
        for i in range((end - begin) * cols, STEP * cols):
            values[i] = np.float32(0)
        if begin < end:
            desc, source, table, scales, scale_codes, zeros = weight
            arrays = DequantizeArrays(source, table, scales, scale_codes, zeros, values)
            dequantize_rows(arrays, desc, begin, False, begin, end)
        for k in range(ZERO, whole, STEP):
            pack_values(values, k, cols, panel, k * WIDE + lane)
        for k in range(whole, cols):
            for n in range(STEP):
                panel[k * WIDE + lane + n] = values[n * cols + k]


@device
def finish_block(
    sums: Any, count: Any, width: Any, bias: Any, first: Any, out: Any, begin: Any, pitch: Any
) -> None:
    """Write sums of ``count`` rows plus bias: ``width`` numbers a row."""
    whole, biased = width - width % STEP, len(bias) > 0
    for r in range(count):
        at, source = begin + r * pitch, r * WIDE
        for i in range(ZERO, whole, STEP):
            y = load_lanes(sums, source + i)
            if biased:
                y = y + load_lanes(bias, first + i)
            store_lanes(out, at + i, y)
        for i in range(whole, width):
            out[at + i] = sums[source + i] + bias[first + i] if biased else sums[source + i]


@device
def _value_panels(
    x: Any, weight: Any, shape: Any, bias: Any, work: Any, out: Any, first: Any, last: Any
) -> None:
    """Compute panels ``first`` to ``last`` of the output."""
    count, cols, rows = shape.input_rows, shape.cols, shape.rows
    values, panel, sums = work[: STEP * cols], work[STEP * cols :], work[(STEP + WIDE) * cols :]
    for p in range(first, last):
        begin = p * WIDE
        width = min(WIDE, rows - begin)
        fill_panel(weight, cols, begin, begin + width, values, panel)
        for top in range(ZERO, count, BLOCK):
            high = min(BLOCK, count - top)
            for i in range(high * WIDE):
                sums[i] = np.float32(0)
            for k in range(ZERO, cols, DEPTH):
                steps, fours = min(DEPTH, cols - k), high - high % FOUR
                for r in range(ZERO, fours, FOUR):
                    at = (top + r) * cols + k
                    four = at, at + cols, at + cols + cols, at + cols + cols + cols
                    add_panel(x, four, panel, k * WIDE, steps, sums, r * WIDE)
                for r in range(fours, high):
                    add_panel(x, ((top + r) * cols + k,), panel, k * WIDE, steps, sums, r * WIDE)
            finish_block(sums, high, width, bias, begin, out, top * rows + begin, rows)


@over_rows
def value_slots(x: Any, stored: Any, bias: Any, work: Any, out: Any, cut: Any, first: Any, last: Any) -> None:
    """Compute slots of a layer's output from values of its weight.

    x: (count * cols,) float32. stored: fields of :class:`PackedValues`. bias: (rows,) float32, or empty.
    work: float32, as many as :func:`work_floats` says for each slot. out: (count * rows,) float32. cut:
    packed :class:`Panels`.
    """
    weight, shape = PackedValues(unpack(stored[0]), *stored[1:]), unpack_panels(cut)
    panels, slots = shape.panels, shape.slots
    size = np.uint64(len(work)) // slots
    for slot in range(first, last):
        own = work[slot * size : (slot + ONE) * size]
        ends = panels * slot // slots, panels * (slot + ONE) // slots
        _value_panels(x, weight, shape, bias, own, out, *ends)
