"""Cuts of tensors into pieces of eight elements, under given scales."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ...layout.blocks import row_mapping
from ...schemes import Granularity

PIECE = 8
"""Elements of a piece: 16 bytes of two-byte floats, and whole bytes of codes of any width."""
LARGEST_BLOCK = 1024
"""Elements of the largest of the small blocks."""
PER_THREAD, WARPS = 4, 4
"""Pieces of a thread, and warps of a program; see the table of docs/evidence/gpu.md."""


class PieceCut(NamedTuple):
    """What kernels take at run time.

    cols, row_bytes: elements, and bytes of codes, of a row. tiles: programs of a row. block, row_blocks:
    elements of a block along the row, and blocks of a row. row_div, row_mod: row ``r`` has the scales of row
    ``r // row_div % row_mod``.
    """

    cols: int
    row_bytes: int
    tiles: int
    block: int
    row_blocks: int
    row_div: int
    row_mod: int


class PieceShape(NamedTuple):
    """What kernels are compiled for.

    pieces: of a program. block: elements of a block, where blocks are powers of two of at least a piece and
    fill programs; 0 otherwise. single: whether a program is inside of a block. even: whether rows are whole
    pieces. joined: whether rows follow each other as one row. own: whether each row has scales of its own.
    """

    pieces: int
    block: int
    single: bool
    even: bool
    joined: bool
    own: bool


class Pieces(NamedTuple):
    """A tensor in pieces, and the programs that take them."""

    cut: PieceCut
    shape: PieceShape
    programs: int
    warps: int


@functools.lru_cache(maxsize=1024)
def pieces_of(
    granularity: Granularity,
    shape: tuple[int, ...],
    width: int,
    *,
    joins: bool = True,
    each: int = PER_THREAD,
) -> Pieces | str:
    """Pieces of a tensor with codes of ``width`` bits, or why none.

    joins: whether rows may be joined. each: pieces of a thread.
    """
    cols = shape[-1] if shape else 1
    grid, extents = granularity.grid(shape) or (1,), granularity.block_shape(shape) or (1,)
    mapping = row_mapping(shape[:-1], extents[:-1], grid[:-1])
    if mapping is None:
        return f"blocks of {granularity} in a tensor of shape {shape} span rows unevenly"
    rows, block, row_blocks = math.prod(shape[:-1]), min(extents[-1], max(cols, 1)), grid[-1]
    even, one = cols % PIECE == 0, math.prod(grid) == 1
    own = mapping[0] == 1 and mapping[1] >= rows
    in_order = own and cols % block == 0 and row_blocks > 1
    joined = joins and even and (one or in_order)
    if joined:
        block, row_blocks = (rows * cols if one else block), math.prod(grid)
        rows, cols, mapping = 1, rows * cols, (1, 1)
    pieces, warps = _size(-(-cols // PIECE), each)
    tile, tiles = pieces * PIECE, -(-cols // (pieces * PIECE))
    known = block if even and block >= PIECE and block & (block - 1) == 0 and tile % block == 0 else 0
    cut = PieceCut(cols, -(-cols * width // 8), tiles, block, row_blocks, *mapping)
    made = PieceShape(
        pieces=pieces,
        block=known,
        single=row_blocks == 1 or block % tile == 0,
        even=even,
        joined=joined,
        own=own or joined,
    )
    return Pieces(cut=cut, shape=made, programs=rows * tiles, warps=warps)


def covering_power(count: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << max(0, count - 1).bit_length()


def _size(count: int, each: int) -> tuple[int, int]:
    """Program's share of ``count``, a power of two, and warps; each: thread's."""
    size = min(32 * WARPS * each, max(32, covering_power(count)))
    return size, max(1, size // (32 * each))


class BlockShape(NamedTuple):
    """What the kernel of small blocks is compiled for.

    threads: of a program, counted over all turns. vectors: pieces of a thread. lanes: threads of a block.
    """

    threads: int
    vectors: int
    lanes: int


class SmallBlocks(NamedTuple):
    """A tensor in small blocks of ``cut`` pieces, and their programs."""

    cut: int
    shape: BlockShape
    programs: int
    warps: int


@functools.lru_cache(maxsize=1024)
def small_blocks_of(granularity: Granularity, shape: tuple[int, ...], width: int) -> SmallBlocks | None:
    """Small blocks of a tensor, or None: see :mod:`.programs.small_blocks`."""
    cols, block = (shape[-1], granularity.block_shape(shape)[-1]) if shape else (1, 1)
    alone = math.prod(granularity.block_shape(shape)) == block
    if not alone or cols % block or block & (block - 1) or not PIECE <= block <= LARGEST_BLOCK:
        return None
    vectors = min(4, PER_THREAD, block // PIECE) if width in (1, 2, 4) else 1
    pieces, lanes = math.prod(shape) // PIECE, block // PIECE // vectors
    threads, warps = _size(max(lanes, pieces // vectors), PER_THREAD // vectors)
    return SmallBlocks(
        cut=pieces,
        shape=BlockShape(threads=threads, vectors=vectors, lanes=lanes),
        programs=-(-pieces // (threads * vectors)),
        warps=warps,
    )
