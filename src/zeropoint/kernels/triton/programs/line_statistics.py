"""One-read statistics: block extremes, bin counts, exact sums of magnitudes.

A tensor is lines of numbers, each of one block: a line is a run of neighbors, or ``across`` them, a column.
A program has ``many`` lines, of each ``turns`` tiles of ``size`` numbers. For ``cut`` and ``lines`` see
:mod:`..statistics_launch`. Programs meet in integers alone, by atomic maxima and sums, whose results no order
changes; there are some copies of these, so that few meet.
"""

import triton
import triton.language as tl

from .element_codes import float32, float_of

_LEAST = tl.constexpr(-(1 << 31))
_MAGNITUDE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_FRACTION, _LEADING = tl.constexpr(0x7FFFFF), tl.constexpr(1 << 23)
_LIMBS, _LIMB = tl.constexpr(10), tl.constexpr(0xFFFFFFFF)


@triton.jit
def _own_lines(cut, lines: tl.constexpr):
    """Program's line numbers, (many,) int64, which exist, and first tile."""
    group = tl.program_id(0) // cut.parts
    line = group.to(tl.int64) * lines.many + tl.arange(0, lines.many)
    return line, line < cut.lines, (tl.program_id(0) - group * cut.parts) * lines.turns


@triton.jit
def _copy(cut, lines: tl.constexpr):
    """Return which copy of results the program adds to."""
    return tl.program_id(0) % lines.copies


@triton.jit
def _bits(x, line, inside, tile, cut, lines: tl.constexpr):
    """Load a tile as float32 bits, (many, size) int32, with its mask."""
    place = tile.to(tl.int64) * lines.size + tl.arange(0, lines.size)
    there = inside[:, None] & (place < cut.length)[None, :]
    at = line[:, None] * cut.length + place[None, :]
    if lines.across:
        at = place[None, :] * cut.lines + line[:, None]
    return float32(tl.load(x + at, mask=there, other=0)).to(tl.int32, bitcast=True), there


@triton.jit
def _wider(high, low, bits, there):
    """Largest keys, ordered like numbers, and largest complements."""
    key = bits ^ ((bits >> 31) & _MAGNITUDE)
    high = tl.maximum(high, tl.where(there, key, _LEAST))
    return high, tl.maximum(low, tl.where(there, ~key, _LEAST))


@triton.jit
def _note_ends(ends, high, low, line, inside, cut, lines: tl.constexpr):
    """Raise the ends of blocks, (copies, 2, blocks) int32."""
    at = ends + _copy(cut, lines) * (2 * cut.blocks) + line % cut.blocks
    tl.atomic_max(at, tl.max(high, axis=1), mask=inside, sem="relaxed")
    tl.atomic_max(at + cut.blocks, tl.max(low, axis=1), mask=inside, sem="relaxed")


@triton.jit
def line_extremes(x, ends, cut, lines: tl.constexpr):
    """Raise ``ends`` to block keys and complements; NaN, Inf are outermost."""
    line, inside, first = _own_lines(cut, lines)
    high = tl.full([lines.many, lines.size], _LEAST, tl.int32)
    low = high
    for turn in range(lines.turns):
        bits, there = _bits(x, line, inside, first + turn, cut, lines)
        high, low = _wider(high, low, bits, there)
    _note_ends(ends, high, low, line, inside, cut, lines)


@triton.jit
def end_values(ends, out, blocks, copies: tl.constexpr, size: tl.constexpr):
    """Write extremes, (2, blocks) float64, from all copies' keys.

    Zeros are positive: which of them is found depends on the order of reading.
    """
    block = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = block < blocks
    for kind in tl.static_range(2):
        key = tl.full([size], _LEAST, tl.int32)
        for copy in range(copies):
            at = (copy * 2 + kind) * blocks + block
            key = tl.maximum(key, tl.load(ends + at, mask=inside, other=0))
        if kind == 1:
            key = ~key
        number = float_of(key ^ ((key >> 31) & _MAGNITUDE)).to(tl.float64) + 0.0
        tl.store(out + (1 - kind) * blocks + block, number, mask=inside)


@triton.jit
def line_bins(x, ends, counts, cut, lines: tl.constexpr, mantissa_bits: tl.constexpr):
    """Add finite numbers to ``counts`` by their first bits.

    They are (copies, blocks, 2 * bins).
    """
    bins: tl.constexpr = 255 << mantissa_bits
    line, inside, first = _own_lines(cut, lines)
    high = tl.full([lines.many, lines.size], _LEAST, tl.int32)
    low = high
    own = counts + (_copy(cut, lines) * cut.blocks + line % cut.blocks)[:, None] * (2 * bins)
    for turn in range(lines.turns):
        bits, there = _bits(x, line, inside, first + turn, cut, lines)
        high, low = _wider(high, low, bits, there)
        magnitude = bits & _MAGNITUDE
        place = (magnitude >> (23 - mantissa_bits)) + tl.where(bits < 0, bins, 0)
        one = tl.full([lines.many, lines.size], 1, counts.dtype.element_ty)
        tl.atomic_add(own + place, one, mask=there & (magnitude < _INFINITE), sem="relaxed")
    _note_ends(ends, high, low, line, inside, cut, lines)


@triton.jit
def _add_units(limbs, units, position, inside):
    """Add int64 units, (many,), of ``2**position`` to exact 32-bit limbs.

    Units are below 2**63.
    """
    shift, place = (position & 31).to(tl.int64), limbs + (position >> 5)
    low, high = (units & _LIMB) << shift, (units >> 32) << shift
    more = inside & (units > 0)
    tl.atomic_add(place, low & _LIMB, mask=more, sem="relaxed")
    tl.atomic_add(place + 1, (low >> 32) + (high & _LIMB), mask=more, sem="relaxed")
    tl.atomic_add(place + 2, high >> 32, mask=more & (high >> 32 > 0), sem="relaxed")


@triton.jit
def line_sums(x, ends, limbs, counts, cut, lines: tl.constexpr, reach: tl.constexpr):
    """Add finite magnitudes to exact ``limbs``, and to ``counts``.

    Limbs are (copies, blocks, 10) int64. Numbers of a tile whose exponents are at most ``reach`` below the
    largest are added as integers of 63 bits; where some are smaller, these follow in the same way.
    """
    line, inside, first = _own_lines(cut, lines)
    high = tl.full([lines.many, lines.size], _LEAST, tl.int32)
    low, finite = high, tl.full([lines.many, lines.size], 0, tl.int32)
    block = _copy(cut, lines) * cut.blocks + line % cut.blocks
    for turn in range(lines.turns):
        bits, there = _bits(x, line, inside, first + turn, cut, lines)
        high, low = _wider(high, low, bits, there)
        left = bits & _MAGNITUDE
        there &= left < _INFINITE
        finite += there.to(tl.int32)
        left = tl.where(there, left, 0)
        field = tl.maximum(left >> 23, 1)
        significand = (left & _FRACTION) + tl.where(left > _FRACTION, _LEADING, 0)
        top = tl.max(left, axis=1)
        while tl.max(top, axis=0) > 0:
            base = tl.maximum((top >> 23) - reach, 1)
            taken = field >= base[:, None]
            shift = tl.maximum(field - base[:, None], 0).to(tl.int64)
            units = tl.sum(tl.where(taken, significand, 0).to(tl.int64) << shift, axis=1)
            _add_units(limbs + block * _LIMBS, units, base - 1, inside)
            left = tl.where(taken, 0, left)
            significand = tl.where(taken, 0, significand)
            top = tl.max(left, axis=1)
    _note_ends(ends, high, low, line, inside, cut, lines)
    tl.atomic_add(counts + block, tl.sum(finite, axis=1).to(tl.int64), mask=inside, sem="relaxed")
