"""Two levels of powers of two, as in shared microexponents: exponents of blocks and of their halves or so."""

from typing import Any

import numpy as np

from ..machine.descriptor import BAD_SCALE, OK
from ..machine.intrinsics import bits32, device, inlined, scratch, shr32

_ONE, _FEW = np.uint64(1), 256
_TINY, _UP = np.float32(2.0**-126), np.float32(2.0**64)
ABSENT = np.int32(-(1 << 14))
"""The exponent of zero."""


@inlined
def _exponent(x: Any, addend: Any) -> Any:
    """Return the exponent of a magnitude whose mantissa ``addend`` rounds up; see the rule's lowering."""
    small = x < _TINY
    bits = bits32(x * (_UP if small else np.float32(1))) + addend
    found = np.int32(shr32(np.uint32(bits), np.uint32(23))) - (np.int32(191) if small else np.int32(127))
    return found if x > np.float32(0) else ABSENT


@device
def power_level_blocks(
    amax: Any, sizes: Any, numbers: Any, codes: Any, limits: Any, fine: Any, coarse: Any, first: Any,
    last: Any,
) -> Any:  # fmt: skip
    """Write the bytes of both levels of coarse blocks ``first`` to ``last``.

    amax: float32, of fine blocks. sizes: (3,) uint64, fine blocks of a coarse one, and what is added to the
    bits of magnitudes on each level. numbers: (6,) int32, the emax of elements, the least exponent of fine
    blocks, and the first and last exponents that each level holds. codes: uint8, the code of each exponent,
    held, of the fine level and then of the coarse one. limits: float64, for each exponent of the coarse level
    the largest magnitude that the rules allow under the largest fine one.
    """
    per, emax, least = sizes[0], numbers[0], numbers[1]
    low, high, bottom, top = numbers[2], numbers[3], numbers[4], numbers[5]
    exponents, past = scratch(_FEW, np.int32), np.uint32(0)
    for c in range(first, last):
        begin, end, largest = c * per, (c + _ONE) * per, np.float32(0)
        for b in range(begin, end):
            largest = max(largest, amax[b])
        outer = _exponent(largest, np.uint32(sizes[2])) - emax
        past |= np.uint32(outer > top)
        outer = max(min(outer, top), bottom)
        coarse[c] = codes[np.uint64(high - low + np.int32(1) + outer - bottom)]
        shift, limit = max(outer, np.int32(-127)), limits[np.uint64(outer - bottom)]
        for start in range(begin, end, np.uint64(_FEW)):
            n, over = min(end - start, np.uint64(_FEW)), np.uint32(0)
            for i in range(n):
                a = amax[start + i]
                inner = max(_exponent(a, np.uint32(sizes[1])) - emax, least) - shift
                over |= np.uint32((inner > high) & (np.float64(a) > limit))
                exponents[i] = max(min(inner, high), low) - low
            past |= over
            for i in range(n):
                fine[start + i] = codes[np.uint64(exponents[i])]
    return BAD_SCALE if past else OK
