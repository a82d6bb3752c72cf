"""What a kernel is told: the shape of the data, the element and the scale rule, as tuples of numbers.

Formats and rules are run-time parameters, not specializations: one compiled kernel serves every format, also
one just invented. From Python they travel as one array of float64, which holds each of them exactly: handing
over sixty objects takes longer than quantizing thousands of numbers.
"""

from typing import Any, NamedTuple

import numpy as np

from .intrinsics import inlined


class Layout(NamedTuple):
    """Rows of ``cols`` elements in blocks of ``block`` along the row; ``kind`` tells 16-bit floats apart.

    Row ``r`` has its parameters in row ``(r // row_div) % row_mod`` of a (rows, row_blocks) array.
    """

    cols: np.uint64
    block: np.uint64
    row_blocks: np.uint64
    row_bytes: np.uint64
    bits: np.uint64
    kind: np.uint8
    row_div: np.uint64
    row_mod: np.uint64


INTEGER, FLOAT, CODEBOOK = np.uint8(0), np.uint8(1), np.uint8(2)
NO_ROUNDING, TO_BFLOAT16, TO_FLOAT16 = np.uint8(0), np.uint8(1), np.uint8(2)
ZERO_NONE, ZERO_AFTER, ZERO_INSIDE = np.uint8(0), np.uint8(1), np.uint8(2)
DIVIDE, MULTIPLY, RECIPROCAL = np.uint8(0), np.uint8(1), np.uint8(2)
THRESHOLDS = 15


class Element(NamedTuple):
    """A format's parameters; each kind reads its own.

    low, high: integer clamp bounds. zero_place: when a zero point is added. sign: sign bit of a two's
    complement code. mantissa, emin (biased like float32), maximum, sign_shift (31 minus the sign's place),
    magnitude (mask of the bits below the sign), max_code (of the largest finite value), negative_nan (whether
    negative zero's code is NaN): of a float format.
    unsigned_below: largest magnitude of a quotient whose sign is dropped, negative for none. quotient: what
    the quotient is rounded to first.
    thresholds: ascending boundaries of a codebook, padded with Inf.
    """

    kind: np.uint8
    low: np.float32
    high: np.float32
    zero_place: np.uint8
    sign: np.uint32
    mantissa: np.uint32
    emin: np.uint32
    maximum: np.float32
    sign_shift: np.uint32
    magnitude: np.uint32
    max_code: np.uint32
    negative_nan: np.uint8
    unsigned_below: np.float32
    quotient: np.uint8
    scaling: np.uint8
    thresholds: tuple[np.float32, ...]


GIVEN, LINEAR, POWER, MINIFLOAT, AFFINE = (np.uint8(n) for n in range(5))
OFFSET_REAL, OFFSET_NEAREST, OFFSET_TRUNCATED, OFFSET_OF_ROUNDED = (np.uint8(n) for n in range(4))


class ScaleRule(NamedTuple):
    """How scales come about, and how stored ones are read.

    GIVEN: float32 factors. LINEAR: ``amax / divisor``, through ``narrow``, rounded to ``stored``. POWER: E8M0
    bytes from ``exponent(bits(amax) + addend) - emax``, at least ``least_byte``; magnitudes below ``quiet``
    take byte ``quiet_byte``.
    MINIFLOAT: a small float format, relative to ``coarse`` (multiplied or, if ``inverse``, divided). AFFINE:
    from the range, with zero points.
    unit: step of the element's codes. offset: how ``low - minimum / scale`` becomes a zero point: not at all,
    rounded, cut off, or from a rounded quotient. formula: whether that of an empty range is so too.
    """

    how: np.uint8
    divisor: np.float32
    narrow: np.uint8
    stored: np.uint8
    zero_scale: np.float32
    least: np.float32
    addend: np.uint32
    emax: np.uint32
    quiet: np.float32
    quiet_byte: np.uint8
    least_byte: np.uint32
    unit: np.float32
    coarse: np.float32
    inverse: np.uint8
    mantissa: np.uint32
    emin: np.uint32
    maximum: np.float32
    low: np.float32
    high: np.float32
    unsigned: np.uint8
    widen: np.uint8
    offset: np.uint8
    formula: np.uint8


OK, BAD_VALUE, BAD_SCALE = np.uint8(0), np.uint8(1), np.uint8(2)
"""What a kernel returns: fine, NaN or Inf in the data, a scale that does not fit its format."""

_ELEMENT = len(Layout._fields)
_THRESHOLDS = _ELEMENT + len(Element._fields) - 1
_RULE = _THRESHOLDS + THRESHOLDS
_COARSE = _RULE + ScaleRule._fields.index("coarse")


def tell(layout: Layout, element: Element, rule: ScaleRule) -> Any:
    """Return all that a kernel is told as one array; the layout comes first and can go alone."""
    return np.array([*layout, *element[:-1], *element.thresholds, *rule], np.float64)


def with_coarse(told: Any, coarse: float) -> Any:
    """Return what was told, but for the coarse scale."""
    changed = told.copy()
    changed[_COARSE] = coarse
    return changed


@inlined
def layout_in(told: Any) -> Any:
    """Return the layout that was told."""
    a = told
    return Layout(
        np.uint64(a[0]), np.uint64(a[1]), np.uint64(a[2]), np.uint64(a[3]), np.uint64(a[4]), np.uint8(a[5]),
        np.uint64(a[6]), np.uint64(a[7]),
    )  # fmt: skip


@inlined
def element_in(told: Any) -> Any:
    """Return the element that was told."""
    a, t = told[_ELEMENT:], told[_THRESHOLDS:]
    return Element(
        np.uint8(a[0]), np.float32(a[1]), np.float32(a[2]), np.uint8(a[3]), np.uint32(a[4]), np.uint32(a[5]),
        np.uint32(a[6]), np.float32(a[7]), np.uint32(a[8]), np.uint32(a[9]), np.uint32(a[10]),
        np.uint8(a[11]), np.float32(a[12]), np.uint8(a[13]), np.uint8(a[14]),
        (
            np.float32(t[0]), np.float32(t[1]), np.float32(t[2]), np.float32(t[3]), np.float32(t[4]),
            np.float32(t[5]), np.float32(t[6]), np.float32(t[7]), np.float32(t[8]), np.float32(t[9]),
            np.float32(t[10]), np.float32(t[11]), np.float32(t[12]), np.float32(t[13]), np.float32(t[14]),
        ),
    )  # fmt: skip


@inlined
def rule_in(told: Any) -> Any:
    """Return the scale rule that was told."""
    a = told[_RULE:]
    return ScaleRule(
        np.uint8(a[0]), np.float32(a[1]), np.uint8(a[2]), np.uint8(a[3]), np.float32(a[4]), np.float32(a[5]),
        np.uint32(a[6]), np.uint32(a[7]), np.float32(a[8]), np.uint8(a[9]), np.uint32(a[10]),
        np.float32(a[11]), np.float32(a[12]), np.uint8(a[13]), np.uint32(a[14]), np.uint32(a[15]),
        np.float32(a[16]), np.float32(a[17]), np.float32(a[18]), np.uint8(a[19]), np.uint8(a[20]),
        np.uint8(a[21]), np.uint8(a[22]),
    )  # fmt: skip
