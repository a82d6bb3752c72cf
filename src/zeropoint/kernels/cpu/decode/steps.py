"""Whole steps of 32 codes to values on explicit vectors: the way of the common cases.

Codes of up to 4 bits are looked up: a block has sixteen values, whatever the format, so they are computed
once and picked by byte shuffles. Small floats of more bits become float16 by moving their fields, with the
sign: the hardware widens those, subnormals included, and a power of two makes up for the difference of the
exponents' biases.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ..encode.step_access import is_bfloat16
from ..encode.steps import nearest_bits
from ..machine.descriptor import CODEBOOK, INTEGER, ZERO_NONE, ZERO_OF_PRODUCT
from ..machine.intrinsics import address_of, bits32, device, float32_of, inlined, prefetch, shl32, shr32
from ..machine.lookup import pick_halves, store_picked
from ..machine.vector import (
    HALF,
    WHOLE,
    above_signed,
    bits_of,
    first_float16,
    first_octets,
    float16_of_floats,
    floats_of,
    floats_of_integers,
    halves_of,
    halves_of_octets,
    high_halves,
    larger_bits,
    largest_lane,
    load_lanes,
    load_nibbles,
    octets_of,
    second_float16,
    second_octets,
    shift_signed,
    store_lanes,
    stream_lanes,
    two_halves,
    unequal,
    words_of,
)

FLOAT16_EXPONENT_BITS = np.uint32(5)
FLOAT16_MANTISSA_BITS = np.uint32(10)
TABLE_BITS = np.uint64(4)
"""Widest codes that are looked up."""
FIELD_BITS = np.uint32(3)
"""Most mantissa bits of codes whose mantissas are looked up."""
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
    exponent_bits = float_bits(element) - np.uint32(1) - element.mantissa
    reserved = element.max_code < shl32(np.uint32(31), element.mantissa)
    small = exponent_bits < FLOAT16_EXPONENT_BITS or (exponent_bits == FLOAT16_EXPONENT_BITS and reserved)
    return small and exponent_bits > np.uint32(0)


@device
def float_bits(element: Any) -> Any:
    """Return the bits of a code of a signed float format."""
    return np.uint32(np.uint32(32) - element.sign_shift)


@inlined
def codes_at(source: Any, byte_at: Any, i: Any, bits: Any, scratch: Any) -> Any:
    """Return the codes of step ``i``: bytes and nibbles from the source, other widths from ``scratch``."""
    if bits == np.uint64(8):
        return load_lanes(source, byte_at + i)
    if bits == np.uint64(4):
        return load_nibbles(source, byte_at + i // np.uint64(2))
    return load_lanes(scratch, i)


def _put_values(a: Any, b: Any, out: Any, at: Any, aligned: Any, exact: Any) -> None:
    """Round to the target's dtype and store."""


@overload(_put_values, inline="always")
def _put_values_overload(a: Any, b: Any, out: Any, at: Any, aligned: Any, exact: Any) -> Any:
    if out.dtype == types.float32:

        def put(a: Any, b: Any, out: Any, at: Any, aligned: Any, exact: Any) -> None:
            if aligned:
                stream_lanes(out, at, a)
                stream_lanes(out, at + HALF, b)
            else:
                store_lanes(out, at, a)
                store_lanes(out, at + HALF, b)

    elif out.dtype == types.uint16:

        def put(a: Any, b: Any, out: Any, at: Any, aligned: Any, exact: Any) -> None:
            if exact:
                store_lanes(out, at, high_halves(bits_of(a), bits_of(b)))
            else:
                store_lanes(out, at, high_halves(nearest_bits(a), nearest_bits(b)))

    else:

        def put(a: Any, b: Any, out: Any, at: Any, aligned: Any, exact: Any) -> None:
            store_lanes(out, at, float16_of_floats(a, b))

    return put


@inlined
def put_values(a: Any, b: Any, out: Any, at: Any, aligned: Any, exact: Any) -> None:
    """Write a step of values, none of them NaN.

    aligned: float32 bypass the cache; an ordinary store first reads the line it overwrites, and four bytes an
    element make that the larger part of the traffic. exact: the values are bfloat16 already.
    """
    _put_values(a, b, out, at, aligned, exact)


@device
def decode_ints(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, factors: Any, zeros: Any,
    shift: Any, ahead: Any, out: Any, at: Any, aligned: Any, exact: Any,
) -> None:  # fmt: skip
    """Write ``code * factor`` of integers, plus ``zero`` where that is an offset."""
    sign, moved = words_of(element.sign), element.zero_place == ZERO_OF_PRODUCT
    for i in range(np.uint64(0), count, WHOLE):
        prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
        codes = codes_at(source, byte_at, i, bits, scratch)
        a = floats_of_integers((first_octets(codes) ^ sign) - sign)
        b = floats_of_integers((second_octets(codes) ^ sign) - sign)
        f, g = floats_of(factors[i >> shift]), floats_of(factors[(i + HALF) >> shift])
        a, b = a * f, b * g
        if moved:
            a, b = a + floats_of(zeros[i >> shift]), b + floats_of(zeros[(i + HALF) >> shift])
        put_values(a, b, out, at + i, aligned, exact)


@inlined
def worse(worst: Any, codes: Any, element: Any) -> Any:
    """Return lane by lane the larger magnitude of ``worst`` and the codes; 255 for a NaN in place of -0."""
    if element.negative_nan:
        negative_zero = octets_of(np.uint8(element.magnitude + np.uint32(1)))
        return worst | (octets_of(np.uint8(0xFF)) - unequal(codes, negative_zero))
    return larger_bits(worst, codes & octets_of(np.uint8(element.magnitude)))


@device
def decode_floats(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, factors: Any, shift: Any,
    ahead: Any, out: Any, at: Any, aligned: Any, exact: Any,
) -> Any:  # fmt: skip
    """Write ``value(code) * factor`` of small floats; False when a code is NaN or Inf, all lost then."""
    width = float_bits(element)
    exponent_bits = np.uint32(width - np.uint32(1) - element.mantissa)
    left = halves_of(np.uint16(np.uint32(16) - width))
    right = halves_of(np.uint16(FLOAT16_EXPONENT_BITS - exponent_bits))
    fields = shl32(np.uint32(1), np.uint32(FLOAT16_MANTISSA_BITS + exponent_bits)) - np.uint32(1)
    keep = halves_of(np.uint16(fields | np.uint32(0x8000)))
    bias = floats_of(float32_of(shl32(np.uint32(element.emin + np.uint32(14)), np.uint32(23))))
    worst = octets_of(np.uint8(0))
    for i in range(np.uint64(0), count, WHOLE):
        prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
        codes = codes_at(source, byte_at, i, bits, scratch)
        worst = worse(worst, codes, element)
        half = shift_signed(halves_of_octets(codes) << left, right) & keep
        f, g = floats_of(factors[i >> shift]), floats_of(factors[(i + HALF) >> shift])
        put_values(
            first_float16(half) * bias * f, second_float16(half) * bias * g, out, at + i, aligned, exact
        )
    return largest_lane(worst) <= np.uint8(element.max_code)


def _put_picked(a: Any, b: Any, codes: Any, out: Any, at: Any) -> None:
    """Round two tables to the target's dtype, pick by code and store."""


@overload(_put_picked, inline="always")
def _put_picked_overload(a: Any, b: Any, codes: Any, out: Any, at: Any) -> Any:
    if out.dtype == types.float32:

        def put(a: Any, b: Any, codes: Any, out: Any, at: Any) -> None:
            store_picked(out, at, bits_of(a), bits_of(b), codes)

    elif out.dtype == types.uint16:

        def put(a: Any, b: Any, codes: Any, out: Any, at: Any) -> None:
            store_lanes(out, at, pick_halves(high_halves(nearest_bits(a), nearest_bits(b)), codes))

    else:

        def put(a: Any, b: Any, codes: Any, out: Any, at: Any) -> None:
            store_lanes(out, at, pick_halves(float16_of_floats(a, b), codes))

    return put


@inlined
def put_picked(a: Any, b: Any, codes: Any, out: Any, at: Any) -> None:
    """Write a step: values of ``a`` by its first 16 codes, below 16, and of ``b`` by the others, rounded."""
    _put_picked(a, b, codes, out, at)


@inlined
def _moved(values: Any, factor: Any, zero: Any, element: Any) -> Any:
    """Return ``(value - zero) * factor``, or ``value * factor + zero`` where that is an offset."""
    factor, zero = floats_of(factor), floats_of(zero)
    if element.zero_place == ZERO_OF_PRODUCT:
        return values * factor + zero
    return (values - zero) * factor


@device
def decode_by_table(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, table: Any, factors: Any,
    zeros: Any, shift: Any, ahead: Any, out: Any, at: Any,
) -> None:  # fmt: skip
    """Write :func:`_moved` values of codes of up to 4 bits."""
    run = WHOLE
    if shift >= np.uint64(5):
        run = count if shift >= np.uint64(63) else np.uint64(1) << shift
    values = load_lanes(table, np.uint64(0))
    for start in range(np.uint64(0), count, run):
        first, second = start >> shift, (start + HALF) >> shift
        a = _moved(values, factors[first], zeros[first], element)
        b = _moved(values, factors[second], zeros[second], element)
        for i in range(start, min(start + run, count), WHOLE):
            prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
            put_picked(a, b, codes_at(source, byte_at, i, bits, scratch), out, at + i)


@device
def decode_by_exponent(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, table: Any, factors: Any, shift: Any,
    ahead: Any, out: Any, at: Any,
) -> None:  # fmt: skip
    """Write bfloat16 of codes of up to 4 bits times powers of two: one table for all, exponents added."""
    words = bits_of(load_lanes(table, np.uint64(0)))
    values, one = high_halves(words, words), np.uint32(127 << 7)
    for i in range(np.uint64(0), count, WHOLE):
        prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
        picked = pick_halves(values, codes_at(source, byte_at, i, bits, scratch))
        first = np.uint16(shr32(bits32(factors[i >> shift]), np.uint32(16)) - one)
        second = np.uint16(shr32(bits32(factors[(i + HALF) >> shift]), np.uint32(16)) - one)
        nonzero = above_signed(picked & halves_of(np.uint16(0x7FFF)), halves_of(np.uint16(0)))
        store_lanes(out, at + i, picked + (two_halves(first, second) & nonzero))


@device
def decode_fields(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, table: Any, factors: Any,
    shift: Any, ahead: Any, out: Any, at: Any, exact: Any,
) -> Any:  # fmt: skip
    """Write bfloat16 of floats with up to 3 mantissa bits; False when a code is NaN or Inf, all lost then.

    Codes with exponent fields 0 and 1 are looked up, and what the field is above 1 is added to the exponent.
    exact: factors are powers of two, which are added too; otherwise each serves many steps.
    """
    implicit = np.uint8(shl32(np.uint32(1), element.mantissa))
    normal, mantissas = octets_of(implicit), octets_of(np.uint8(implicit - np.uint8(1)))
    magnitude, zero = octets_of(np.uint8(element.magnitude)), octets_of(np.uint8(0))
    rise = halves_of(np.uint16(np.uint32(7) - element.mantissa))
    sign, sign_rise = halves_of(np.uint16(0x8000)), halves_of(np.uint16(np.uint32(16) - float_bits(element)))
    values, worst, one = load_lanes(table, np.uint64(0)), zero, np.uint32(127 << 7)
    run = np.uint64(1) << shift if shift < np.uint64(63) and not exact else count
    for start in range(np.uint64(0), count, run):
        factor = np.float32(1) if exact else factors[start >> shift]
        words = nearest_bits(values * floats_of(factor))
        products = high_halves(words, words)
        for i in range(start, min(start + run, count), WHOLE):
            prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
            codes = codes_at(source, byte_at, i, bits, scratch)
            worst = worse(worst, codes, element)
            field = (codes & magnitude) - (codes & mantissas)
            picked = pick_halves(products, (codes & mantissas) | (unequal(field, zero) & normal))
            above_first = halves_of_octets(larger_bits(field, normal) - normal) << rise
            result = picked + above_first
            if exact:
                first = np.uint16(shr32(bits32(factors[i >> shift]), np.uint32(16)) - one)
                second = np.uint16(shr32(bits32(factors[(i + HALF) >> shift]), np.uint32(16)) - one)
                nonzero = above_signed(result, halves_of(np.uint16(0)))
                result = result + (two_halves(first, second) & nonzero)
            store_lanes(out, at + i, result | ((halves_of_octets(codes) << sign_rise) & sign))
    return largest_lane(worst) <= np.uint8(element.max_code)


@device
def decode_steps(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, table: Any, factors: Any,
    zeros: Any, shift: Any, ahead: Any, out: Any, at: Any, stream: Any, safe: Any, exact: Any,
) -> Any:  # fmt: skip
    """Write the values of ``count`` codes, whole steps, to ``out[at:]``; False when some code is no number.

    Codes of 8 and 4 bits are read from ``source[byte_at:]``, others as bytes from ``scratch``.
    ``factors[i >> shift]`` and ``zeros[i >> shift]`` are those of element i. ahead: how far to prefetch, in
    elements. stream: whether ``out`` is not read again soon. safe: whether products with ``factors`` are
    normal numbers. exact: they are, the target is bfloat16, and factors are powers of two, so that none is
    rounded.
    """
    aligned = stream and address_of(out, at) % np.uint64(64) == 0
    small = bits <= TABLE_BITS
    if small and exact:
        decode_by_exponent(source, byte_at, count, bits, scratch, table, factors, shift, ahead, out, at)
        return True
    pays = shift >= LONG_RUN and out.itemsize == 2
    if small and (pays or element.kind == CODEBOOK or element.zero_place != ZERO_NONE):
        decode_by_table(
            source, byte_at, count, bits, scratch, element, table, factors, zeros, shift, ahead, out, at
        )
        return True
    if element.kind == INTEGER:
        decode_ints(
            source, byte_at, count, bits, scratch, element, factors, zeros, shift, ahead, out, at, aligned,
            exact,
        )  # fmt: skip
        return True
    by_fields = exact or (safe and shift >= LONG_RUN and is_bfloat16(out))
    if by_fields and element.mantissa <= FIELD_BITS:
        return decode_fields(
            source, byte_at, count, bits, scratch, element, table, factors, shift, ahead, out, at, exact
        )
    return decode_floats(
        source, byte_at, count, bits, scratch, element, factors, shift, ahead, out, at, aligned, exact
    )
