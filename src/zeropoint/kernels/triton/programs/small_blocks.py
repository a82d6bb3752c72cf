"""Quantization of small blocks, 8 to 1,024 elements that fill rows.

Block after block lies in memory without gaps, whatever the shape. A thread has ``vectors`` pieces of eight
elements that follow each other, of one block; ``lanes`` threads share a block. Scales and quotients of a
thread belong to few blocks, so that few of them are computed more than once.
"""

import triton
import triton.language as tl

from ....ops.lowering import How, Kind
from .code_bytes import bytes_of, store_codes
from .element_codes import below_the_end, codes_of, float32, larger, largest, ratio_of, ratios, usual
from .held_scales import chosen_scales, factors_of
from .rounding_modes import piece_noise

_FLOAT = tl.constexpr(int(Kind.FLOAT))
_AFFINE = tl.constexpr(int(How.AFFINE))


@triton.jit
def _of_blocks(numbers, kind: tl.constexpr, k: tl.constexpr):
    """Reduce threads to blocks: largest (``kind`` 0), low (1), high (2)."""
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
def _bytes(value, factor, inverse, rest, zero, noise, fast: tl.constexpr, k: tl.constexpr):
    """Return the bytes of pieces, (threads, k.width)."""
    ratio = ratio_of(value, factor, inverse, rest, fast, k)
    return bytes_of(codes_of(ratio, zero, noise, fast and k.element.kind == _FLOAT, k), k)


@triton.jit
def _all_bytes(values, factor, inverse, rest, zero, seed, first, at, fast: tl.constexpr, k: tl.constexpr):
    """Bytes of all thread pieces, (threads, vectors * k.width) int32.

    first, at: flat index of the program's first element, and places of first pieces from there.
    They become bytes after the two branches have met: ptxas 12.8 loses some that meet there as bytes.
    """
    a = _bytes(values[0], factor, inverse, rest, zero, piece_noise(seed, first, at, k), fast, k)
    b = _bytes(values[1], factor, inverse, rest, zero, piece_noise(seed, first, at + 8, k), fast, k)
    if k.cut.vectors == 4:
        c = _bytes(values[2], factor, inverse, rest, zero, piece_noise(seed, first, at + 16, k), fast, k)
        d = _bytes(values[3], factor, inverse, rest, zero, piece_noise(seed, first, at + 24, k), fast, k)
        joined = tl.join(tl.join(a, c), tl.join(b, d))  # (threads, width, 2, 2), the piece last
        return tl.reshape(tl.permute(joined, [0, 2, 3, 1]), [k.cut.threads, 4 * k.width])
    else:  # noqa: RET505
        return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [k.cut.threads, 2 * k.width])


@triton.jit
def _chosen(values, coarse, scales, tables, zeros, notes, start, left, k: tl.constexpr):
    """Choose and write block scales; return factors and zero points, by threads.

    Returns (amax, factor, inverse, rest, zero), (threads, 1), as :func:`.element_codes.ratios` takes them.
    """
    vectors: tl.constexpr = k.cut.vectors
    ranged: tl.constexpr = k.rule.how == _AFFINE or k.rule.unsigned
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
    # Each thread stores and looks up the scales of its own blocks: others would have to be exchanged.
    block = tl.max_contiguous(tl.arange(0, k.cut.threads // k.cut.lanes), [1])
    inside = block * k.cut.lanes < left
    factor, inverse, rest, zero = chosen_scales(
        amax, low, high, coarse, scales + start, tables, zeros + start, notes, block, inside, k
    )
    threads = _of_threads(factor, k), _of_threads(inverse, k), _of_threads(rest, k), _of_threads(zero, k)
    return _of_threads(amax, k), threads[0], threads[1], threads[2], threads[3]


@triton.jit
def _given(values, coarse, scales, tables, zeros, notes, start, left, k: tl.constexpr):
    """Load given scales as :func:`_chosen` returns chosen ones."""
    vectors: tl.constexpr = k.cut.vectors
    thread = tl.arange(0, k.cut.threads)
    amax = largest(values[0], k)
    for piece in tl.static_range(1, vectors):
        amax = larger(amax, largest(values[piece], k))
    there, place = thread < left, start + thread // k.cut.lanes
    factor, inverse, rest = factors_of(tl.load(scales + place, mask=there, other=1), tables, coarse, k)
    tl.store(notes + thread * 0, 1, mask=(amax < float("inf")) == 0)
    zero = factor * 0.0
    if k.element.zero_place:
        zero = float32(tl.load(zeros + place, mask=there, other=0))
    return amax[:, None], factor[:, None], inverse[:, None], rest[:, None], zero[:, None]


@triton.jit(do_not_specialize=["seed"])
def quantize_small_blocks(x, scales, tables, coarse, zeros, data, notes, seed, cut, k: tl.constexpr):
    """Write codes of ``x``, with chosen scales and zero points.

    ``cut`` is the number of pieces of ``x``. notes: (1,) int32, set if a value is not finite or a scale does
    not fit its format. For ``scales``, ``tables`` and ``coarse`` see :mod:`.held_scales`.
    """
    threads: tl.constexpr = k.cut.threads
    vectors: tl.constexpr = k.cut.vectors
    part = tl.program_id(0).to(tl.int64)
    first = part * threads
    start = part * (threads // k.cut.lanes)
    left = tl.minimum(cut // vectors - first, threads).to(tl.int32)
    thread = tl.arange(0, threads)[:, None]
    at = thread * (8 * vectors) + tl.arange(0, 8)[None, :]
    values = ()
    for piece in tl.static_range(vectors):
        found = tl.load(x + first * (8 * vectors) + (at + 8 * piece), mask=thread < left, other=0)
        values = values + (float32(found),)  # noqa: RUF005 (Triton has no other way to grow a tuple)
    if k.chosen:
        amax, factor, inverse, rest, zero = _chosen(
            values, coarse, scales, tables, zeros, notes, start, left, k
        )
    else:
        amax, factor, inverse, rest, zero = _given(
            values, coarse, scales, tables, zeros, notes, start, left, k
        )
    if vectors == 1:
        noise = piece_noise(seed, first * 8, thread * 8, k)
        codes = codes_of(ratios(values[0], factor, inverse, rest, amax, k), zero, noise, False, k)
        store_codes(data, codes, first * k.width, thread < left, left * 8, k)
    else:
        begin, place = first * (8 * vectors), thread * (8 * vectors)
        if k.fused:
            plain = usual(amax, factor, k)
            if k.element.kind == _FLOAT:
                plain = plain & below_the_end(amax, inverse, k)
            if plain:
                codes = _all_bytes(values, factor, inverse, rest, zero, seed, begin, place, True, k)
            else:
                codes = _all_bytes(values, factor, inverse, rest, zero, seed, begin, place, False, k)
        else:
            codes = _all_bytes(values, factor, inverse, rest, zero, seed, begin, place, False, k)
        each: tl.constexpr = vectors * k.width
        places = data + first * each + (thread * each + tl.arange(0, each)[None, :])
        tl.store(places, codes.to(tl.uint8), mask=thread < left)
