"""The descriptor of a call: data layout, element and scale rule; constants."""

from typing import Any, NamedTuple

import numpy as np

from ....ops import lowering
from ....ops.lowering import UInt8, UInt64
from .intrinsics import inlined
from .named_records import record_type, unpacker


class RowLayout(NamedTuple):
    """Rows of ``cols`` elements in blocks of ``block``; kind: of 16-bit floats.

    Row ``r`` has its parameters in row ``(r // row_div) % row_mod`` of a (rows, row_blocks) array.
    """

    cols: UInt64
    block: UInt64
    row_blocks: UInt64
    row_bytes: UInt64
    bits: UInt64
    kind: UInt8
    row_div: UInt64
    row_mod: UInt64


INTEGER, FLOAT, CODEBOOK = map(np.uint8, lowering.Kind)
NO_ROUNDING, TO_BFLOAT16, TO_FLOAT16 = map(np.uint8, lowering.Narrow)
ZERO_NONE, ZERO_AFTER, ZERO_INSIDE, ZERO_OF_PRODUCT = map(np.uint8, lowering.ZeroPlace)
DIVIDE, MULTIPLY, RECIPROCAL = map(np.uint8, lowering.ScaleBy)
HALF_EVEN, HALF_AWAY, HALF_UP, HALF_DOWN, FLOOR, CEIL, TOWARD_ZERO, _STOCHASTIC, SUMS = map(
    np.uint8, lowering.Rounded
)
THRESHOLDS = lowering.THRESHOLDS
LONGEST_CODE = 16
"""Most values of a code."""


GIVEN, LINEAR, POWER, MINIFLOAT, AFFINE = map(np.uint8, lowering.How)
FROM_RANGE, FROM_SIGNED, FROM_LARGEST, FROM_EDGE = map(np.uint8, lowering.From)
AS_INTEGER, AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16, AS_LADDER = map(np.uint8, lowering.HeldAs)
OFFSET_REAL, OFFSET_NEAREST, OFFSET_TRUNCATED, OFFSET_OF_ROUNDED = map(np.uint8, lowering.Offset)


OK, BAD_VALUE, BAD_SCALE = np.uint8(0), np.uint8(1), np.uint8(2)
"""What a kernel returns: fine, NaN or Inf in the data, a scale that does not fit its format."""


class Descriptor(NamedTuple):
    """Layout, element and scale rule of a call; only layout is required."""

    layout: RowLayout
    element: lowering.Element = lowering.Element(kind=lowering.Kind.INTEGER)
    rule: lowering.LoweredRule = lowering.GIVEN


unpack = unpacker(Descriptor)
_RULE, _COARSE = (
    record_type(kind).fields[name][1]  # type: ignore[index]
    for kind, name in ((Descriptor, "rule"), (lowering.LoweredRule, "coarse"))
)
_PLACE = (_RULE + _COARSE) // 4
"""Place of the coarse scale among the float32 of a packed descriptor."""


@inlined
def set_coarse(descriptor: Any, coarse: Any) -> None:
    """Change the coarse scale of a packed descriptor."""
    descriptor.view(np.float32)[_PLACE] = coarse


def with_coarse(descriptor: Any, coarse: float) -> Any:
    """Copy a packed descriptor and change its coarse scale."""
    changed = descriptor.copy()
    changed.view(np.float32)[_PLACE] = coarse
    return changed
