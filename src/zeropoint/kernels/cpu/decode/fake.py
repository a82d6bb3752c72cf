"""Fake quantization in one pass each way; straight-through gradients."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float32
from ..encode.elements import INFINITE, MAGIC, encode, round_by_mode, round_tile, scale_tile
from ..encode.rows import parameter_row
from ..machine.descriptor import HALF_EVEN, INTEGER, ZERO_INSIDE, ZERO_NONE, unpack
from ..machine.intrinsics import and32, bits32, device, float32_of, scratch, stream_fence
from ..machine.named_records import unpacker
from ..machine.team import bundled
from ..machine.tile import NOT_FINITE, TILE, clear, fetch_ahead, load, run_amax
from .rows import decode, emit_values


@device
def fill_blocks(values: Any, base: Any, column: Any, count: Any, block: Any, out: Any) -> None:
    """Spread ``values[base + (column + i) // block]`` without divisions."""
    at = np.uint64(0)
    while at < count:
        b = (column + at) // block
        end = min((b + np.uint64(1)) * block - column, count)
        v = values[base + b]
        for i in range(at, end):
            out[i] = v
        at = end


@device
def fake_integers(tile: Any, factors: Any, zeros: Any, count: Any, element: Any) -> None:
    """Replace scaled values by ``(clamp(rint(t) + z) - z) * s`` directly.

    Clamping before rounding is exact: bounds and zero points are integers below 2 ** 22.
    """
    low, high = element.low, element.high
    if element.zero_place == ZERO_NONE:
        for i in range(count):
            t = tile[i]
            t = t if t > low else low
            t = t if t < high else high
            tile[i] = ((t + MAGIC) - MAGIC) * factors[i]
    elif element.zero_place == ZERO_INSIDE:
        for i in range(count):
            tile[i] = tile[i] + zeros[i]
        round_tile(tile, count, element.quotient)
        if element.rounding != HALF_EVEN:
            round_by_mode(tile, count, element)
        for i in range(count):
            t = tile[i]
            t = t if t > low else low
            t = t if t < high else high
            tile[i] = (((t + MAGIC) - MAGIC) - zeros[i]) * factors[i]
    else:
        for i in range(count):
            z = zeros[i]
            a = low - z
            b = high - z
            t = tile[i]
            t = t if t > a else a
            t = t if t < b else b
            tile[i] = ((t + MAGIC) - MAGIC) * factors[i]


@device
def signed_zero(x: Any) -> Any:
    """Zero with the sign of ``x``: a finite slope times 0."""
    return float32_of(and32(bits32(x), np.uint32(0x80000000)))


class FakeQuantizeArrays(NamedTuple):
    """What :func:`fake_quantize_rows` reads and writes.

    x, out: (rows * cols,) float32, uint16 bits of bfloat16, or int16 bits of float16. order, table: code of
    each rank, and value of each code. divisors: float32 factors to divide by; multipliers: factors to
    multiply codes by, which differ only where a scale is zero. zeros: float32 zero points.
    """

    x: Any
    order: Any
    table: Any
    divisors: Any
    multipliers: Any
    zeros: Any
    out: Any


@bundled
def fake_quantize_rows(args: Any, first: Any, last: Any) -> None:
    """Fake-quantize rows ``first`` to ``last``: the values of dequantize(quantize(x)).

    args: a descriptor, then :class:`FakeQuantizeArrays`.
    """
    x, order, table, scales, multipliers, zeros, out = FakeQuantizeArrays(*args[1:])
    layout, element, _rule = unpack(args[0])
    lossy = False
    for b in range(np.uint64(len(scales))):
        lossy |= scales[b] == INFINITE
    step = np.uint64(TILE)
    tile, factors, offsets = (scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32))
    codes = scratch(TILE, np.uint8)
    for r in range(first, last):
        base = parameter_row(layout, r)
        for c in range(np.uint64(0), layout.cols, step):
            n = min(step, layout.cols - c)
            at = r * layout.cols + c
            load(x, at, n, layout.kind, tile)
            fetch_ahead(x, at + n, n)
            fill_blocks(scales, base, c, n, layout.block, factors)
            if element.zero_place != ZERO_NONE:
                fill_blocks(zeros, base, c, n, layout.block, offsets)
            if lossy:
                # Blocks whose scale was lost hold zeros, of Inf too.
                for i in range(n):
                    zero = factors[i] == INFINITE and tile[i] == tile[i]
                    tile[i] = signed_zero(tile[i]) if zero else tile[i]
            if element.kind == INTEGER:
                scale_tile(tile, factors, n, element.scaling)
                round_tile(tile, n, element.quotient)
                if element.rounding != HALF_EVEN and element.zero_place != ZERO_INSIDE:
                    round_by_mode(tile, n, element)
                if lossy:
                    fill_blocks(multipliers, base, c, n, layout.block, factors)
                fake_integers(tile, factors, offsets, n, element)
            else:
                lost = run_amax(tile, np.uint64(0), n) > NOT_FINITE
                encode(tile, factors, offsets, n, element, order, codes)
                if lossy:
                    fill_blocks(multipliers, base, c, n, layout.block, factors)
                decode(codes, n, element, table, factors, offsets, tile)
                if lost:
                    load(x, at, n, layout.kind, offsets)
                    for i in range(n):
                        tile[i] = tile[i] if offsets[i] == offsets[i] else np.float32(np.nan)
            emit_values(out, at, tile, n, layout.kind)
    stream_fence()


@device
def gate_integers(tile: Any, zeros: Any, count: Any, element: Any, grad: Any) -> None:
    """Zero gradients where the rounded quotient is no code; NaN is none."""
    low, high = element.low, element.high
    one = np.float32(1)
    if element.zero_place == ZERO_INSIDE:
        for i in range(count):
            tile[i] = tile[i] + zeros[i]
        round_tile(tile, count, element.quotient)
    if element.rounding != HALF_EVEN:
        round_by_mode(tile, count, element)
    after = np.float32(0) if element.zero_place == ZERO_INSIDE else np.float32(1)
    for i in range(count):
        z = zeros[i] * after
        a = low - z
        b = high - z
        t = tile[i]
        inside = (t >= a - one) & (t <= b + one)
        t = t if t > a - one else a - one
        t = t if t < b + one else b + one
        q = (t + MAGIC) - MAGIC
        keep = inside & (q >= a) & (q <= b)
        grad[i] = grad[i] if keep else signed_zero(grad[i])


@device
def gate_bounds(tile: Any, count: Any, bounds: Any, grad: Any) -> None:
    """Zero the gradient where ``tile`` lies outside of :class:`GradientBounds`."""
    low, high, closed = bounds
    if closed:
        for i in range(count):
            grad[i] = grad[i] if (tile[i] >= low) & (tile[i] <= high) else signed_zero(grad[i])
    else:
        for i in range(count):
            grad[i] = grad[i] if (tile[i] > low) & (tile[i] < high) else signed_zero(grad[i])


class GradientBounds(NamedTuple):
    """Scaled values that non-integer formats do not clip; closed: with ends."""

    low: Float32
    high: Float32
    closed: Flag


unpack_bounds = unpacker(GradientBounds)


class BackwardArrays(NamedTuple):
    """Gradients, values, divisors, zero points, and the gradients that are written."""

    grad: Any
    x: Any
    divisors: Any
    zeros: Any
    out: Any


@bundled
def fake_quantize_backward_rows(args: Any, first: Any, last: Any) -> None:
    """Pass ``grad`` where the rounded ``x`` is within codes, else 0.

    It is the straight-through gradient. args: a descriptor, :class:`GradientBounds`,
    :class:`BackwardArrays`.
    """
    grad, x, scales, zeros, out = BackwardArrays(*args[2:])
    (layout, element, _rule), bounds = unpack(args[0]), unpack_bounds(args[1])
    step = np.uint64(TILE)
    tile, factors, offsets = (scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32))
    slope = scratch(TILE, np.float32)
    clear(offsets)
    for r in range(first, last):
        base = parameter_row(layout, r)
        for c in range(np.uint64(0), layout.cols, step):
            n = min(step, layout.cols - c)
            at = r * layout.cols + c
            load(x, at, n, layout.kind, tile)
            load(grad, at, n, layout.kind, slope)
            fetch_ahead(x, at + n, n)
            fetch_ahead(grad, at + n, n)
            fill_blocks(scales, base, c, n, layout.block, factors)
            if element.zero_place != ZERO_NONE:
                fill_blocks(zeros, base, c, n, layout.block, offsets)
            scale_tile(tile, factors, n, element.scaling)
            round_tile(tile, n, element.quotient)
            if element.kind == INTEGER:
                gate_integers(tile, offsets, n, element, slope)
            else:
                if element.rounding != HALF_EVEN:
                    round_by_mode(tile, n, element)
                gate_bounds(tile, n, bounds, slope)
            emit_values(out, at, slope, n, layout.kind)
    stream_fence()
