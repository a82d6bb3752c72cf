"""Compile-time constants of kernels: format and layout, in one record."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from ...formats import FloatFormat, IntFormat
from ...formats.torch_dtypes import dtype_of, format_of
from ...ops import lowering
from ...ops.code_tables import code_order
from ...ops.lowering import Kind, Rounded, ScaleBy, ZeroPlace
from ...ops.registry import Request
from ...params.effective import over_reciprocal
from ...schemes import Granularity, Scheme

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_WHOLE_BYTES = {1: 8, 2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 7: 8, 8: 1}
"""Codes of each width that fill whole bytes together."""

_LARGEST_FACTORS = {torch.float32: 2.0**-2, torch.bfloat16: 2.0**10, torch.float16: 2.0**60}
"""Powers of two under which no number has a quotient below 2**-147, which may be taken for zero."""


class Hardware(IntEnum):
    """GPU float conversions like the reference's: half to even, saturating."""

    NONE = 0
    E4M3 = 1
    E5M2 = 2


class Held(NamedTuple):
    """How given scales are stored.

    bytes: whether they are codes, whose values a table has. power: whether these are E8M0, powers of two,
    which need no table. coarse: whether they are relative to the scale of the whole tensor; inverse: which
    divides them. unit: step of integer codes.
    """

    bytes: bool
    power: bool
    coarse: bool
    inverse: bool
    unit: float


class Constants(NamedTuple):
    """Constants of compilation.

    element, rule: records of :mod:`zeropoint.ops.lowering`, of plain numbers. ``unsigned_below`` is the bits
    of a float32, as a subnormal constant would make float64 of what it meets. inverse_divisor: ``RN(1 /
    rule.divisor)``. held: how scales are stored. chosen: whether the kernel chooses them. outer: the rule of
    the tensor's scale above those, or None. cut: the part of a cut that is compiled in. order: of a codebook
    the codes of all ranks, four bits each, int64. width: bits of a code. group: codes that fill whole bytes
    together. multiply: whether values are multiplied by factors. native: whether a GPU runs the kernel,
    rather than the interpreter. fused: whether quotients may be made of fused multiplications and additions,
    see :func:`.programs.element_codes.fused`. short: whether they may be of two operations, see
    :func:`.programs.element_codes.reciprocals`. hardware: the format whose conversion a GPU has. most:
    largest factor under which fused quotients are IEEE's to the last bit, as all are that are not rounded
    half to even. extent: of :func:`zeropoint.ops.row_errors.code_extent`, if errors are measured.
    """

    element: Any
    rule: Any
    inverse_divisor: float
    held: Any
    chosen: bool
    outer: Any
    cut: Any
    order: int
    width: int
    group: int
    multiply: bool
    native: bool
    fused: bool
    short: bool
    hardware: int
    most: float = 2.0**60
    extent: tuple[float, float] = (0.0, 0.0)


def constants_of(request: Request, cut: Any, *, chosen: bool, dividing: bool = False) -> Constants:
    """Derive compile-time constants of a request's kernels.

    cut: the part of its cut that is compiled in. chosen: whether they choose scales. dividing: whether values
    are divided by powers of two, too.
    """
    scheme, dtype = request.scheme, request.own_dtype
    rule = lowering.rule_of(scheme, dtype) if chosen else lowering.GIVEN
    multiply = not dividing and by_powers(scheme, dtype) and isinstance(scheme.element, FloatFormat)
    element = lowering.element_of(scheme, dtype, multiply=multiply)
    if scheme.offsets:
        element = element._replace(zero_place=ZeroPlace.PRODUCT)
    if request.code_range is not None:
        element = element._replace(low=request.code_range[0], high=request.code_range[1])
    unsigned = int(np.float32(element.unsigned_below).view(np.int32))
    plain = _plain(element)._replace(unsigned_below=unsigned)
    outer = lowering.outer_rule_of(scheme, dtype) if chosen else None
    native = request.device.type == "cuda"
    even = element.rounding is Rounded.HALF_EVEN
    return Constants(
        element=plain, rule=_plain(rule), inverse_divisor=float(np.float32(1) / np.float32(rule.divisor)),
        held=held_of(scheme, dtype) or _factors(scheme), chosen=chosen,
        outer=None if outer is None else _plain(outer), cut=cut, order=_order(scheme),
        width=scheme.bits, group=_WHOLE_BYTES[scheme.bits], multiply=multiply, native=native,
        fused=native and element.scaling is ScaleBy.DIVIDE and _boundaries_are_large(element),
        short=even and _is_short(element, request.dtype),
        hardware=int(_hardware(scheme, element)) if native and even else 0,
        most=2.0**60 if even else _LARGEST_FACTORS[request.dtype],
    )  # fmt: skip


def by_powers(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Return whether a block has one scale, an E8M0 byte."""
    return len(scheme.scales) == 1 and (
        dtype_of(scheme.scales[0].format_for(format_of(dtype))) is torch.float8_e8m0fnu
    )


def _factors(scheme: Scheme) -> Held:
    """Layout of factors from the host, one float32 a block."""
    return Held(bytes=False, power=False, coarse=False, inverse=False, unit=_unit(scheme))


def _unit(scheme: Scheme) -> float:
    return float(scheme.element_step) if isinstance(scheme.element, IntFormat) else 1.0


def held_of(scheme: Scheme, dtype: torch.dtype) -> Held | None:
    """Storage of given scales; None: the host computes float32 factors."""
    formats, unit = [level.format_for(format_of(dtype)) for level in scheme.scales], _unit(scheme)
    alone = scheme.center is None and not scheme.offsets and scheme.element.per_scale == 1
    if not alone or not 1 <= len(formats) <= 2:
        return None
    coarse = len(formats) == 2
    if coarse and (
        scheme.scales[1].granularity != Granularity.tensor() or dtype_of(formats[1]) not in _FLOATS
    ):
        return None
    if dtype_of(formats[0]) in _FLOATS:
        power, inverse = False, coarse and over_reciprocal(scheme, 0)
        return Held(bytes=False, power=power, coarse=coarse, inverse=inverse, unit=unit)
    if formats[0].bits > 8:
        return None
    power, inverse = by_powers(scheme, dtype), coarse and over_reciprocal(scheme, 0)
    return Held(bytes=True, power=power, coarse=coarse, inverse=inverse, unit=unit)


def of_extremes(cut: Any, device: torch.device) -> Constants:
    """Derive compile-time constants of the extremes kernel, for any format."""
    return Constants(
        element=None, rule=None, inverse_divisor=1.0, held=None, chosen=False, outer=None, cut=cut, order=0,
        width=8, group=1, multiply=False, native=device.type == "cuda", fused=False, short=False, hardware=0,
    )  # fmt: skip


def _hardware(scheme: Scheme, element: lowering.Element) -> Hardware:
    """GPU conversion format; signs follow the quotients there."""
    if element.kind is not Kind.FLOAT or element.unsigned_below >= 0:
        return Hardware.NONE
    found = dtype_of(scheme.element)
    if found is torch.float8_e4m3fn:
        return Hardware.E4M3
    return Hardware.E5M2 if found is torch.float8_e5m2 else Hardware.NONE


def _plain(record: Any) -> Any:
    """Return a record whose fields are plain numbers, which Triton takes."""
    return type(record)(*(int(value) if isinstance(value, IntEnum) else value for value in record))


def _boundaries_are_large(element: lowering.Element) -> bool:
    """Return whether all quotients at which codes change are far above 2**-40."""
    if element.kind is Kind.FLOAT:
        return element.emin - element.mantissa > 127 - 30
    return all(abs(threshold) > 2.0**-30 for threshold in element.thresholds)


def _is_short(element: lowering.Element, dtype: torch.dtype) -> bool:
    """Whether values and code boundaries are short enough for short quotients."""
    few = element.kind is not Kind.CODEBOOK and element.zero_place is not ZeroPlace.INSIDE
    return few and dtype in (torch.bfloat16, torch.float16)


def _order(scheme: Scheme) -> int:
    packed = sum(int(code) << (4 * rank) for rank, code in enumerate(code_order(scheme)))
    return packed - (1 << 64) if packed >> 63 else packed
