"""Kernels for the scale of a whole tensor: its largest magnitude, and the scale that follows from it.

``notes`` are two int32: whether some number does not fit, and the bits of the largest magnitude so far, as
float32. NaN has larger bits than Inf, and Inf than any finite number.
"""

import triton
import triton.language as tl

from .element_codes import bits_of, float32, float_of, largest
from .pieces import part_elements, part_place, part_start

_LEAST = tl.constexpr(2.0**-126)


@triton.jit
def tensor_amax(x, notes, cut, k: tl.constexpr):
    """Raise ``notes[1]`` to the bits of the largest magnitude of ``x``."""
    row, part, left = part_place(cut, k)
    at, there = part_elements(left, k)
    value = float32(tl.load(x + part_start(row, part, cut, k) + at, mask=there, other=0))
    found = tl.max(bits_of(largest(value, k)).to(tl.int32), axis=0)
    tl.atomic_max(notes + 1, found, sem="relaxed")


@triton.jit
def coarse_scale(notes, coarse, cut, k: tl.constexpr):
    """Write the scale of a tensor, (1,) float32, and make ``notes[1]`` zero.

    The largest magnitude is divided in float64 by ``k.inverse_divisor``, the largest number of a scale of 1;
    one that is not finite sets ``notes[0]``.
    """
    amax = float_of(tl.load(notes + 1))
    scale = tl.maximum(amax.to(tl.float64) / k.inverse_divisor, _LEAST).to(tl.float32)
    tl.store(coarse, tl.where(amax == 0.0, 1.0, scale))
    tl.store(notes + 1, 0)
    if (amax < float("inf")) == 0:
        tl.store(notes, 1)
