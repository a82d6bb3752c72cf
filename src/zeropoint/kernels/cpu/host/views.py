"""Which schemes and shapes the kernels know, and how tensors are seen as rows.

Refusals are sentences for :func:`zeropoint.explain`; what is refused here runs on the reference.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ....formats import CodebookFormat, FloatFormat, IntFormat, Overflow, RoundingMode
from ....formats.torch_dtypes import dtype_of, format_of
from ....ops.lowering import How, LoweredRule, row_mapping, rule_of
from ....schemes import Scheme, ZeroPoint
from ....schemes.scale_rules import LINEAR_UP
from ..machine import descriptor as k
from ..machine.descriptor import RowLayout
from ..machine.tile import BFLOAT16, FLOAT16, FLOAT32, TILE

KINDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


@functools.lru_cache(maxsize=1024)
def element_refusal(scheme: Scheme, *, decoding: bool = False) -> str | None:
    """Return why the kernels cannot encode and decode the scheme's elements, or None.

    decoding: whether codes and scales are there already, so that it does not matter how they are made.
    """
    element = scheme.element
    # Codes of these elements are multiplied by one factor a block, of either sign, whatever it is made of.
    read = decoding and isinstance(element, IntFormat | CodebookFormat)
    if scheme.chained is not None and not read:
        return f"{scheme.chained} are known to the reference alone"
    if scheme.dialect.small_scales.of_zeros == 0.0 and not decoding:
        return f"scales of zero, as dialect {scheme.dialect.name} has them, are known to the reference alone"
    if isinstance(element, IntFormat) and element.fraction_bits and not _by_powers(scheme):
        return f"fixed-point codes of {scheme.element_name} are scaled by the reference but by powers of two"
    if element.bits > 8:
        return f"codes of {element.bits} bits are wider than a byte"
    if scheme.rounding.mode is not RoundingMode.HALF_EVEN and not decoding:
        return f"rounding {scheme.rounding} is not to nearest even"
    if scheme.overflow is not Overflow.SATURATE:
        return f"overflow {scheme.overflow.value} is not saturate"
    if isinstance(element, CodebookFormat) and len(element.order) > k.THRESHOLDS + 1:
        return f"codebooks of more than {k.THRESHOLDS + 1} values are searched by the reference"
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
    """Return whether the product of scale and step is exact, which factors include."""
    return len(scheme.scales) <= 1 and all(level.rule.power_of_two for level in scheme.scales)


@functools.lru_cache(maxsize=1024)
def rule_refusal(scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Return why the scales cannot be chosen in the pass that quantizes, or None."""
    if not scheme.scales:
        return "there is no scale to choose"
    if scheme.search is not None:
        return f"scales of rule {scheme.search.text} are chosen by errors"
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
        return (
            None
            if dtype_of(fmt) is torch.float8_e4m3fn
            else f"scales of level {first} are chosen by the reference"
        )
    if dtype_of(fmt) not in (torch.float32, torch.bfloat16, torch.float16):
        return f"scales of level {first} are chosen by the reference"
    if scheme.zero_point is not ZeroPoint.NONE and scheme.element_step != 1:
        return "zero points of fixed-point integers are chosen by the reference"
    return None


@functools.lru_cache(maxsize=1024)
def stored_rule(scheme: Scheme, dtype: torch.dtype) -> LoweredRule | None:
    """Return how the kernels read scales as they are stored, or None where they take factors."""
    # Read as they are stored, scales have no zero points next to them.
    if (
        not scheme.scales
        or scheme.zero_point is not ZeroPoint.NONE
        or rule_refusal(scheme.start, dtype) is not None
    ):
        return None
    rule = rule_of(scheme, dtype)
    return rule if rule.how in (How.POWER, How.MINIFLOAT) else None


@dataclass(frozen=True, kw_only=True)
class View:
    """How a tensor's elements are seen as rows: their number and the layout of codes and parameters."""

    rows: int
    layout: RowLayout

    @property
    def one_pass(self) -> bool:
        """Whether every block lies in one row; others take a pass of their own for statistics."""
        return int(self.layout.row_div) == 1 and int(self.layout.row_mod) >= self.rows


@functools.lru_cache(maxsize=1024)
def view_of(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> View | str:
    """Return the tensor as rows whose blocks lie along the row, or why that cannot be done."""
    cols = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    granularity = scheme.granularity
    extents, grid = granularity.block_shape(shape) or (1,), granularity.grid(shape) or (1,)
    block = min(extents[-1], max(cols, 1))
    if block * scheme.bits % 8 and block < cols and block > TILE // 8:
        return f"blocks of {block} codes of {scheme.bits} bits do not end on bytes"
    mapping = row_mapping(shape[:-1], extents[:-1], grid[:-1])
    if mapping is None:
        return f"blocks of {granularity} in a tensor of shape {shape} span rows unevenly"
    div, mod = mapping
    row_blocks = grid[-1]
    return View(
        rows=rows,
        layout=RowLayout(
            cols=np.uint64(cols), block=np.uint64(block), row_blocks=np.uint64(row_blocks),
            row_bytes=np.uint64(-(-cols * scheme.bits // 8)), bits=np.uint64(scheme.bits), kind=KINDS[dtype],
            row_div=np.uint64(div), row_mod=np.uint64(mod),
        ),
    )  # fmt: skip
