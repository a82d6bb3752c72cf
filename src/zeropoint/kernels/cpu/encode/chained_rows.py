"""Chained levels and codes under them: :mod:`zeropoint.params.chains`, fused.

A run is as many whole blocks of the coarsest level as a tile holds, or one. The extremes of its blocks give a
number for each, the levels take turns to store these, coarsest first, and the numbers as they are stored
encode the elements. Numbers are as in :mod:`zeropoint.ops.chain_levels`.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Chain
from ..machine import descriptor as k
from ..machine import vector as v
from ..machine.intrinsics import bits32, device, float32_of, scratch
from ..machine.named_records import unpacker
from ..machine.reductions import largest_lane, largest_signed_lane, smallest_signed_lane
from ..machine.team import bundled, over_rows
from ..machine.tile import NOT_FINITE, TILE, load
from .block_numbers import (
    LANES,
    ONE,
    ZERO,
    edge_numbers,
    first_of,
    float_of_key,
    range_numbers,
    read_blocks,
    zero_points,
)
from .block_scales import BlockFactors
from .chained_steps import MODERATE, block_shift, encode_blocks, largest_bits
from .elements import INFINITE, is_identity
from .group_extremes import keys_of
from .level_numbers import keep_numbers, misfits, round_numbers, store_numbers, unpack_level
from .rows import PACKED, encode_span, tile_span
from .step_access import Elements
from .steps import can_encode_steps

BLOCKS = 2048
"""Most of the finest blocks in a run."""
RUN = 4 * TILE
"""Elements of a run of small blocks, which are still in the nearest cache when they are encoded.

Gain that keeps it: 1.3 times the speed of q4_k in rows of 2048.
"""
LEVELS = 6
_LEAST_NORMAL = np.float32(2.0**-126)


unpack_chain = unpacker(Chain)


class LevelArrays(NamedTuple):
    """Levels as kernels take them.

    chain: packed :class:`zeropoint.ops.lowering.Chain`. levels: packed :class:`zeropoint.ops.lowering.Level`
    records, finest first. ladder: arrays of keys, values and codes; see
    :class:`zeropoint.ops.chain_levels.Rungs`. outs: bytes of each of :data:`LEVELS` levels, scales first.
    """

    chain: Any
    levels: Any
    ladder: Any
    outs: Any


@device
def _largest_lane_of(numbers: Any, at: Any, signed: Any) -> Any:
    """Find the largest of 16 by magnitude, first of ties; unsigned: magnitude."""
    if not signed:
        return float32_of(
            largest_lane(v.bits_of(v.load_lanes(numbers, at)) & v.words_of(np.uint32(0x7FFFFFFF)))
        )
    keys = keys_of(v.load_lanes(numbers, at))
    low, high = float_of_key(smallest_signed_lane(keys)), float_of_key(largest_signed_lane(keys))
    if abs(low) == abs(high):
        return first_of(numbers[at:], abs(high))
    return high if abs(high) > abs(low) else low


@device
def _largest_of(numbers: Any, outer: Any, above: Any, blocks: Any, level: Any, largest: Any) -> Any:
    """Numbers of largest magnitude of a level's blocks, over ``outer`` if ``above``.

    Returns how many there are.
    """
    count = (blocks + level.blocks - ONE) // level.blocks
    if not above and level.blocks == LANES and blocks % LANES == ZERO:
        for c in range(count):
            largest[c] = _largest_lane_of(numbers, c * LANES, level.signed)
        return count
    if not (above or level.signed):
        for c in range(count):
            begin = c * level.blocks
            largest[c] = float32_of(largest_bits(numbers[begin:], min(level.blocks, blocks - begin)))
        return count
    for c in range(count):
        most = np.float32(0)
        for b in range(c * level.blocks, min((c + ONE) * level.blocks, blocks)):
            x = numbers[b]
            if above:
                x = np.float32(0) if outer[b] == np.float32(0) else x / outer[b]
            most = x if abs(x) > abs(most) else most
        largest[c] = most if level.signed else abs(most)
    return count


@device
def _single(numbers: Any, blocks: Any, level: Any, chain: Any, minimum: Any, ladder: Any, values: Any) -> Any:
    """Round the only level's numbers to what encodes elements; return the state."""
    quiet = np.float32(0) if minimum else chain.quiet
    least = np.float32(0) if minimum else chain.least
    for b in range(blocks):
        x = numbers[b]
        if not minimum and quiet == np.float32(0) and abs(x) < _LEAST_NORMAL:
            x *= np.float32(0)
        if abs(x) < least:
            x = -least if bits32(x) >= np.uint32(0x80000000) else least
        numbers[b] = values[b] = x
    round_numbers(values, blocks, level, ladder, False)
    bad = misfits(numbers, values, blocks, level)
    if quiet != np.float32(0):
        for b in range(blocks):
            bad = bad | ((values[b] == np.float32(0)) & (numbers[b] != np.float32(0)))
            values[b] = chain.blank if numbers[b] == np.float32(0) else values[b]
    for b in range(blocks):
        numbers[b] = values[b] if not level.late or numbers[b] == np.float32(0) else numbers[b]
    return k.BAD_SCALE if bad else k.OK


@device
def _spread(factors: Any, count: Any, blocks: Any, level: Any, above: Any, outer: Any) -> None:
    """Spread factors over the finest blocks, or multiply by them if ``above``."""
    for c in range(count):
        begin, end = c * level.blocks, min((c + ONE) * level.blocks, blocks)
        if above:
            for b in range(begin, end):
                outer[b] *= factors[c]
        else:
            for b in range(begin, end, LANES):  # what is written past the end is written again
                v.store_lanes(outer, b, v.floats_of(factors[c]))


@device
def _store_levels(
    numbers: Any, blocks: Any, chain: Any, arrays: Any, offsets: Any, place: Any, room: Any
) -> Any:
    """Store numbers level by level, leaving what encodes elements; return the state.

    arrays: :class:`LevelArrays`. offsets: whether they are offsets. place: of the first block: its row, the
    finest blocks of a row, and how many of its row come before it. room: (4 * BLOCKS + 16,) floats.
    """
    _, levels, ladder, outs = arrays
    row, width, before = place
    begin, count = (chain.scales, chain.offsets) if offsets else (ZERO, chain.scales)
    values, ideal = room[:BLOCKS], room[BLOCKS : 2 * BLOCKS]
    largest, outer = room[2 * BLOCKS : 3 * BLOCKS], room[3 * BLOCKS :]
    own = np.int64(begin)
    fine = unpack_level(levels, own)
    if count == ONE:
        state = _single(numbers, blocks, fine, chain, offsets, ladder, values)
        store_numbers(values, blocks, fine, ladder, outs[own], row * width + before)
        return state
    filler = np.float32(1) if chain.quiet != np.float32(0) and not offsets else np.float32(0)
    state, above = k.OK, False
    for down in range(ONE, count):
        index = begin + count - down
        level = unpack_level(levels, np.int64(index))
        coarse = _largest_of(numbers, outer, above, blocks, level, largest)
        blank = min(filler, level.high)
        for c in range(coarse):
            quotient = np.float32(np.float64(largest[c]) / level.span)
            values[c] = ideal[c] = blank if largest[c] == np.float32(0) else quotient
        round_numbers(values, coarse, level, ladder, above)
        if not above and misfits(ideal, values, coarse, level):
            state = k.BAD_SCALE
        for c in range(coarse):
            tiny = -level.tiny if largest[c] < np.float32(0) else level.tiny
            lost = values[c] == np.float32(0) and max(abs(largest[c]), filler) > np.float32(0)
            values[c] = tiny if lost else values[c]
        at = row * ((width + level.blocks - ONE) // level.blocks) + before // level.blocks
        store_numbers(values, coarse, level, ladder, outs[np.int64(index)], at)
        _spread(values, coarse, blocks, level, above, outer)
        state = state if largest_bits(outer, blocks) < NOT_FINITE else k.BAD_SCALE
        above = True
    for b in range(blocks):
        quotient = numbers[b] / outer[b]
        values[b] = np.float32(0) if outer[b] == np.float32(0) else quotient
    keep_numbers(values, blocks, fine, ladder, True, outs[own], row * width + before)
    if not fine.late:
        for b in range(blocks):
            numbers[b] = values[b] * outer[b]
    return state


@device
def _choose(
    blocks: Any, chain: Any, arrays: Any, desc: Any, place: Any, ends: Any, found: Any, room: Any
) -> Any:
    """Choose and store block levels; found: takes scales, zero points or offsets."""
    (numbers, more), element, rule = found, desc.element, desc.rule
    lows, highs = ends
    if chain.scale_from == k.FROM_RANGE:
        range_numbers(lows, highs, blocks, chain, numbers)
    elif chain.scale_from == k.FROM_EDGE:
        edge_numbers(lows, highs, blocks, chain, numbers)
    elif chain.scale_from == k.FROM_SIGNED:
        for b in range(blocks):
            numbers[b] /= chain.divisor
    else:
        for b in range(blocks):
            numbers[b] = max(abs(lows[b]), abs(highs[b])) / chain.divisor
    if chain.zeroed:
        for b in range(blocks):
            highs[b] = numbers[b]
    state = _store_levels(numbers, blocks, chain, arrays, False, place, room)
    if chain.zeroed:
        zero_points(lows, numbers, highs, blocks, element, rule, more)
    elif chain.offsets > ZERO:
        for b in range(blocks):
            more[b] = (lows[b] - chain.end * numbers[b]) + np.float32(0)  # without a sign of zero
        state = max(state, _store_levels(more, blocks, chain, arrays, True, place, room))
    return state


@device
def _move_tile(tile: Any, blocks: Any, block: Any, offsets: Any) -> Any:
    """Subtract block offsets from numbers; return the largest magnitude's bits."""
    worst = np.uint32(0)
    if block % LANES == ZERO:
        most = v.words_of(np.uint32(0))
        for b in range(blocks):
            offset = v.floats_of(offsets[b])
            for i in range(b * block, (b + ONE) * block, LANES):
                x = v.load_lanes(tile, i) - offset
                most = v.larger_bits(most, v.bits_of(x) & v.words_of(np.uint32(0x7FFFFFFF)))
                v.store_lanes(tile, i, x)
        return np.uint32(largest_lane(most))
    for b in range(blocks):
        for i in range(b * block, (b + ONE) * block):
            tile[i] -= offsets[b]
            worst = max(worst, np.uint32(bits32(tile[i]) & np.uint32(0x7FFFFFFF)))
    return worst


@device
def _encode_tile(source: Any, desc: Any, order: Any, used: Any, room: Any, out: Any, byte_at: Any) -> Any:
    """Write the codes of a tile; compiled once, whatever the source is."""
    return encode_span(source, desc, order, used, room, out, byte_at)


class ChainedArrays(NamedTuple):
    """What :func:`chained_rows` reads and writes.

    x: float32, uint16 bits of bfloat16, or int16 bits of float16. order: the code of each rank of a codebook.
    levels: fields of :class:`LevelArrays`. zeros: float32 zero points, written where there are some. out:
    packed codes.
    """

    x: Any
    order: Any
    levels: Any
    zeros: Any
    out: Any


@bundled
def chained_rows(args: Any, first: Any, last: Any) -> Any:
    """Quantize rows ``first`` to ``last``, whole blocks, choosing levels in passing.

    args: a descriptor, then :class:`ChainedArrays`. Returns OK, BAD_VALUE or BAD_SCALE; after the latter two
    the bytes mean nothing.
    """
    x, order, of_levels, zeros, out = ChainedArrays(*args[1:])
    desc = k.unpack(args[0])
    layout, element, _rule = desc
    levels = LevelArrays(*of_levels)
    chain = unpack_chain(levels.chain)
    floats = scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32)
    room = floats, scratch(TILE, np.uint8), scratch(PACKED, np.uint8)
    integers = scratch(2048, np.float32), room[1], room[2]
    tile, ends = scratch(TILE, np.float32), (scratch(2048, np.float32), scratch(2048, np.float32))
    numbers, more, work = scratch(2048, np.float32), scratch(2048, np.float32), scratch(8208, np.float32)
    known = can_encode_steps(element)
    block, width = layout.block, layout.row_blocks
    run = max(chain.run, min(np.uint64(RUN), np.uint64(BLOCKS) * block) // chain.run * chain.run)
    stepwise = known and (element.kind != k.CODEBOOK or is_identity(order))
    state, moves, shift = k.OK, chain.offsets > ZERO, block_shift(block, element) if stepwise else ZERO
    if not moves:
        for b in range(np.uint64(BLOCKS)):
            more[b] = np.float32(0)
    # Rows of whole blocks of all levels follow each other as the parts of one do.
    lines = last - first if layout.cols % chain.run == ZERO else ONE
    for r in range(first, last, lines):
        done, count = ZERO, layout.cols * lines
        while done < count:
            span = min(run, count - done)
            blocks, at, place = span // block, r * layout.cols + done, (np.uint64(r), width, done // block)
            read_blocks(x, at, span, layout, chain, tile, ends, numbers)
            most = max(largest_bits(ends[0], blocks), largest_bits(ends[1], blocks))
            if most >= NOT_FINITE:
                return k.BAD_VALUE
            found = _choose(blocks, chain, levels, desc, place, ends, (numbers, more), work)
            state = max(state, found)
            for b in range(blocks):
                numbers[b] = INFINITE if numbers[b] == np.float32(0) else numbers[b]
            if chain.zeroed:
                for b in range(blocks):
                    zeros[r * width + done // block + b] = more[b]
            byte_at, left, own = r * layout.row_bytes + done * layout.bits // np.uint64(8), span, ZERO
            done += span
            if shift > ZERO and span % v.WHOLE == ZERO and max(most, largest_bits(more, blocks)) < MODERATE:
                source, target = Elements(x, at, span), (layout.bits, out, byte_at)
                encode_blocks(source, numbers, more, (shift, moves), element, integers, target)
                continue
            while left > ZERO:
                part = tile_span(block, left)
                load(x, at + span - left, part, layout.kind, tile)
                if moves and _move_tile(tile, part // block, block, more[own:]) >= NOT_FINITE:
                    state = max(state, k.BAD_VALUE)
                used = BlockFactors(numbers[own:], more[own:])
                byte_at = _encode_tile(Elements(tile, ZERO, part), desc, order, used, room, out, byte_at)
                left -= part
                own += part // block
    return state


@over_rows
def stored_rows(numbers: Any, of_levels: Any, center: Any, width: Any, first: Any, last: Any) -> Any:
    """Store block scales minus their center, level by level.

    Elements use the scales as they are. of_levels: fields of :class:`LevelArrays`; runs ``first`` to ``last``
    are ``width`` numbers each, up to BLOCKS. Returns OK or BAD_SCALE.
    """
    own, work, state = scratch(2048, np.float32), scratch(8208, np.float32), k.OK
    levels = LevelArrays(*of_levels)
    chain = unpack_chain(levels.chain)
    for r in range(np.uint64(first), np.uint64(last)):
        at = r * width
        count = min(width, np.uint64(numbers.size) - at)
        for b in range(count):
            own[b] = numbers[at + b] - center
        place = r, width, ZERO
        state = max(state, _store_levels(own, count, chain, levels, False, place, work))
    return state
