"""The descriptor of a call: the shape of the data, the element and the scale rule, as named records.

Formats and rules are run-time parameters, not specializations: one compiled kernel serves every format, also
one just invented. From Python they travel as one record, in an array: handing over sixty objects takes longer
than quantizing thousands of numbers.
"""

import math
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from ....ops import lowering
from .intrinsics import inlined


class RowLayout(NamedTuple):
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


INTEGER, FLOAT, CODEBOOK = map(np.uint8, lowering.Kind)
NO_ROUNDING, TO_BFLOAT16, TO_FLOAT16 = map(np.uint8, lowering.Narrow)
ZERO_NONE, ZERO_AFTER, ZERO_INSIDE, ZERO_OF_PRODUCT = map(np.uint8, lowering.ZeroPlace)
DIVIDE, MULTIPLY, RECIPROCAL = map(np.uint8, lowering.ScaleBy)
THRESHOLDS = lowering.THRESHOLDS


class Element(NamedTuple):
    """:class:`zeropoint.ops.lowering.Element` in the types of the machine.

    thresholds: padded with Inf.
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


GIVEN, LINEAR, POWER, MINIFLOAT, AFFINE = map(np.uint8, lowering.How)
FROM_RANGE, FROM_SIGNED, FROM_LARGEST, FROM_EDGE = map(np.uint8, lowering.From)
AS_INTEGER, AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16, AS_LADDER = map(np.uint8, lowering.HeldAs)
OFFSET_REAL, OFFSET_NEAREST, OFFSET_TRUNCATED, OFFSET_OF_ROUNDED = map(np.uint8, lowering.Offset)


class LoweredRule(NamedTuple):
    """:class:`zeropoint.ops.lowering.LoweredRule` in the types of the machine."""

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
    by_product: np.uint8
    empty_scale: np.float32
    ceiling: np.float32
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


def record_type(kind: Any) -> np.dtype[Any]:
    """Return the fields of a NamedTuple as those of a record, under their names and in their types."""
    hints = get_type_hints(kind)
    fields = [(name, np.float32, (THRESHOLDS,)) if name == "thresholds" else (name, hint)
              for name, hint in hints.items()]  # fmt: skip
    return np.dtype(fields, align=True)


def packed(record: np.dtype[Any], values: Any) -> Any:
    """Return one record as bytes, of which Numba takes an array in half the time."""
    made = np.zeros(1, record)
    made[0] = values
    return made.view(np.uint8)


_PARTS = ("layout", RowLayout), ("element", Element), ("rule", LoweredRule)
DESCRIPTOR = np.dtype([(name, record_type(kind)) for name, kind in _PARTS], align=True)
_COARSE = DESCRIPTOR.fields["rule"][1] + DESCRIPTOR["rule"].fields["coarse"][1]  # type: ignore[index]
"""Where the coarse scale lies."""


def pack(
    layout: RowLayout, element: lowering.Element | None = None, rule: lowering.LoweredRule = lowering.GIVEN
) -> Any:
    """Return the descriptor that a kernel takes; some kernels need the layout alone."""
    element = lowering.Element(kind=lowering.Kind.INTEGER) if element is None else element
    padding = (math.inf,) * (THRESHOLDS - len(element.thresholds))
    padded = element._replace(thresholds=element.thresholds + padding)
    parts = (by_name(Element, padded), by_name(LoweredRule, rule))
    return packed(DESCRIPTOR, (layout, *parts))


def by_name(kind: Any, constants: Any) -> tuple[Any, ...]:
    """Return constants in the order of a record's fields."""
    return tuple(getattr(constants, name) for name in kind._fields)


def with_coarse(descriptor: Any, coarse: float) -> Any:
    """Return a descriptor with another coarse scale."""
    changed = descriptor.copy()
    changed[_COARSE : _COARSE + 4].view(np.float32)[0] = coarse
    return changed


@inlined
def unpack_layout(descriptor: Any) -> Any:
    """Return the layout of a descriptor."""
    r = descriptor.view(DESCRIPTOR)[0]["layout"]
    return RowLayout(
        cols=r["cols"], block=r["block"], row_blocks=r["row_blocks"], row_bytes=r["row_bytes"],
        bits=r["bits"], kind=r["kind"], row_div=r["row_div"], row_mod=r["row_mod"],
    )  # fmt: skip


@inlined
def unpack_element(descriptor: Any) -> Any:
    """Return the element of a descriptor."""
    r = descriptor.view(DESCRIPTOR)[0]["element"]
    t = r["thresholds"]
    return Element(
        kind=r["kind"], low=r["low"], high=r["high"], zero_place=r["zero_place"], sign=r["sign"],
        mantissa=r["mantissa"], emin=r["emin"], maximum=r["maximum"], sign_shift=r["sign_shift"],
        magnitude=r["magnitude"], max_code=r["max_code"], negative_nan=r["negative_nan"],
        unsigned_below=r["unsigned_below"], quotient=r["quotient"], scaling=r["scaling"],
        thresholds=(
            t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12], t[13], t[14],
        ),
    )  # fmt: skip


@inlined
def unpack_rule(descriptor: Any) -> Any:
    """Return the scale rule of a descriptor."""
    r = descriptor.view(DESCRIPTOR)[0]["rule"]
    return LoweredRule(
        how=r["how"], divisor=r["divisor"], narrow=r["narrow"], stored=r["stored"],
        zero_scale=r["zero_scale"], least=r["least"], addend=r["addend"], emax=r["emax"], quiet=r["quiet"],
        quiet_byte=r["quiet_byte"], least_byte=r["least_byte"], unit=r["unit"], coarse=r["coarse"],
        inverse=r["inverse"], by_product=r["by_product"], empty_scale=r["empty_scale"],
        ceiling=r["ceiling"], mantissa=r["mantissa"], emin=r["emin"], maximum=r["maximum"], low=r["low"],
        high=r["high"], unsigned=r["unsigned"], widen=r["widen"], offset=r["offset"], formula=r["formula"],
    )  # fmt: skip
