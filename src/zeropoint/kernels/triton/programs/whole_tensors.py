"""Whole-tensor scale: largest magnitude, and the scale from it.

``notes`` are int32: whether some number does not fit, and the bits of the largest magnitude so far, as
float32. NaN has larger bits than Inf, and Inf than any finite number.
"""

import triton
import triton.language as tl

from .element_codes import bits_of, float32, float_of, largest, rounded, stored
from .held_scales import fill_tables
from .pieces import part_elements, part_place, part_start
from .scale_choice import scales_of

_LEAST = tl.constexpr(2.0**-126)


@triton.jit
def tensor_amax(x, notes, cut, k: tl.constexpr):
    """Raise ``notes[1]`` to the bits of the largest magnitude of ``x``.

    The scale is a launch of its own: where the last program to come writes it, each program waits for its
    fence, and the launch takes two thirds longer (H100, 1 GiB).
    """
    row, part, left = part_place(tl.program_id(0), cut, k)
    at, there = part_elements(left, k)
    value = float32(tl.load(x + part_start(row, part, cut, k) + at, mask=there, other=0))
    found = tl.max(bits_of(largest(value, k)).to(tl.int32), axis=0)
    tl.atomic_max(notes + 1, found, sem="relaxed")


@triton.jit
def _clear(notes, bad):
    """Set ``notes[0]`` where something does not fit, and make ``notes[1]`` zero."""
    one = tl.arange(0, 1)
    tl.store(notes + 1 + one, 0)
    tl.store(notes + one, 1, mask=bad)


@triton.jit
def coarse_scale(notes, coarse, levels, tables, cut, k: tl.constexpr):
    """Write a tensor's scale, (1,) float32, and finer tables: :mod:`.held_scales`.

    A largest magnitude that is not finite, or a scale that does not fit, sets ``notes[0]``.
    """
    rule: tl.constexpr = k.outer
    one = tl.arange(0, 1)
    amax = float_of(tl.load(notes + 1 + one))
    fits = amax < float("inf")
    if rule.reciprocal:
        scale = rounded(tl.div_rn(one * 0.0 + 1.0, tl.maximum(amax, rule.tiny)), rule.narrow)
        scale = rounded(scale * rule.largest, rule.narrow)
        scale = tl.where(scale < float("inf"), scale, 1.0)
        own = rounded(tl.div_rn(amax, one * 0.0 + rule.divisor), rule.narrow)
        fits &= own.to(tl.float64) * scale.to(tl.float64) <= tl.full([1], rule.fits, tl.float64)
    else:
        scale = amax.to(tl.float64) / tl.full([1], rule.largest, tl.float64)
        scale = tl.maximum(scale, tl.full([1], _LEAST, tl.float64)).to(tl.float32)
        scale = tl.where(amax == 0.0, 1.0, scale)
    tl.store(coarse + one, scale)
    _clear(notes, fits == 0)
    fill_tables(levels, scale, tables, k)


@triton.jit
def tensor_scale(notes, scales, cut, k: tl.constexpr):
    """Write the stored scale of a tensor that is one block.

    A largest magnitude that is not finite, or a scale that does not fit its format, sets ``notes[0]``.
    """
    one = tl.arange(0, 1)
    amax = float_of(tl.load(notes + 1 + one))
    scale, _, _, fits = scales_of(amax, amax, amax, scales, False, k)
    tl.store(scales + one, stored(scale, scales.dtype.element_ty))
    _clear(notes, ((amax < float("inf")) & fits) == 0)
