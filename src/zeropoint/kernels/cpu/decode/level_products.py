"""The number of each block from two levels: a number of its own times that of the coarse block it lies in."""

from typing import Any

import numpy as np

from ..machine.descriptor import AS_BFLOAT16, AS_FLOAT16, AS_FLOAT32
from ..machine.intrinsics import device, float32_of, scratch, shl32, widen_half

TABLE = 256
"""Values of a byte."""
_ZERO, _FEW = np.uint64(0), np.uint64(256)


@device
def _values(stored: Any, kind: Any, table: Any, at: Any, count: Any, out: Any, to: Any) -> None:
    """Write ``count`` numbers of a level from the one at ``at`` on."""
    if kind == AS_FLOAT16:
        halves = stored.view(np.uint16)
        for i in range(count):
            out[to + i] = widen_half(halves[at + i])
    elif kind == AS_BFLOAT16:
        halves = stored.view(np.uint16)
        for i in range(count):
            out[to + i] = float32_of(shl32(np.uint32(halves[at + i]), np.uint32(16)))
    elif kind == AS_FLOAT32:
        floats = stored.view(np.float32)
        for i in range(count):
            out[to + i] = floats[at + i]
    else:
        for i in range(count):
            out[to + i] = table[stored[at + i]]


@device
def level_products(fine: Any, coarse: Any, tables: Any, sizes: Any, out: Any, first: Any, last: Any) -> None:
    """Write the products of the blocks in coarse blocks ``first`` to ``last``.

    fine, coarse: bytes of the levels. tables: (2 * TABLE,) float32, the values of bytes of each. sizes: (3,)
    uint64, what the numbers of each are, and how many blocks a coarse one has. out: float32.
    """
    factors, per = scratch(256, np.float32), sizes[2]
    for c in range(first, last, _FEW):
        count = min(_FEW, last - c)
        _values(coarse, sizes[1], tables[TABLE:], c, count, factors, _ZERO)
        _values(fine, sizes[0], tables, c * per, count * per, out, c * per)
        for n in range(count):
            for b in range((c + n) * per, (c + n + np.uint64(1)) * per):
                out[b] *= factors[n]
