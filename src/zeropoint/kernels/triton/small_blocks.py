"""The kernel that chooses scales of small blocks: blocks of 8 to 1,024 elements that fill rows.

Block after block lies in memory without gaps, whatever the shape. A thread has ``vectors`` pieces of eight
elements that follow each other, of one block; ``lanes`` threads share a block. Scales and quotients of a
thread are those of few blocks, so that few of them are computed more than once.
"""

import triton
import triton.language as tl

from ...ops.lowering import How
from .code_bytes import store_codes, word_of
from .element_codes import codes_of, float32, larger, largest, stored, usual
from .scale_choice import scales_fit_fusing, scales_of

_POWER, _AFFINE = tl.constexpr(int(How.POWER)), tl.constexpr(int(How.AFFINE))


@triton.jit
def _of_blocks(numbers, kind: tl.constexpr, k: tl.constexpr):
    """Return the largest (``kind`` 0), low (1) or high (2) number of blocks from those of threads."""
    if k.cut.lanes == 1:
        return numbers
    else:  # noqa: RET505 (Triton compiles one of the two)
        shared = tl.reshape(numbers, [k.cut.threads // k.cut.lanes, k.cut.lanes])
        if kind == 0:
            return largest(shared, k)
        elif kind == 1:  # noqa: RET505
            return tl.min(shared, axis=1)
        else:
            return tl.max(shared, axis=1)


@triton.jit
def _of_threads(numbers, k: tl.constexpr):
    """Return the numbers of the threads of blocks, (threads, 1)."""
    if k.cut.lanes == 1:
        return numbers[:, None]
    else:  # noqa: RET505
        blocks: tl.constexpr = k.cut.threads // k.cut.lanes
        shared = tl.broadcast_to(numbers[:, None], [blocks, k.cut.lanes])
        return tl.reshape(shared, [k.cut.threads, 1])


@triton.jit
def _store(data, values, factor, zero, first, left, fast: tl.constexpr, k: tl.constexpr):
    """Write the codes of all pieces of threads; ``first`` is the number of the first thread."""
    vectors: tl.constexpr = k.cut.vectors
    thread = tl.arange(0, k.cut.threads)
    if vectors == 1:
        codes = codes_of(values[0], factor, zero, fast, k)
        store_codes(data, codes, first * k.width, thread[:, None] < left, left * 8, k)
    else:
        a = word_of(codes_of(values[0], factor, zero, fast, k), k)
        b = word_of(codes_of(values[1], factor, zero, fast, k), k)
        if vectors == 4:
            c = word_of(codes_of(values[2], factor, zero, fast, k), k)
            d = word_of(codes_of(values[3], factor, zero, fast, k), k)
            words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [k.cut.threads, 4])
        else:
            words = tl.join(a, b)
        at = thread[:, None] * vectors + tl.arange(0, vectors)[None, :]
        place = data + first * (vectors * k.width) // k.word
        tl.store(place + at, words.to(data.dtype.element_ty), mask=thread[:, None] < left)


@triton.jit
def quantize_small_blocks(x, coarse, scales, zeros, data, bad, cut, k: tl.constexpr):
    """Choose the scale of each block and write it with zero point and codes.

    ``cut`` is the number of pieces of ``x``; other arguments are those of
    :func:`.segments.quantize_blocks`.
    """
    threads: tl.constexpr = k.cut.threads
    vectors: tl.constexpr = k.cut.vectors
    blocks: tl.constexpr = threads // k.cut.lanes
    ranged: tl.constexpr = k.rule.how == _AFFINE or k.rule.unsigned
    first = tl.program_id(0).to(tl.int64) * threads
    left = tl.minimum(cut // vectors - first, threads).to(tl.int32)
    thread = tl.arange(0, threads)[:, None]
    at = thread * (8 * vectors) + tl.arange(0, 8)[None, :]
    values = ()
    for piece in tl.static_range(vectors):
        found = tl.load(x + first * (8 * vectors) + (at + 8 * piece), mask=thread < left, other=0)
        values = values + (float32(found),)  # noqa: RUF005 (Triton has no other way to grow a tuple)
    amax = largest(values[0], k)
    low, high = amax, amax
    if ranged:
        low, high = tl.min(values[0], axis=1), tl.max(values[0], axis=1)
    for piece in tl.static_range(1, vectors):
        amax = larger(amax, largest(values[piece], k))
        if ranged:
            low = tl.minimum(low, tl.min(values[piece], axis=1))
            high = tl.maximum(high, tl.max(values[piece], axis=1))
    amax = _of_blocks(amax, 0, k)
    if ranged:
        low, high = _of_blocks(low, 1, k), _of_blocks(high, 2, k)
    if k.fused and not ranged:
        if scales_fit_fusing(amax, coarse, k):
            scale, factor, zero, fits = scales_of(amax, low, high, coarse, True, k)
        else:
            scale, factor, zero, fits = scales_of(amax, low, high, coarse, False, k)
    else:
        scale, factor, zero, fits = scales_of(amax, low, high, coarse, False, k)
    start = tl.program_id(0).to(tl.int64) * blocks
    block = tl.arange(0, blocks)
    inside = block * k.cut.lanes < left
    tl.store(scales + start + block, stored(scale, scales.dtype.element_ty), mask=inside)
    if k.element.zero_place:
        tl.store(zeros + start + block, stored(zero, zeros.dtype.element_ty), mask=inside)
    tl.store(bad + block * 0, 1, mask=inside & (((amax < float("inf")) & fits) == 0))
    factors, zero_points = _of_threads(factor, k), _of_threads(zero, k)
    if k.fused:
        # A block of zeros has the codes of zeros under any factor.
        nonzero = tl.where(amax == 0.0, 1.0, factor)
        if usual(amax[:, None], nonzero[:, None]):
            _store(data, values, _of_threads(nonzero, k), zero_points, first, left, True, k)
        else:
            _store(data, values, factors, zero_points, first, left, False, k)
    else:
        _store(data, values, factors, zero_points, first, left, False, k)
