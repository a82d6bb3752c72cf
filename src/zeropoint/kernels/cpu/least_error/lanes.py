"""Blocks as lanes: 16 in an array's columns; ggml's arithmetic on vectors."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ..encode.steps import nearest_bfloat16
from ..linear.panels import columns_at
from ..machine import intrinsics as m
from ..machine import vector as v
from ..machine.compilers import x86_has
from ..machine.descriptor import NO_ROUNDING, TO_BFLOAT16
from ..machine.reductions import any_below

LANES = np.uint64(v.STEP // 2)
"""Blocks that are searched at once."""
ONE, SUPER = np.uint64(1), np.uint64(256)
LEAST = np.float32(1e-15)
"""Blocks whose largest magnitude is below this are zeros to llama.cpp."""
_MAGIC = np.float32(12582912.0)
_VECTOR = ir.VectorType(m.F32, v.STEP // 2)


@m.instruction(types.void, m.ANY, m.INDEX, m.INDEX, m.ANY, m.INDEX, m.INDEX)
def transpose(builder: Any, values: Any, begin: Any, pitch: Any, out: Any, place: Any, step: Any) -> None:
    """Transpose 16 x 16 numbers into ``out[place + step*i + b]``.

    values: float32; row b begins at ``begin + b * pitch``.
    """
    for n, column in enumerate(columns_at(builder, values, (begin, pitch), _VECTOR)):
        m.store_at(builder, column, out, builder.add(place, builder.mul(step, m.I64(n))), 4)


@m.instruction(m.SECOND, v.WORDS, m.ANY, m.SECOND)
def where(builder: Any, mask: Any, a: Any, b: Any) -> Any:
    """Select lanes of ``a`` where ``mask`` words are nonzero, else ``b``."""
    chosen = builder.icmp_unsigned("!=", mask, ir.Constant(v.WORDS.lanes, [0] * v.WORDS.count))
    return builder.select(chosen, a, b)


_QUARTERS = (0, *[2] * 2, *[4] * 2, *[6] * 2, *[8] * 3, *[12] * 4, *[16] * 6, *[24] * 12)
"""The closest value of e2m1 of each number of quarters, in quarters; middles of values are whole quarters."""


@m.instruction(types.boolean)
def picks_from_tables(builder: Any) -> Any:
    """Whether the processor looks up 32 floats at once, at compile time."""
    return ir.Constant(ir.IntType(1), int(x86_has("avx512f")))


@m.instruction(v.FLOATS, v.WORDS)
def closest_quarters(builder: Any, words: Any) -> Any:
    """Closest e2m1 values, in quarters, of whole quarters below 32."""
    halves = [ir.Constant(v.FLOATS.lanes, [float(n) for n in part]) for part in _halves(_QUARTERS)]
    if x86_has("avx512f"):
        return m.call(
            builder, v.FLOATS.lanes, "llvm.x86.avx512.vpermi2var.ps.512", halves[0], words, halves[1]
        )
    result = halves[0]
    for value in dict.fromkeys(_QUARTERS):
        first = ir.Constant(v.WORDS.lanes, [_QUARTERS.index(value)] * v.FLOATS.count)
        beyond = builder.icmp_unsigned(">=", words, first)
        result = builder.select(beyond, ir.Constant(v.FLOATS.lanes, [float(value)] * v.FLOATS.count), result)
    return result


def _halves(values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


@m.inlined
def magnitudes(x: Any) -> Any:
    """Return magnitudes of floats."""
    return v.values_of(v.bits_of(x) & v.words_of(np.uint32(0x7FFFFFFF)))


@m.inlined
def rounded(x: Any, low: Any, high: Any) -> Any:
    """Round half to even, within words ``low`` and ``high``, as floats.

    Past 2**22, the bits of the sum give other integers, which llama.cpp takes, too.
    """
    bits = v.bits_of(x + v.floats_of(_MAGIC)) & v.words_of(np.uint32(0x7FFFFF))
    whole = bits - v.words_of(np.uint32(0x400000))
    return v.floats_of_integers(v.larger_signed(v.smaller_signed(whole, high), low))


@m.inlined
def rounded_within(x: Any, low: Any, high: Any) -> Any:
    """Round half to even, within whole floats of at most 2**22."""
    magic = v.floats_of(_MAGIC)
    return v.larger(v.smaller((x + magic) - magic, high), low)


@m.inlined
def code_of(t: Any, element: Any) -> Any:
    """Nearest codes of an integer to ``t``, as floats."""
    return rounded_within(t, v.floats_of(element.low), v.floats_of(element.high))


@m.device
def power_of(exponent: Any) -> Any:
    """Return ``2 ** exponent``, a normal float64; exponent: int64."""
    return m.float64_of(np.uint64(exponent + np.int64(1023)) << np.uint64(52))


@m.device
def exponent_of(reach: Any) -> Any:
    """Compute ``floor(log2(reach)) + 1`` of a float64, int64; 0 of zero."""
    field = np.int64((m.bits64(reach) >> np.uint64(52)) & np.uint64(0x7FF))
    return np.int64(0) if reach == np.float64(0) else field - np.int64(1022)


@m.device
def nearest(x: Any) -> Any:
    """Return a float32 rounded as :func:`rounded` does, int32."""
    return np.int32(np.int64(m.bits32(np.float32(x + _MAGIC)) & np.uint32(0x7FFFFF)) - np.int64(0x400000))


@m.instruction(v.WORDS, v.FLOATS)
def is_zero(builder: Any, x: Any) -> Any:
    """Words of ones where floats are zeros of any sign."""
    zeros = builder.fcmp_ordered("==", x, ir.Constant(v.FLOATS.lanes, [0.0] * v.FLOATS.count))
    return builder.sext(zeros, v.WORDS.lanes)


@m.inlined
def larger_magnitude(worst: Any, x: Any) -> Any:
    """Larger of the words ``worst`` and magnitude bits of ``x``."""
    return v.larger_bits(worst, v.bits_of(x) & v.words_of(np.uint32(0x7FFFFFFF)))


@m.inlined
def is_nonfinite(worst: Any) -> Any:
    """Return whether a magnitude of :func:`larger_magnitude` is not finite."""
    return any_below(v.words_of(np.uint32(0x7F7FFFFF)), worst)


@m.inlined
def negative(x: Any) -> Any:
    """Return ``-x``, also of zeros."""
    return v.values_of(v.bits_of(x) ^ v.words_of(np.uint32(0x80000000)))


@m.inlined
def divided(number: Any, x: Any) -> Any:
    """Return a float32 over each lane."""
    return v.floats_of(number) / x


@m.inlined
def narrowed(t: Any, to: Any) -> Any:
    """Round to bfloat16, to float16, or not, as descriptors say."""
    if to == TO_BFLOAT16:
        return nearest_bfloat16(t)
    if to != NO_ROUNDING:
        return v.first_float16(v.float16_of_floats(t, t))
    return t


@m.device
def add_neighbors(values: Any, count: Any) -> None:
    """Add ``count`` float64 numbers pairwise by halves, to the first."""
    while count > np.uint64(1):
        half = count // np.uint64(2)
        for i in range(half):
            values[i] = values[i] + values[half + i]
        if count % np.uint64(2) > np.uint64(0):
            values[half] = values[count - np.uint64(1)]
            half += np.uint64(1)
        count = half


@m.device
def add_pairwise(values: Any, count: Any) -> None:
    """Add ``count`` float64 vectors pairwise by halves, to the first."""
    while count > np.uint64(1):
        half = count // np.uint64(2)
        for i in range(half):
            pair = v.load_lanes(values, i * LANES) + v.load_lanes(values, (half + i) * LANES)
            v.store_lanes(values, i * LANES, pair)
        if count % np.uint64(2) > np.uint64(0):
            v.store_lanes(values, half * LANES, v.load_lanes(values, (count - np.uint64(1)) * LANES))
            half += np.uint64(1)
        count = half


@m.device
def sum_of_squares(x: Any, begin: Any, count: Any) -> Any:
    """Sum squares of neighbors one after the other in float32."""
    total = np.float32(0)
    for i in range(count):
        total = np.float32(total + np.float32(x[begin + i] * x[begin + i]))
    return total
