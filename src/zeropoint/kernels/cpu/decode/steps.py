"""SIMD fast path from codes to values, whole steps of 32.

Codes of up to 4 bits are looked up: a block has sixteen values, whatever the format, so they are computed
once and picked by byte shuffles. Small floats of more bits become float16 by moving their fields, with the
sign: the hardware widens those, subnormals included, and a power of two makes up for the difference of the
exponents' biases.
"""

from typing import Any, NamedTuple

import numpy as np

from ..encode.step_access import is_bfloat16
from ..encode.steps import nearest_bits
from ..machine import vector as v
from ..machine.descriptor import CODEBOOK, FLOAT, INTEGER, ZERO_NONE, ZERO_OF_PRODUCT
from ..machine.intrinsics import (
    address_of,
    bits32,
    by_dtype,
    device,
    float32_of,
    inlined,
    prefetch,
    shl32,
    shr32,
)
from ..machine.lookup import pick_floats, pick_halves
from ..machine.reductions import first_doubled, largest_lane, second_doubled

FLOAT16_EXPONENT_BITS = np.uint32(5)
FLOAT16_MANTISSA_BITS = np.uint32(10)
TABLE_BITS = np.uint64(4)
"""Widest codes that are looked up."""
FIELD_BITS = np.uint32(3)
"""Most mantissa bits of codes whose mantissas are looked up."""
PAIRS = np.uint64(1)
"""Shift of blocks of two."""
LONG_RUN = np.uint64(6)
"""Logarithm of the least block for which a table costs less than it saves where arithmetic would do."""


@device
def can_decode_steps(element: Any, bits: Any) -> Any:
    """Return whether :func:`decode_steps` knows the element.

    A float format must fit into float16: five exponent bits only with the largest of them for NaN and Inf.
    """
    plain = element.zero_place == ZERO_NONE
    if element.kind == INTEGER and (plain or element.zero_place == ZERO_OF_PRODUCT):
        return True
    if element.kind == CODEBOOK or not plain:
        return bits <= TABLE_BITS
    if has_fixed_point(element):
        return False
    exponent_bits = float_bits(element) - np.uint32(1) - element.mantissa
    reserved = element.max_code < shl32(np.uint32(31), element.mantissa)
    small = exponent_bits < FLOAT16_EXPONENT_BITS or (exponent_bits == FLOAT16_EXPONENT_BITS and reserved)
    return small and exponent_bits > np.uint32(0)


@device
def has_fixed_point(element: Any) -> Any:
    """Whether codes are sign bits and magnitudes in equal steps."""
    fixed = element.kind == FLOAT and element.magnitude < shl32(np.uint32(1), element.mantissa)
    return fixed and element.max_code == element.magnitude and not element.negative_nan


@device
def float_bits(element: Any) -> Any:
    """Return the bits of a code of a signed float format."""
    return np.uint32(np.uint32(32) - element.sign_shift)


class PackedSteps(NamedTuple):
    """Codes in whole steps, packed if 8 or 4 bits, else bytes.

    Packed codes begin at ``source[byte_at]``. ahead: prefetch distance in elements.
    """

    source: Any
    byte_at: Any
    count: Any
    bits: Any
    scratch: Any
    ahead: Any


class ValueTarget(NamedTuple):
    """Place of values, ``out[at:]``.

    stream: whether float32 bypass the cache, since they are not read again soon: an ordinary store first
    reads the line it overwrites, and four bytes an element make that the larger part of the traffic. exact:
    values are bfloat16 already, and their factors powers of two.
    """

    out: Any
    at: Any
    stream: Any
    exact: Any


@inlined
def codes_at(codes: Any, i: Any) -> Any:
    """Prefetch ahead of step ``i`` and load its codes, as bytes."""
    prefetch(codes.source, codes.byte_at + (i + codes.ahead) * codes.bits // np.uint64(8))
    if codes.bits == np.uint64(8):
        return v.load_lanes(codes.source, codes.byte_at + i)
    if codes.bits == np.uint64(4):
        return v.load_nibbles(codes.source, codes.byte_at + i // np.uint64(2))
    return v.load_lanes(codes.scratch, i)


@inlined
def factors_of_step(blocks: Any, i: Any) -> Any:
    """Factors of both halves of step ``i``, as vectors."""
    factors, shift = blocks.factors, blocks.shift
    return v.floats_of(factors[i >> shift]), v.floats_of(factors[(i + v.HALF) >> shift])


@inlined
def put_line(out: Any, at: Any, line: Any, stream: Any) -> None:
    """Store a vector, past the cache if asked."""
    if stream:
        v.stream_lanes(out, at, line)
    else:
        v.store_lanes(out, at, line)


@inlined
def _put_floats(out: Any, at: Any, a: Any, b: Any, stream: Any, exact: Any) -> None:
    """Round a step of values to the target's dtype and store it."""
    put_line(out, at, a, stream)
    put_line(out, at + v.HALF, b, stream)


@inlined
def _put_bfloat16(out: Any, at: Any, a: Any, b: Any, stream: Any, exact: Any) -> None:
    if exact:
        put_line(out, at, v.high_halves(v.bits_of(a), v.bits_of(b)), stream)
    else:
        put_line(out, at, v.high_halves(nearest_bits(a), nearest_bits(b)), stream)


@inlined
def _put_float16(out: Any, at: Any, a: Any, b: Any, stream: Any, exact: Any) -> None:
    put_line(out, at, v.float16_of_floats(a, b), stream)


_put_values = by_dtype(float32=_put_floats, uint16=_put_bfloat16, int16=_put_float16)


@inlined
def put_values(a: Any, b: Any, i: Any, target: Any) -> None:
    """Write a step of values without NaN, ``i`` past the target's place."""
    _put_values(target.out, target.at + i, a, b, target.stream, target.exact)


@device
def decode_ints(source: Any, element: Any, blocks: Any, target: Any) -> None:
    """Write ``code * factor`` of integers, plus ``zero`` if an offset."""
    sign, moved = v.words_of(element.sign), element.zero_place == ZERO_OF_PRODUCT
    zeros, shift = blocks.zeros, blocks.shift
    for i in range(np.uint64(0), source.count, v.WHOLE):
        codes = codes_at(source, i)
        a = v.floats_of_integers((v.first_octets(codes) ^ sign) - sign)
        b = v.floats_of_integers((v.second_octets(codes) ^ sign) - sign)
        f, g = factors_of_step(blocks, i)
        a, b = a * f, b * g
        if moved:
            a, b = a + v.floats_of(zeros[i >> shift]), b + v.floats_of(zeros[(i + v.HALF) >> shift])
        put_values(a, b, i, target)


@device
def decode_pairs(source: Any, element: Any, factors: Any, target: Any) -> None:
    """Write ``value(code) * factor``, a factor for each pair of codes.

    For elements with :func:`has_fixed_point`. Gain that keeps it: 1.2 times the speed of mx6 to bfloat16,
    1.5 to float32.
    """
    magnitude, rise = v.octets_of(np.uint8(element.magnitude)), v.words_of(element.sign_shift)
    step = v.floats_of(float32_of(shl32(np.uint32(element.emin - element.mantissa), np.uint32(23))))
    sign = v.words_of(np.uint32(0x80000000))
    for i in range(np.uint64(0), source.count, v.WHOLE):
        codes = codes_at(source, i)
        a = v.bits_of(v.floats_of_integers(v.first_octets(codes & magnitude)) * step)
        b = v.bits_of(v.floats_of_integers(v.second_octets(codes & magnitude)) * step)
        a = v.values_of(a | ((v.first_octets(codes) << rise) & sign))
        b = v.values_of(b | ((v.second_octets(codes) << rise) & sign))
        own = v.load_lanes(factors, i // np.uint64(2))
        put_values(a * first_doubled(own), b * second_doubled(own), i, target)


@inlined
def largest_codes(worst: Any, codes: Any, element: Any) -> Any:
    """Lane-wise larger magnitude of codes; 255 for NaN in place of -0."""
    if element.negative_nan:
        negative_zero = v.octets_of(np.uint8(element.magnitude + np.uint32(1)))
        return worst | (v.octets_of(np.uint8(0xFF)) - v.unequal(codes, negative_zero))
    return v.larger_bits(worst, codes & v.octets_of(np.uint8(element.magnitude)))


@device
def decode_floats(source: Any, element: Any, blocks: Any, target: Any) -> Any:
    """Write ``value(code) * factor`` of small floats; False on NaN, Inf.

    All is lost then.
    """
    width = float_bits(element)
    exponent_bits = np.uint32(width - np.uint32(1) - element.mantissa)
    left = v.halves_of(np.uint16(np.uint32(16) - width))
    right = v.halves_of(np.uint16(FLOAT16_EXPONENT_BITS - exponent_bits))
    fields = shl32(np.uint32(1), np.uint32(FLOAT16_MANTISSA_BITS + exponent_bits)) - np.uint32(1)
    keep = v.halves_of(np.uint16(fields | np.uint32(0x8000)))
    bias = v.floats_of(float32_of(shl32(np.uint32(element.emin + np.uint32(14)), np.uint32(23))))
    worst = v.octets_of(np.uint8(0))
    for i in range(np.uint64(0), source.count, v.WHOLE):
        codes = codes_at(source, i)
        worst = largest_codes(worst, codes, element)
        half = v.shift_signed(v.halves_of_octets(codes) << left, right) & keep
        f, g = factors_of_step(blocks, i)
        put_values(v.first_float16(half) * bias * f, v.second_float16(half) * bias * g, i, target)
    return largest_lane(worst) <= np.uint8(element.max_code)


@inlined
def _pick_floats(out: Any, at: Any, a: Any, b: Any, codes: Any, stream: Any) -> None:
    """Write a looked-up step: a table each for the halves, rounded."""
    put_line(out, at, pick_floats(a, v.first_octets(codes)), stream)
    put_line(out, at + v.HALF, pick_floats(b, v.second_octets(codes)), stream)


@inlined
def _pick_bfloat16(out: Any, at: Any, a: Any, b: Any, codes: Any, stream: Any) -> None:
    put_line(out, at, pick_halves(v.high_halves(nearest_bits(a), nearest_bits(b)), codes), stream)


@inlined
def _pick_float16(out: Any, at: Any, a: Any, b: Any, codes: Any, stream: Any) -> None:
    put_line(out, at, pick_halves(v.float16_of_floats(a, b), codes), stream)


put_picked = by_dtype(float32=_pick_floats, uint16=_pick_bfloat16, int16=_pick_float16)


@inlined
def _moved(values: Any, factor: Any, zero: Any, element: Any) -> Any:
    """Compute ``(value - zero) * factor``; offsets: ``value * factor + zero``."""
    factor, zero = v.floats_of(factor), v.floats_of(zero)
    if element.zero_place == ZERO_OF_PRODUCT:
        return values * factor + zero
    return (values - zero) * factor


@device
def decode_by_table(source: Any, element: Any, table: Any, blocks: Any, target: Any) -> None:
    """Write :func:`_moved` values of codes of up to 4 bits."""
    run, count = v.WHOLE, source.count
    factors, zeros, shift, _inverted = blocks
    if shift >= np.uint64(5):
        run = count if shift >= np.uint64(63) else np.uint64(1) << shift
    values = v.load_lanes(table, np.uint64(0))
    for start in range(np.uint64(0), count, run):
        first, second = start >> shift, (start + v.HALF) >> shift
        a = _moved(values, factors[first], zeros[first], element)
        b = _moved(values, factors[second], zeros[second], element)
        for i in range(start, min(start + run, count), v.WHOLE):
            put_picked(target.out, target.at + i, a, b, codes_at(source, i), target.stream)


@inlined
def _exponents_of_step(blocks: Any, i: Any) -> Any:
    """Exponents of a step's power-of-two factors, as bfloat16 bit increments."""
    factors, shift, one = blocks.factors, blocks.shift, np.uint32(127 << 7)
    first = np.uint16(shr32(bits32(factors[i >> shift]), np.uint32(16)) - one)
    second = np.uint16(shr32(bits32(factors[(i + v.HALF) >> shift]), np.uint32(16)) - one)
    return v.two_halves(first, second)


@device
def decode_by_exponent(source: Any, table: Any, blocks: Any, target: Any) -> None:
    """Decode 4-bit codes times powers of two: one table, exponents added."""
    words = v.bits_of(v.load_lanes(table, np.uint64(0)))
    values = v.high_halves(words, words)
    for i in range(np.uint64(0), source.count, v.WHOLE):
        picked = pick_halves(values, codes_at(source, i))
        nonzero = v.above_signed(picked & v.halves_of(np.uint16(0x7FFF)), v.halves_of(np.uint16(0)))
        picked = picked + (_exponents_of_step(blocks, i) & nonzero)
        put_line(target.out, target.at + i, picked, target.stream)


@device
def decode_fields(source: Any, element: Any, table: Any, blocks: Any, target: Any) -> Any:
    """Decode floats of up to 3 mantissa bits; False on NaN, Inf.

    All is lost then. Codes with exponent fields 0 and 1 are looked up, and what the field is above 1 is added
    to the exponent. Exact factors are powers of two, which are added too; otherwise each serves many steps.
    """
    factors, shift, exact, count = blocks.factors, blocks.shift, target.exact, source.count
    implicit = np.uint8(shl32(np.uint32(1), element.mantissa))
    normal, mantissas = v.octets_of(implicit), v.octets_of(np.uint8(implicit - np.uint8(1)))
    magnitude, zero = v.octets_of(np.uint8(element.magnitude)), v.octets_of(np.uint8(0))
    rise = v.halves_of(np.uint16(np.uint32(7) - element.mantissa))
    sign, sign_rise = (
        v.halves_of(np.uint16(0x8000)),
        v.halves_of(np.uint16(np.uint32(16) - float_bits(element))),
    )
    values, worst = v.load_lanes(table, np.uint64(0)), zero
    run = np.uint64(1) << shift if shift < np.uint64(63) and not exact else count
    for start in range(np.uint64(0), count, run):
        factor = np.float32(1) if exact else factors[start >> shift]
        words = nearest_bits(values * v.floats_of(factor))
        products = v.high_halves(words, words)
        for i in range(start, min(start + run, count), v.WHOLE):
            codes = codes_at(source, i)
            worst = largest_codes(worst, codes, element)
            field = (codes & magnitude) - (codes & mantissas)
            picked = pick_halves(products, (codes & mantissas) | (v.unequal(field, zero) & normal))
            above_first = v.halves_of_octets(v.larger_bits(field, normal) - normal) << rise
            result = picked + above_first
            if exact:
                nonzero = v.above_signed(result, v.halves_of(np.uint16(0)))
                result = result + (_exponents_of_step(blocks, i) & nonzero)
            result = result | ((v.halves_of_octets(codes) << sign_rise) & sign)
            put_line(target.out, target.at + i, result, target.stream)
    return largest_lane(worst) <= np.uint8(element.max_code)


@device
def decode_steps(source: Any, element: Any, table: Any, blocks: Any, target: Any, safe: Any) -> Any:
    """Write the values of codes; False when some code is no number.

    source: :class:`PackedSteps`. blocks: :class:`..encode.steps.StepFactors`. target: :class:`ValueTarget`.
    safe: whether products with factors are normal numbers.
    """
    out, at, exact, shift = target.out, target.at, target.exact, blocks.shift
    small = source.bits <= TABLE_BITS
    place = ValueTarget(out, at, target.stream and address_of(out, at) % np.uint64(64) == 0, exact)
    if shift == PAIRS:
        decode_pairs(source, element, blocks.factors, place)
        return True
    if small and exact:
        decode_by_exponent(source, table, blocks, place)
        return True
    pays = shift >= LONG_RUN and out.itemsize == 2
    if small and (pays or element.kind == CODEBOOK or element.zero_place != ZERO_NONE):
        decode_by_table(source, element, table, blocks, place)
        return True
    if element.kind == INTEGER:
        decode_ints(source, element, blocks, place)
        return True
    by_fields = exact or (safe and shift >= LONG_RUN and is_bfloat16(out))
    if by_fields and element.mantissa <= FIELD_BITS:
        return decode_fields(source, element, table, blocks, place)
    return decode_floats(source, element, blocks, place)
