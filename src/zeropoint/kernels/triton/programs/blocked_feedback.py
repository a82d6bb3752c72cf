"""Triangular factors, error feedback and coordinate descent, float64, in blocks of columns.

Matrices are transposed: a line is a column of the weight or of the factored matrix, and a thread has one
number of it. The columns of a block are processed one after the other, each after those of its block that
come first; then their products are added to all other lines, tile by tile. Every sum takes its terms in the
order of columns, whatever the blocks are. Kernels are launched with ``enable_fp_fusion=False``: a product is
rounded before it is added. A product with ``-1.0`` is a negation, which ``-x`` is not for zero.
"""

import triton
import triton.language as tl

from ..block_steps import FEED, SOLVE

_FEED, _SOLVE = tl.constexpr(int(FEED)), tl.constexpr(int(SOLVE))
# 1.5 * 2**52: added to a float64 and subtracted again, it rounds to an integer, half to even; -0 becomes 0.
_MAGIC = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def add_lines(target, left, right, tiles, sizes, TILE: tl.constexpr):
    """Add products of ``steps`` line pairs, in order: ``target_ij += left_ki right_kj``.

    target: lines of ``target_pitch`` numbers, of which (height, width) change. left, right: (steps, height)
    and (steps, width), lines of ``left_pitch`` and ``right_pitch``. tiles: row and column of tiles, int32, a
    pair for each program.
    """
    i = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    high, wide = i < sizes.height, j < sizes.width
    place = target + (i[:, None] * sizes.target_pitch + j[None, :])
    there = high[:, None] & wide[None, :]
    total = tl.load(place, mask=there, other=0.0)
    for _ in range(sizes.steps):
        a, b = tl.load(left + i, mask=high, other=0.0), tl.load(right + j, mask=wide, other=0.0)
        total += a[:, None] * b[None, :]
        left += sizes.left_pitch
        right += sizes.right_pitch
    tl.store(place, total, mask=there)


@triton.jit
def eliminate_block(h, d, failed, scratch, sizes, CORNER: tl.constexpr, LANES: tl.constexpr):
    """Eliminate columns ``begin`` to ``end`` from the last, in some rows.

    h: (size, size), transposed, of which lines become lines of m; a pivot remains on the diagonal. d: pivots,
    (size,). failed: (1,) int32, the first column whose pivot is not above 0, or -1. scratch: ``minus``, -m,
    and ``kept``, the numbers before their division, (steps, size), the last column first. CORNER: the rows
    are the block's; otherwise they are above it, and the corner is done.
    """
    size = tl.cast(sizes.size, tl.int64)
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    top = sizes.begin
    if CORNER:
        i += sizes.begin
        top = sizes.end
    there, lost = i < top, tl.load(failed)
    for step in range(sizes.end - sizes.begin):
        k = sizes.end - 1 - step
        value = tl.load(h + (k * size + i), mask=there, other=0.0)
        for done in range(step):
            share = tl.load(scratch.minus + (done * size + i), mask=there, other=0.0)
            value += share * tl.load(scratch.kept + (done * size + k))
        tl.store(scratch.kept + (step * size + i), value, mask=there)
        if CORNER:
            tl.debug_barrier()
        pivot = tl.load(scratch.kept + (step * size + k))
        share = value / pivot
        tl.store(scratch.minus + (step * size + i), share * -1.0, mask=there)
        if CORNER:
            tl.store(h + (k * size + i), tl.where(i == k, pivot, share), mask=there)
            tl.store(d + k, pivot)
            lost = tl.maximum(lost, tl.where(pivot > 0.0, -1, k))
        else:
            tl.store(h + (k * size + i), share, mask=there)
    if CORNER:
        tl.store(failed, lost)


@triton.jit
def _level(u, grid, k: tl.constexpr):
    """Return the levels nearest to numbers."""
    if k.consecutive:
        low, high = tl.load(grid.levels), tl.load(grid.levels + grid.last)
        return (tl.minimum(tl.maximum(u, low), high) + _MAGIC) - _MAGIC
    else:  # noqa: RET505 (Triton compiles one of the two)
        # The count of bounds below a number, by halves.
        halvings: tl.constexpr = k.halvings
        found = tl.zeros_like(u).to(tl.int32)
        for halving in tl.static_range(halvings):
            tried = found + (1 << (halvings - 1 - halving))
            bound = tl.load(grid.bounds + (tried - 1), mask=tried <= grid.last, other=float("inf"))
            found = tl.where(u > bound, tried, found)
        return tl.load(grid.levels + found)


@triton.jit
def _nearest(t, block, there, grid, k: tl.constexpr):
    """Nearest grid values of numbers; block: place of their scales."""
    scale = tl.load(grid.scales + block, mask=there, other=1.0)
    offset = tl.load(grid.offsets + block, mask=there, other=0.0)
    zero = tl.load(grid.zeros + block, mask=there, other=0.0)
    level = _level(tl.where(scale == 0.0, 0.0, (t - offset) / scale) + zero, grid, k)
    steps = level - zero
    if k.narrow:
        product = steps.to(tl.float32) * scale.to(tl.float32)
        value = (product + offset.to(tl.float32)).to(tl.float64)
    else:
        value = steps * scale + offset
    return value


@triton.jit
def process_block(lines, m, d, grid, sizes, k: tl.constexpr):
    """Process columns ``begin`` to ``end`` of rows; write errors for others.

    lines: ``weight``, ``numbers``, ``found``, (columns, rows); ``errors``, (steps, rows); ``losses``,
    (rows,). m: (columns, columns). d: pivots, or the diagonal of m. k: see :class:`..block_steps.BlockStep`.

    FEED: values are nearest to ``numbers``, errors are counted from ``weight``. SOLVE: values are the
    numbers. DESCEND: values move by what ``numbers``, the products of errors, have of the diagonal.
    """
    rows, columns = tl.cast(sizes.rows, tl.int64), tl.cast(sizes.columns, tl.int64)
    row = tl.program_id(0).to(tl.int64) * k.lanes + tl.arange(0, k.lanes)
    there = row < sizes.rows
    loss = tl.load(lines.losses + row, mask=there, other=0.0)
    for j in range(sizes.begin, sizes.end):
        at = j * rows + row
        t = tl.load(lines.numbers + at, mask=there, other=0.0)
        for before in range(sizes.begin, j):
            error = tl.load(lines.errors + ((before - sizes.begin) * rows + row), mask=there, other=0.0)
            t += error * tl.load(m + (before * columns + j))
        if k.kind == _SOLVE:
            value = t
            error = t * -1.0
        else:
            block = tl.load(grid.block_of + j) * rows + row
            if k.kind == _FEED:
                value = _nearest(t, block, there, grid, k)
                missed = t - value
                loss += missed * missed * tl.load(d + j)
                error = tl.load(lines.weight + at, mask=there, other=0.0) - value
            else:
                old = tl.load(lines.found + at, mask=there, other=0.0)
                value = _nearest(old + t / tl.load(d + j), block, there, grid, k)
                error = old - value
        tl.store(lines.found + at, value, mask=there)
        tl.store(lines.errors + ((j - sizes.begin) * rows + row), error, mask=there)
    if k.kind == _FEED:
        tl.store(lines.losses + row, loss, mask=there)
