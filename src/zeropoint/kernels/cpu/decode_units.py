"""Whole units of 16 codes to values on explicit vectors: the way of the common cases, as :mod:`.units`.

Small floats become float16 by moving their fields, with the sign: the hardware widens those, subnormals
included, and a power of two makes up for the difference of the exponents' biases.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .intrinsics import address_of, device, float32_of, inlined, prefetch, shl32
from .layout import CODEBOOK, FLOAT, INTEGER, ZERO_NONE
from .vector import (
    UNIT,
    bits_of,
    float16_of_floats,
    floats_of,
    floats_of_float16,
    floats_of_integers,
    halves_of,
    halves_of_octets,
    halves_of_words,
    larger_bits,
    largest_lane,
    load_lanes,
    load_nibbles,
    octets_of,
    shift_signed,
    store_lanes,
    stream_lanes,
    unequal,
    words_of,
    words_of_octets,
)

FLOAT16_EXPONENT_BITS = np.uint32(5)
FLOAT16_MANTISSA_BITS = np.uint32(10)


@device
def can_decode_units(element: Any) -> Any:
    """Return whether :func:`decode_units` knows the element.

    A float format must fit into float16: five exponent bits only with the largest of them for NaN and Inf.
    """
    if element.kind == CODEBOOK or element.zero_place != ZERO_NONE:
        return False
    if element.kind == INTEGER:
        return True
    exponent_bits = float_bits(element) - np.uint32(1) - element.mantissa
    reserved = element.max_code < (np.uint32(31) << element.mantissa)
    small = exponent_bits < FLOAT16_EXPONENT_BITS or (exponent_bits == FLOAT16_EXPONENT_BITS and reserved)
    return small and exponent_bits > np.uint32(0)


@device
def float_bits(element: Any) -> Any:
    """Return the bits of a code of a signed float format."""
    return np.uint32(np.uint32(32) - element.sign_shift)


@inlined
def codes_at(source: Any, byte_at: Any, i: Any, bits: Any, scratch: Any) -> Any:
    """Return the codes of unit ``i``: bytes and nibbles from the source, other widths from ``scratch``."""
    if bits == np.uint64(8):
        return load_lanes(source, byte_at + i)
    if bits == np.uint64(4):
        return load_nibbles(source, byte_at + i // np.uint64(2))
    return load_lanes(scratch, i)


def _put_values(values: Any, out: Any, at: Any, aligned: Any) -> None:
    """Round to the target's dtype and store."""


@overload(_put_values, inline="always")
def _put_values_overload(values: Any, out: Any, at: Any, aligned: Any) -> Any:
    if out.dtype == types.float32:

        def put(values: Any, out: Any, at: Any, aligned: Any) -> None:
            if aligned:
                stream_lanes(out, at, values)
            else:
                store_lanes(out, at, values)

    elif out.dtype == types.uint16:

        def put(values: Any, out: Any, at: Any, aligned: Any) -> None:
            u = bits_of(values)
            odd = (u >> words_of(np.uint32(16))) & words_of(np.uint32(1))
            rounded = u + words_of(np.uint32(0x7FFF)) + odd
            store_lanes(out, at, halves_of_words(rounded >> words_of(np.uint32(16))))

    else:

        def put(values: Any, out: Any, at: Any, aligned: Any) -> None:
            store_lanes(out, at, float16_of_floats(values))

    return put


@inlined
def put_values(values: Any, out: Any, at: Any, aligned: Any) -> None:
    """Write a unit of values, none of them NaN; ``aligned`` float32 bypass the cache.

    An ordinary store first reads the line it overwrites; four bytes an element make that the larger part of
    the traffic.
    """
    _put_values(values, out, at, aligned)


@device
def decode_int_units(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, factors: Any, shift: Any,
    ahead: Any, out: Any, at: Any, aligned: Any,
) -> None:  # fmt: skip
    """Write ``code * factor`` of integers."""
    sign = words_of(element.sign)
    for i in range(np.uint64(0), count, np.uint64(UNIT)):
        prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
        codes = words_of_octets(codes_at(source, byte_at, i, bits, scratch))
        values = floats_of_integers((codes ^ sign) - sign)
        put_values(values * floats_of(factors[i >> shift]), out, at + i, aligned)


@device
def decode_float_units(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, factors: Any, shift: Any,
    ahead: Any, out: Any, at: Any, aligned: Any,
) -> Any:  # fmt: skip
    """Write ``value(code) * factor`` of small floats; False when a code is NaN or Inf, all lost then."""
    width = float_bits(element)
    exponent_bits = np.uint32(width - np.uint32(1) - element.mantissa)
    left = halves_of(np.uint16(np.uint32(16) - width))
    right = halves_of(np.uint16(FLOAT16_EXPONENT_BITS - exponent_bits))
    fields = shl32(np.uint32(1), np.uint32(FLOAT16_MANTISSA_BITS + exponent_bits)) - np.uint32(1)
    keep = halves_of(np.uint16(fields | np.uint32(0x8000)))
    bias = floats_of(float32_of(shl32(np.uint32(element.emin + np.uint32(14)), np.uint32(23))))
    magnitude = octets_of(np.uint8(element.magnitude))
    most = octets_of(np.uint8(0))
    negative_zero = octets_of(np.uint8(element.magnitude + np.uint32(1)))
    for i in range(np.uint64(0), count, np.uint64(UNIT)):
        prefetch(source, byte_at + (i + ahead) * bits // np.uint64(8))
        codes = codes_at(source, byte_at, i, bits, scratch)
        if element.negative_nan:
            most = most | (octets_of(np.uint8(0xFF)) - unequal(codes, negative_zero))
        else:
            most = larger_bits(most, codes & magnitude)
        half = shift_signed(halves_of_octets(codes) << left, right) & keep
        values = floats_of_float16(half) * bias * floats_of(factors[i >> shift])
        put_values(values, out, at + i, aligned)
    return largest_lane(most) <= np.uint8(element.max_code)


@device
def decode_units(
    source: Any, byte_at: Any, count: Any, bits: Any, scratch: Any, element: Any, factors: Any, shift: Any,
    ahead: Any, out: Any, at: Any,
) -> Any:  # fmt: skip
    """Write the values of ``count`` codes, whole units, to ``out[at:]``; False when some code is no number.

    Codes of 8 and 4 bits are read from ``source[byte_at:]``, others as bytes from ``scratch``.
    ``factors[i >> shift]`` is that of element i. ahead: how far to prefetch, in elements.
    """
    aligned = address_of(out, at) % np.uint64(64) == 0
    if element.kind == INTEGER:
        decode_int_units(
            source, byte_at, count, bits, scratch, element, factors, shift, ahead, out, at, aligned
        )
        return True
    return decode_float_units(
        source, byte_at, count, bits, scratch, element, factors, shift, ahead, out, at, aligned
    )
