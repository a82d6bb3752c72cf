"""Schemes without lowered constants, and the reasons.

Refusals are sentences for :func:`zeropoint.explain`; refused schemes run on the reference.
"""

from __future__ import annotations

import functools

import torch

from ..formats import CodebookFormat, FloatFormat, Format, IntFormat, Overflow, RoundingMode
from ..formats.torch_dtypes import dtype_of, format_of
from ..schemes import Scheme, ZeroPoint
from ..schemes.scale_rules import LINEAR_UP
from .lowering import THRESHOLDS


@functools.lru_cache(maxsize=1024)
def element_refusal(
    scheme: Scheme, *, decoding: bool = False, given: bool = False, rounds: bool = False
) -> str | None:
    """Return the reason why kernels cannot encode and decode elements, or None.

    decoding: whether codes and scales are given, so that it does not matter how they are made.
    given: whether scales and offsets are given, and kernels encode under any of them. rounds: whether they
    know all rounding modes.
    """
    element = scheme.element
    # Codes of these elements are multiplied by one factor a block, of either sign, whatever it is made of.
    given = given or decoding
    read = given and isinstance(element, IntFormat | CodebookFormat)
    if scheme.chained is not None and not read:
        return f"{scheme.chained} are known to the reference alone"
    if scheme.dialect.small_scales.of_zeros == 0.0 and not given:
        return f"scales of zero, as dialect {scheme.dialect.name} has them, are known to the reference alone"
    if isinstance(element, IntFormat) and element.fraction_bits and not _by_powers(scheme):
        return f"fixed-point codes of {scheme.element_name} are scaled by the reference but by powers of two"
    if element.bits > 8:
        return f"codes of {element.bits} bits are wider than a byte"
    if scheme.rounding.mode is not RoundingMode.HALF_EVEN and not (decoding or rounds):
        return f"rounding {scheme.rounding} has no kernel here"
    if scheme.overflow is not Overflow.SATURATE:
        return f"overflow {scheme.overflow.value} is not saturate"
    if isinstance(element, CodebookFormat) and len(element.order) > THRESHOLDS + 1:
        return f"codebooks of more than {THRESHOLDS + 1} values are searched by the reference"
    if isinstance(element, FloatFormat):
        known = (
            element.subnormals and element.mantissa_bits <= 7 and element.emin >= -126 and element.emax <= 120
        )
        if not known or not element.signed or element.magnitude_bits == 0:
            return f"{scheme.element_name} is not a signed float format inside the range of float32"
        if element.emin - element.mantissa_bits < -126:
            return f"{scheme.element_name} reaches below the normal numbers of float32"
    return None


def _by_powers(scheme: Scheme) -> bool:
    """Return whether scale times step is exact, as factors include it."""
    return len(scheme.scales) <= 1 and all(level.rule.power_of_two for level in scheme.scales)


@functools.lru_cache(maxsize=1024)
def rule_refusal(scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Return the reason why scales cannot be chosen while quantizing, or None."""
    if not scheme.scales:
        return "there is no scale to choose"
    if scheme.search is not None:
        return f"scales of rule {scheme.search.text} are chosen by errors"
    if scheme.chained is not None:
        return f"{scheme.chained} are chosen by the reference"
    first, coarser = scheme.scales[0], scheme.scales[1:]
    if scheme.element.max <= 0:
        return f"{scheme.element_name} has no positive numbers, which the reference looks for"
    if first.rule == LINEAR_UP:
        return "scales that are rounded up are chosen by the reference"
    fmt = first.format_for(format_of(dtype))
    if first.rule.power_of_two:
        fits = dtype_of(fmt) is torch.float8_e8m0fnu and not coarser and scheme.element.emax >= 0
        return None if fits else f"power-of-two scales of level {first} are chosen by the reference"
    if coarser:
        simple = (
            len(coarser) == 1 and not coarser[0].rule.power_of_two and coarser[0].granularity.extents == ()
        )
        if (
            not simple
            or coarser[0].granularity.rest != 0
            or dtype_of(coarser[0].format_for(format_of(dtype))) != torch.float32
        ):
            return f"scales relative to level {coarser[-1]} are chosen by the reference"
        return None if _is_minifloat(fmt) else f"scales of level {first} are chosen by the reference"
    if scheme.zero_point is ZeroPoint.NONE and _is_minifloat(fmt):
        return None
    if dtype_of(fmt) not in (torch.float32, torch.bfloat16, torch.float16):
        return f"scales of level {first} are chosen by the reference"
    if scheme.zero_point is not ZeroPoint.NONE and scheme.element_step != 1:
        return "zero points of fixed-point integers are chosen by the reference"
    return None


def _is_minifloat(fmt: Format) -> bool:
    """Return whether a byte format's steps are all normal float32."""
    if dtype_of(fmt) is torch.float8_e4m3fn:
        return True
    if not isinstance(fmt, FloatFormat) or fmt.signed or not fmt.subnormals or fmt.has_inf:
        return False
    return fmt.bits <= 8 and fmt.emin - fmt.mantissa_bits >= -126 and fmt.emax <= 100
