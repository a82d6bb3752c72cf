"""16-bit floats to 4 bits with 8-bit scales, by integer tables.

A block's scale follows from its largest magnitude, of which a tensor of 16-bit floats has few; under one
scale, the code of a magnitude is the number of boundaries below it, seven magnitudes of the source. Both are
found in the general way when they are first met, so that whatever a dialect does on the way is in them. The
eighth boundary is the largest magnitude whose code has no sign.

Gain that keeps it, whole second passes over 4096 x 4096 numbers on one AVX-512 thread: 1.5 times the speed of
:mod:`.steps` on nvfp4, 1.9 on nvint4, and 3.8 times the speed of :mod:`.elements` on mxfp4 from float16.
"""

from typing import Any

import numpy as np

from ..machine import descriptor as k
from ..machine.intrinsics import amax16, by_dtype, device, inlined, scratch
from ..machine.lookup import REPEATED, ROW, above_last_of_rows, count_rows
from ..machine.tile import FLOAT16, NOT_FINITE, TILE, factor_shift, halves_at, load, run_amax, widen_magnitude
from ..machine.vector import STEP, WHOLE, halves_of, shift_signed, store_low_nibbles
from .block_scales import BlockFactors, BlockStatistics, ScaleArrays, block_scales
from .elements import encode
from .step_access import fetch_step, is_short

SCALES, MAGNITUDES = 256, 1 << 15
TABLE = SCALES * ROW
"""int16 of the rows of all scales of 8 bits."""
UNKNOWN = np.uint8(0)
"""In the place of a scale plus 1; a scale of code 255 is found again in each block."""
WORTH = np.uint64(1 << 19)
"""Elements from which tables of one call pay: filling them takes as long as some 200,000 elements."""
ROOM = MAGNITUDES + SCALES + 2 * TABLE + 4
"""Bytes of tables that calls share, all zero before the first; see :func:`tables_of`."""
BOUNDARIES, SIGN = np.uint64(8), np.uint64(7)
"""Boundaries of a row, and the number of the sign's."""
PROBES = np.uint64(STEP // 8)
"""Magnitudes that are tried at once for each boundary."""
MOST_BFLOAT16, MOST_FLOAT16 = np.int64(0x7F7F), np.int64(0x7BFF)
"""Bits of the largest finite magnitudes."""
SHORT = np.uint64(STEP // 2)
"""Elements of the shortest blocks, half a step."""


@inlined
def has_seven_each_way(element: Any) -> Any:
    """Whether codes are integers from -7 to 7."""
    whole = element.kind == k.INTEGER and element.zero_place == k.ZERO_NONE
    return whole and element.low == np.float32(-7) and element.high == np.float32(7)


@inlined
def can_encode_boundaries(x: Any, desc: Any, worth: Any) -> Any:
    """Return whether :func:`encode_boundaries` knows element and layout, where tables are ``worth`` it."""
    layout, element, rule = desc
    floats = element.kind == k.FLOAT and element.magnitude == np.uint32(7)
    few = layout.bits == np.uint64(4) and (floats or has_seven_each_way(element))
    stored = (rule.how == k.POWER or rule.how == k.MINIFLOAT) and not rule.unsigned
    block = layout.block
    fits = block >= SHORT and block <= np.uint64(TILE) and block & (block - np.uint64(1)) == np.uint64(0)
    whole = layout.cols % max(block, WHOLE) == np.uint64(0)
    few = few and element.rounding in (k.HALF_EVEN, k.HALF_AWAY, k.TOWARD_ZERO)  # alike for both signs
    return is_short(x) and few and stored and fits and whole and worth


def _finder(lane: Any) -> Any:
    """Build the boundary search for 16-bit floats, ``lane`` in an array."""

    @device
    def find(x: Any, factor: Any, kind: Any, element: Any, order: Any, row: Any) -> None:
        """Set the eight boundaries under ``factor``, each repeated over half a step.

        Codes grow with magnitudes, so each boundary is the largest magnitude whose code is not past its
        number.
        """
        probes, codes = scratch(32, lane), scratch(32, np.uint8)
        tile, factors, zeros = scratch(32, np.float32), scratch(32, np.float32), scratch(32, np.float32)
        low, high = scratch(8, np.int64), scratch(8, np.int64)
        for i in range(WHOLE):
            factors[i], zeros[i] = factor, np.float32(0)
        for j in range(BOUNDARIES):
            low[j], high[j] = np.int64(-1), MOST_FLOAT16 if kind == FLOAT16 else MOST_BFLOAT16
        searching = True
        while searching:
            for i in range(WHOLE):
                n = i // PROBES
                step = (high[n] - low[n] + np.int64(PROBES)) // np.int64(PROBES + np.uint64(1))
                probe = max(min(low[n] + step * np.int64(i % PROBES + np.uint64(1)), high[n]), np.int64(0))
                probes[i] = lane(probe | np.int64(0x8000) if n == SIGN else probe)
            load(probes, np.uint64(0), WHOLE, kind, tile)
            encode(tile, factors, zeros, WHOLE, element, order, codes)
            for i in range(WHOLE):
                n, probe = i // PROBES, np.int64(probes[i]) & np.int64(0x7FFF)
                inside = np.uint64(codes[i]) < np.uint64(8) if n == SIGN else np.uint64(codes[i]) <= n
                if inside:
                    low[n] = max(low[n], probe)
                else:
                    high[n] = min(high[n], probe - np.int64(1))
            searching = False
            for j in range(BOUNDARIES):
                searching |= low[j] < high[j]
        for j in range(BOUNDARIES):
            row[j] = np.int16(low[j])
            for i in range(SHORT):
                row[np.uint64(REPEATED) + j * SHORT + i] = np.int16(low[j])

    return find


@device
def _no_row(x: Any, factor: Any, kind: Any, element: Any, order: Any, row: Any) -> None:
    """Do nothing: float32 never comes here."""


_find_row = by_dtype(uint16=_finder(np.uint16), int16=_finder(np.int16), float32=_no_row)


@inlined
def tables_of(room: Any) -> Any:
    """Return the tables in :data:`ROOM` bytes.

    They are (MAGNITUDES,) uint8, by the largest magnitude the scale plus 1, 0 for those that are not known;
    (TABLE,) int16, rows of boundaries; (SCALES,) uint8, which rows are found; (1,) uint32, what
    :func:`encode_boundaries` returns.
    """
    begin, middle = np.uint64(MAGNITUDES), np.uint64(MAGNITUDES + SCALES)
    end = np.uint64(MAGNITUDES + SCALES + 2 * TABLE)
    rows, state = room[middle:end].view(np.int16), room[end : end + np.uint64(4)].view(np.uint32)
    return room[:begin], rows, room[begin:middle], state


@device
def clear_tables(room: Any) -> None:
    """Forget all scales and which boundaries are found."""
    for i in range(np.uint64(MAGNITUDES + SCALES)):
        room[i] = np.uint8(0)


@device
def find_scale(x: Any, magnitude: Any, desc: Any, order: Any, tables: Any) -> Any:
    """Scale code for a largest magnitude, with its row of boundaries found."""
    kind, element = desc.layout.kind, desc.element
    scale_of, table, found, state = tables
    amax, codes = scratch(1, np.uint32), scratch(1, np.uint8)
    factors, none = scratch(1, np.float32), scratch(1, np.float32)
    amax[0] = widen_magnitude(magnitude, kind)
    statistics, stored = BlockStatistics(amax, none, none), ScaleArrays(none, codes, none)
    used, multiply = BlockFactors(factors, none), element.scaling == k.MULTIPLY
    fits = block_scales(statistics, np.uint64(1), desc.rule, multiply, np.uint64(0), stored, used)
    bad = k.BAD_VALUE if amax[0] >= NOT_FINITE else fits
    if bad != k.OK:
        state[0] = max(state[0], np.uint32(bad))
        return codes[0]
    if found[codes[0]] == np.uint8(0):
        begin = np.uint64(codes[0]) * np.uint64(ROW)
        _find_row(x, factors[0], kind, element, order, table[begin : begin + np.uint64(ROW)])
        found[codes[0]] = np.uint8(1)
    scale_of[magnitude] = codes[0] + np.uint8(1)
    return codes[0]


@inlined
def put_codes(
    x: Any, at: Any, table: Any, first: Any, second: Any, element: Any, out: Any, byte_at: Any
) -> None:
    """Write the packed codes of a step; first, second: scales of halves."""
    u = halves_at(x, at)
    magnitude = u & halves_of(np.uint16(0x7FFF))
    codes = count_rows(magnitude, table, first, second)
    if element.kind == k.INTEGER:
        negative = shift_signed(u, halves_of(np.uint16(15)))
        store_low_nibbles(out, byte_at, (codes ^ negative) - negative)
        return
    sign = (u >> halves_of(np.uint16(12))) & halves_of(np.uint16(8))
    if element.unsigned_below >= np.float32(0) or element.negative_nan:
        sign = sign & (above_last_of_rows(magnitude, table, first, second) << halves_of(np.uint16(3)))
    store_low_nibbles(out, byte_at, codes + sign)


@inlined
def encode_boundaries(
    source: Any, desc: Any, order: Any, tables: Any, scales: Any, out: Any, byte_at: Any
) -> Any:
    """Write scales and packed codes of whole blocks and whole steps.

    source: :class:`.step_access.Elements`. tables: see :func:`tables_of`. scales: codes of its blocks.
    Returns OK, BAD_VALUE or BAD_SCALE.
    """
    (x, at, span), layout, element = source, desc.layout, desc.element
    scale_of, table, _, state = tables
    block = layout.block
    for b in range(span // block):
        m = np.uint16(amax16(x, at + b * block))
        if block == WHOLE:
            m = max(m, np.uint16(amax16(x, at + b * block + SHORT)))
        elif block > WHOLE:
            m = np.uint16(run_amax(x, at + b * block, at + (b + np.uint64(1)) * block))
        scale = scale_of[m]
        if scale == UNKNOWN:
            scale = find_scale(x, m, desc, order, tables) + np.uint8(1)
        scales[b] = np.uint8(scale - np.uint8(1))
    if block == SHORT:
        for i in range(np.uint64(0), span, WHOLE):
            fetch_step(x, at + i + span)
            first, second = np.uint64(scales[i // SHORT]), np.uint64(scales[i // SHORT + np.uint64(1)])
            put_codes(x, at + i, table, first, second, element, out, byte_at + i // np.uint64(2))
        return state[0]
    shift = factor_shift(block, span)
    for i in range(np.uint64(0), span, WHOLE):
        fetch_step(x, at + i + span)
        row = np.uint64(scales[i >> shift])
        put_codes(x, at + i, table, row, row, element, out, byte_at + i // np.uint64(2))
    return state[0]
