"""Whole steps of 32 values in and their codes out: what the dtype of the source decides."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ..machine.intrinsics import LINE, inlined, prefetch
from ..machine.vector import (
    HALF,
    STEP,
    first_bfloat16,
    first_float16,
    floats_of,
    halves_of_pairs,
    load_lanes,
    low_octets,
    octets_of_halves,
    pairs_of,
    second_bfloat16,
    second_float16,
    store_lanes,
    store_nibble_pairs,
    store_nibbles,
    two_floats,
    values_of,
    words_of,
)


def _values_at(x: Any, at: Any) -> Any:
    """Load a step and widen it exactly."""


@overload(_values_at, inline="always")
def _values_at_overload(x: Any, at: Any) -> Any:
    if x.dtype == types.float32:

        def load(x: Any, at: Any) -> Any:
            return load_lanes(x, at), load_lanes(x, at + HALF)

    elif x.dtype == types.uint16:

        def load(x: Any, at: Any) -> Any:
            pairs = pairs_of(load_lanes(x, at))
            odd = pairs & words_of(np.uint32(0xFFFF0000))
            return values_of(pairs << words_of(np.uint32(16))), values_of(odd)

    else:

        def load(x: Any, at: Any) -> Any:
            half = load_lanes(x, at)
            return first_float16(half), second_float16(half)

    return load


@inlined
def values_at(x: Any, at: Any) -> Any:
    """Return ``x[at : at + 32]`` as two vectors of floats, in the order of :mod:`..machine.vector`.

    x: float32, uint16 bits of bfloat16, or int16 bits of float16.
    """
    return _values_at(x, at)


def _is_bfloat16(x: Any) -> Any:
    """Return whether the dtype is uint16."""


@overload(_is_bfloat16, inline="always")
def _is_bfloat16_overload(x: Any) -> Any:
    found = x.dtype == types.uint16

    def tell(x: Any) -> Any:
        return found

    return tell


@inlined
def is_bfloat16(x: Any) -> Any:
    """Return whether an array holds bits of bfloat16, known when a kernel is compiled."""
    return _is_bfloat16(x)


def _factors_at(x: Any, factors: Any, shift: Any, i: Any) -> Any:
    """Return the factors of a step, in the order of the values of ``x``."""


@overload(_factors_at, inline="always")
def _factors_at_overload(x: Any, factors: Any, shift: Any, i: Any) -> Any:
    if x.dtype == types.uint16:

        def find(x: Any, factors: Any, shift: Any, i: Any) -> Any:
            both = two_floats(factors[i >> shift], factors[(i + HALF) >> shift])
            return both, both

    else:

        def find(x: Any, factors: Any, shift: Any, i: Any) -> Any:
            return floats_of(factors[i >> shift]), floats_of(factors[(i + HALF) >> shift])

    return find


@inlined
def factors_at(x: Any, factors: Any, shift: Any, i: Any) -> Any:
    """Return ``factors[j >> shift]`` of the elements j of a step, in the order of the values of ``x``."""
    return _factors_at(x, factors, shift, i)


def _octets_of_words(x: Any, a: Any, b: Any) -> Any:
    """Return the low bytes of two vectors in the order of the values of ``x``."""


@overload(_octets_of_words, inline="always")
def _octets_of_words_overload(x: Any, a: Any, b: Any) -> Any:
    if x.dtype == types.uint16:

        def narrow(x: Any, a: Any, b: Any) -> Any:
            pairs = (a & words_of(np.uint32(0xFFFF))) | (b << words_of(np.uint32(16)))
            return octets_of_halves(halves_of_pairs(pairs))

    else:

        def narrow(x: Any, a: Any, b: Any) -> Any:
            return low_octets(a, b)

    return narrow


def _values_in_order(x: Any, at: Any) -> Any:
    """Load a step and widen it exactly, the first 16 elements first."""


@overload(_values_in_order, inline="always")
def _values_in_order_overload(x: Any, at: Any) -> Any:
    if x.dtype != types.uint16:
        return _values_at_overload(x, at)

    def load(x: Any, at: Any) -> Any:
        half = load_lanes(x, at)
        return first_bfloat16(half), second_bfloat16(half)

    return load


@inlined
def values_in_order(x: Any, at: Any) -> Any:
    """Return ``x[at : at + 16]`` and the 16 elements after it as floats."""
    return _values_in_order(x, at)


def _fetch_step(x: Any, at: Any) -> None:
    """Prefetch a step, one cache line or two."""


@overload(_fetch_step, inline="always")
def _fetch_step_overload(x: Any, at: Any) -> Any:
    if x.dtype.bitwidth // 8 * STEP > LINE:

        def fetch(x: Any, at: Any) -> None:
            prefetch(x, at)
            prefetch(x, at + HALF)

    else:

        def fetch(x: Any, at: Any) -> None:
            prefetch(x, at)

    return fetch


@inlined
def fetch_step(x: Any, at: Any) -> None:
    """Prefetch ``x[at : at + 32]``."""
    _fetch_step(x, at)


@inlined
def put(codes: Any, i: Any, bits: Any, scratch: Any, out: Any, byte_at: Any) -> None:
    """Write the codes of step ``i``: bytes and nibbles where they belong, other widths to ``scratch``."""
    if bits == np.uint64(8):
        store_lanes(out, byte_at + i, codes)
    elif bits == np.uint64(4):
        store_nibbles(out, byte_at + i // np.uint64(2), codes)
    else:
        store_lanes(scratch, i, codes)


@inlined
def put_words(x: Any, a: Any, b: Any, i: Any, bits: Any, scratch: Any, out: Any, byte_at: Any) -> None:
    """Write the codes of step ``i``, the low bits of two vectors in the order of the values of ``x``."""
    if is_bfloat16(x) and bits == np.uint64(4):
        store_nibble_pairs(out, byte_at + i // np.uint64(2), a, b)
    else:
        put(_octets_of_words(x, a, b), i, bits, scratch, out, byte_at)


@inlined
def octets_in_order(x: Any, a: Any, b: Any) -> Any:
    """Return the low bytes of two vectors in the order of the values of ``x``, as octets in theirs."""
    return _octets_of_words(x, a, b)
