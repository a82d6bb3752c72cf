"""Codes under block tables, and codes made of several digits."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import UInt8, UInt64
from ..machine import vector as v
from ..machine.base3 import FIVE, emit_digits
from ..machine.descriptor import BAD_VALUE, OK
from ..machine.emit import emit_packed
from ..machine.intrinsics import bits32, by_dtype, device, inlined, scratch
from ..machine.lookup import count_floats_above, count_halves_above
from ..machine.named_records import unpacker
from ..machine.pack import load_codes
from ..machine.reductions import largest_lane
from ..machine.team import over_rows
from ..machine.tile import NOT_FINITE, TILE, load, magnitudes_at, widen_magnitude
from .group_extremes import half_keys, keys_of
from .step_access import Elements, StepTarget, is_stored, put

_ONE, _THREE, _EIGHT = np.uint64(1), np.uint64(3), np.uint64(8)
_ROOM = TILE + 8
"""Digits of a tile, and slack for the last whole word that is read."""
MOST = 15
"""Most boundaries of a table that is searched by bisection."""
_VECTOR = 16
"""Boundaries in a vector; the last one is beyond all numbers."""


class TableRows(NamedTuple):
    """Bits, block, columns, blocks and bytes of a row, dtype of ``x``."""

    bits: UInt64
    block: UInt64
    cols: UInt64
    width: UInt64
    row_bytes: UInt64
    kind: UInt8


class DigitRows(NamedTuple):
    """Codes of digits.

    bits: of a digit. per: digits of a code. missing: the digit in the place of those that are missing. block:
    values of a block, whose digits end on bytes. source_bytes, row_bytes: of a row of digits and of codes.
    """

    bits: UInt64
    base: UInt64
    per: UInt64
    missing: UInt64
    block: UInt64
    cols: UInt64
    source_bytes: UInt64
    row_bytes: UInt64


unpack_tables, unpack_digits = unpacker(TableRows), unpacker(DigitRows)


@inlined
def _same(x: Any, boundaries: Any) -> Any:
    """Largest numbers of the dtype of ``x`` not above floats, as compared."""
    return boundaries


@inlined
def _bfloat16_not_above(x: Any, boundaries: Any) -> Any:
    keys = keys_of(boundaries)
    negative = v.shift_signed(keys, v.words_of(np.uint32(31)))
    keys = v.shift_signed(keys - negative, v.words_of(np.uint32(16))) + negative
    return v.low_halves(keys, keys)


@inlined
def _float16_not_above(x: Any, boundaries: Any) -> Any:
    near = v.float16_of_floats(boundaries, boundaries)
    past = v.above(v.first_float16(near), boundaries)
    return half_keys(near) + v.low_halves(past, past)


_limits_of = by_dtype(float32=_same, uint16=_bfloat16_not_above, int16=_float16_not_above)


@inlined
def _count_floats(x: Any, at: Any, limits: Any) -> Any:
    """Count the limits below the numbers of a step, as octets."""
    first = count_floats_above(v.load_lanes(x, at), limits)
    return v.low_octets(first, count_floats_above(v.load_lanes(x, at + v.HALF), limits))


@inlined
def _count_halves(x: Any, at: Any, limits: Any) -> Any:
    return v.octets_of_halves(count_halves_above(half_keys(v.load_lanes(x, at)), limits))


_count_of_step = by_dtype(float32=_count_floats, uint16=_count_halves, int16=_count_halves)


@device
def _count_steps(source: Any, kind: Any, boundaries: Any, target: Any) -> Any:
    """Write the codes of whole steps; return the largest magnitude's bits.

    source: :class:`.step_access.Elements`. boundaries: _VECTOR float32, rising. target: of the codes.

    Gain that keeps comparisons of 16 bits: 1.3 times the speed of table4:channel from bfloat16.
    """
    x, at, count = source
    limits, most = _limits_of(x, v.load_lanes(boundaries, np.uint64(0))), magnitudes_at(x, at)
    for i in range(np.uint64(0), count, v.WHOLE):
        most = v.larger_bits(most, magnitudes_at(x, at + i))
        put(_count_of_step(x, at + i, limits), i, target)
    return widen_magnitude(largest_lane(most), kind)


@device
def _count_tile(x: Any, at: Any, n: Any, kind: Any, boundaries: Any, tile: Any, codes: Any) -> Any:
    """Write the codes of a tile; return the largest magnitude's bits."""
    most = np.uint32(0)
    load(x, at, n, kind, tile)
    for j in range(n):
        codes[j] = np.uint8(0)
        most = max(most, bits32(abs(tile[j])))
    for boundary in boundaries:
        for j in range(n):
            codes[j] += np.uint8(tile[j] > boundary)
    return most


@over_rows
def table_rows(x: Any, sizes: Any, boundaries: Any, out: Any, first: Any, last: Any) -> Any:
    """Count boundaries of its block below each number: codes of rows.

    sizes: packed :class:`TableRows`. boundaries: float32, one less than there are codes for each block.
    Blocks end on bytes.
    """
    bits, block, cols, width, row_bytes, kind = unpack_tables(sizes)
    tile, codes, packed = scratch(TILE, np.float32), scratch(TILE, np.uint8), scratch(TILE, np.uint8)
    count, worst, own = (_ONE << bits) - _ONE, np.uint32(0), scratch(_VECTOR, np.float32)
    for t in range(np.uint64(_VECTOR)):
        own[t] = np.float32(np.inf)
    for r in range(first, last):
        at, b = r * row_bytes, r * width
        for start in range(np.uint64(0), cols, block):
            size, table = min(block, cols - start), boundaries[b * count : (b + _ONE) * count]
            for t in range(min(count, np.uint64(MOST))):
                own[t] = table[t] + np.float32(0)  # zero without a sign, which orders below it
            for i in range(np.uint64(0), size, np.uint64(TILE)):
                n = min(size - i, np.uint64(TILE))
                stepwise, begin = count <= np.uint64(MOST) and n % v.WHOLE == 0, r * cols + start + i
                if stepwise:
                    target = StepTarget(bits, codes, out, at)
                    most = _count_steps(Elements(x, begin, n), kind, own, target)
                else:
                    most = _count_tile(x, begin, n, kind, table, tile, codes)
                worst = max(worst, most)
                if bits == _EIGHT:
                    for j in range(n):
                        out[at + j] = codes[j]
                elif not (stepwise and is_stored(bits)):
                    emit_packed(codes, n, bits, packed, out, at)
                at += (n * bits + np.uint64(7)) // _EIGHT
            b += _ONE
    return BAD_VALUE if worst >= NOT_FINITE else OK


@over_rows
def digit_rows(source: Any, sizes: Any, out: Any, first: Any, last: Any) -> None:
    """Join packed digits of rows ``first`` to ``last`` to bytes, highest first.

    sizes: packed :class:`DigitRows`.
    """
    bits, base, per, missing, block, cols, source_bytes, row_bytes = unpack_digits(sizes)
    digits = scratch(_ROOM, np.uint8)
    most = np.uint64(TILE) // (per * _EIGHT) * (per * _EIGHT)
    for r in range(first, last):
        to, bit = r * row_bytes, np.uint64(0)
        for start in range(np.uint64(0), cols, block):
            size = min(block, cols - start)
            for i in range(np.uint64(0), size, most):
                n = min(size - i, most)
                load_codes(source, r * source_bytes + bit // _EIGHT, n, bits, digits)
                bit += n * bits
                if base == _THREE and per == FIVE:
                    emit_digits(digits, _ONE, n, missing, out, to)
                    to += (n + per - _ONE) // per
                    continue
                for c in range((n + per - _ONE) // per):
                    code = np.uint64(0)
                    for j in range(c * per, (c + _ONE) * per):
                        code = code * base + (np.uint64(digits[j]) if j < n else missing)
                    out[to] = np.uint8(code)
                    to += _ONE
