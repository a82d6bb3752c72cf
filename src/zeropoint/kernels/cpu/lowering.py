"""From schemes to kernel parameters: which schemes the kernels know, and the flat tuples that tell them.

Refusals are sentences for :func:`zeropoint.explain`; what is refused here runs on the reference.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ...formats import CodebookFormat, FloatFormat, IntFormat, Overflow, RoundingMode, Specials
from ...formats.torch_dtypes import dtype_of, format_of
from ...ops.lowering import row_mapping
from ...params.arithmetic import multiplies, rounder, zero_scale
from ...schemes import ScaleRule, Scheme, TensorScale, ZeroPoint, ZeroPointPlace
from ...schemes.rules import CEIL, EVEN, FLOOR, LINEAR_UP, RCEIL
from . import layout as k
from .layout import Element, Layout
from .layout import ScaleRule as Rule
from .tile import BFLOAT16, FLOAT16, FLOAT32, TILE
from .vector import STEP

KINDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
_ROUNDING = {
    None: k.NO_ROUNDING,
    torch.float32: k.NO_ROUNDING,
    torch.bfloat16: k.TO_BFLOAT16,
    torch.float16: k.TO_FLOAT16,
}
_OPEN = np.float32(0)


@functools.lru_cache(maxsize=1024)
def element_refusal(scheme: Scheme) -> str | None:
    """Return why the kernels cannot encode and decode the scheme's elements, or None."""
    element = scheme.element
    if scheme.chained is not None:
        return f"{scheme.chained} are known to the reference alone"
    if scheme.dialect.zero_scale == 0.0:
        return f"scales of zero, as dialect {scheme.dialect.name} has them, are known to the reference alone"
    if isinstance(element, IntFormat) and element.fraction_bits and not _by_powers(scheme):
        return f"fixed-point codes of {scheme.element_name} are scaled by the reference but by powers of two"
    if element.bits > 8:
        return f"codes of {element.bits} bits are wider than a byte"
    if scheme.rounding.mode is not RoundingMode.HALF_EVEN:
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
def element_of(scheme: Scheme, dtype: torch.dtype, *, multiply: bool) -> Element:
    """Return the kernel parameters of the scheme's elements.

    multiply: whether factors are exact reciprocals (powers of two).
    """
    fmt = scheme.element
    scaling = k.RECIPROCAL if multiplies(scheme) else k.DIVIDE
    narrow = rounder(scheme, dtype) if len(scheme.scales) == 1 else None
    # A bfloat16 times a power of two is a bfloat16 again, unless it falls below the subnormals and becomes
    # zero.
    exact = multiply and narrow is torch.bfloat16
    base = Element(
        kind=k.INTEGER, low=_OPEN, high=_OPEN, zero_place=k.ZERO_NONE, sign=np.uint32(0),
        mantissa=np.uint32(0), emin=np.uint32(0), maximum=_OPEN, sign_shift=np.uint32(0),
        magnitude=np.uint32(0), max_code=np.uint32(0), negative_nan=np.uint8(0),
        unsigned_below=np.float32(-1), quotient=k.NO_ROUNDING if exact else _ROUNDING[narrow],
        scaling=k.MULTIPLY if multiply else scaling, thresholds=(np.float32(math.inf),) * k.THRESHOLDS,
    )  # fmt: skip
    if isinstance(fmt, IntFormat):
        return base._replace(
            low=np.float32(scheme.qmin), high=np.float32(scheme.qmax), zero_place=_zero_place(scheme),
            sign=np.uint32(1 << (fmt.bits - 1)) if fmt.signed else np.uint32(0),
        )  # fmt: skip
    if isinstance(fmt, FloatFormat):
        zero = 2.0**-134 if exact else 0.0
        return base._replace(
            kind=k.FLOAT, unsigned_below=np.float32(zero if fmt.bits <= scheme.dialect.positive_zero_bits else
            -1.0), mantissa=np.uint32(fmt.mantissa_bits), emin=np.uint32(fmt.emin + 127),
            maximum=np.float32(float(fmt.max)), sign_shift=np.uint32(31 - fmt.magnitude_bits),
            magnitude=np.uint32((1 << fmt.magnitude_bits) - 1), max_code=np.uint32(fmt.max_code),
            negative_nan=np.uint8(fmt.nan_code == fmt.sign_bit),
        )  # fmt: skip
    bounds = [np.float32(t) for t in fmt.thresholds]
    padding = [np.float32(math.inf)] * (k.THRESHOLDS - len(bounds))
    return base._replace(kind=k.CODEBOOK, thresholds=tuple(bounds + padding))


def _zero_place(scheme: Scheme) -> np.uint8:
    if scheme.zero_point is ZeroPoint.NONE:
        return k.ZERO_NONE
    real = scheme.zero_point is ZeroPoint.REAL
    inside = real or scheme.dialect.zero_point_place is ZeroPointPlace.INSIDE_ROUNDING
    return k.ZERO_INSIDE if inside else k.ZERO_AFTER


@functools.lru_cache(maxsize=1024)
def rule_refusal(scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Return why the scales cannot be chosen in the pass that quantizes, or None."""
    if not scheme.scales:
        return "there is no scale to choose"
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


_NO_RULE = Rule(
    how=k.GIVEN, divisor=np.float32(1), narrow=k.NO_ROUNDING, stored=k.NO_ROUNDING, zero_scale=np.float32(1),
    least=np.float32(0), addend=np.uint32(0), emax=np.uint32(0), quiet=np.float32(0), quiet_byte=np.uint8(0),
    least_byte=np.uint32(0),
    unit=np.float32(1), coarse=np.float32(1), inverse=np.uint8(0), mantissa=np.uint32(0),
    emin=np.uint32(0), maximum=np.float32(0), low=_OPEN, high=_OPEN, unsigned=np.uint8(0), widen=np.uint8(0),
    offset=k.OFFSET_NEAREST, formula=np.uint8(0),
)  # fmt: skip


def given_rule() -> Rule:
    """Return the rule of factors that are given."""
    return _NO_RULE


@functools.lru_cache(maxsize=1024)
def rule_of(scheme: Scheme, dtype: torch.dtype) -> Rule:
    """Return the kernel parameters of the finest scale level, with a coarse scale of 1."""
    first, fmt = scheme.scales[0], scheme.scales[0].format_for(format_of(dtype))
    step = float(scheme.element.step) if isinstance(scheme.element, IntFormat) else 1.0
    unsigned = scheme.element.min >= 0
    rule = _NO_RULE._replace(
        divisor=np.float32(scheme.divisor), narrow=_ROUNDING[rounder(scheme, dtype)], unit=np.float32(step),
        unsigned=np.uint8(unsigned and scheme.zero_point is ZeroPoint.NONE),
    )  # fmt: skip
    if first.rule.power_of_two:
        return _power_rule(scheme, dtype, rule)
    if len(scheme.scales) > 1:
        assert isinstance(fmt, FloatFormat)
        return rule._replace(
            how=k.MINIFLOAT, mantissa=np.uint32(fmt.mantissa_bits), emin=np.uint32(fmt.emin + 127),
            maximum=np.float32(float(fmt.max)), zero_scale=np.float32(scheme.dialect.zero_block_scale),
            inverse=np.uint8(scheme.dialect.tensor_scale is TensorScale.RECIPROCAL),
        )  # fmt: skip
    least = scheme.dialect.minimum_scale
    assert isinstance(fmt, FloatFormat)
    rule = rule._replace(
        how=k.LINEAR, stored=_ROUNDING[dtype_of(fmt)], zero_scale=np.float32(zero_scale(scheme, dtype)),
        least=np.float32(least if least >= float(fmt.smallest) else 0.0),
    )  # fmt: skip
    if scheme.zero_point is ZeroPoint.NONE:
        return rule
    return rule._replace(
        how=k.AFFINE, low=np.float32(scheme.qmin), high=np.float32(scheme.qmax),
        widen=np.uint8(scheme.widens_to_zero), offset=_offset(scheme),
        formula=np.uint8(scheme.formula_zero_point),
    )  # fmt: skip


def _offset(scheme: Scheme) -> np.uint8:
    if scheme.zero_point is ZeroPoint.REAL:
        return k.OFFSET_REAL
    if scheme.dialect.rounds_quotient:
        return k.OFFSET_OF_ROUNDED
    truncates = scheme.dialect.zero_point_rounding is RoundingMode.TOWARD_ZERO
    return k.OFFSET_TRUNCATED if truncates else k.OFFSET_NEAREST


@functools.lru_cache(maxsize=1024)
def stored_rule(scheme: Scheme, dtype: torch.dtype) -> Rule | None:
    """Return how the kernels read scales as they are stored, or None where they take factors."""
    if not scheme.scales or rule_refusal(scheme, dtype) is not None:
        return None
    rule = rule_of(scheme, dtype)
    return rule if rule.how in (k.POWER, k.MINIFLOAT) else None


def _power_rule(scheme: Scheme, dtype: torch.dtype, rule: Rule) -> Rule:
    """Turn the rule's rounding of amax into one addition to its bits, whose carry moves the exponent."""
    full = (1 << 23) - 1
    top = round((scheme.divisor / 2.0**scheme.element.emax - 1.0) * (1 << 23))
    width = scheme.dialect.even_mantissa_bits
    bits = scheme.element.mantissa_bits if width is None else width
    addends: dict[ScaleRule, int] = {
        FLOOR: 0, EVEN: 1 << (22 - bits), CEIL: full, RCEIL: full -
        top
    }  # fmt: skip
    addend = addends[scheme.scales[0].rule]
    rule = rule._replace(how=k.POWER, addend=np.uint32(addend), emax=np.uint32(scheme.element.emax))
    if rounder(scheme, dtype) is torch.float16:
        # Below this a float16 block has a scale of 0 in its own dtype, which the dialect replaces by 1; other
        # blocks have at least the exponent of its normal numbers.
        rule = rule._replace(
            quiet=np.float32(2.0**-14 - 2.0**-16), quiet_byte=np.uint8(127),
            least_byte=np.uint32(max(127 - 14 - scheme.element.emax, 0)),
        )  # fmt: skip
    return rule


@dataclass(frozen=True, kw_only=True)
class View:
    """How a tensor's elements are seen as rows: their number and the layout of codes and parameters."""

    rows: int
    layout: Layout

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
        layout=Layout(
            cols=np.uint64(cols), block=np.uint64(block), row_blocks=np.uint64(row_blocks),
            row_bytes=np.uint64(-(-cols * scheme.bits // 8)), bits=np.uint64(scheme.bits), kind=KINDS[dtype],
            row_div=np.uint64(div), row_mod=np.uint64(mod),
        ),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def half_boundaries(scheme: Scheme, dtype: torch.dtype, view: View) -> tuple[np.int16, ...] | None:
    """Return the bfloat16 bits of the rounding boundaries of a 4-bit float, less one where a tie goes up.

    None when the short cut of :mod:`.half` does not apply.
    """
    fmt, shape = scheme.element, view.layout
    if not isinstance(fmt, FloatFormat) or fmt.bits != 4 or dtype is not torch.bfloat16:
        return None
    block = int(shape.block)
    plain = int(shape.cols) % block == 0 and block.bit_count() == 1 and STEP <= block <= TILE
    if not plain or not scheme.scales[0].rule.power_of_two or not view.one_pass:
        return None
    if fmt.specials is not Specials.FINITE or fmt.smallest < 2.0**-5:
        return None
    middles = [float((fmt.magnitude(c) + fmt.magnitude(c + 1)) / 2) for c in range(7)]
    values = torch.tensor(middles, device="cpu")
    exact = values.bfloat16()
    if not bool((exact == values).all()):
        return None
    bits = exact.view(torch.int16).tolist()
    return tuple(np.int16(b - code % 2) for code, b in enumerate(bits))
