"""What kernels are compiled for: the numbers of a format and of a layout, in one record."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from ...formats import FloatFormat
from ...ops import lowering
from ...ops.lowering import THRESHOLDS, How, Kind, code_order
from ...ops.registry import Request
from ...schemes import Scheme
from .segmentation import Segments

_WHOLE_BYTES = {1: 8, 2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 7: 8, 8: 1}
"""Codes of each width that fill whole bytes together."""


class Constants(NamedTuple):
    """Constants of compilation.

    element, rule: records of :mod:`zeropoint.ops.lowering`, of plain numbers. ``unsigned_below`` is the bits
    of a float32, as a subnormal constant would make float64 of what it meets; ``thresholds`` are padded with
    Inf. order: of a codebook the codes of all ranks, four bits each, int64. width: bits of a code. group:
    codes that fill whole bytes together. multiply: whether values are multiplied by factors. size, many,
    flat, own: see :class:`.segmentation.Segments`. native: whether a GPU runs the kernel, rather than the
    interpreter. fused: whether quotients may be made of fused multiplications and additions, see
    :func:`.element_codes.quotient`.
    """

    element: Any
    rule: Any
    order: int
    width: int
    group: int
    multiply: bool
    size: int
    many: int
    flat: bool
    own: bool
    native: bool
    fused: bool


def constants_of(request: Request, segments: Segments, *, chosen: bool) -> Constants:
    """Return what the kernels of a request are compiled for; chosen: whether they choose scales."""
    scheme, dtype = request.scheme, request.own_dtype
    rule = lowering.rule_of(scheme, dtype) if chosen else lowering.GIVEN
    multiply = rule.how is How.POWER and isinstance(scheme.element, FloatFormat)
    element = lowering.element_of(scheme, dtype, multiply=multiply)
    if request.code_range is not None:
        element = element._replace(low=request.code_range[0], high=request.code_range[1])
    padding = (math.inf,) * (THRESHOLDS - len(element.thresholds))
    unsigned = int(np.float32(element.unsigned_below).view(np.int32))
    plain = _plain(element)._replace(unsigned_below=unsigned, thresholds=element.thresholds + padding)
    native = request.device.type == "cuda"
    return Constants(
        element=plain, rule=_plain(rule), order=_order(scheme),
        width=scheme.bits, group=_WHOLE_BYTES[scheme.bits], multiply=multiply, size=segments.size,
        many=segments.many, flat=segments.flat, own=segments.own, native=native,
        fused=native and _boundaries_are_large(element),
    )  # fmt: skip


def of_extremes(segments: Segments, device: torch.device) -> Constants:
    """Return what the kernel that finds extremes is compiled for, whatever the format."""
    return Constants(
        element=None, rule=None, order=0, width=8, group=1, multiply=False, size=segments.size,
        many=segments.many, flat=segments.flat, own=segments.own, native=device.type == "cuda", fused=False,
    )  # fmt: skip


def _plain(record: Any) -> Any:
    """Return a record whose fields are plain numbers, which Triton takes."""
    return type(record)(*(int(value) if isinstance(value, IntEnum) else value for value in record))


def _boundaries_are_large(element: lowering.Element) -> bool:
    """Return whether all quotients at which codes change are far above 2**-40."""
    if element.kind is Kind.FLOAT:
        return element.emin - element.mantissa > 127 - 30
    return all(abs(threshold) > 2.0**-30 for threshold in element.thresholds)


def _order(scheme: Scheme) -> int:
    packed = sum(int(code) << (4 * rank) for rank, code in enumerate(code_order(scheme)))
    return packed - (1 << 64) if packed >> 63 else packed
