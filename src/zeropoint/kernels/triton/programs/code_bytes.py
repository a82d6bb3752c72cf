"""Codes of eight-element pieces to bytes and back, low bits first.

``start`` is the byte at which a program begins, int64, and ``left`` the number of its elements.
"""

import triton
import triton.language as tl

from ....ops.lowering import Kind

_FLOAT = tl.constexpr(int(Kind.FLOAT))


@triton.jit
def bytes_of(codes, k: tl.constexpr):
    """Pack codes, (pieces, 8), of 1, 2 or 4 bits: int32 bytes.

    They are (pieces, k.width).
    """
    count: tl.constexpr = 8 // k.width
    parts = tl.reshape(codes, [codes.shape[0], k.width, count])
    place = tl.arange(0, count)
    if k.element.kind != _FLOAT:  # of floats, the low byte is the code
        # What is above the last code of a byte is cut off with the byte.
        mask = tl.where(place < count - 1, (1 << k.width) - 1, -1)
        parts &= mask[None, None, :]
    return tl.sum(parts << (place * k.width)[None, None, :], axis=2)


@triton.jit
def words_of(codes, k: tl.constexpr):
    """Pack codes, (pieces, 8), of any width into (pieces,) int64."""
    shifts = (tl.arange(0, 8) * k.width)[None, :].to(tl.int64)
    return tl.sum((codes.to(tl.int64) & ((1 << k.width) - 1)) << shifts, axis=1)


@triton.jit
def store_codes(data, codes, start, there, left, k: tl.constexpr):
    """Write codes, (pieces, 8) int32; there: which of them there are."""
    each: tl.constexpr = k.width
    piece = tl.arange(0, codes.shape[0])
    if each == 8:
        at = piece[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(data + start + at, codes.to(tl.uint8), mask=there)
    elif 8 % each == 0:
        at = piece[:, None] * each + tl.arange(0, each)[None, :]
        if there.shape[1] == 1:
            tl.store(data + start + at, bytes_of(codes, k).to(tl.uint8), mask=there)
        else:
            whole = bytes_of(tl.where(there, codes, 0), k)
            tl.store(data + start + at, whole.to(tl.uint8), mask=at < (left * each + 7) // 8)
    else:
        word, last = words_of(tl.where(there, codes, 0), k), (left * each + 7) // 8
        for byte in tl.static_range(each):
            at = piece * each + byte
            tl.store(data + start + at, (word >> (8 * byte)).to(tl.uint8), mask=at < last)


@triton.jit
def load_codes(data, start, there, left, pieces: tl.constexpr, k: tl.constexpr):
    """Load codes of :func:`store_codes`, (pieces, 8) int32."""
    each: tl.constexpr = k.width
    piece, mask = tl.arange(0, pieces), (1 << each) - 1
    if each == 8:
        at = piece[:, None] * 8 + tl.arange(0, 8)[None, :]
        return tl.load(data + start + at, mask=there, other=0).to(tl.int32)
    elif 8 % each == 0:  # noqa: RET505 (Triton compiles one of the two)
        count: tl.constexpr = 8 // each
        at = piece[:, None] * each + tl.arange(0, each)[None, :]
        if there.shape[1] == 1:
            found = tl.load(data + start + at, mask=there, other=0).to(tl.int32)
        else:
            found = tl.load(data + start + at, mask=at < (left * each + 7) // 8, other=0).to(tl.int32)
        shifts = (tl.arange(0, count) * each)[None, None, :]
        return tl.reshape((found[:, :, None] >> shifts) & mask, [pieces, 8])
    else:
        last = (left * each + 7) // 8
        word = tl.zeros([pieces], tl.int64)
        for byte in tl.static_range(each):
            at = piece * each + byte
            word |= tl.load(data + start + at, mask=at < last, other=0).to(tl.int64) << (8 * byte)
        shifts = (tl.arange(0, 8) * each)[None, :].to(tl.int64)
        return ((word[:, None] >> shifts) & mask).to(tl.int32)
