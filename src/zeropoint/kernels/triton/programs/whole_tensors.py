"""Kernels for the scale of a whole tensor: its largest magnitude, and the scale that follows from it.

``notes`` are four int32: whether some number does not fit; the bits of the largest magnitude so far, as
float32, where NaN has larger bits than Inf, and Inf than any finite number; how many programs of a launch
have arrived; and how often all have.
"""

import triton
import triton.language as tl

from .element_codes import bits_of, float32, float_of, largest, rounded, stored
from .held_scales import fill_tables
from .pieces import part_elements, part_place, part_start
from .scale_choice import scales_of

_LEAST = tl.constexpr(2.0**-126)


@triton.jit
def note_amax(amax, notes):
    """Raise ``notes[1]`` to the bits of the largest of the magnitudes ``amax``, (many,) float32."""
    tl.atomic_max(notes + 1, tl.max(bits_of(amax).to(tl.int32), axis=0), sem="relaxed")


@triton.jit
def tensor_amax(x, notes, cut, k: tl.constexpr):
    """Raise ``notes[1]`` to the bits of the largest magnitude of ``x``."""
    row, part, left = part_place(cut, k)
    at, there = part_elements(left, k)
    value = float32(tl.load(x + part_start(row, part, cut, k) + at, mask=there, other=0))
    note_amax(largest(value, k), notes)


@triton.jit
def arrive(notes):
    """Wait until all programs of the launch, which are resident, are here; True, at once, for the last one.

    The others wait for its :func:`release`. What programs wrote before is seen after.
    """
    tl.debug_barrier()
    turn = tl.atomic_add(notes + 3, 0, sem="acquire")
    last = tl.atomic_add(notes + 2, 1, sem="acq_rel") == tl.num_programs(0) - 1
    waiting = last == 0
    while waiting:
        waiting = tl.atomic_add(notes + 3, 0, sem="acquire") == turn
    return last


@triton.jit
def release(notes):
    """Let the others of :func:`arrive` go on."""
    tl.store(notes + 2, 0)
    tl.debug_barrier()
    tl.atomic_add(notes + 3, 1, sem="release")


@triton.jit
def write_coarse(notes, coarse, levels, tables, k: tl.constexpr):
    """Write the scale of a tensor, (1,) float32, and the tables of finer ones; make ``notes[1]`` zero.

    For ``levels`` and ``tables`` see :mod:`.held_scales`.
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
    tl.store(notes + 1 + one, 0)
    tl.store(notes + one, 1, mask=fits == 0)
    fill_tables(levels, scale, tables, k)


@triton.jit
def coarse_scale(notes, coarse, levels, tables, cut, k: tl.constexpr):
    """See :func:`write_coarse`."""
    write_coarse(notes, coarse, levels, tables, k)


@triton.jit
def tensor_scale(notes, scales, cut, k: tl.constexpr):
    """Write the scale of the one block of a tensor, as it is stored, and make ``notes[1]`` zero.

    A largest magnitude that is not finite, or a scale that does not fit its format, sets ``notes[0]``.
    """
    one = tl.arange(0, 1)
    amax = float_of(tl.load(notes + 1 + one))
    scale, _, _, fits = scales_of(amax, amax, amax, scales, False, k)
    tl.store(scales + one, stored(scale, scales.dtype.element_ty))
    tl.store(notes + 1 + one, 0)
    tl.store(notes + one, 1, mask=((amax < float("inf")) & fits) == 0)
