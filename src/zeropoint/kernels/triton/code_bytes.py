"""Codes of pieces of eight elements to bytes and back, in Triton, low bits first.

Where rows are whole pieces, tensors of codes of 2 and 4 bits are passed as int16 and int32, a word for each
piece; others are passed as bytes. ``start`` is the byte at which a program begins, int64, and ``left`` the
number of its elements.
"""

import triton
import triton.language as tl


@triton.jit
def word_of(codes, k: tl.constexpr):
    """Return the words of pieces, (pieces,), from their codes, (pieces, 8) int32; int64 from 5 bits on."""
    kind: tl.constexpr = tl.int32 if k.width <= 4 else tl.int64
    shifts = (tl.arange(0, 8) * k.width)[None, :].to(kind)
    return tl.sum((codes.to(kind) & ((1 << k.width) - 1)) << shifts, axis=1)


@triton.jit
def store_codes(data, codes, start, there, left, k: tl.constexpr):
    """Write codes, (pieces, 8) int32; there: which of them there are."""
    piece = tl.arange(0, codes.shape[0])
    if k.word:
        words = data + start // k.word
        tl.store(words + piece, word_of(codes, k).to(data.dtype.element_ty), mask=piece * 8 < left)
    elif k.width == 8:
        at = piece[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(data + start + at, codes.to(tl.uint8), mask=there)
    else:
        word = word_of(tl.where(there, codes, 0), k)
        last = (left * k.width + 7) // 8
        for byte in tl.static_range(k.width):
            at = piece * k.width + byte
            tl.store(data + start + at, (word >> (8 * byte)).to(tl.uint8), mask=at < last)


@triton.jit
def load_codes(data, start, there, left, pieces: tl.constexpr, k: tl.constexpr):
    """Return what :func:`store_codes` has stored, (pieces, 8) int32."""
    piece, mask = tl.arange(0, pieces), (1 << k.width) - 1
    if k.width == 8:
        at = piece[:, None] * 8 + tl.arange(0, 8)[None, :]
        return tl.load(data + start + at, mask=there, other=0).to(tl.int32)
    else:  # noqa: RET505 (Triton compiles one of the two)
        if k.word:
            word = tl.load(data + start // k.word + piece, mask=piece * 8 < left, other=0).to(tl.int32)
        else:
            last = (left * k.width + 7) // 8
            word = tl.zeros([pieces], tl.int32 if k.width <= 4 else tl.int64)
            for byte in tl.static_range(k.width):
                at = piece * k.width + byte
                found = tl.load(data + start + at, mask=at < last, other=0)
                word |= found.to(word.dtype) << (8 * byte)
        shifts = (tl.arange(0, 8) * k.width).to(word.dtype)
        return ((word[:, None] >> shifts[None, :]) & mask).to(tl.int32)
