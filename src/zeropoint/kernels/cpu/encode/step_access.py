"""Steps of 32 values in, codes out: the dtype-dependent part."""

from typing import Any, NamedTuple

import numpy as np

from ..machine import vector as v
from ..machine.intrinsics import by_dtype, inlined, prefetch
from ..machine.reductions import even_lanes, odd_lanes


class Elements(NamedTuple):
    """Elements ``x[at : at + count]``."""

    x: Any
    at: Any
    count: Any


class StepSource(NamedTuple):
    """Whole steps ``x[at : at + count]``; ahead: prefetch distance in elements."""

    x: Any
    at: Any
    count: Any
    ahead: Any


class StepTarget(NamedTuple):
    """Place of codes: in ``out`` where :func:`is_stored`, else ``scratch``."""

    bits: Any
    scratch: Any
    out: Any
    byte_at: Any


@inlined
def _of_floats(x: Any, at: Any) -> Any:
    """Load ``x[at : at + 32]`` as two float vectors."""
    return v.load_lanes(x, at), v.load_lanes(x, at + v.HALF)


@inlined
def _of_bfloat16(x: Any, at: Any) -> Any:
    pairs = v.pairs_of(v.load_lanes(x, at))
    odd = pairs & v.words_of(np.uint32(0xFFFF0000))
    return v.values_of(pairs << v.words_of(np.uint32(16))), v.values_of(odd)


@inlined
def _of_float16(x: Any, at: Any) -> Any:
    half = v.load_lanes(x, at)
    return v.first_float16(half), v.second_float16(half)


@inlined
def _of_bfloat16_in_order(x: Any, at: Any) -> Any:
    half = v.load_lanes(x, at)
    return v.first_bfloat16(half), v.second_bfloat16(half)


@inlined
def _of_float_pairs(x: Any, at: Any) -> Any:
    a, b = _of_floats(x, at)
    return even_lanes(a, b), odd_lanes(a, b)


@inlined
def _of_float16_pairs(x: Any, at: Any) -> Any:
    a, b = _of_float16(x, at)
    return even_lanes(a, b), odd_lanes(a, b)


values_at = by_dtype(float32=_of_floats, uint16=_of_bfloat16, int16=_of_float16)
values_in_order = by_dtype(float32=_of_floats, uint16=_of_bfloat16_in_order, int16=_of_float16)
"""Likewise, ``x[at : at + 16]`` and the 16 elements after it."""
values_of_pairs = by_dtype(float32=_of_float_pairs, uint16=_of_bfloat16, int16=_of_float16_pairs)
"""Likewise, the 16 even elements and the 16 odd ones."""


@inlined
def _yes(x: Any) -> Any:
    """Whether an array holds bits of bfloat16, known at compile time."""
    return True


@inlined
def _no(x: Any) -> Any:
    return False


is_bfloat16 = by_dtype(uint16=_yes, float32=_no, int16=_no)
is_short = by_dtype(float32=_no, uint16=_yes, int16=_yes)
"""Whether an array holds 16-bit floats."""


@inlined
def _factors_in_order(x: Any, factors: Any, shift: Any, i: Any) -> Any:
    """Load ``factors[j >> shift]`` of a step, in the order of ``x``."""
    return v.floats_of(factors[i >> shift]), v.floats_of(factors[(i + v.HALF) >> shift])


@inlined
def _factors_of_pairs(x: Any, factors: Any, shift: Any, i: Any) -> Any:
    both = v.two_floats(factors[i >> shift], factors[(i + v.HALF) >> shift])
    return both, both


factors_at = by_dtype(float32=_factors_in_order, uint16=_factors_of_pairs, int16=_factors_in_order)


@inlined
def _low_octets(x: Any, a: Any, b: Any) -> Any:
    """Join the low bytes of two vectors in the order of ``x``."""
    return v.low_octets(a, b)


@inlined
def _low_octets_of_pairs(x: Any, a: Any, b: Any) -> Any:
    pairs = (a & v.words_of(np.uint32(0xFFFF))) | (b << v.words_of(np.uint32(16)))
    return v.octets_of_halves(v.halves_of_pairs(pairs))


octets_in_order = by_dtype(float32=_low_octets, uint16=_low_octets_of_pairs, int16=_low_octets)


@inlined
def _fetch_lines(x: Any, at: Any) -> None:
    """Prefetch ``x[at : at + 32]``, one cache line or two."""
    prefetch(x, at)
    prefetch(x, at + v.HALF)


@inlined
def _fetch_line(x: Any, at: Any) -> None:
    prefetch(x, at)


fetch_step = by_dtype(float32=_fetch_lines, uint16=_fetch_line, int16=_fetch_line)


@inlined
def is_stored(bits: Any) -> Any:
    """Whether :func:`put` stores codes of so many bits as they are packed."""
    return bits == np.uint64(8) or bits == np.uint64(4) or bits == np.uint64(2)


@inlined
def put(codes: Any, i: Any, target: Any) -> None:
    """Write the codes of step ``i`` to a :class:`StepTarget`."""
    if target.bits == np.uint64(8):
        v.store_lanes(target.out, target.byte_at + i, codes)
    elif target.bits == np.uint64(4):
        v.store_nibbles(target.out, target.byte_at + i // np.uint64(2), codes)
    elif target.bits == np.uint64(2):
        v.store_pairs_of_bits(target.out, target.byte_at + i // np.uint64(4), codes)
    else:
        v.store_lanes(target.scratch, i, codes)


@inlined
def put_words(x: Any, a: Any, b: Any, i: Any, target: Any) -> None:
    """Write codes of step ``i``, low bits of vectors in ``x``'s order."""
    if is_bfloat16(x) and target.bits == np.uint64(4):
        v.store_nibble_pairs(target.out, target.byte_at + i // np.uint64(2), a, b)
    else:
        put(octets_in_order(x, a, b), i, target)
