"""Tile kernels: matrices, also transposed, in blocks that may span rows.

A program has a tile of rows and columns. It reads rows of memory, which of a transposed matrix are columns,
and finds what belongs to a block where it has read it; there threads have a few rows of memory that follow
each other. Then numbers change places among threads, before they are widened, so that codes of a row follow
each other. ``cut`` is a :class:`..tile_cuts.TileCut`, ``k`` the :class:`..specialization.Constants` of
compilation.

Values are float32, float16, bfloat16, or int16 bits of bfloat16; codes are packed bytes. For ``scales``,
``tables`` and ``coarse`` see :mod:`.held_scales`.
"""

import triton
import triton.language as tl

from ....ops.lowering import How
from .code_bytes import bytes_of, words_of
from .element_codes import bits_of, codes_of, float32, float_of, larger, largest, ratio_of, stored, usual
from .held_scales import chosen_scales, factors_of
from .pieces import faked, without_offsets
from .rounding_modes import noise_of
from .scale_choice import scales_of

_HALVINGS = tl.constexpr(12)
_AFFINE = tl.constexpr(int(How.AFFINE))


@triton.jit
def _place(cut, k: tl.constexpr):
    """Program's matrix, and first row and column of its tile, int64.

    Programs follow each other along the rows of memory.
    """
    tile = tl.program_id(0)
    if k.cut.transposed:
        rest, down = tile // cut.down, tile % cut.down
        batch, across = rest // cut.across, rest % cut.across
    else:
        rest, across = tile // cut.across, tile % cut.across
        batch, down = rest // cut.down, rest % cut.down
    return batch.to(tl.int64), down.to(tl.int64) * k.cut.rows, across.to(tl.int64) * k.cut.cols


@triton.jit
def _inside(row, col, cut, k: tl.constexpr):
    """Return which elements of :func:`_values` there are, (lines / near, near, elements)."""
    if k.cut.transposed:
        lines, elements = cut.cols - col, cut.rows - row
    else:
        lines, elements = cut.rows - row, cut.cols - col
    line = tl.arange(0, k.cut.lines // k.cut.near)[:, None] * k.cut.near + tl.arange(0, k.cut.near)[None, :]
    return (line < lines)[:, :, None] & (tl.arange(0, k.cut.elements) < elements)[None, None, :]


@triton.jit
def _values(x, batch, row, col, cut, k: tl.constexpr):
    """Load a tile in memory order, (lines / near, near, elements)."""
    line = tl.arange(0, k.cut.lines // k.cut.near)[:, None] * k.cut.near + tl.arange(0, k.cut.near)[None, :]
    start = x + batch * cut.batch
    if k.cut.transposed:
        start += col * cut.step + row
    else:
        start += row * cut.step + col
    places = start + (line.to(tl.int64) * cut.step)[:, :, None] + tl.arange(0, k.cut.elements)[None, None, :]
    elements: tl.constexpr = k.cut.elements
    if elements > 2:
        # Threads go along elements, then along the first axis, as if that followed in memory, too. The second
        # one is left, and each thread has all of it. Only the order of axes follows from the first number.
        places = tl.max_contiguous(places, [2, 1, elements])
    if k.cut.even:
        return tl.load(places)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return tl.load(places, mask=_inside(row, col, cut, k), other=0)


@triton.jit
def _in_rows(numbers, k: tl.constexpr):
    """Return numbers by lines and elements as those by rows and columns."""
    return tl.trans(numbers) if k.cut.transposed else numbers


@triton.jit
def _of_blocks(numbers, kind: tl.constexpr, k: tl.constexpr):
    """Reduce blocks, (blocks,): magnitude (``kind`` 0), least (1), greatest (2).

    Blocks are in the order of memory.
    """
    lines: tl.constexpr = k.cut.lines // k.cut.block_lines
    elements: tl.constexpr = k.cut.elements // k.cut.block_elements
    parts: tl.constexpr = k.cut.block_lines // k.cut.near
    found = _reduced(numbers, kind, k)
    found = tl.permute(tl.reshape(found, [lines, parts, k.cut.elements]), [0, 2, 1])
    for _ in tl.static_range(_HALVINGS):
        if found.shape[2] > 1:
            found = _halved(tl.reshape(found, [lines, k.cut.elements, found.shape[2] // 2, 2]), kind)
    return _reduced(tl.reshape(found, [lines * elements, k.cut.block_elements]), kind, k)


@triton.jit
def _halved(numbers, kind: tl.constexpr):
    """Return the largest, least or greatest numbers of pairs, the last axis.

    The pairs come into one thread, so that what follows has each number once. A reduction would leave it with
    all threads that had a part, and these would all choose the scale of its block.
    """
    a, b = tl.split(numbers)
    if kind == 0:
        return larger(a, b)
    elif kind == 1:  # noqa: RET505 (Triton compiles one of the three)
        return tl.minimum(a, b)
    else:
        return tl.maximum(a, b)


@triton.jit
def _reduced(numbers, kind: tl.constexpr, k: tl.constexpr):
    if kind == 0:
        return largest(numbers, k)
    elif kind == 1:  # noqa: RET505 (Triton compiles one of the three)
        return tl.min(numbers, axis=1)
    else:
        return tl.max(numbers, axis=1)


@triton.jit
def _by_runs(found, k: tl.constexpr):
    """Reorder a tile of :func:`_values` by rows, (runs, run) float32."""
    found = _in_rows(tl.reshape(found, [k.cut.lines, k.cut.elements]), k)
    return float32(tl.reshape(found, [k.cut.rows * k.cut.cols // k.cut.run, k.cut.run]))


@triton.jit
def _of_runs(numbers, k: tl.constexpr):
    """Block numbers of runs, (runs, 1), or elements if runs span blocks."""
    lines: tl.constexpr = k.cut.lines // k.cut.block_lines
    elements: tl.constexpr = k.cut.elements // k.cut.block_elements
    numbers = _in_rows(tl.reshape(numbers, [lines, elements]), k)[:, None, :, None]
    down: tl.constexpr = k.cut.rows // numbers.shape[0]
    across: tl.constexpr = k.cut.cols // numbers.shape[2]
    runs: tl.constexpr = k.cut.rows * k.cut.cols // k.cut.run
    if across >= k.cut.run:
        shape: tl.constexpr = [numbers.shape[0], down, numbers.shape[2], across // k.cut.run]
        return tl.reshape(tl.broadcast_to(numbers, shape), [runs, 1])
    else:  # noqa: RET505
        whole: tl.constexpr = [numbers.shape[0], down, numbers.shape[2], across]
        return tl.reshape(tl.broadcast_to(numbers, whole), [runs, k.cut.run])


@triton.jit
def _noise(seed, batch, row, col, cut, k: tl.constexpr):
    """Noise of a tile in row order, (runs, run)."""
    first = tl.arange(0, k.cut.rows * k.cut.cols // k.cut.run)[:, None] * k.cut.run
    down, across = row + first // k.cut.cols, col + first % k.cut.cols
    start = (batch * cut.rows + down) * cut.cols + across
    return noise_of(seed, start, tl.arange(0, k.cut.run)[None, :], k)


@triton.jit
def _block_places(batch, row, col, cut, k: tl.constexpr):
    """Block numbers of a tile's parts, (parts,) int64, and their mask."""
    lines: tl.constexpr = k.cut.lines // k.cut.block_lines
    elements: tl.constexpr = k.cut.elements // k.cut.block_elements
    line, element = tl.arange(0, lines) * k.cut.block_lines, tl.arange(0, elements) * k.cut.block_elements
    if k.cut.transposed:
        down, across = row + element[None, :], col + line[:, None]
        block_row, block_col = down // k.cut.block_elements, across // k.cut.block_lines
    else:
        down, across = row + line[:, None], col + element[None, :]
        block_row, block_col = down // k.cut.block_lines, across // k.cut.block_elements
    inside = (down < cut.rows) & (across < cut.cols)
    if not k.cut.exact:
        block_row, block_col = down // cut.block_rows, across // cut.block_cols
    # Of an axis that is one block, all parts are of block 0.
    block_row, block_col = tl.minimum(block_row, cut.grid_rows - 1), tl.minimum(block_col, cut.grid_cols - 1)
    place = (batch * cut.grid_rows + block_row) * cut.grid_cols + block_col
    return tl.reshape(place, [lines * elements]), tl.reshape(inside, [lines * elements])


@triton.jit
def _store(data, codes, batch, row, col, cut, k: tl.constexpr):
    """Pack the codes of a tile, (runs, run) int32, and write them."""
    width: tl.constexpr = k.width
    start = data + (batch * cut.rows + row) * cut.row_bytes + col * width // 8
    down = tl.arange(0, k.cut.rows)
    places = start + (down.to(tl.int64) * cut.row_bytes)[:, None]
    there, end = (down < cut.rows - row)[:, None], cut.row_bytes - col * width // 8
    pieces: tl.constexpr = k.cut.rows * k.cut.cols // 8
    if not k.cut.even and width < 8:
        codes = tl.reshape(codes, [k.cut.rows, k.cut.cols])
        codes = tl.where((tl.arange(0, k.cut.cols) < cut.cols - col)[None, :], codes, 0)
    if 8 % width == 0:
        whole: tl.constexpr = k.cut.cols * width // 8
        if width < 8:
            codes = bytes_of(tl.reshape(codes, [pieces, 8]), k)
        codes = tl.reshape(codes.to(tl.uint8), [k.cut.rows, whole])
        at = tl.arange(0, whole)[None, :]
        if k.cut.even:
            tl.store(places + at, codes)
        else:
            tl.store(places + at, codes, mask=there & (at < end))
    else:
        words = words_of(tl.reshape(codes, [pieces, 8]), k)
        words = tl.reshape(words, [k.cut.rows, k.cut.cols // 8])
        for byte in tl.static_range(width):
            at = tl.arange(0, k.cut.cols // 8)[None, :] * width + byte
            tl.store(places + at, (words >> (8 * byte)).to(tl.uint8), mask=there & (at < end))


@triton.jit
def _extremes(value, row, col, cut, k: tl.constexpr):
    """Largest magnitude, least and greatest number of block parts, (parts,).

    The last two are read where scales follow from both.
    """
    amax = _of_blocks(value, 0, k)
    if k.chosen and (k.rule.how == _AFFINE or k.rule.unsigned):
        there = _inside(row, col, cut, k)
        low = _of_blocks(tl.where(there, value, float("inf")), 1, k)
        high = _of_blocks(tl.where(there, value, float("-inf")), 2, k)
        return amax, low, high
    else:  # noqa: RET505
        return amax, amax, amax


@triton.jit
def _rank(number):
    """Int32 ordered like float32; its own inverse, but for the type."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def tile_extremes(x, found, least, most, cut, k: tl.constexpr):
    """Accumulate the extremes of blocks by atomic maxima.

    found: bits of the largest magnitude. least, most: ranks of the negated least and of the greatest value,
    where scales follow from both ends. All are (blocks,) int32.
    """
    batch, row, col = _place(cut, k)
    value = float32(_values(x, batch, row, col, cut, k))
    amax, low, high = _extremes(value, row, col, cut, k)
    place, inside = _block_places(batch, row, col, cut, k)
    tl.atomic_max(found + place, bits_of(amax).to(tl.int32), mask=inside, sem="relaxed")
    if k.rule.how == _AFFINE or k.rule.unsigned:
        tl.atomic_max(least + place, _rank(0.0 - low), mask=inside, sem="relaxed")
        tl.atomic_max(most + place, _rank(high), mask=inside, sem="relaxed")


@triton.jit
def block_scales(found, least, most, scales, zeros, coarse, notes, cut, k: tl.constexpr):
    """Write scales and zero points from :func:`tile_extremes`, and reset its results.

    ``cut`` is their number. notes: as for :func:`quantize_tiles`.
    """
    place = tl.program_id(0).to(tl.int64) * k.cut.threads + tl.arange(0, k.cut.threads)
    inside = place < cut
    amax = float_of(tl.load(found + place, mask=inside, other=0))
    low, high = amax, amax
    if k.rule.how == _AFFINE or k.rule.unsigned:
        low = 0.0 - _rank(tl.load(least + place, mask=inside, other=0)).to(tl.float32, bitcast=True)
        high = _rank(tl.load(most + place, mask=inside, other=0)).to(tl.float32, bitcast=True)
        tl.store(least + place, -0x80000000, mask=inside)
        tl.store(most + place, -0x80000000, mask=inside)
    scale, _, zero, fits = scales_of(amax, low, high, coarse, False, k)
    tl.store(found + place, 0, mask=inside)
    tl.store(scales + place, stored(scale, scales.dtype.element_ty), mask=inside)
    if k.element.zero_place:
        tl.store(zeros + place, stored(zero, zeros.dtype.element_ty), mask=inside)
    tl.store(notes + place * 0, 1, mask=inside & (((amax < float("inf")) & fits) == 0))


@triton.jit(do_not_specialize=["seed"])
def quantize_tiles(x, scales, tables, coarse, zeros, data, notes, seed, cut, k: tl.constexpr):
    """Write codes of ``x``, with chosen scales and zero points.

    notes: (1,) int32, set if a value is not finite or a scale does not fit its format.
    """
    batch, row, col = _place(cut, k)
    found = _values(x, batch, row, col, cut, k)
    place, inside = _block_places(batch, row, col, cut, k)
    value = _by_runs(found, k)
    if k.chosen:
        amax, low, high = _extremes(float32(found), row, col, cut, k)
        factor, inverse, rest, zero = chosen_scales(
            amax, low, high, coarse, scales, tables, zeros, notes, place, inside, k
        )
    else:
        factor, inverse, rest = factors_of(tl.load(scales + place), tables, coarse, k)
        zero = factor * 0.0
        if k.element.zero_place:
            zero = float32(tl.load(zeros + place))
        value = without_offsets(value, _of_runs(zero, k), k)
        amax = largest(value, k)
        tl.store(notes + tl.zeros_like(amax).to(tl.int32), 1, mask=(amax < float("inf")) == 0)
    plain = False
    if k.fused and k.chosen:  # magnitudes are of blocks
        plain = usual(amax[:, None], factor[:, None], k)
    factor, inverse, rest = _of_runs(factor, k), _of_runs(inverse, k), _of_runs(rest, k)
    if k.fused and not k.chosen:  # of runs
        plain = usual(amax[:, None], factor, k)
    if k.fused:
        if plain:
            ratio = ratio_of(value, factor, inverse, rest, True, k)
        else:
            ratio = ratio_of(value, factor, inverse, rest, False, k)
    else:
        ratio = ratio_of(value, factor, inverse, rest, False, k)
    codes = codes_of(ratio, _of_runs(zero, k), _noise(seed, batch, row, col, cut, k), False, k)
    _store(data, codes, batch, row, col, cut, k)


@triton.jit(do_not_specialize=["seed"])
def fake_quantize_tiles(x, scales, tables, coarse, zeros, values, out, seed, cut, k: tl.constexpr):
    """Write values of codes row by row; NaN: lowest integer or NaN."""
    batch, row, col = _place(cut, k)
    value = _by_runs(_values(x, batch, row, col, cut, k), k)
    place, _ = _block_places(batch, row, col, cut, k)
    place = _of_runs(place, k)
    zero = place.to(tl.float32) * 0.0
    if k.element.zero_place:
        zero = float32(tl.load(zeros + place))
    noise = _noise(seed, batch, row, col, cut, k)
    result = faked(value, tl.load(scales + place), tables, coarse, zero, noise, values, k)
    result = tl.reshape(stored(result, out.dtype.element_ty), [k.cut.rows, k.cut.cols])
    down, across = tl.arange(0, k.cut.rows), tl.arange(0, k.cut.cols)
    places = out + (batch * cut.rows + row) * cut.cols + col + (down.to(tl.int64) * cut.cols)[:, None]
    if k.cut.even:
        tl.store(places + across[None, :], result)
    else:
        inside = (down < cut.rows - row)[:, None] & (across < cut.cols - col)[None, :]
        tl.store(places + across[None, :], result, mask=inside)
