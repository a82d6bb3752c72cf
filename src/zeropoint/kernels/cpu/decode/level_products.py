"""Block scales under two levels: fine scale times coarse scale.

A few rows are decoded at a time, so that the products stay in the cache; for small blocks they take more
memory than the codes.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Float32, UInt8, UInt64
from ..machine.descriptor import AS_BFLOAT16, AS_FLOAT16, AS_FLOAT32, unpack
from ..machine.intrinsics import device, float32_of, scratch, shl32, widen_half
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.tile import FEW, TILE, spread
from .rows import DequantizeArrays, dequantize_rows

TABLE = 256
"""Values of a byte."""
TWO_VALUES, POWERS = np.uint8(5), np.uint8(6)
"""Kinds of bytes that need no table: codes 0 and 1 only, and E8M0. ``HeldAs`` has the numbers below."""
_ZERO, _ONE = np.uint64(0), np.uint64(1)


class LevelPairKinds(NamedTuple):
    """Storage of two levels, fine blocks per coarse one, integer step."""

    fine: UInt8
    coarse: UInt8
    per: UInt64
    unit: Float32 = 1.0


unpack_kinds = unpacker(LevelPairKinds)


class LevelPairArrays(NamedTuple):
    """Bytes of both levels, and (2 * TABLE,) float32, their bytes' values."""

    fine: Any
    coarse: Any
    tables: Any


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
    elif kind == TWO_VALUES:
        first, second, other = table[0], table[1], table[2]
        for i in range(count):
            code = stored[at + i]
            out[to + i] = first if code == np.uint8(0) else (second if code == np.uint8(1) else other)
    elif kind == POWERS:
        for i in range(count):
            code = np.uint32(stored[at + i])
            bits = shl32(code, np.uint32(23)) if code > np.uint32(0) else np.uint32(0x00400000)
            out[to + i] = float32_of(bits if code < np.uint32(255) else np.uint32(0x7FC00000))
    else:
        for i in range(count):
            out[to + i] = table[stored[at + i]]


@device
def _products(levels: Any, kinds: Any, out: Any, origin: Any, first: Any, last: Any) -> None:
    """Multiply the levels of coarse blocks ``first`` to ``last``, from ``origin``."""
    own, factors, per = scratch(TILE, np.float32), scratch(TILE, np.float32), kinds.per
    step = max(np.uint64(TILE) // per, _ONE)
    for c in range(first, last, step):
        count = min(step, last - c)
        to, blocks = (c - origin) * per, count * per
        _values(levels.coarse, kinds.coarse, levels.tables[TABLE:], c, count, own, _ZERO)
        _values(levels.fine, kinds.fine, levels.tables, c * per, blocks, out, to)
        if blocks > np.uint64(TILE):
            for b in range(to, to + blocks):
                out[b] *= own[0]
        else:
            spread(own, blocks, per, factors)
            for b in range(blocks):
                out[to + b] *= factors[b]


@over_rows
def level_products(levels: Any, kinds: Any, out: Any, first: Any, last: Any) -> None:
    """Write the products of the blocks in coarse blocks ``first`` to ``last``.

    levels: fields of :class:`LevelPairArrays`. kinds: packed :class:`LevelPairKinds`. out: float32.
    """
    _products(LevelPairArrays(*levels), unpack_kinds(kinds), out, _ZERO, first, last)


@over_rows
def level_rows(
    source: Any, desc: Any, table: Any, levels: Any, kinds: Any, out: Any, first: Any, last: Any
) -> None:
    """Decode rows of whole coarse blocks, at most FEW values each.

    desc: packed, for given scales. levels, kinds: as in :func:`level_products`.
    """
    given, found, pair = unpack(desc), unpack_kinds(kinds), LevelPairArrays(*levels)
    layout = given.layout
    factors, none, nothing = scratch(FEW, np.float32), scratch(1, np.uint8), scratch(1, np.float32)
    step, width = np.uint64(FEW) // layout.cols, layout.row_blocks // found.per
    for r in range(first, last, step):
        rows = min(last - r, step)
        _products(pair, found, factors, r * width, r * width, (r + rows) * width)
        if found.unit != np.float32(1):
            for b in range(rows * layout.row_blocks):
                factors[b] *= found.unit
        codes, values = source[r * layout.row_bytes :], out[r * layout.cols :]
        arrays = DequantizeArrays(codes, table, factors, none, nothing, values)
        dequantize_rows(arrays, given, _ZERO, True, _ZERO, rows)
