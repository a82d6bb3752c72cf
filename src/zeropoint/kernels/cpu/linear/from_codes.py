"""Linear layer on integer codes: quantize rows, multiply packed weights, scale.

    y[m, n] = (sum over groups g of float32(sum over k in g of a[m, k] * w[n, k]) * t[n, g]) * s[m] + bias[n]

a: codes of the input less their zero points. They come from :mod:`..encode.rows`, which is called for some
rows at a time, and are kept while the rows of the weight pass over them: in 16 bits, or in 8 where the
processor multiplies these (see :mod:`.products`). w: codes of the weight, bytes as they are kept, or 4 bits
that are brought to bytes some rows at a time; many rows of 8-bit codes are multiplied by panels of them (see
:mod:`.panels`). Threads take rows of the input, or, where these are few, of the weight; every result is
computed in one order, so that neither changes it.
"""

from typing import Any, NamedTuple

import numpy as np

from ..encode.rows import QuantizeArrays, quantize_rows
from ..machine.descriptor import GIVEN, OK, unpack
from ..machine.intrinsics import by_dtype, device, inlined, scratch
from ..machine.team import bundled, over_rows
from .chunks import (
    FOUR,
    LANES,
    MANY,
    ONE,
    PAIR_ROWS,
    QUAD_ROWS,
    START,
    THREE,
    TWO,
    ZERO,
    Matrix,
    RowCodes,
    Weights,
    multiply_chunks,
    unpack_matrix,
    unpack_slots,
)
from .panels import PANEL
from .products import (
    QUADS,
    SHIFT,
    lanes_of,
    start_sums,
)


class Input(NamedTuple):
    """Quantization of the input; layout: any rows, a block each or one.

    desc: descriptor. order: code of each rank. signed: whether codes have a sign. scale, zero: given float32,
    (1,) each, unread where the rule chooses them.
    """

    desc: Any
    order: Any
    signed: Any
    scale: Any
    zero: Any


def work_bytes(rows: int, matrix: Matrix) -> int:
    """Return the bytes of workspace for ``rows`` rows of input."""
    cols, groups = matrix.cols, matrix.groups
    chunk = max(QUADS.chunk // cols, PANEL)
    unpacked = chunk * cols if matrix.bits < 8 else 0
    panel = PANEL * (cols + 4 * groups) if rows >= int(MANY) else 0
    codes = (min(rows, QUADS.rows) + 1) * (4 * cols + 4 * QUADS.sums * groups)
    return codes + 4 * chunk + unpacked + panel


@inlined
def slot_of(work: Any, cut: Any, slot: Any) -> Any:
    """Workspace, rows and columns of one of the slots of :class:`Slots`."""
    count, width, along, height, slots = cut
    whole = count if along else width
    tiles, size = (whole + height - ONE) // height, np.uint64(len(work)) // slots
    part = tiles * slot // slots * height, min(tiles * (slot + ONE) // slots * height, whole)
    own = work[slot * size : (slot + ONE) * size]
    return (own, part, (ZERO, width)) if along else (own, (ZERO, count), part)


@device
def widen_codes(codes: Any, at: Any, count: Any, signed: Any, zero: Any, target: Any) -> None:
    """Set ``target[i] = codes[at + i] - zero`` in 16 bits."""
    if signed:
        for i in range(count):
            target[i] = np.int16(np.int16(np.int8(codes[at + i])) - zero)
    else:
        for i in range(count):
            target[i] = np.int16(np.int16(codes[at + i]) - zero)


@device
def quantize_block(x: Any, source: Any, scales: Any, zeros: Any, codes: Any, top: Any, count: Any) -> Any:
    """Quantize ``count`` rows of ``x`` from ``top``; return the state."""
    nothing, rows = scratch(LANES, np.uint8), x[top * source.desc.layout.cols :]
    arrays = QuantizeArrays(rows, source.order, scales, nothing, zeros, codes, nothing)
    return quantize_rows(arrays, source.desc, ZERO, count)


@device
def pair_rows(x: Any, source: Any, weights: Any, work: Any, out: Any, rows: Any, columns: Any) -> Any:
    """Compute some rows and columns of the output, from 16-bit codes.

    x: (M * cols,), as for :func:`..encode.rows.quantize_rows`. source: :class:`Input`. weights:
    :class:`Weights`. work: bytes of :func:`work_bytes`. out: (M * rows,) float32. Returns OK, BAD_VALUE or
    BAD_SCALE; after the latter two the output means nothing.
    """
    own_scales, own_zeros = scratch(PAIR_ROWS, np.float32), scratch(PAIR_ROWS, np.float32)
    starts, moves = scratch(1, np.int32), scratch(1, np.uint32)
    block, cols = min(np.uint64(PAIR_ROWS), rows[1] - rows[0]), weights.matrix.cols
    wide = work[: TWO * block * cols].view(np.int16)
    codes, space = work[TWO * block * cols : THREE * block * cols], work[FOUR * block * cols :]
    known = source.desc.rule.how == GIVEN
    used_scales, used_zeros = (source.scale, source.zero) if known else (own_scales, own_zeros)
    state = OK
    for top in range(rows[0], rows[1], block):
        count = min(block, rows[1] - top)
        state = max(state, quantize_block(x, source, used_scales, used_zeros, codes, top, count))
        for r in range(count):
            shift = np.int16(0)
            if source.desc.element.zero_place:
                shift = np.int16(used_zeros[ZERO if known else r])
            widen_codes(codes, r * cols, cols, source.signed, shift, wide[r * cols :])
        inputs = RowCodes(wide, starts, moves[:0], used_scales)
        multiply_chunks(inputs, count, weights, space, out, top, columns)
    return state


@device
def quad_rows(x: Any, source: Any, weights: Any, work: Any, out: Any, rows: Any, columns: Any) -> Any:
    """Compute :func:`pair_rows` on 8-bit codes, rows and groups of whole steps.

    Codes without sign are moved down by 128 to fit. What all codes of a row then lack, their zero point
    considered, is added times the sums over rows of the weight, which a row of ones gives: groups, each with
    its own sum, cannot have it.
    """
    own_scales, own_zeros = scratch(QUAD_ROWS, np.float32), scratch(QUAD_ROWS, np.float32)
    missing = scratch(QUAD_ROWS, np.uint32)
    matrix = weights.matrix
    block, cols, groups = min(np.uint64(QUAD_ROWS), rows[1] - rows[0]), matrix.cols, matrix.groups
    begun = (block + ONE) * cols
    space = begun + (block + ONE) * groups * START * FOUR
    octets, starts = work[:begun], work[begun:space].view(np.int32)
    codes = octets.view(np.int8)
    known, low = source.desc.rule.how == GIVEN, np.uint8(0 if source.signed else SHIFT)
    used_scales, used_zeros = (source.scale, source.zero) if known else (own_scales, own_zeros)
    moves = missing[: block if low or source.desc.element.zero_place else ZERO]
    steps = matrix.cols // groups // lanes_of(codes)
    state = OK
    for top in range(rows[0], rows[1], block):
        count = min(block, rows[1] - top)
        state = max(state, quantize_block(x, source, used_scales, used_zeros, octets, top, count))
        for r in range(count):
            missing[r] = np.uint32(low)
            if source.desc.element.zero_place:
                missing[r] -= np.uint32(np.int32(used_zeros[ZERO if known else r]))
            for i in range(r * cols, r * cols + cols):
                octets[i] ^= low
        octets[count * cols : count * cols + cols] = np.uint8(1)
        for g in range((count + ONE) * groups):
            start_sums(codes, g * steps * lanes_of(codes), steps, starts, g * START)
        inputs = RowCodes(codes, starts, moves, used_scales)
        multiply_chunks(inputs, count, weights, work[space:], out, top, columns)
    return state


@inlined
def _quad_rows(like: Any, args: Any) -> Any:
    """Call :func:`quad_rows` or :func:`pair_rows`, by the dtype of ``like``."""
    return quad_rows(*args)


@inlined
def _pair_rows(like: Any, args: Any) -> Any:
    return pair_rows(*args)


code_rows = by_dtype(int8=_quad_rows, int16=_pair_rows)


@device
def float_rows(x: Any, weights: Any, work: Any, out: Any, rows: Any, columns: Any) -> None:
    """Compute :func:`pair_rows` from float32 ``x`` as it is.

    Rows of the weight are whole steps, and ``matrix.grouped`` is set.
    """
    starts, moves, factors = scratch(1, np.int32), scratch(1, np.uint32), scratch(1, np.float32)
    factors[0] = np.float32(1)
    values, count = x[rows[0] * weights.matrix.cols :], rows[1] - rows[0]
    inputs = RowCodes(values, starts, moves[:0], factors)
    multiply_chunks(inputs, count, weights, work, out, rows[0], columns)


@bundled
def code_slots(args: Any, first: Any, last: Any) -> Any:
    """Compute slots of a layer's output from integer codes.

    args: an array of the dtype of codes, x, a descriptor, order, whether codes have a sign, the given scale
    and zero point, fields of :class:`.chunks.Weights`, workspace, output, :class:`.chunks.Slots`.
    """
    like, x, desc, order, signed, given, weight, work, out, cut = args
    source = Input(unpack(desc), order, np.uint8(signed), given[0], given[1])
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots, state = unpack_slots(cut), OK
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        state = max(state, code_rows(like, (x, source, weights, own, out, rows, columns)))
    return state


@over_rows
def float_slots(x: Any, weight: Any, work: Any, out: Any, cut: Any, first: Any, last: Any) -> None:
    """Compute slots of a layer's output from float32; see :func:`float_rows`."""
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots = unpack_slots(cut)
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        float_rows(x, weights, own, out, rows, columns)
