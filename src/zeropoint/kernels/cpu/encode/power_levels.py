"""Two levels of powers of two: shared microexponents of blocks and sub-blocks."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Float32, Int32, UInt8, UInt32, UInt64
from ..machine.descriptor import BAD_SCALE, BAD_VALUE, OK, unpack
from ..machine.intrinsics import bits32, device, float32_of, inlined, scratch, shl32, shr32
from ..machine.named_records import unpacker
from ..machine.team import bundled
from ..machine.tile import FEW, FLOAT32, NOT_FINITE, block_amax, spread
from .power_steps import power_steps
from .rows import QuantizeArrays, amax_rows, quantize_rows
from .step_access import Elements

LEAST, MOST = -127, 127
"""Smallest and largest exponent of a level: 2 ** -127 is subnormal in float32, with the bits 0x400000."""
_ZERO = np.uint64(0)
_BIAS = np.int32(127)
_TINY, _UP = np.float32(2.0**-126), np.float32(2.0**64)
ABSENT = np.int32(-(1 << 14))
"""The exponent of zero."""


class Powers(NamedTuple):
    """Two levels of powers of two.

    per: fine blocks of a coarse one. inner_addend, outer_addend: added to bits of magnitudes on each level.
    emax: of elements. least: the least exponent of fine blocks. inner_first, inner_last, outer_first,
    outer_last: exponents that each level holds. inner_code, inner_step, outer_code, outer_step: the code of
    the first exponent of a level, and the step to the next. unit: step of integer codes. limits: float64, for
    each exponent of the coarse level the largest magnitude that the rules allow under the largest fine one.
    top_code: largest magnitude of a code for :mod:`.power_steps`, or 0 where these know no such blocks;
    sign_place: bit of its sign. places: bits of a code behind the point. calm: the least exponent of a coarse
    block that these compute. pair_base, pair_flip: the code of a pair is its exponent plus the one, its
    bits inverted by the other. zero_pair: the code of a pair in a block of zeros.
    """

    per: UInt64
    inner_addend: UInt32
    outer_addend: UInt32
    emax: Int32
    least: Int32
    inner_first: Int32
    inner_last: Int32
    outer_first: Int32
    outer_last: Int32
    inner_code: UInt8
    inner_step: UInt8
    outer_code: UInt8
    outer_step: UInt8
    unit: Float32
    limits: Any
    top_code: UInt32 = 0
    sign_place: UInt32 = 0
    places: Int32 = 0
    calm: Int32 = 0
    pair_base: UInt32 = 0
    pair_flip: UInt32 = 0
    zero_pair: UInt32 = 0


unpack_powers = unpacker(Powers)


@inlined
def _exponent(x: Any, addend: Any) -> Any:
    """Exponent of a magnitude whose mantissa ``addend`` rounds up."""
    small = x < _TINY
    bits = np.uint32(bits32(x * (_UP if small else np.float32(1))) + addend)
    found = np.int32(np.int32(shr32(bits, np.uint32(23))) - (np.int32(191) if small else _BIAS))
    return found if x > np.float32(0) else ABSENT


@inlined
def _power(exponent: Any) -> Any:
    """Return ``2 ** exponent`` of an exponent from LEAST to MOST."""
    bits = shl32(np.uint32(np.int32(exponent + _BIAS)), np.uint32(23))
    return float32_of(bits if exponent > np.int32(LEAST) else np.uint32(0x00400000))


@device
def power_levels(amax: Any, count: Any, powers: Any, fine: Any, coarse: Any, factors: Any) -> Any:
    """Write both levels' codes of ``count`` coarse blocks, and fine divisors.

    amax: float32, of fine blocks. Returns OK or BAD_SCALE.
    """
    per, emax, least, past = powers.per, powers.emax, powers.least, np.uint32(0)
    low, high, bottom, top = powers.inner_first, powers.inner_last, powers.outer_first, powers.outer_last
    inner_addend, outer_addend = powers.inner_addend, powers.outer_addend
    largest, outers, blocks = scratch(FEW, np.float32), scratch(FEW, np.int32), count * per
    block_amax(amax, _ZERO, blocks, per, FLOAT32, largest.view(np.uint32))
    above = np.uint32(0)
    for c in range(count):
        outer = np.int32(_exponent(largest[c], outer_addend) - emax)
        past |= np.uint32(outer > top)
        outer = max(min(outer, top), bottom)
        inner = np.int32(max(np.int32(_exponent(largest[c], inner_addend) - emax), least) - outer)
        above |= np.uint32(inner > high)
        outers[c] = outer
        coarse[c] = np.uint8(powers.outer_code + np.uint8(np.int32(outer - bottom)) * powers.outer_step)
    if above:
        for c in range(count):
            inner = np.int32(max(np.int32(_exponent(largest[c], inner_addend) - emax), least) - outers[c])
            beyond = np.float64(largest[c]) > powers.limits[np.uint64(np.int32(outers[c] - bottom))]
            past |= np.uint32(beyond and inner > high)
    own = largest.view(np.int32)
    spread(outers, blocks, per, own)
    for i in range(blocks):
        inner = np.int32(max(np.int32(_exponent(amax[i], inner_addend) - emax), least) - own[i])
        inner = max(min(inner, high), low)
        fine[i] = np.uint8(powers.inner_code + np.uint8(np.int32(inner - low)) * powers.inner_step)
        factor = _power(inner) * _power(own[i])
        factors[i] = (factor if factor > np.float32(0) else np.float32(np.inf)) * powers.unit
    return BAD_SCALE if past else OK


class PowerArrays(NamedTuple):
    """Data, code order, limits of :class:`Powers`; level bytes and codes out."""

    x: Any
    order: Any
    limits: Any
    fine: Any
    coarse: Any
    out: Any


@bundled
def power_level_rows(args: Any, first: Any, last: Any) -> Any:
    """Write both levels of rows, and codes unless ``out`` is empty.

    A few of the rows ``first`` to ``last`` at a time. args: a descriptor of given scales, :class:`Powers`,
    :class:`PowerArrays`. Rows are whole coarse blocks, and have at most FEW values. Returns OK, BAD_VALUE or
    BAD_SCALE; after the latter two what was written means nothing.
    """
    x, order, limits, fine, coarse, out = PowerArrays(*args[2:])
    desc, powers = unpack(args[0]), unpack_powers(args[1], limits=limits)
    layout = desc.layout
    amax, factors, nothing = scratch(FEW, np.float32), scratch(FEW, np.float32), scratch(1, np.float32)
    none, step, width = scratch(1, np.uint8), np.uint64(FEW) // layout.cols, layout.row_blocks
    for r in range(first, last, step):
        rows, worst = min(last - r, step), np.uint32(0)
        values, blocks = x[r * layout.cols :], rows * width
        levels = fine[r * width :], coarse[r * width // powers.per :]
        codes = out[r * layout.row_bytes :] if len(out) else out
        if powers.top_code > np.uint32(0):
            source = Elements(values, _ZERO, rows * layout.cols)
            if power_steps(source, powers, *levels, layout.bits, codes):
                continue
        amax_rows(values, layout, amax, _ZERO, rows)
        for b in range(blocks):
            worst = max(worst, bits32(amax[b]))
        if worst >= NOT_FINITE:
            return BAD_VALUE
        state = power_levels(amax, blocks // powers.per, powers, *levels, factors)
        if state != OK:
            return state
        if len(out):
            quantize_rows(
                QuantizeArrays(values, order, factors, none, nothing, codes, none), desc, _ZERO, rows
            )
    return OK
