"""Rounding but half to even: :mod:`zeropoint.formats.codes` again, in Triton, bit for bit.

``k`` is what kernels are compiled for, see :class:`..specialization.Constants`; the seed of stochastic
rounding is no part of it, so that a seed for each step compiles nothing.
"""

import triton
import triton.language as tl

from ....ops.lowering import Rounded

_STOCHASTIC, _FLOOR = tl.constexpr(int(Rounded.STOCHASTIC)), tl.constexpr(int(Rounded.FLOOR))
_HALF_AWAY, _HALF_UP = tl.constexpr(int(Rounded.HALF_AWAY)), tl.constexpr(int(Rounded.HALF_UP))
_HALF_DOWN, _CEIL = tl.constexpr(int(Rounded.HALF_DOWN)), tl.constexpr(int(Rounded.CEIL))
_TOWARD_ZERO, _SUMS = tl.constexpr(int(Rounded.TOWARD_ZERO)), tl.constexpr(int(Rounded.SUMS))
# 1.5 * 2**23: added to a float32 below 2**22, it leaves the nearest integer, ties to even, in the low bits.
_WHOLE = tl.constexpr(12582912.0)
# 2**-54 in units of noise, and a bit less: so far above noise the reference's ``1 - fraction`` rounds to it.
_NEAR_NOISE = tl.constexpr(2.0**-22 - 2.0**-26)


@triton.jit
def _mixed(h):
    """Return uint32 through the finalizer of MurmurHash3."""
    return _after_first_step(h ^ (h >> 16))


@triton.jit
def _after_first_step(h):
    h *= 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def noise_of(seed, start, at, k: tl.constexpr):
    """Return :func:`zeropoint.formats.codes.uniform_noise` in units of 2**-32, the bits of uint32 as int32.

    It is of elements with flat indices ``start + at``, at: int32. start: int64, of few dimensions: where
    indices pass a multiple of 2**32, their high halves are one of two.
    """
    if k.element.rounding == _STOCHASTIC:
        own = _mixed(seed.to(tl.uint32))
        first, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
        low = first + at.to(tl.uint32)
        high = tl.where(low < first, _mixed((high + 1) ^ own), _mixed(high ^ own))
        return _mixed(low ^ high).to(tl.int32, bitcast=True)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return 0


@triton.jit
def piece_noise(seed, start, at, k: tl.constexpr):
    """Noise of eight-element pieces, (pieces, 8): :func:`noise_of`, aligned.

    ``start + at`` are multiples of eight. at: (pieces, 1) int32. Elements of a piece differ in the lowest
    bits alone, also after the first step.
    """
    if k.element.rounding == _STOCHASTIC:
        own = _mixed(seed.to(tl.uint32))
        first, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
        low = first + at.to(tl.uint32)
        low ^= tl.where(low < first, _mixed((high + 1) ^ own), _mixed(high ^ own))
        h = (low ^ (low >> 16)) ^ tl.arange(0, 8)[None, :].to(tl.uint32)
        return _after_first_step(h).to(tl.int32, bitcast=True)
    else:  # noqa: RET505
        return 0


@triton.jit
def _ceiled(number, k: tl.constexpr):
    """Return float32 rounded up to int32, the largest past its end.

    Triton's own function takes two conversions, of which one flushes.
    """
    if k.native:
        return tl.inline_asm_elementwise(
            "cvt.rpi.s32.f32 $0, $1;", "=r,f", [number], dtype=tl.int32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.ceil(number).to(tl.int32)


@triton.jit
def rounded_to(number, step, inverse, noise, k: tl.constexpr):
    """Round numbers, below 2**22 steps, to power-of-two steps, not half-even.

    inverse: of steps. noise: see :func:`noise_of`, for stochastic rounding, which goes up where what is above
    the multiple below is more than noise. As signed numbers, it is the noise of going up from the nearest
    multiple, or of going down if negative; ``part`` is less than a half, and is compared as an integer.
    """
    lift = step * _WHOLE
    nearest = (number + lift) - lift
    off = (number - nearest) * inverse
    if k.element.rounding == _STOCHASTIC:
        part = off * 4294967296.0
        part -= tl.where(part < 0.0, _NEAR_NOISE, 0.0)
        above = (_ceiled(part, k) > noise) | (off >= 0.5)  # half is 2**31, past int32
        return (nearest - tl.where(noise < 0, step, 0.0)) + tl.where(above, step, 0.0)
    elif k.element.rounding == _SUMS:  # noqa: RET505 (of steps of 1; what is cut off is positive)
        total = number + (0.5 - k.element.low)
        nearest = (total + _WHOLE) - _WHOLE
        return (nearest - tl.where(nearest > total, 1.0, 0.0)) + k.element.low
    elif k.element.rounding == _FLOOR:
        return nearest - tl.where(off < 0.0, step, 0.0)
    elif k.element.rounding == _CEIL:
        return nearest + tl.where(off > 0.0, step, 0.0)
    elif k.element.rounding == _TOWARD_ZERO:
        nearest -= tl.where((off < 0.0) & (number > 0.0), step, 0.0)
        return nearest + tl.where((off > 0.0) & (number < 0.0), step, 0.0)
    elif k.element.rounding == _HALF_UP:
        return nearest + tl.where(off == 0.5, step, 0.0)
    elif k.element.rounding == _HALF_DOWN:
        return nearest - tl.where(off == -0.5, step, 0.0)
    else:
        tl.static_assert(k.element.rounding == _HALF_AWAY)
        nearest += tl.where((off == 0.5) & (number > 0.0), step, 0.0)
        return nearest - tl.where((off == -0.5) & (number < 0.0), step, 0.0)
