"""Quantization error by rows, independent of threads and vector width."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Float32
from ..decode.rows import decode, stored_scales
from ..decode.steps import PackedSteps, ValueTarget, can_decode_steps, decode_steps
from ..encode.rows import parameter_row, tile_span
from ..encode.step_access import values_in_order
from ..encode.steps import StepFactors
from ..machine import vector as v
from ..machine.descriptor import ZERO_NONE, unpack
from ..machine.intrinsics import device, float32_of, inlined, scratch
from ..machine.named_records import unpacker
from ..machine.pack import load_codes
from ..machine.reductions import largest_lane, sum_of_lanes, sum_of_words
from ..machine.team import bundled
from ..machine.tile import TILE, clear, factor_cut, factor_shift, fetch_ahead, load, spread

ONE = np.uint64(1)
CHUNK = np.uint64(512)
"""Elements whose squares are added in float32, 16 sums side by side; chunks are added in float64."""


class ClipExtent(NamedTuple):
    """Middle of the codes, and steps to the first clipped value."""

    middle: Float32
    reach: Float32


unpack_extent = unpacker(ClipExtent)


class ErrorArrays(NamedTuple):
    """What :func:`measure_rows` reads and writes.

    x, source: values and packed codes. table, scales, scale_codes, zeros: see
    :class:`..decode.rows.DequantizeArrays`. adds: the offset of each block, which is added to products, or
    none. sums: (3 * rows,) float64, for each row the sum of x**2, the sum of (x - y)**2 and the largest |x -
    y|. clipped: (rows,) int64.
    """

    x: Any
    source: Any
    table: Any
    scales: Any
    scale_codes: Any
    zeros: Any
    adds: Any
    sums: Any
    clipped: Any


class DecodedTile(NamedTuple):
    """Decoded values; factors, zero points and offsets of blocks ``i >> shift``."""

    values: Any
    factors: Any
    zeros: Any
    added: Any
    shift: Any


@inlined
def _block_of(tile: Any, extent: Any, block: Any) -> Any:
    """Middle of a block's codes, distance without clipping, and its offset."""
    factor, offset = tile.factors[block], tile.added[block]
    middle = (extent.middle - tile.zeros[block]) * factor + offset
    return v.floats_of(middle), v.floats_of(extent.reach * abs(factor)), v.floats_of(offset)


@device
def measure_steps(x: Any, at: Any, begin: Any, count: Any, tile: Any, extent: Any, sums: Any) -> Any:
    """Add figures of ``count`` tile values; return how many are clipped.

    They are whole steps. at: where the tile begins in ``x``. begin: where they begin in the tile, a
    :class:`DecodedTile`. sums: the three of their row; see :class:`ErrorArrays`.
    """
    decoded, shift = tile.values, tile.shift
    end = begin + count
    magnitude = v.words_of(np.uint32(0x7FFFFFFF))
    clipped, worst = v.words_of(np.uint32(0)), v.words_of(np.uint32(0))
    for start in range(begin, end, CHUNK):
        squares, errors = v.floats_of(np.float32(0)), v.floats_of(np.float32(0))
        i, stop = np.uint64(start), min(start + CHUNK, end)
        while i < stop:
            first, second = i >> shift, (i + v.HALF) >> shift
            middle, reach, more = _block_of(tile, extent, first)
            next_middle, next_reach, next_more = middle, reach, more
            edge = min((first + ONE) << shift, stop)
            if second != first:  # a block is half a step
                next_middle, next_reach, next_more = _block_of(tile, extent, second)
                edge = i + v.WHOLE
            while i < edge:
                a, b = values_in_order(x, at + i)
                off = v.bits_of(a - middle) & magnitude
                clipped = clipped - v.above(v.values_of(off), reach)
                off = v.bits_of(b - next_middle) & magnitude
                clipped = clipped - v.above(v.values_of(off), next_reach)
                squares = squares + (a * a + b * b)
                a = a - (v.load_lanes(decoded, i) + more)
                b = b - (v.load_lanes(decoded, i + v.HALF) + next_more)
                errors = errors + (a * a + b * b)
                worst = v.larger_bits(
                    worst, v.larger_bits(v.bits_of(a) & magnitude, v.bits_of(b) & magnitude)
                )
                i += v.WHOLE
        sums[0] += np.float64(sum_of_lanes(squares))
        sums[1] += np.float64(sum_of_lanes(errors))
    sums[2] = max(sums[2], np.float64(float32_of(largest_lane(worst))))
    return sum_of_words(clipped)


@inlined
def measure_lines(x: Any, at: Any, count: Any, tile: Any, extent: Any, arrays: Any, rows: Any) -> None:
    """Add figures of ``count`` values of each row; see :func:`measure_steps`."""
    for row in range(rows[0], rows[1]):
        sums = arrays.sums[np.uint64(3) * row : np.uint64(3) * row + np.uint64(3)]
        begin = (row - rows[0]) * count
        arrays.clipped[row] += np.int64(measure_steps(x, at, begin, count, tile, extent, sums))


@device
def start_rows(sums: Any, clipped: Any, row: Any, lines: Any) -> None:
    """Set the figures of ``lines`` rows from ``row`` to nothing's."""
    for i in range(np.uint64(3) * row, np.uint64(3) * (row + lines)):
        sums[i] = np.float64(0)
    for i in range(row, row + lines):
        clipped[i] = np.int64(0)


@device
def measure_tile(values: Any, decoded: Any, count: Any, totals: Any) -> None:
    """Add the figures of a tile of any length, one by one."""
    for i in range(count):
        off = values[i] - decoded[i]
        totals[0] += np.float64(values[i] * values[i])
        totals[1] += np.float64(off * off)
        totals[2] = max(totals[2], np.float64(abs(off)))


@device
def count_clipped(tile: Any, factors: Any, zeros: Any, added: Any, count: Any, extent: Any) -> Any:
    """Count values further than ``extent.reach`` steps from the middle of the codes."""
    clipped = np.uint32(0)
    for i in range(count):
        away = abs(tile[i] - ((extent.middle - zeros[i]) * factors[i] + added[i]))
        clipped += np.uint32(1) if away > extent.reach * abs(factors[i]) else np.uint32(0)
    return clipped


@device
def take(numbers: Any, at: Any, count: Any, out: Any) -> None:
    """Copy ``count`` numbers from a place on."""
    for b in range(count):
        out[b] = numbers[at + b]


@device
def rows_at_once(layout: Any, most: Any, last: Any) -> Any:
    """Rows decoded together: short ones of whole steps, up to ``most``.

    Gain that keeps it: rows of 128 take three fifths of the time.
    """
    flat = layout.row_div == np.uint64(1) and layout.row_mod >= last
    regular = flat and layout.cols % layout.block == 0 and layout.cols * layout.bits % np.uint64(8) == 0
    stepwise = layout.cols % v.WHOLE == 0 and factor_shift(layout.block, most) > np.uint64(0)
    return max(most // layout.cols, np.uint64(1)) if regular and stepwise else np.uint64(1)


@bundled
def measure_rows(args: Any, first: Any, last: Any) -> None:
    """Measure rows ``first`` to ``last`` against their codes, short ones together.

    args: a descriptor, :class:`ClipExtent`, :class:`ErrorArrays`.
    """
    (layout, element, rule), extent = unpack(args[0]), unpack_extent(args[1])
    arrays = ErrorArrays(*args[2:])
    x, source, table, scales, scale_codes, zeros, adds, sums, clipped = arrays
    tile, decoded = scratch(TILE, np.float32), scratch(TILE, np.float32)
    factors, offsets = scratch(TILE, np.float32), scratch(TILE, np.float32)
    codes, per_block = scratch(TILE, np.uint8), scratch(TILE, np.float32)
    zero_points, added = scratch(TILE, np.float32), scratch(TILE, np.float32)
    for zeroed in (offsets, zero_points, added):
        clear(zeroed)
    known = can_decode_steps(element, layout.bits)
    narrow = layout.bits != np.uint64(8) and layout.bits != np.uint64(4)
    per = rows_at_once(layout, tile_span(layout.block, np.uint64(TILE) * layout.block), last)
    for r in range(first, last, per):
        lines = min(per, last - r)
        at = r * layout.cols
        end = at + layout.cols * lines
        block_at = parameter_row(layout, r)
        byte_at = r * layout.row_bytes
        start_rows(sums, clipped, r, lines)
        while at < end:
            span = tile_span(layout.block, end - at)
            blocks = (span + layout.block - np.uint64(1)) // layout.block
            stored_scales(rule, scales, scale_codes, block_at, blocks, per_block)
            if element.zero_place != ZERO_NONE:
                take(zeros, block_at, blocks, zero_points)
            if adds.size > 0:
                take(adds, block_at, blocks, added)
            shift, part = factor_cut(layout.block, span)
            for chunk in range(np.uint64(0), span, part):
                n, first_block = min(part, span - chunk), chunk // layout.block
                own, own_zeros = per_block[first_block:], zero_points[first_block:]
                own_added = added[first_block:]
                fetch_ahead(x, at + chunk + n, n)
                whole = shift > np.uint64(0) and n % v.WHOLE == 0
                if narrow or not whole:
                    load_codes(source, byte_at, n, layout.bits, codes)
                stepped = whole and known
                if stepped:
                    steps = PackedSteps(source, byte_at, n, layout.bits, codes, n)
                    blocks_of_steps = StepFactors(own, own_zeros, shift, False)
                    target = ValueTarget(decoded, np.uint64(0), False, False)
                    stepped = decode_steps(steps, element, table, blocks_of_steps, target, False)
                if not stepped:
                    load_codes(source, byte_at, n, layout.bits, codes)
                    spread(own, n, layout.block, factors)
                    spread(own_zeros, n, layout.block, offsets)
                    decode(codes, n, element, table, factors, offsets, decoded)
                byte_at += (n * layout.bits + np.uint64(7)) // np.uint64(8)
                if whole:
                    found = DecodedTile(decoded, own, own_zeros, own_added, shift)
                    measure_lines(x, at + chunk, n // lines, found, extent, arrays, (r, r + lines))
                else:
                    if adds.size > 0:
                        spread(own_added, n, layout.block, tile)
                        for i in range(n):
                            decoded[i] += tile[i]
                    load(x, at + chunk, n, layout.kind, tile)
                    spread(own, n, layout.block, factors)
                    spread(own_zeros, n, layout.block, offsets)
                    measure_tile(tile, decoded, n, sums[np.uint64(3) * r : np.uint64(3) * r + np.uint64(3)])
                    spread(own_added, n, layout.block, decoded)
                    clipped[r] += np.int64(count_clipped(tile, factors, offsets, decoded, n, extent))
            at += span
            block_at += blocks
