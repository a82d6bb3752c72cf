"""Row drivers that read values: one-pass quantization, block extremes."""

from typing import Any, NamedTuple

import numpy as np

from ..machine.descriptor import AFFINE, BAD_VALUE, GIVEN, MULTIPLY, OK, ZERO_NONE, unpack
from ..machine.emit import emit_packed
from ..machine.intrinsics import bits32, device, inlined, scratch
from ..machine.team import bundled, over_rows
from ..machine.tile import NOT_FINITE, TILE, block_amax, factor_cut, fetch_ahead, load, run_extremes, spread
from ..machine.vector import WHOLE
from .block_scales import BlockFactors, BlockStatistics, ScaleArrays, block_scales
from .boundaries import ROOM, WORTH, can_encode_boundaries, clear_tables, encode_boundaries, tables_of
from .elements import encode
from .fields import LONG_BLOCK, PAIRS, build_pairs, can_encode_fields, encode_fields
from .group_extremes import GROUP, can_group, group_extremes
from .step_access import Elements, StepSource, StepTarget, is_stored
from .steps import StepFactors, can_encode_steps, encode_steps, invert

PACKED = 2 * TILE
"""Bytes for the packed codes of a tile, and for what the last whole word writes past them."""


@device
def tile_span(block: Any, left: Any) -> Any:
    """Elements of a step: whole blocks of a tile, at least one.

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
    """Extremes of each block of ``x[at : at + span]``."""
    blocks, first = (span + layout.block - np.uint64(1)) // layout.block, np.uint64(0)
    if can_group(layout.block):
        first = span // layout.block // GROUP * GROUP
        group_extremes(x, at, first, layout.block, lows, highs)
    for b in range(first, blocks):
        begin = at + b * layout.block
        lows[b], highs[b] = run_extremes(x, begin, min(begin + layout.block, at + span), layout.kind)


@device
def given_scales(stored: Any, zeroed: Any, at: Any, count: Any, used: Any) -> None:
    """Copy factors, and zero points if any, of ``count`` blocks from ``at``."""
    for b in range(count):
        used.factors[b] = stored.scales[at + b]
    if zeroed:
        for b in range(count):
            used.offsets[b] = stored.zeros[at + b]


@device
def span_statistics(x: Any, at: Any, span: Any, desc: Any, found: Any) -> None:
    """Largest magnitude bits of each block, and extremes if the rule asks."""
    layout, rule = desc.layout, desc.rule
    if rule.how != AFFINE and not rule.unsigned:
        block_amax(x, at, span, layout.block, layout.kind, found.amax)
        return
    block_extremes(x, at, span, layout, found.lows, found.highs)
    magnitude = np.uint32(0x7FFFFFFF)
    for b in range((span + layout.block - np.uint64(1)) // layout.block):
        low, high = bits32(found.lows[b]), bits32(found.highs[b])
        found.amax[b] = max(np.uint32(low & magnitude), np.uint32(high & magnitude))


@inlined
def span_scales(desc: Any, blocks: Any, found: Any, block_at: Any, stored: Any, used: Any) -> Any:
    """Set factors and zero points of a span; store the chosen ones.

    found: of :func:`span_statistics`. Returns OK or BAD_SCALE.
    """
    element = desc.element
    if desc.rule.how == GIVEN:
        given_scales(stored, element.zero_place != ZERO_NONE, block_at, blocks, used)
        return OK
    return block_scales(found, blocks, desc.rule, element.scaling == MULTIPLY, block_at, stored, used)


@inlined
def encode_span(source: Any, desc: Any, order: Any, used: Any, room: Any, out: Any, byte_at: Any) -> Any:
    """Write the codes of a tile or block; return the place behind.

    source: :class:`.step_access.Elements`. used: :class:`.block_scales.BlockFactors` of its blocks. room:
    scratch for a tile.
    """
    (x, at, span), layout, element = source, desc.layout, desc.element
    (tile, factors, offsets), codes, packed = room
    per_block, per_block_zero = used
    known = can_encode_steps(element)
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
        steps, target = StepSource(x, at + chunk, n, span), StepTarget(bits, codes, out, byte_at)
        if stepped and by_fields:
            encode_fields(steps, own, element, pairs, target)
        elif stepped:
            encode_steps(steps, StepFactors(own, own_zeros, shift, inverted), element, order, target)
        else:
            # Codes of a byte go where they belong; narrower ones are packed from scratch.
            place = out[byte_at : byte_at + n] if bits == np.uint64(8) else codes
            fetch_ahead(x, at + chunk + span, n)
            load(x, at + chunk, n, layout.kind, tile)
            encode(tile, factors, offsets, n, element, order, place)
        if bits != np.uint64(8) and not (stepped and is_stored(bits)):
            emit_packed(codes, n, bits, packed, out, byte_at)
        byte_at += (n * bits + np.uint64(7)) // np.uint64(8)
    return byte_at


class QuantizeArrays(NamedTuple):
    """What :func:`quantize_rows` reads and writes.

    x: (rows * cols,) float32, uint16 bits of bfloat16, or int16 bits of float16. order: (16,) uint8, the code
    of each rank of a codebook. scales: float32 factors, read (GIVEN) or written; scale_codes: uint8, written
    by POWER and MINIFLOAT. zeros: float32 zero points, read (GIVEN) or written (AFFINE); one element long
    when there are none. out: (rows * row_bytes,) uint8. kept: uint8 tables of :mod:`.boundaries`, which
    earlier calls of the same element and rule on one thread may have filled, or one byte for none.
    """

    x: Any
    order: Any
    scales: Any
    scale_codes: Any
    zeros: Any
    out: Any
    kept: Any


@device
def quantize_rows(arrays: Any, desc: Any, first: Any, last: Any) -> Any:
    """Quantize rows ``first`` to ``last`` in one pass over memory.

    arrays: :class:`QuantizeArrays`. Returns OK, BAD_VALUE or BAD_SCALE; after the latter two the bytes mean
    nothing.
    """
    x, order, scales, scale_codes, zeros, out, kept = arrays
    layout = desc.layout
    floats = scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32)
    room = floats, scratch(TILE, np.uint8), scratch(PACKED, np.uint8)
    found = BlockStatistics(scratch(TILE, np.uint32), scratch(TILE, np.float32), scratch(TILE, np.float32))
    used = BlockFactors(scratch(TILE, np.float32), scratch(TILE, np.float32))
    stored = ScaleArrays(scales, scale_codes, zeros)
    worst, state = np.uint32(0), OK
    flat = layout.row_div == np.uint64(1) and layout.row_mod >= last
    regular = flat and layout.cols % layout.block == 0 and layout.cols * layout.bits % np.uint64(8) == 0
    rows = np.uint64(1) if regular else last - first
    width = layout.cols * (last - first) if regular else layout.cols
    own, shared = scratch(ROOM, np.uint8), kept.size == ROOM
    bounded = can_encode_boundaries(x, desc, shared or rows * width >= WORTH)
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
            source, blocks = Elements(x, at, span), (span + layout.block - np.uint64(1)) // layout.block
            if bounded:
                codes = scale_codes[block_at : block_at + blocks]
                state = max(state, encode_boundaries(source, desc, order, tables, codes, out, byte_at))
                byte_at += span // np.uint64(2)
                at += span
                block_at += blocks
                continue
            span_statistics(x, at, span, desc, found)
            for b in range(blocks):
                worst = max(worst, found.amax[b])
            state = max(state, span_scales(desc, blocks, found, block_at, stored, used))
            byte_at = encode_span(source, desc, order, used, room, out, byte_at)
            at += span
            block_at += blocks
    return BAD_VALUE if worst >= NOT_FINITE else state


@bundled
def quantize(args: Any, first: Any, last: Any) -> Any:
    """Quantize rows: a descriptor, then :class:`QuantizeArrays`."""
    return quantize_rows(QuantizeArrays(*args[1:]), unpack(args[0]), first, last)


@device
def amax_rows(x: Any, layout: Any, out: Any, first: Any, last: Any) -> None:
    """Largest magnitude of each block of rows; NaN and Inf win."""
    found, width = out.view(np.uint32), layout.row_blocks
    for r in range(first, last):
        block_amax(x, r * layout.cols, layout.cols, layout.block, layout.kind, found[r * width :])


@over_rows
def amax(x: Any, desc: Any, out: Any, first: Any, last: Any) -> None:
    """Find the largest magnitudes of blocks."""
    amax_rows(x, unpack(desc).layout, out, first, last)


@over_rows
def range_rows(x: Any, desc: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Extremes of each block; NaN sorts past infinity, by its sign bit."""
    layout = unpack(desc).layout
    for r in range(first, last):
        for b in range(layout.row_blocks):
            at = r * layout.cols + b * layout.block
            end = min(at + layout.block, (r + np.uint64(1)) * layout.cols)
            lows[r * layout.row_blocks + b], highs[r * layout.row_blocks + b] = run_extremes(
                x, at, end, layout.kind
            )
