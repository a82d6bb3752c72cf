"""Q4_0 to Q5_1 with importance, and FP4; see :mod:`zeropoint.ops.ggml.plain_blocks` and ``table_blocks``.

16 blocks are columns, as in the searches: what the codes of a block have in common is then a lane. Without
importance, :mod:`.extreme_scales` quantizes integers.

Gain that keeps it, over plain torch: 33 times the speed on q4_0 to q5_0.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float32, UInt64
from ..machine.descriptor import OK
from ..machine.intrinsics import bits32, device, float32_of, narrow_half, scratch
from ..machine.named_records import unpacker
from ..machine.reductions import integers, root
from ..machine.team import bundled, over_rows
from ..machine.vector import above, bits_of, floats_of, load_lanes, store_lanes, values_of, words_of
from .lanes import LANES, is_zero, magnitudes, rounded, sum_of_squares, where
from .line_search import Tries, fit_minima, fit_signed
from .super_block import ZERO, load_group, load_importance
from .table_scales import table_rows

SYMMETRIC, AFFINE, EIGHT_BITS, TERNARY, MXFP4, NVFP4, TABLE = (np.uint64(n) for n in range(7))
"""Kinds of types."""
_LONG, _WORDS = 256 * 16, 16 * 16
_LINE: Any = np.float32(-0.9), np.float32(0.05), np.uint64(36), np.uint8(0)
"""First try, step, number of steps and kind of error of affine types; see :class:`.line_search.Tries`."""


class PlainKind(NamedTuple):
    """A type.

    kind: one of those above. size: values of a block. top: half of the codes, or the largest. bits: of a
    code. columns: of a row. weighted: whether codes are searched by importance.
    """

    kind: UInt64
    size: UInt64
    top: Float32
    bits: UInt64
    columns: UInt64
    weighted: Flag


unpack_plain = unpacker(PlainKind)


class Numbers(NamedTuple):
    """Outputs of blocks: float16 bits of scales and minima, or bytes."""

    halves: Any
    half_minima: Any
    octets: Any


@device
def _largest(values: Any, size: Any, ends: Any) -> None:
    """Write each block's first number of largest magnitude to ``ends``."""
    value = amax = floats_of(np.float32(0))
    for i in range(size):
        number = load_lanes(values, i * LANES)
        value = where(above(magnitudes(number), amax), number, value)
        amax = magnitudes(value)
    store_lanes(ends, LANES + LANES, value)


@device
def _exponent(amax: Any) -> Any:
    """MXFP4 scale byte; its exponent is the float32 logarithm, rounded down."""
    if amax == 0:
        return np.int64(0)
    logarithm = np.float32(np.log2(np.float64(amax)))
    return np.int64(np.floor(logarithm) + np.float32(125)) & np.int64(0xFF)


@device
def _unsigned_e4m3(x: Any) -> Any:
    """NVFP4 scale byte: ties up, maximum from 248, own subnormals."""
    if x <= 0:
        return np.int64(0)
    if np.float32(x * np.float32(64)) < 1:
        return min(np.int64(np.float32(np.float32(x * np.float32(512)) + np.float32(0.5))), np.int64(7))
    code = ((np.int64(bits32(x)) + np.int64(1 << 19)) >> np.int64(20)) - np.int64(120 << 3)
    return code if code < np.int64(0x78) else np.int64(0x7E)


@device
def _power(exponent: Any) -> Any:
    """Return two to the power of ``exponent``, at least -149."""
    if exponent >= -126:
        return float32_of(np.uint32(exponent + np.int64(127)) << np.uint32(23))
    return float32_of(np.uint32(1) << np.uint32(exponent + np.int64(149)))


@device
def _float_scales(kind: Any, ends: Any, octets: Any, first: Any, last: Any) -> None:
    """Write the bytes of scales, and to ``ends`` half of the scales."""
    for block in range(LANES):
        amax = np.float32(abs(ends[LANES + LANES + block]))
        if kind.kind == MXFP4:
            code = _exponent(amax)
            scale = _power(code - np.int64(128))
        else:
            code = _unsigned_e4m3(np.float32(amax / np.float32(6)))
            fraction = code & np.int64(7)
            steps = fraction + np.int64(8) if code > 7 else fraction
            scale = np.float32(
                np.float32(steps) * _power(max(code >> np.int64(3), np.int64(1)) - np.int64(11))
            )
        ends[block] = scale
        if first + block < last:
            octets[first + block] = np.uint8(code)


@device
def _closest_floats(values: Any, size: Any, ends: Any, codes: Any) -> None:
    """Write float4 codes of least error under ``ends``, first of equals."""
    scale, zero, none = load_lanes(ends, ZERO), floats_of(np.float32(0)), words_of(np.uint32(0))
    for i in range(size):
        number = load_lanes(values, i * LANES)
        size_of = magnitudes(number)
        best, code = size_of, none
        for n in range(1, 8):
            value = (
                np.float32(n)
                if n < 5
                else np.float32(6)
                if n == 5
                else np.float32(8)
                if n == 6
                else np.float32(12)
            )
            error = magnitudes(floats_of(value) * scale - size_of)
            nearer = above(best, error)
            best, code = where(nearer, error, best), where(nearer, words_of(np.uint32(n)), code)
        negative = above(zero, number) & words_of(np.uint32(8))
        store_lanes(codes, i * LANES, values_of(where(code, code | negative, none)))


@device
def _searched(values: Any, weights: Any, kind: Any, line: Any, tried: Any, found: Any, codes: Any) -> None:
    """Write scales, negated minima and codes of Q4_0 to Q5_1, weighted."""
    zero = floats_of(np.float32(0))
    if kind.kind == SYMMETRIC:
        fit_signed(values, weights, kind.size, kind.top, found)
        inverse, offset = load_lanes(found, LANES), floats_of(kind.top)
        least = words_of(np.uint32(0)) - words_of(np.uint32(kind.top))
        most, empty = words_of(np.uint32(kind.top - np.float32(1))), is_zero(inverse)
        for i in range(kind.size):
            code = rounded(inverse * load_lanes(values, i * LANES), least, most) + offset
            store_lanes(codes, i * LANES, values_of(integers(where(empty, zero, code))))
    else:
        fit_minima(values, weights, kind.size, line, tried, found)
        inverse, low = load_lanes(found, LANES + LANES), load_lanes(found, LANES + LANES + LANES)
        none, most = words_of(np.uint32(0)), words_of(np.uint32(kind.top))
        empty = is_zero(inverse)
        for i in range(kind.size):
            code = rounded(inverse * (load_lanes(values, i * LANES) - low), none, most)
            store_lanes(codes, i * LANES, values_of(integers(where(empty, zero, code))))


@device
def _weights(
    values: Any, importance: Any, means: Any, kind: Any, first: Any, last: Any, weights: Any
) -> None:
    """Write ``i * sqrt(m + x^2)`` of blocks; ``means`` of rows."""
    spread = scratch(16, np.float32)
    for block in range(LANES):
        row = min(first + block, last - np.uint64(1)) * kind.size // kind.columns
        spread[block] = means[row]
    mean = load_lanes(spread, ZERO)
    load_importance(importance, first * kind.size % kind.columns, kind.size, kind.columns, weights)
    for i in range(kind.size):
        value = load_lanes(values, i * LANES)
        store_lanes(weights, i * LANES, load_lanes(weights, i * LANES) * root(mean + value * value))


@device
def _pack(columns: Any, kind: Any, words: Any, out: Any, first: Any, last: Any) -> None:
    """Pack blocks' codes, columns of words, into words of ``out``.

    words: room for 16 blocks.
    """
    none, bits, wide = words_of(np.uint32(0)), np.uint32(kind.bits), np.uint32(32)
    mask = words_of((np.uint32(1) << bits) - np.uint32(1))
    flip = words_of(np.uint32(kind.top) if kind.kind == SYMMETRIC else np.uint32(0))
    word, shift, place = none, np.uint32(0), ZERO
    for i in range(kind.size):
        code = (bits_of(load_lanes(columns, i * LANES)) ^ flip) & mask
        word = word | (code << words_of(shift))
        shift = np.uint32(shift + bits)
        if shift >= wide:
            store_lanes(words, place, word)
            shift = np.uint32(shift - wide)
            place += LANES
            word = code >> words_of(np.uint32(bits - shift))
    count = place // LANES
    for block in range(first, last):
        for n in range(count):
            out[block * count + n] = words[n * LANES + (block - first)]


@device
def _plain_rows(
    x: Any, importance: Any, means: Any, kind: Any, packed: Any, numbers: Any, first: Any, last: Any
) -> Any:
    """Quantize blocks ``first`` to ``last`` of ``x``, float32.

    means: mean squares of rows, where importance counts. packed: takes codes, as uint32.
    """
    own, values, codes = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(_LONG, np.float32)
    ends, found, tried = scratch(48, np.float32), scratch(64, np.float32), scratch(_LONG, np.float32)
    words = scratch(_WORDS, np.uint32)
    line = Tries(kind.top, *_LINE)
    state = OK
    for start in range(first, last, LANES):
        count = min(LANES, last - start)
        state = max(state, load_group(x, start * kind.size, count * kind.size, kind.size, own, values))
        if kind.weighted:
            _weights(values, importance, means, kind, start, last, own)
            _searched(values, own, kind, line, tried, found, codes)
            for block in range(count):
                numbers.halves[start + block] = narrow_half(found[block])
                if kind.kind == AFFINE:
                    numbers.half_minima[start + block] = narrow_half(-found[LANES + block])
        else:
            _largest(values, kind.size, ends)
            _float_scales(kind, ends, numbers.octets, start, last)
            _closest_floats(values, kind.size, ends, codes)
        _pack(codes, kind, words, packed, start, start + count)
    return state


@bundled
def plain_rows(args: Any, first: Any, last: Any) -> Any:
    """Quantize blocks with one number or two; rows are blocks.

    args: float32, importance, means, a packed :class:`PlainKind`, memory of codes, as uint32, and
    :class:`Numbers`.
    """
    x, importance, means, record, packed, halves, half_minima, octets = args
    kind = unpack_plain(record)
    if kind.kind == TABLE:
        codes = packed.view(np.uint8)
        return table_rows(x, importance, kind.columns, kind.weighted, codes, halves, first, last)
    return _plain_rows(x, importance, means, kind, packed, Numbers(halves, half_minima, octets), first, last)


@over_rows
def square_rows(x: Any, columns: Any, out: Any, first: Any, last: Any) -> None:
    """Write each row's sum of squares, added one by one."""
    for row in range(first, last):
        out[row] = sum_of_squares(x, row * columns, columns)
