"""Byte layouts to and from codes and parameters: structs, transposed words."""

import triton
import triton.language as tl


@triton.jit
def move_bits(
    sources, out, moves, flips, count, strides: tl.constexpr, size: tl.constexpr, terms: tl.constexpr,
    many: tl.constexpr,
):  # fmt: skip
    """Write block bytes from bits of several sources' bytes.

    ``count`` bytes of blocks, ``size`` of each. strides: bytes of a block in each source. moves: (terms,
    size) int32, where bits of a byte come from: the byte in its block, and from bit 12 on a mask, how far
    left and right bits are shifted after it, and the source. flips: (size,) int32, bits that are opposite.
    """
    index = tl.program_id(0).to(tl.int64) * many + tl.max_contiguous(tl.arange(0, many), [4])
    block = index // size
    byte = (index - block * size).to(tl.int32)
    there = index < count
    found = tl.load(flips + byte)
    for term in tl.static_range(terms):
        move = tl.load(moves + term * size + byte)
        place = sources[0] + block * strides[0]
        for number in tl.static_range(1, len(strides)):
            place = tl.where((move >> 26) == number, sources[number] + block * strides[number], place)
        bits = tl.load(place + (move & 0xFFF), mask=there, other=0).to(tl.int32)
        found ^= ((bits & (move >> 12)) << ((move >> 20) & 7)) >> ((move >> 23) & 7)
    tl.store(out + index, found.to(tl.uint8), mask=there)


@triton.jit
def turn_words(words, out, rows, columns, flip, size: tl.constexpr):
    """Write the transpose of words, (rows, columns) int32, each differing by ``flip``."""
    across = tl.cdiv(columns, size)
    tile = tl.program_id(0)
    row = (tile // across).to(tl.int64) * size + tl.arange(0, size)
    column = (tile % across).to(tl.int64) * size + tl.arange(0, size)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    found = tl.load(words + row[:, None] * columns + column[None, :], mask=there, other=0)
    tl.store(out + column[None, :] * rows + row[:, None], found ^ flip, mask=there)


@triton.jit
def fields_to_words(data, out, groups, width, flip, places: tl.constexpr, size: tl.constexpr):
    """Write lines of words of eight rows' 4-bit codes.

    See :mod:`zeropoint.layout`. data: (8 * groups, width) uint8. out: (2 * width, groups) int32.
    """
    across = tl.cdiv(width, size)
    tile = tl.program_id(0)
    group = (tile // across).to(tl.int64) * size + tl.arange(0, size)
    byte = (tile % across).to(tl.int64) * size + tl.arange(0, size)
    there = (group < groups)[:, None] & (byte < width)[None, :]
    low, high = tl.zeros([size, size], tl.int32), tl.zeros([size, size], tl.int32)
    for field in tl.static_range(8):
        row = group * 8 + places[field]
        codes = tl.load(data + row[:, None] * width + byte[None, :], mask=there, other=0).to(tl.int32)
        low |= (codes & 15) << (4 * field)
        high |= (codes >> 4) << (4 * field)
    line = out + byte[None, :] * (2 * groups) + group[:, None]
    tl.store(line, low ^ flip, mask=there)
    tl.store(line + groups, high ^ flip, mask=there)


@triton.jit
def words_to_fields(words, out, groups, width, flip, places: tl.constexpr, size: tl.constexpr):
    """Write what :func:`fields_to_words` has read."""
    across = tl.cdiv(width, size)
    tile = tl.program_id(0)
    group = (tile // across).to(tl.int64) * size + tl.arange(0, size)
    byte = (tile % across).to(tl.int64) * size + tl.arange(0, size)
    there = (group < groups)[:, None] & (byte < width)[None, :]
    line = words + byte[None, :] * (2 * groups) + group[:, None]
    low = tl.load(line, mask=there, other=0) ^ flip
    high = tl.load(line + groups, mask=there, other=0) ^ flip
    for field in tl.static_range(8):
        codes = ((low >> (4 * field)) & 15) | (((high >> (4 * field)) & 15) << 4)
        row = group * 8 + places[field]
        tl.store(out + row[:, None] * width + byte[None, :], codes.to(tl.uint8), mask=there)
