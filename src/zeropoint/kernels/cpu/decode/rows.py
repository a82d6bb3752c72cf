"""Codes to values: tiles, and the one-pass driver of rows."""

from typing import Any, NamedTuple

import numpy as np

from ..encode.block_scales import combined, minifloat_value
from ..encode.rows import parameter_row, tile_span
from ..encode.steps import StepFactors
from ..machine.descriptor import CODEBOOK, FLOAT, GIVEN, INTEGER, POWER, ZERO_NONE, ZERO_OF_PRODUCT, unpack
from ..machine.emit import stream_floats
from ..machine.intrinsics import (
    bits32,
    by_dtype,
    device,
    float32_of,
    narrow_half,
    near_bfloat16,
    scratch,
    shl32,
    shr32,
    stream_fence,
)
from ..machine.pack import load_codes
from ..machine.team import bundled
from ..machine.tile import BFLOAT16, TILE, clear, factor_cut, fetch_ahead, spread
from ..machine.vector import WHOLE
from .steps import (
    PAIRS,
    PackedSteps,
    ValueTarget,
    can_decode_steps,
    decode_steps,
    has_fixed_point,
)

STREAMED = np.uint64(1 << 24)
"""Results of at least so many bytes bypass the cache, which is too small for them."""
LEAST_NORMAL, MOST = np.float32(2.0**-126), np.float32(2.0**127)
"""Between these, products are normal numbers that no rounding makes infinite."""


@device
def decode_int(codes: Any, count: Any, sign: Any, factors: Any, tile: Any) -> None:
    """Set ``tile[i] = code * factors[i]`` for integers.

    sign: the sign bit of two's complement, 0 for unsigned codes.
    """
    for i in range(count):
        c = np.int32(codes[i])
        q = np.int32(np.int32(c ^ np.int32(sign)) - np.int32(sign))
        tile[i] = np.float32(q) * factors[i]


@device
def decode_int_zero(codes: Any, count: Any, sign: Any, zeros: Any, factors: Any, tile: Any) -> None:
    """Set ``tile[i] = (code - zeros[i]) * factors[i]``."""
    for i in range(count):
        c = np.int32(codes[i])
        q = np.int32(np.int32(c ^ np.int32(sign)) - np.int32(sign))
        tile[i] = (np.float32(q) - zeros[i]) * factors[i]


@device
def decode_float(codes: Any, count: Any, element: Any, factors: Any, tile: Any) -> None:
    """Decode floats as n * 2**k from integer fields, times factors.

    With e the exponent field, k follows max(e, 1) and n is the significand with its hidden bit: no lookup,
    and no subnormal float32 on the way, so flush-to-zero modes cannot change it.
    """
    mantissa, magnitude, sign_shift = element.mantissa, element.magnitude, element.sign_shift
    base = np.uint32(shl32(np.uint32(element.emin - mantissa), np.uint32(23)))
    for i in range(count):
        c = np.uint32(codes[i])
        a = np.uint32(c & magnitude)
        e = np.uint32(max(shr32(a, mantissa), np.uint32(1)) - np.uint32(1))
        n = np.int32(np.uint32(a - shl32(e, mantissa)))
        power = float32_of(np.uint32(shl32(e, np.uint32(23)) + base))
        value = bits32(np.float32(n) * power) | shl32(np.uint32(c & np.uint32(~magnitude)), sign_shift)
        tile[i] = float32_of(np.uint32(value)) * factors[i]


@device
def decode_table(codes: Any, count: Any, table: Any, factors: Any, tile: Any) -> None:
    """Set ``tile[i] = table[code] * factors[i]``; table: (256,) float32."""
    for i in range(count):
        tile[i] = table[np.uint64(codes[i])] * factors[i]


@device
def decode(codes: Any, count: Any, element: Any, table: Any, factors: Any, zeros: Any, tile: Any) -> None:
    """Decode codes times ``factors`` into a tile; offsets in ``zeros`` are added.

    A table serves codebooks and the formats with NaN or Inf codes, which arithmetic would take for numbers.
    """
    moved = element.zero_place == ZERO_OF_PRODUCT
    if element.kind == INTEGER:
        if element.zero_place == ZERO_NONE or moved:
            decode_int(codes, count, element.sign, factors, tile)
        else:
            decode_int_zero(codes, count, element.sign, zeros, factors, tile)
    elif element.kind == FLOAT and not has_special(codes, count, element):
        decode_float(codes, count, element, factors, tile)
    else:
        decode_table(codes, count, table, factors, tile)
    if moved:
        for i in range(count):
            tile[i] += zeros[i]


@device
def has_special(codes: Any, count: Any, element: Any) -> Any:
    """Whether a code is NaN or Inf, also in negative zero's place."""
    mask, limit = np.uint8(element.magnitude), np.uint8(element.max_code)
    if limit == mask and not element.negative_nan:
        return False
    worst = np.uint8(0)
    for i in range(count):
        worst = max(worst, np.uint8(codes[i] & mask))
    if element.negative_nan:
        hits = np.uint8(0)
        for i in range(count):
            hits |= np.uint8(codes[i] == np.uint8(mask + np.uint8(1)))
        return hits > np.uint8(0)
    return worst > limit


@device
def narrow(tile: Any, count: Any, kind: Any, halves: Any) -> None:
    """Round a tile to bfloat16 or float16 bits; NaN must be canonical."""
    if kind == BFLOAT16:
        for i in range(count):
            halves[i] = np.uint16(shr32(near_bfloat16(tile[i]), np.uint32(16)))
    else:
        for i in range(count):
            halves[i] = narrow_half(tile[i])


@device
def _emit_floats(target: Any, at: Any, tile: Any, count: Any, kind: Any) -> None:
    """Round a float32 tile to the target's dtype and store it."""
    stream_floats(tile, count, target, at)


@device
def _emit_halves(target: Any, at: Any, tile: Any, count: Any, kind: Any) -> None:
    narrow(tile, count, kind, target[at : at + count])


emit_values = by_dtype(float32=_emit_floats, uint16=_emit_halves, int16=_emit_halves)


@device
def stored_scales(rule: Any, scales: Any, codes: Any, at: Any, count: Any, out: Any) -> None:
    """Factors of stored scales; E8M0 byte 0: 2 ** -127, 255: NaN."""
    if rule.how == POWER:
        for b in range(count):
            x = np.uint32(codes[at + b])
            u = shl32(x, np.uint32(23)) if x > np.uint32(0) else np.uint32(0x00400000)
            out[b] = float32_of(u if x < np.uint32(255) else np.uint32(0x7FC00000)) * rule.unit
    elif rule.how == GIVEN:
        for b in range(count):
            out[b] = scales[at + b]
    else:
        for b in range(count):
            out[b] = combined(minifloat_value(np.uint32(codes[at + b]), rule), rule) * rule.unit


@device
def normal_products(element: Any, factors: Any, count: Any) -> Any:
    """Whether values times ``factors`` are zero or normal, far below the largest."""
    smallest, largest = np.float32(1), np.float32(256)
    if element.kind == FLOAT:
        last_place = float32_of(shl32(np.uint32(np.uint32(127) - element.mantissa), np.uint32(23)))
        smallest = float32_of(shl32(element.emin, np.uint32(23))) * last_place
        largest = element.maximum
    safe = np.uint32(1)
    for b in range(count):
        f = factors[b]
        safe &= np.uint32((f * smallest >= LEAST_NORMAL) & (f * largest <= MOST))
    return safe > np.uint32(0)


class DequantizeArrays(NamedTuple):
    """What :func:`dequantize_rows` reads and writes.

    source: packed codes. table: (256,) float32 values of all codes. scales, scale_codes: float32 factors, or
    the bytes of stored scales. zeros: float32. out: float32, uint16 bits of bfloat16, or int16 bits of
    float16 (``layout.kind``).
    """

    source: Any
    table: Any
    scales: Any
    scale_codes: Any
    zeros: Any
    out: Any


@device
def dequantize_rows(arrays: Any, desc: Any, origin: Any, stream: Any, first: Any, last: Any) -> None:
    """Dequantize rows in one pass: ``(value(code) - zero) * scale``.

    Of offsets, ``value(code) * scale + zero``. Computed in float32. arrays: :class:`DequantizeArrays`,
    ``out`` from row ``origin`` on. stream: whether it may bypass the cache.
    """
    source, table, scales, scale_codes, zeros, out = arrays
    layout, element, rule = desc
    stream = stream and np.uint64(out.size * out.itemsize) >= STREAMED
    step = np.uint64(TILE)
    tile, factors, offsets = (scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32))
    codes = scratch(TILE, np.uint8)
    per_block, zero_points = scratch(TILE, np.float32), scratch(TILE, np.float32)
    flat = layout.row_div == np.uint64(1) and layout.row_mod >= last
    regular = flat and layout.cols % layout.block == 0 and layout.cols * layout.bits % np.uint64(8) == 0
    rows = np.uint64(1) if regular else last - first
    width = layout.cols * (last - first) if regular else layout.cols
    known = can_decode_steps(element, layout.bits)
    power = rule.how == POWER and element.kind != CODEBOOK and element.mantissa <= np.uint32(7)
    clear(zero_points)
    narrow_codes = layout.bits != np.uint64(8) and layout.bits != np.uint64(4)
    for r in range(rows):
        at = (first + r - origin) * layout.cols
        end = at + width
        block_at = parameter_row(layout, first + r)
        byte_at = (first + r) * layout.row_bytes
        while at < end:
            span = tile_span(layout.block, end - at)
            blocks = (span + layout.block - np.uint64(1)) // layout.block
            stored_scales(rule, scales, scale_codes, block_at, blocks, per_block)
            safe = layout.kind == BFLOAT16 and normal_products(element, per_block, blocks)
            # Then powers of two move the exponent and nothing else.
            exact = safe and power
            shift, part = factor_cut(layout.block, span) if known else (np.uint64(0), step)
            if layout.block == np.uint64(2) and has_fixed_point(element):
                shift, part = PAIRS, step
            stepwise = shift > np.uint64(0)
            if element.zero_place != ZERO_NONE:
                for b in range(blocks):
                    zero_points[b] = zeros[block_at + b]
            for chunk in range(np.uint64(0), span, part):
                n, first_block = min(part, span - chunk), chunk // layout.block
                own, own_zeros = per_block[first_block:], zero_points[first_block:]
                size = (n * layout.bits + np.uint64(7)) // np.uint64(8)
                stepped = stepwise and n % WHOLE == 0
                if stepped:
                    if narrow_codes:
                        load_codes(source, byte_at, n, layout.bits, codes)
                    steps = PackedSteps(source, byte_at, n, layout.bits, codes, n)
                    scales_of_steps = StepFactors(own, own_zeros, shift, False)
                    target = ValueTarget(out, at + chunk, stream, exact)
                    stepped = decode_steps(steps, element, table, scales_of_steps, target, safe)
                if not stepped:
                    # Several chunks have one block, and the same factors.
                    if chunk == np.uint64(0) or stepwise:
                        spread(own, min(span, part), layout.block, factors)
                        if element.zero_place != ZERO_NONE:
                            spread(own_zeros, min(span, part), layout.block, offsets)
                    load_codes(source, byte_at, n, layout.bits, codes)
                    fetch_ahead(source, byte_at + size, size)
                    decode(codes, n, element, table, factors, offsets, tile)
                    emit_values(out, at + chunk, tile, n, layout.kind)
                byte_at += size
            at += span
            block_at += blocks
    if stream:
        stream_fence()


@bundled
def dequantize(args: Any, first: Any, last: Any) -> None:
    """Dequantize rows: a descriptor, then :class:`DequantizeArrays`."""
    dequantize_rows(DequantizeArrays(*args[1:]), unpack(args[0]), np.uint64(0), True, first, last)
