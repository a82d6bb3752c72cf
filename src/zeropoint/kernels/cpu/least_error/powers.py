"""Powers of errors and their sums: as :func:`zeropoint.ops.block_errors.powers`, and nearly, in float32.

The exact ones take up to ten square roots a number. Near ones are ``2 ** (power * log2 t)`` by polynomials,
of ``t = u |x|`` with u a power of two that makes the largest magnitude of a block lie in 1..2. With t = m 2^e
and m within a factor ``sqrt(2)`` of 1, ``power e`` is exact for powers of up to 8, and the logarithm of m is
off by at most 2 ** -24 and its roundings, so that a near power is within

    (power + 2) * 2 ** -22    of itself

(a tenth of that is the most that was seen), besides at most ``2 ** -124`` for those that are held between
``2 ** -125`` and ``2 ** 125``. Their sums are made in float64. So, of sums above :data:`LEAST_SUM`, one that
is above the other by a factor of :func:`apart_of`, four times as much, is above it for certain.

Gain that keeps near powers, over exact ones alone, under ``scale=search2.4``: 4.9 times the speed on int4 in
groups of 128, 3.5 on nf4 in groups of 64, 2.0 on mxfp4 (128 x 1024 float32, one AVX-512 thread).
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float32, UInt64
from ..machine import vector as v
from ..machine.intrinsics import device, inlined
from ..machine.reductions import integers, multiply_add, root, sum_of_doubles, whole
from .lane_errors import add_vectors
from .lanes import LANES, magnitudes

_PLACES = np.uint64(10)
"""Binary places of a power."""
_ROOT_OF_HALF, _EXPONENT = np.uint32(0x3F3504F3), np.uint32(0x7F800000)
_MOST = np.float32(125)
LEAST_SUM = np.float64(2.0**-80)
"""Near sums of up to 2 ** 22 powers above this are not of those that are held."""


class Power(NamedTuple):
    """A power: float32; squarings, an odd factor, and remainder in 1024ths."""

    exponent: Float32
    squares: UInt64
    odd: Flag
    part: UInt64


@inlined
def is_square(power: Any) -> Any:
    """Return whether errors are squared."""
    return power.exponent == np.float32(2)


@inlined
def apart_of(power: Any) -> Any:
    """Factor between near sums whose order is certain, float64."""
    return np.float64(1) + (np.float64(power.exponent) + np.float64(2)) * np.float64(2.0**-20)


@inlined
def powers_of(x: Any, power: Any) -> Any:
    """Return exact powers of magnitudes of doubles."""
    own = v.larger(x, v.doubles_of(np.float64(0)) - x)
    square, result = x * x, own if power.odd else v.doubles_of(np.float64(1))
    for _ in range(power.squares):
        result = result * square
    place = np.uint64(1) << _PLACES
    part = power.part
    while part > np.uint64(0):
        own, place = root(own), place >> np.uint64(1)
        if part & place:
            result = result * own
            part = part - place
    return result


@inlined
def units_of(amax: Any) -> Any:
    """Return the powers of two that make largest magnitudes lie in 1..2."""
    return v.values_of(v.words_of(np.uint32(254 << 23)) - (v.bits_of(amax) & v.words_of(_EXPONENT)))


@inlined
def near_powers_of(x: Any, units: Any, power: Any) -> Any:
    """Return near powers of magnitudes of floats times units."""
    bits = v.bits_of(magnitudes(x) * units)
    # Words are as signed here: numbers below 1 have negative words.
    exponent = v.shift_signed(bits - v.words_of(_ROOT_OF_HALF), v.words_of(np.uint32(23)))
    f = v.values_of(bits - (exponent << v.words_of(np.uint32(23)))) - v.floats_of(np.float32(1))
    log = v.floats_of(np.float32(0.12250134789361726))
    log = multiply_add(log, f, v.floats_of(np.float32(-0.20884729383782616)))
    log = multiply_add(log, f, v.floats_of(np.float32(0.21786986108292694)))
    log = multiply_add(log, f, v.floats_of(np.float32(-0.23878532177605574)))
    log = multiply_add(log, f, v.floats_of(np.float32(0.2876273287734744)))
    log = multiply_add(log, f, v.floats_of(np.float32(-0.3607061250927224)))
    log = multiply_add(log, f, v.floats_of(np.float32(0.48092338602087426)))
    log = multiply_add(log, f, v.floats_of(np.float32(-0.7213473799503507)))
    log = multiply_add(log, f, v.floats_of(np.float32(1.4426948570498614))) * f
    by = v.floats_of(power.exponent)
    most = v.floats_of(_MOST)
    first = v.floats_of_integers(exponent) * by
    steps = whole(first)
    second = multiply_add(log, by, first - steps)
    more = whole(second)
    steps = v.larger(v.smaller(steps + more, most), v.floats_of(-_MOST))
    f = second - more
    result = v.floats_of(np.float32(0.0001546973197855427))
    result = multiply_add(result, f, v.floats_of(np.float32(0.0013400432165384063)))
    result = multiply_add(result, f, v.floats_of(np.float32(0.009618025602932087)))
    result = multiply_add(result, f, v.floats_of(np.float32(0.0555032721420917)))
    result = multiply_add(result, f, v.floats_of(np.float32(0.2402265121359557)))
    result = multiply_add(result, f, v.floats_of(np.float32(0.6931472067106204)))
    result = multiply_add(result, f, v.floats_of(np.float32(1)))
    return v.values_of(v.bits_of(result) + (integers(steps) << v.words_of(np.uint32(23))))


@inlined
def _off(columns: Any, decoded: Any, i: Any) -> Any:
    return v.load_lanes(decoded, i * LANES) - v.load_lanes(columns, i * LANES)


@inlined
def _past(columns: Any, i: Any, end: Any) -> Any:
    past = v.wide_floats(magnitudes(v.load_lanes(columns, i * LANES))) - end
    return v.larger(past, v.doubles_of(np.float64(0)))


@inlined
def _joined(total: Any, row: Any) -> Any:
    return v.doubles_of(sum_of_doubles(total)) if row else total


@device
def add_powers(columns: Any, decoded: Any, size: Any, row: Any, power: Any, sums: Any) -> None:
    """Write exact powers of errors of 16 blocks to ``sums``.

    row: as of :func:`.lane_errors.add_errors`. sums: float64, room for all numbers.
    """
    for i in range(size):
        at = i * LANES
        off = v.wide_floats(v.load_lanes(decoded, at)) - v.wide_floats(v.load_lanes(columns, at))
        v.store_lanes(sums, at, powers_of(off, power))
    add_vectors(sums, size, row)


@device
def add_near_powers(
    columns: Any, decoded: Any, size: Any, row: Any, power: Any, units: Any, sums: Any
) -> None:
    """Write the same nearly; units: (16,) float32."""
    unit, total = v.load_lanes(units, np.uint64(0)), v.doubles_of(np.float64(0))
    for i in range(size):
        total = total + v.wide_floats(near_powers_of(_off(columns, decoded, i), unit, power))
    v.store_lanes(sums, np.uint64(0), _joined(total, row))


@device
def add_clipped_powers(columns: Any, size: Any, row: Any, power: Any, ends: Any, sums: Any) -> None:
    """Write exact powers of excess past ``ends``, (16,) float64, to ``sums``."""
    end = v.load_lanes(ends, np.uint64(0))
    for i in range(size):
        v.store_lanes(sums, i * LANES, powers_of(_past(columns, i, end), power))
    add_vectors(sums, size, row)


@device
def add_near_clipped_powers(
    columns: Any, size: Any, row: Any, power: Any, units: Any, ends: Any, sums: Any
) -> None:
    """Write the same nearly; units: (16,) float32."""
    end, unit, total = (
        v.load_lanes(ends, np.uint64(0)),
        v.load_lanes(units, np.uint64(0)),
        v.doubles_of(np.float64(0)),
    )
    for i in range(size):
        past = v.narrow_doubles(_past(columns, i, end))
        total = total + v.wide_floats(near_powers_of(past, unit, power))
    v.store_lanes(sums, np.uint64(0), _joined(total, row))
