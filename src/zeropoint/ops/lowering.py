"""Named kernel constants of schemes and shapes, equal for all backends.

Constants are plain numbers, exact or to be rounded to float32. A field names, next to its Python type, the
type that a compiled kernel holds it in: backends derive their records from these declarations. What a scheme
needs and a kernel lacks is the backend's to refuse.
"""

from __future__ import annotations

import functools
import math
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
import torch

from ..formats import CodebookFormat, FloatFormat, IntFormat, RoundingMode
from ..formats.torch_dtypes import dtype_of, format_of
from ..params.arithmetic import multiplies, rounder, tensor_rule, zero_scale
from ..params.powers_of_two import quiet_below
from ..params.stored import IEEE, round_to, smallest, top
from ..schemes import Arithmetic, ScaleRule, Scheme, TensorScale, ZeroPoint, ZeroPointPlace
from ..schemes.dialects import FinestQuotient
from ..schemes.scale_rules import CEIL, EVEN, FLOOR, RCEIL, Ceiling

THRESHOLDS = 15
"""Boundaries of a codebook that kernels have room for."""
UInt8: TypeAlias = Annotated[int, np.uint8]
UInt32: TypeAlias = Annotated[int, np.uint32]
UInt64: TypeAlias = Annotated[int, np.uint64]
Int32: TypeAlias = Annotated[int, np.int32]
Int64: TypeAlias = Annotated[int, np.int64]
Float32: TypeAlias = Annotated[float, np.float32]
Float64: TypeAlias = Annotated[float, np.float64]
Flag: TypeAlias = Annotated[bool, np.uint8]
Thresholds: TypeAlias = Annotated[tuple[float, ...], np.float32, THRESHOLDS]
"""Fields of records: what Python hands over, what a kernel holds, and how many of it."""


class Kind(IntEnum):
    """Kinds of elements."""

    INTEGER = 0
    FLOAT = 1
    CODEBOOK = 2


class Narrow(IntEnum):
    """What an intermediate is rounded to."""

    NONE = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Rounded(IntEnum):
    """Rounding modes; SUMS is half up as :class:`zeropoint.schemes.Arithmetic` has it."""

    HALF_EVEN = 0
    HALF_AWAY = 1
    HALF_UP = 2
    HALF_DOWN = 3
    FLOOR = 4
    CEIL = 5
    TOWARD_ZERO = 6
    STOCHASTIC = 7
    SUMS = 8


class ZeroPlace(IntEnum):
    """When a zero point is added: not at all, after rounding, before.

    PRODUCT: in its place, an offset is added to products of codes and scales.
    """

    NONE = 0
    AFTER = 1
    INSIDE = 2
    PRODUCT = 3


class ScaleBy(IntEnum):
    """Division by the factor, or product with it or its rounded reciprocal."""

    DIVIDE = 0
    MULTIPLY = 1
    RECIPROCAL = 2


class How(IntEnum):
    """How scales come about; see :class:`LoweredRule`."""

    GIVEN = 0
    LINEAR = 1
    POWER = 2
    MINIFLOAT = 3
    AFFINE = 4


class Offset(IntEnum):
    """How ``low - minimum / scale`` becomes a zero point."""

    REAL = 0
    NEAREST = 1
    TRUNCATED = 2
    OF_ROUNDED = 3


class From(IntEnum):
    """Which number of a block its scale follows from."""

    RANGE = 0
    SIGNED = 1
    LARGEST = 2
    EDGE = 3


class HeldAs(IntEnum):
    """How numbers of a level are rounded and stored."""

    INTEGER = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    LADDER = 4


HELD = {torch.float32: HeldAs.FLOAT32, torch.bfloat16: HeldAs.BFLOAT16, torch.float16: HeldAs.FLOAT16}

_NARROW = {
    None: Narrow.NONE,
    torch.float32: Narrow.NONE,
    torch.bfloat16: Narrow.BFLOAT16,
    torch.float16: Narrow.FLOAT16,
}


class Element(NamedTuple):
    """A format's constants; each kind has its own.

    low, high: integer clamp bounds. zero_place: when a zero point is added. sign: sign bit of a two's
    complement code. mantissa, emin (biased like float32), maximum, sign_shift (31 minus the sign's place),
    magnitude (mask of the bits below the sign), max_code (of the largest finite value), negative_nan (whether
    negative zero's code is NaN): of a float format.
    unsigned_below: largest magnitude of a quotient whose sign is dropped, negative for none. quotient: what
    the quotient is rounded to first. rounding: how it becomes a code; no codebook has another than half even.
    thresholds: ascending boundaries of a codebook, padded with Inf.
    """

    kind: Annotated[Kind, np.uint8]
    low: Float32 = 0
    high: Float32 = 0
    zero_place: Annotated[ZeroPlace, np.uint8] = ZeroPlace.NONE
    sign: UInt32 = 0
    mantissa: UInt32 = 0
    emin: UInt32 = 0
    maximum: Float32 = 0.0
    sign_shift: UInt32 = 0
    magnitude: UInt32 = 0
    max_code: UInt32 = 0
    negative_nan: Flag = False
    unsigned_below: Float32 = -1.0
    quotient: Annotated[Narrow, np.uint8] = Narrow.NONE
    scaling: Annotated[ScaleBy, np.uint8] = ScaleBy.DIVIDE
    rounding: Annotated[Rounded, np.uint8] = Rounded.HALF_EVEN
    thresholds: Thresholds = (math.inf,) * THRESHOLDS


class LoweredRule(NamedTuple):
    """Constants that choose scales, or read stored ones.

    GIVEN: float32 factors. LINEAR: ``amax / divisor``, through ``narrow``, rounded to ``stored``. POWER: E8M0
    bytes from ``exponent(bits(amax) + addend) - emax``, at least ``least_byte``; magnitudes below ``quiet``
    take byte ``quiet_byte``.
    MINIFLOAT: a small float format, relative to ``coarse`` (multiplied or, if ``inverse``, divided), by which
    the divisor is multiplied first if ``by_product``; where it is zero, ``zero_scale``, or ``empty_scale`` of
    a block of zeros. Past ``ceiling``, or where that is finite and the scale rounds to zero, it does not fit.
    AFFINE: from the range, with zero points.
    unit: step of the element's codes. offset: formula of the zero point. formula: whether an empty range uses
    it, too.
    """

    how: Annotated[How, np.uint8]
    divisor: Float32 = 1.0
    narrow: Annotated[Narrow, np.uint8] = Narrow.NONE
    stored: Annotated[Narrow, np.uint8] = Narrow.NONE
    zero_scale: Float32 = 1.0
    least: Float32 = 0.0
    addend: UInt32 = 0
    emax: UInt32 = 0
    quiet: Float32 = 0.0
    quiet_byte: UInt8 = 0
    least_byte: UInt32 = 0
    unit: Float32 = 1.0
    coarse: Float32 = 1.0
    inverse: Flag = False
    by_product: Flag = False
    empty_scale: Float32 = 0.0
    ceiling: Float32 = math.inf
    mantissa: UInt32 = 0
    emin: UInt32 = 0
    maximum: Float32 = 0.0
    low: Float32 = 0
    high: Float32 = 0
    unsigned: Flag = False
    widen: Flag = False
    offset: Annotated[Offset, np.uint8] = Offset.NEAREST
    formula: Flag = False


GIVEN = LoweredRule(how=How.GIVEN)
"""The rule of factors that are given."""


class OuterRule(NamedTuple):
    """Scale of a whole tensor above finer ones; see :class:`zeropoint.params.arithmetic.TensorRule`."""

    largest: Float64
    divisor: Float32
    reciprocal: Flag
    narrow: Annotated[Narrow, np.uint8]
    tiny: Float32
    fits: Float64


class Level(NamedTuple):
    """A level, finest first.

    blocks: how many of the finest blocks one of its blocks has. signed: whether the number of largest
    magnitude keeps its sign. late: whether elements take the number before it was rounded. mask: of codes of
    integers. low, high: numbers are clipped to these. least, most: numbers that the coarsest level takes.
    tiny: the smallest positive number. span: the largest product of the levels below. first, rungs: of its
    ladder.
    """

    blocks: UInt64
    held: Annotated[HeldAs, np.uint8]
    signed: Flag
    late: Flag
    mask: UInt32
    low: Float32
    high: Float32
    least: Float32
    most: Float32
    tiny: Float32
    span: Float64
    first: UInt64
    rungs: UInt64


class Chain(NamedTuple):
    """The numbers of blocks, before they are stored.

    scale_from: of which numbers. under_zero: whether the range begins at 0 or below. zeroed: whether there
    are zero points, and the range ends at 0 or above. steps: of the range; divisor: of other numbers; end:
    the value of the smallest code. quiet: the scale of a block of zeros, blank that as the format holds it, 0
    for none. least: the smallest magnitude of a single level; step: the smallest step of an edge. scales,
    offsets: how many levels. run: values of a block of the coarsest level.
    """

    scale_from: Annotated[From, np.uint8]
    under_zero: Flag
    zeroed: Flag
    steps: Float64
    divisor: Float32
    end: Float32
    quiet: Float32
    blank: Float32
    least: Float32
    step: Float32
    scales: UInt64
    offsets: UInt64
    run: UInt64


@functools.lru_cache(maxsize=1024)
def element_of(scheme: Scheme, dtype: torch.dtype, *, multiply: bool) -> Element:
    """Return the constants of the scheme's elements.

    multiply: whether factors are exact reciprocals (powers of two).
    """
    fmt = scheme.element
    scaling = ScaleBy.RECIPROCAL if multiplies(scheme) else ScaleBy.DIVIDE
    narrow = rounder(scheme, dtype) if len(scheme.scales) == 1 else None
    # A bfloat16 times a power of two is a bfloat16 again, unless it falls below the subnormals and becomes
    # zero; that has the nearest code of either, but not the next one above.
    exact = multiply and narrow is torch.bfloat16 and scheme.rounding.mode is RoundingMode.HALF_EVEN
    base = Element(
        kind=Kind.INTEGER,
        quotient=Narrow.NONE if exact else _NARROW[narrow],
        scaling=ScaleBy.MULTIPLY if multiply else scaling,
        rounding=_rounded(scheme),
    )
    if isinstance(fmt, IntFormat):
        return base._replace(
            low=scheme.qmin,
            high=scheme.qmax,
            zero_place=_zero_place(scheme),
            sign=1 << (fmt.bits - 1) if fmt.signed else 0,
        )
    if isinstance(fmt, FloatFormat):
        zero = 2.0**-134 if exact else 0.0
        positive = fmt.bits <= scheme.dialect.positive_zero_bits
        return base._replace(
            kind=Kind.FLOAT, unsigned_below=zero if positive else -1.0, mantissa=fmt.mantissa_bits,
            emin=fmt.emin + 127, maximum=float(fmt.max), sign_shift=31 - fmt.magnitude_bits,
            magnitude=(1 << fmt.magnitude_bits) - 1, max_code=fmt.max_code,
            negative_nan=fmt.nan_code == fmt.sign_bit,
        )  # fmt: skip
    assert isinstance(fmt, CodebookFormat)
    ends = tuple(float(t) for t in fmt.thresholds)
    return base._replace(kind=Kind.CODEBOOK, thresholds=ends + (math.inf,) * (THRESHOLDS - len(ends)))


def _rounded(scheme: Scheme) -> Rounded:
    found = Rounded[scheme.rounding.mode.name]
    sums = scheme.dialect.arithmetic is Arithmetic.SUMS and scheme.zero_point is ZeroPoint.NONE
    whole = sums and isinstance(scheme.element, IntFormat)
    return Rounded.SUMS if whole and found is Rounded.HALF_UP else found


def _zero_place(scheme: Scheme) -> ZeroPlace:
    if scheme.zero_point is ZeroPoint.NONE:
        return ZeroPlace.NONE
    real = scheme.zero_point is ZeroPoint.REAL
    inside = real or scheme.dialect.zero_points.place is ZeroPointPlace.INSIDE_ROUNDING
    return ZeroPlace.INSIDE if inside else ZeroPlace.AFTER


@functools.lru_cache(maxsize=1024)
def rule_of(scheme: Scheme, dtype: torch.dtype) -> LoweredRule:
    """Return the finest level's constants, with a coarse scale of 1.

    A rule that compares errors yields the constants of its start.
    """
    scheme = scheme.start
    first, fmt = scheme.scales[0], scheme.scales[0].format_for(format_of(dtype))
    step = float(scheme.element.step) if isinstance(scheme.element, IntFormat) else 1.0
    unsigned = scheme.element.min >= 0
    rule = LoweredRule(
        how=How.GIVEN,
        divisor=float(scheme.divisor),
        narrow=_NARROW[rounder(scheme, dtype)],
        unit=step,
        unsigned=unsigned and scheme.zero_point is ZeroPoint.NONE,
    )
    if first.rule.power_of_two:
        return _power_rule(scheme, dtype, rule)
    assert isinstance(fmt, FloatFormat)
    small, two_levels = scheme.dialect.small_scales, len(scheme.scales) > 1
    least = float(small.least) if small.least >= float(fmt.smallest) and not two_levels else 0.0
    if two_levels or dtype_of(fmt) not in IEEE:
        rule = rule._replace(
            how=How.MINIFLOAT, mantissa=fmt.mantissa_bits, emin=fmt.emin + 127, maximum=float(fmt.max)
        )
        if two_levels:
            return _under_a_coarse_scale(scheme, fmt, rule)
        return _alone(scheme, fmt, dtype, least, rule)
    rule = rule._replace(
        how=How.LINEAR,
        stored=_NARROW[dtype_of(fmt)],
        zero_scale=float(zero_scale(scheme, dtype)),
        least=least,
    )
    if scheme.zero_point is ZeroPoint.NONE:
        return rule
    return rule._replace(
        how=How.AFFINE,
        low=scheme.qmin,
        high=scheme.qmax,
        widen=scheme.widens_to_zero,
        offset=_offset(scheme),
        formula=scheme.formula_zero_point,
    )


@functools.lru_cache(maxsize=1024)
def outer_rule_of(scheme: Scheme, dtype: torch.dtype) -> OuterRule | None:
    """Constants of a tensor scale above one finer level, or None."""
    rule = tensor_rule(scheme, dtype)
    return None if rule is None else OuterRule(**{**rule._asdict(), "narrow": _NARROW[rule.narrow]})


def _under_a_coarse_scale(scheme: Scheme, fmt: FloatFormat, rule: LoweredRule) -> LoweredRule:
    small = scheme.dialect.small_scales
    # What is stored is what counts: a format may have no number that small.
    finest = float(round_to(torch.tensor(small.finest, device="cpu"), fmt, up=False))
    return rule._replace(
        zero_scale=finest,
        empty_scale=finest if small.finest_of_zeros is None else float(small.finest_of_zeros),
        inverse=scheme.dialect.tensor_scale is TensorScale.RECIPROCAL,
        by_product=scheme.dialect.finest_quotient is FinestQuotient.BY_PRODUCT,
    )


def _alone(
    scheme: Scheme, fmt: FloatFormat, dtype: torch.dtype, least: float, rule: LoweredRule
) -> LoweredRule:
    quiet = torch.tensor(max(zero_scale(scheme, dtype), smallest(fmt)), device="cpu")
    return rule._replace(
        least=least,
        zero_scale=0.0,
        empty_scale=float(round_to(quiet, fmt, up=False)),
        ceiling=top(fmt, up=False),
    )


def _offset(scheme: Scheme) -> Offset:
    if scheme.zero_point is ZeroPoint.REAL:
        return Offset.REAL
    return Offset[scheme.dialect.zero_points.formula.name]


def _power_rule(scheme: Scheme, dtype: torch.dtype, rule: LoweredRule) -> LoweredRule:
    rule = rule._replace(
        how=How.POWER, addend=addend_of(scheme, scheme.scales[0].rule), emax=scheme.element.emax
    )
    if rounder(scheme, dtype) is torch.float16:
        # Below this a float16 block has a scale of 0 in its own dtype, which the dialect replaces by 1; other
        # blocks have at least the exponent of its normal numbers.
        rule = rule._replace(
            quiet=quiet_below(scheme), quiet_byte=127, least_byte=max(127 - 14 - scheme.element.emax, 0)
        )
    return rule


def addend_of(scheme: Scheme, picked: ScaleRule) -> int:
    """Return the float32 bit addend whose carry rounds the exponent."""
    full = (1 << 23) - 1
    limit = picked.limit if isinstance(picked, Ceiling) else scheme.divisor
    # A limit between two float32 is one of the smaller: no float32 lies between them.
    top = math.floor((limit / 2.0**scheme.element.emax - 1.0) * (1 << 23))
    even = 1 << (22 - scheme.even_bits)
    addends: dict[ScaleRule, int] = {FLOOR: 0, EVEN: even, CEIL: full, RCEIL: full - top}
    return addends.get(picked, full - top)


def needs_range(scheme: Scheme) -> bool:
    """Return whether scales follow from both extremes, not the largest magnitude.

    Scales of one-sided elements follow from the magnitude, once no number has the other sign.
    """
    one_sided = not scheme.element.min < 0 < scheme.element.max
    return one_sided or scheme.zero_point is not ZeroPoint.NONE
