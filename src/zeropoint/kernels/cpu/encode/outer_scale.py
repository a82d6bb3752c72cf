"""The per-tensor scale above finer ones: :func:`zeropoint.params.arithmetic.coarsest_scale`, compiled."""

from typing import Any

import numpy as np

from ....ops.lowering import OuterRule
from ..machine.descriptor import BAD_SCALE, BAD_VALUE, OK, set_coarse, unpack
from ..machine.intrinsics import device, float32_of, kernel, scratch
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.tile import NOT_FINITE, block_amax
from .block_scales import rounded

LEAST = np.float64(2.0**-126)
"""Smallest scale that is no reciprocal."""
unpack_outer = unpacker(OuterRule)


@over_rows
def largest_bits_of_rows(x: Any, desc: Any, first: Any, last: Any) -> Any:
    """Largest magnitude of rows as float32 bits; NaN and Inf win."""
    layout = unpack(desc).layout
    found, count = scratch(1, np.uint32), (last - first) * layout.cols
    block_amax(x, first * layout.cols, count, count, layout.kind, found)
    return found[0]


@device
def outer_scale(bits: Any, rule: Any) -> Any:
    """Scale of a tensor from its largest magnitude's bits, and the state.

    BAD_SCALE leaves the scale to the reference: another one may fit.
    """
    amax, one = float32_of(bits), np.float32(1)
    if bits >= NOT_FINITE:
        return one, BAD_VALUE
    if not rule.reciprocal:
        scale = np.float32(max(np.float64(amax) / rule.largest, LEAST))
        return one if amax == np.float32(0) else scale, OK
    scale = rounded(one / max(amax, rule.tiny), rule.narrow)
    scale = rounded(scale * np.float32(rule.largest), rule.narrow)
    scale = scale if scale < np.float32(np.inf) else one
    ideal = rounded(amax / rule.divisor, rule.narrow)
    fits = np.float64(ideal) * np.float64(scale) <= rule.fits
    return scale, OK if fits else BAD_SCALE


@kernel
def choose_outer(bits: Any, rule: Any, desc: Any, out: Any) -> Any:
    """Write a tensor's scale to ``out`` and to a descriptor; see :func:`outer_scale`."""
    scale, state = outer_scale(np.uint32(bits), unpack_outer(rule))
    out[0] = scale
    set_coarse(desc, scale)
    return state
