"""Scales of blocks under two levels: the scale of a block times the scale of its coarse block.

A few rows are decoded at a time, so that the products stay in the cache; for small blocks they take more
memory than the codes.
"""

from typing import Any

import numpy as np

from ..machine.descriptor import (
    AS_BFLOAT16,
    AS_FLOAT16,
    AS_FLOAT32,
    unpack_element,
    unpack_layout,
    unpack_rule,
)
from ..machine.intrinsics import device, float32_of, scratch, shl32, widen_half
from ..machine.tile import FEW, TILE, spread
from .rows import dequantize_rows

TABLE = 256
"""Values of a byte."""
_ZERO, _ONE = np.uint64(0), np.uint64(1)


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
def _products(
    fine: Any, coarse: Any, tables: Any, sizes: Any, out: Any, origin: Any, first: Any, last: Any
) -> None:
    """Write the products of the blocks in coarse blocks ``first`` to ``last``, the first at ``origin``."""
    own, factors, per = scratch(TILE, np.float32), scratch(TILE, np.float32), sizes[2]
    step = max(np.uint64(TILE) // per, _ONE)
    for c in range(first, last, step):
        count = min(step, last - c)
        to, blocks = (c - origin) * per, count * per
        _values(coarse, sizes[1], tables[TABLE:], c, count, own, _ZERO)
        _values(fine, sizes[0], tables, c * per, blocks, out, to)
        if blocks > np.uint64(TILE):
            for b in range(to, to + blocks):
                out[b] *= own[0]
        else:
            spread(own, blocks, per, factors)
            for b in range(blocks):
                out[to + b] *= factors[b]


@device
def level_products(fine: Any, coarse: Any, tables: Any, sizes: Any, out: Any, first: Any, last: Any) -> None:
    """Write the products of the blocks in coarse blocks ``first`` to ``last``.

    fine, coarse: bytes of the levels. tables: (2 * TABLE,) float32, the values of bytes of each. sizes: (3,)
    uint64, what the numbers of each are, and how many blocks a coarse one has. out: float32.
    """
    _products(fine, coarse, tables, sizes, out, _ZERO, first, last)


@device
def level_rows(
    source: Any, desc: Any, table: Any, fine: Any, coarse: Any, tables: Any, sizes: Any, unit: Any, out: Any,
    first: Any, last: Any,
) -> None:  # fmt: skip
    """Decode rows ``first`` to ``last``, of whole coarse blocks and of at most FEW values each.

    desc: descriptor for given scales. fine, coarse, tables, sizes: as in :func:`level_products`. unit: (1,)
    float32, the step of integer codes.
    """
    layout, element, rule = unpack_layout(desc), unpack_element(desc), unpack_rule(desc)
    factors, none, nothing = scratch(FEW, np.float32), scratch(1, np.uint8), scratch(1, np.float32)
    step, width = np.uint64(FEW) // layout.cols, layout.row_blocks // sizes[2]
    for r in range(first, last, step):
        rows = min(last - r, step)
        _products(fine, coarse, tables, sizes, factors, r * width, r * width, (r + rows) * width)
        if unit[0] != np.float32(1):
            for b in range(rows * layout.row_blocks):
                factors[b] *= unit[0]
        dequantize_rows(
            source[r * layout.row_bytes :], layout, element, rule, table, factors, none, nothing,
            out[r * layout.cols :], _ZERO, True, _ZERO, rows,
        )  # fmt: skip
