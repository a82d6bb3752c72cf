"""The drivers that read values: quantize in one pass over memory, and find the extremes of blocks."""

from typing import Any

import numpy as np

from ..machine.descriptor import AFFINE, BAD_VALUE, GIVEN, MULTIPLY, OK, ZERO_NONE
from ..machine.emit import emit_packed
from ..machine.intrinsics import bits32, device, inlined, scratch
from ..machine.tile import (
    NOT_FINITE,
    TILE,
    block_amax,
    factor_cut,
    fetch_ahead,
    load,
    run_extremes,
    spread,
)
from ..machine.vector import WHOLE
from .block_scales import block_scales
from .boundaries import (
    ROOM,
    WORTH,
    can_encode_boundaries,
    clear_tables,
    encode_boundaries,
    tables_of,
)
from .elements import encode
from .fields import LONG_BLOCK, PAIRS, build_pairs, can_encode_fields, encode_fields
from .group_extremes import GROUP, can_group, group_extremes
from .steps import can_encode_steps, encode_steps, invert

PACKED = 2 * TILE
"""Bytes for the packed codes of a tile, and for what the last whole word writes past them."""


@device
def tile_span(block: Any, left: Any) -> Any:
    """Return how many of the ``left`` elements one step takes: the whole blocks of a tile, at least one.

    A multiple of 8 blocks where several fit, so that packed codes of any width end on a byte.
    """
    fit = np.uint64(TILE) // block
    if fit >= np.uint64(8):
        fit = fit // np.uint64(8) * np.uint64(8)
    return min(left, max(fit, np.uint64(1)) * block)


@device
def parameter_row(layout: Any, row: Any) -> Any:
    """Return the first parameter index of a row."""
    return (row // layout.row_div) % layout.row_mod * layout.row_blocks


@device
def block_extremes(x: Any, at: Any, span: Any, layout: Any, lows: Any, highs: Any) -> None:
    """Set the smallest and largest value of each block of ``x[at : at + span]``."""
    blocks, first = (span + layout.block - np.uint64(1)) // layout.block, np.uint64(0)
    if can_group(layout.block):
        first = span // layout.block // GROUP * GROUP
        group_extremes(x, at, first, layout.block, lows, highs)
    for b in range(first, blocks):
        begin = at + b * layout.block
        lows[b], highs[b] = run_extremes(x, begin, min(begin + layout.block, at + span), layout.kind)


@device
def given_scales(
    scales: Any, zeros: Any, zeroed: Any, at: Any, count: Any, factors: Any, offsets: Any
) -> None:
    """Copy the factors, and zero points where there are some, of ``count`` blocks from index ``at``."""
    for b in range(count):
        factors[b] = scales[at + b]
    if zeroed:
        for b in range(count):
            offsets[b] = zeros[at + b]


@device
def span_statistics(
    x: Any, at: Any, span: Any, layout: Any, rule: Any, amax: Any, lows: Any, highs: Any
) -> None:
    """Write the bits of the largest magnitude of each block, and its extremes where the rule needs them."""
    if rule.how != AFFINE and not rule.unsigned:
        block_amax(x, at, span, layout.block, layout.kind, amax)
        return
    block_extremes(x, at, span, layout, lows, highs)
    magnitude = np.uint32(0x7FFFFFFF)
    for b in range((span + layout.block - np.uint64(1)) // layout.block):
        amax[b] = max(np.uint32(bits32(lows[b]) & magnitude), np.uint32(bits32(highs[b]) & magnitude))


@inlined
def span_scales(
    x: Any, at: Any, span: Any, layout: Any, element: Any, rule: Any, amax: Any, lows: Any, highs: Any,
    block_at: Any, scales: Any, scale_codes: Any, zeros: Any, factors: Any, offsets: Any,
) -> Any:  # fmt: skip
    """Set factors and zero points of the blocks of ``x[at : at + span]``, and store those that are chosen.

    amax, lows, highs: of :func:`span_statistics`. Returns OK or BAD_SCALE.
    """
    blocks = (span + layout.block - np.uint64(1)) // layout.block
    if rule.how == GIVEN:
        given_scales(scales, zeros, element.zero_place != ZERO_NONE, block_at, blocks, factors, offsets)
        return OK
    return block_scales(
        amax, lows, highs, blocks, rule, element.scaling == MULTIPLY, block_at, scales, scale_codes, zeros,
        factors, offsets,
    )  # fmt: skip


@inlined
def encode_span(
    x: Any, at: Any, span: Any, layout: Any, element: Any, order: Any, known: Any, per_block: Any,
    per_block_zero: Any, room: Any, out: Any, byte_at: Any,
) -> Any:  # fmt: skip
    """Write the codes of ``x[at : at + span]``, a tile or one block, and return the place behind them.

    known: whether :func:`encode_steps` knows the element. room: scratch for a tile.
    """
    (tile, factors, offsets), codes, packed = room
    pairs = scratch(PAIRS, np.uint8), scratch(PAIRS, np.uint8)
    shift, step = factor_cut(layout.block, span) if known else (np.uint64(0), np.uint64(TILE))
    stepwise, bits = shift > np.uint64(0), layout.bits
    by_fields = stepwise and span >= LONG_BLOCK and span <= layout.block and can_encode_fields(x, element)
    by_fields = by_fields and build_pairs(element, per_block, pairs)
    if not stepwise or span % WHOLE > np.uint64(0):
        spread(per_block, min(span, step), layout.block, factors)
        if element.zero_place != ZERO_NONE:
            spread(per_block_zero, min(span, step), layout.block, offsets)
    blocks = (span + layout.block - np.uint64(1)) // layout.block
    inverted = stepwise and not by_fields and invert(x, per_block, blocks, element)
    for chunk in range(np.uint64(0), span, step):
        n = min(step, span - chunk)
        stepped, first_block = stepwise and n % WHOLE == 0, chunk // layout.block
        own, own_zeros = per_block[first_block:], per_block_zero[first_block:]
        if stepped and by_fields:
            encode_fields(x, at + chunk, n, own, element, pairs, span, bits, codes, out, byte_at)
        elif stepped:
            encode_steps(
                x, at + chunk, n, own, own_zeros, shift, element, order, inverted, span, bits, codes, out,
                byte_at,
            )  # fmt: skip
        else:
            # Codes of a byte go where they belong; narrower ones are packed from scratch.
            place = out[byte_at : byte_at + n] if bits == np.uint64(8) else codes
            fetch_ahead(x, at + chunk + span, n)
            load(x, at + chunk, n, layout.kind, tile)
            encode(tile, factors, offsets, n, element, order, place)
        if bits != np.uint64(8) and (bits != np.uint64(4) or not stepped):
            emit_packed(codes, n, bits, packed, out, byte_at)
        byte_at += (n * bits + np.uint64(7)) // np.uint64(8)
    return byte_at


@device
def quantize_rows(
    x: Any, layout: Any, element: Any, rule: Any, order: Any, scales: Any, scale_codes: Any, zeros: Any,
    out: Any, kept: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    """Quantize rows ``first`` to ``last`` of ``x`` in one pass over memory.

    x: (rows * cols,) float32, uint16 bits of bfloat16, or int16 bits of float16.
    scales: float32 factors, read (GIVEN) or written; scale_codes: uint8, written by POWER and MINIFLOAT.
    zeros: float32 zero points, read (GIVEN) or written (AFFINE); one element long when there are none.
    out: (rows * row_bytes,) uint8. kept: uint8 tables of :mod:`.boundaries`, which earlier calls of the same
    element and rule on one thread may have filled, or one byte for none.
    Returns OK, BAD_VALUE or BAD_SCALE; after the latter two the bytes mean nothing.
    """
    floats = scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32)
    room = floats, scratch(TILE, np.uint8), scratch(PACKED, np.uint8)
    amax = scratch(TILE, np.uint32)
    lows, highs = scratch(TILE, np.float32), scratch(TILE, np.float32)
    per_block, per_block_zero = scratch(TILE, np.float32), scratch(TILE, np.float32)
    worst, state = np.uint32(0), OK
    flat = layout.row_div == np.uint64(1) and layout.row_mod >= last
    regular = flat and layout.cols % layout.block == 0 and layout.cols * layout.bits % np.uint64(8) == 0
    rows = np.uint64(1) if regular else last - first
    width = layout.cols * (last - first) if regular else layout.cols
    known = can_encode_steps(element)
    own, shared = scratch(ROOM, np.uint8), kept.size == ROOM
    bounded = can_encode_boundaries(x, layout, element, rule, shared or rows * width >= WORTH)
    if bounded and not shared:
        clear_tables(own)
    tables = tables_of(kept if shared else own)
    if bounded:
        tables[3][0] = np.uint32(OK)
    for r in range(rows):
        at = (first + r) * layout.cols
        end = at + width
        block_at = parameter_row(layout, first + r)
        byte_at = (first + r) * layout.row_bytes
        while at < end:
            span = tile_span(layout.block, end - at)
            blocks = (span + layout.block - np.uint64(1)) // layout.block
            if bounded:
                found = encode_boundaries(
                    x, at, span, layout, element, order, rule, tables, scale_codes, block_at, out, byte_at
                )
                state = max(state, found)
                byte_at += span // np.uint64(2)
                at += span
                block_at += blocks
                continue
            span_statistics(x, at, span, layout, rule, amax, lows, highs)
            for b in range(blocks):
                worst = max(worst, amax[b])
            found = span_scales(
                x, at, span, layout, element, rule, amax, lows, highs, block_at, scales, scale_codes, zeros,
                per_block, per_block_zero,
            )  # fmt: skip
            state = max(state, found)
            byte_at = encode_span(
                x, at, span, layout, element, order, known, per_block, per_block_zero, room, out, byte_at
            )  # fmt: skip
            at += span
            block_at += blocks
    return BAD_VALUE if worst >= NOT_FINITE else state


@device
def amax_rows(x: Any, layout: Any, out: Any, first: Any, last: Any) -> None:
    """Set ``out[r * row_blocks + b]`` to the largest magnitude of a row's block; NaN and Inf win."""
    found, width = out.view(np.uint32), layout.row_blocks
    for r in range(first, last):
        block_amax(x, r * layout.cols, layout.cols, layout.block, layout.kind, found[r * width :])


@device
def range_rows(x: Any, layout: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Write the smallest and largest value of each block; NaN sorts past infinity, by its sign bit."""
    for r in range(first, last):
        for b in range(layout.row_blocks):
            at = r * layout.cols + b * layout.block
            end = min(at + layout.block, (r + np.uint64(1)) * layout.cols)
            lows[r * layout.row_blocks + b], highs[r * layout.row_blocks + b] = run_extremes(
                x, at, end, layout.kind
            )
