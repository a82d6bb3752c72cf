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
from numba.core import cgutils

from ....ops.lowering import UInt64
from ..decode.rows import DequantizeArrays, dequantize_rows
from ..machine.intrinsics import F32, I64, address, device, primitive, x86_has
from ..machine.named_records import unpacker
from ..machine.vector import load_lanes, store_lanes
from .panels import LANES, PANEL, VECTORS, columns_at, spread
from .products import HIGH, add_product, zeroed

_tools: Any = cgutils  # has no types
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
    """Return the numbers of workspace that :func:`value_panels` needs: rows, a panel, sums."""
    return (LANES + PANEL) * cols + int(BLOCK) * PANEL


def _at_once() -> int:
    """Panel vectors summed at once: sums of four rows fit registers."""
    return VECTORS if x86_has("avx512f") else 1


@primitive
def pack_values(typingctx: Any, values: Any, begin: Any, pitch: Any, panel: Any, place: Any) -> Any:
    """Write 16 numbers of 16 rows of a panel from ``panel[place]`` on.

    values: float32; row i begins at ``begin + i * pitch``.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        columns = columns_at(context, builder, (values, args[0]), (args[1], args[2]), _FLOATS)
        for n, column in enumerate(columns):
            place = builder.add(args[4], I64(PANEL * n))
            builder.store(column, address(context, builder, panel, args[3], place, _FLOATS)).align = 4
        return context.get_dummy_value()

    return types.void(values, types.uint64, types.uint64, panel, types.uint64), codegen


@primitive
def add_panel(
    typingctx: Any, x: Any, rows: Any, panel: Any, begin: Any, steps: Any, sums: Any, place: Any
) -> Any:
    """Add products of ``steps`` numbers of each row with a panel's.

    To ``sums[place + r * PANEL + n]``. x: float32; row r begins at ``rows[r]``. panel: float32, those of step
    k from ``begin + k * PANEL`` on.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def place_of(which: int, index: Any, lane: Any) -> Any:
            return address(context, builder, signature.args[which], args[which], index, lane)

        high = signature.args[1].count
        firsts = [place_of(0, builder.extract_value(args[1], r), F32) for r in range(high)]
        for start in range(0, VECTORS, _at_once()):
            vectors = range(start, start + _at_once())
            totals = [zeroed(builder, _FLOATS, len(vectors)) for _ in range(high)]
            with _tools.for_range(builder, args[4]) as loop:
                at = builder.add(args[3], builder.mul(loop.index, I64(PANEL)))
                weights = []
                for v in vectors:
                    weight = builder.load(place_of(2, builder.add(at, I64(LANES * v)), _FLOATS))
                    weight.align = 4
                    weights.append(weight)
                for first, row in zip(firsts, totals, strict=True):
                    numbers = spread(builder, builder.load(builder.gep(first, [loop.index])), _FLOATS)
                    for weight, total in zip(weights, row, strict=True):
                        builder.store(add_product(builder, builder.load(total), numbers, weight), total)
            for r, row in enumerate(totals):
                for v, total in zip(vectors, row, strict=True):
                    target = place_of(5, builder.add(args[6], I64(PANEL * r + LANES * v)), _FLOATS)
                    before = builder.load(target)
                    before.align = 4
                    builder.store(builder.fadd(before, builder.load(total)), target).align = 4
        return context.get_dummy_value()

    number = types.uint64
    return types.void(x, rows, panel, number, number, sums, number), codegen


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
def value_panels(
    x: Any, weight: Any, shape: Any, bias: Any, work: Any, out: Any, first: Any, last: Any
) -> None:
    """Compute panels ``first`` to ``last`` of the output.

    x: (count * cols,) float32. weight: :class:`PackedValues`. shape: :class:`Panels`. bias: (rows,) float32,
    or empty. work: float32, as many as :func:`work_floats` says. out: (count * rows,) float32.
    """
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
