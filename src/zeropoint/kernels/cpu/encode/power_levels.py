"""Two levels of powers of two, as in shared microexponents: exponents of blocks and of their halves or so."""

from typing import Any, NamedTuple

import numpy as np

from ..machine.descriptor import (
    BAD_SCALE,
    BAD_VALUE,
    CODEBOOK,
    DIVIDE,
    INTEGER,
    NO_ROUNDING,
    OK,
    ZERO_NONE,
    unpack_element,
    unpack_layout,
)
from ..machine.emit import emit_packed
from ..machine.intrinsics import bits32, device, inlined, scratch, shl32
from ..machine.tile import FEW, FLOAT32, NOT_FINITE, TILE, block_amax, fetch_ahead, load, spread
from ..machine.vector import (
    HALF,
    WHOLE,
    above,
    any_lane,
    bits_of,
    floats_of,
    larger_bits,
    larger_signed,
    largest_lane,
    largest_signed_lane,
    load_lanes,
    low_octets,
    smaller_signed,
    store_lanes,
    values_of,
    words_of,
)
from .elements import encode
from .rows import PACKED
from .steps import bounded_words, finished, float_words

LEAST, MOST = -127, 127
"""Smallest and largest exponent of a level: 2 ** -127 is subnormal in float32, with the bits 0x400000."""
_ZERO, _ONE, _EIGHT = np.uint64(0), np.uint64(1), np.uint64(8)
_TINY, _UP = np.float32(2.0**-126), np.float32(2.0**64)
_LEAST_BITS, _INFINITE = np.uint32(0x00400000), np.uint32(0x7F800000)
_LARGEST = np.float32(np.finfo(np.float32).max)
_TWO_BIASES = np.uint32(254 << 23)
"""Bits of a power of two and of its reciprocal add up to this."""
ABSENT = np.int32(-(1 << 14))
"""The exponent of zero."""
ROOM = FEW + 32
"""Fine blocks of a row, and a step of them past its end."""


class Powers(NamedTuple):
    """What two levels of powers of two are computed with.

    sizes: (3,) uint64, fine blocks of a coarse one, and what is added to bits of magnitudes on each level.
    numbers: (6,) int32, the emax of elements, the least exponent of fine blocks, and the first and last
    exponents that each level holds. codes: (4,) uint8, on each level the code of the first exponent, and the
    step to the next. limits: float64, for each exponent of the coarse level the largest magnitude that the
    rules allow under the largest fine one. unit: (1,) float32, the step of integer codes.
    """

    sizes: Any
    numbers: Any
    codes: Any
    limits: Any
    unit: Any


@inlined
def _exponents(x: Any, addend: Any) -> Any:
    """Return exponents of magnitudes whose mantissas ``addend`` rounds up; see the rule's lowering."""
    small = above(floats_of(_TINY), x)
    one, up = bits_of(floats_of(np.float32(1))), bits_of(floats_of(_UP))
    bits = bits_of(x * values_of(one ^ ((one ^ up) & small))) + words_of(addend)
    found = (bits >> words_of(np.uint32(23))) - words_of(np.uint32(127)) - (words_of(np.uint32(64)) & small)
    absent = words_of(np.uint32(ABSENT))
    return absent ^ ((absent ^ found) & above(x, floats_of(np.float32(0))))


@inlined
def _powers(exponents: Any) -> Any:
    """Return ``2 ** exponent`` of exponents from LEAST to MOST; the bits of 2 ** LEAST are subnormal."""
    bits = (exponents + words_of(np.uint32(127))) << words_of(np.uint32(23))
    return values_of(larger_bits(bits, words_of(_LEAST_BITS)))


@inlined
def _least_exponents(x: Any, addend: Any, ends: Any) -> Any:
    """Return exponents of the scales that fine blocks ask for, at least the least one."""
    return larger_signed(_exponents(x, addend) - ends[0], ends[1])


@inlined
def _fine_levels(amax: Any, own: Any, at: Any, addend: Any, ends: Any, unit: Any, factors: Any) -> Any:
    """Write the divisors of 16 fine blocks; return how far their exponents are above the lowest."""
    outer = load_lanes(own, at)
    inner = _least_exponents(load_lanes(amax, at), addend, ends) - outer
    inner = larger_signed(smaller_signed(inner, ends[3]), ends[2])
    factor, infinite = _powers(inner) * _powers(outer), words_of(_INFINITE)
    nonzero = above(factor, floats_of(np.float32(0)))
    store_lanes(factors, at, values_of(infinite ^ ((infinite ^ bits_of(factor)) & nonzero)) * unit)
    return inner - ends[2]


@inlined
def _codes_of(first: Any, second: Any, code: Any, step: Any) -> Any:
    """Return the codes of 32 exponents, given how far they are above the first of their format."""
    step, code = words_of(np.uint32(step)), words_of(np.uint32(code))
    return low_octets(first * step + code, second * step + code)


@inlined
def _coarse_levels(largest: Any, at: Any, addends: Any, ends: Any, outers: Any, inners: Any) -> Any:
    """Write the exponents of 16 coarse blocks, and the largest of their fine ones.

    Returns how far the first are above the lowest, what they were before they were cut off, and the second.
    """
    x = load_lanes(largest, at)
    asked = _exponents(x, addends[1]) - ends[0]
    outer = larger_signed(smaller_signed(asked, ends[5]), ends[4])
    inner = _least_exponents(x, addends[0], ends) - outer
    store_lanes(outers, at, outer)
    store_lanes(inners, at, inner)
    return outer - ends[4], asked, inner


@device
def _beyond(largest: Any, outers: Any, inners: Any, count: Any, numbers: Any, limits: Any) -> Any:
    """Return whether a largest magnitude whose fine exponent is cut off is past what the rules allow."""
    past = False
    for c in range(count):
        limit = limits[np.uint64(np.int32(np.int32(outers[c]) - numbers[4]))]
        past |= np.int32(inners[c]) > numbers[3] and np.float64(largest[c]) > limit
    return past


@device
def power_levels(amax: Any, blocks: Any, powers: Any, fine: Any, coarse: Any, factors: Any) -> Any:
    """Write the codes of both levels of whole coarse blocks, and the divisor of each fine block.

    amax: float32, of ``blocks`` fine blocks, with room for a step, as ``factors`` has. Returns OK or
    BAD_SCALE.
    """
    per, numbers, codes, low = powers.sizes[0], powers.numbers, powers.codes, np.uint32(0x80000000)
    ends = (
        words_of(np.uint32(numbers[0])), words_of(np.uint32(numbers[1])), words_of(np.uint32(numbers[2])),
        words_of(np.uint32(numbers[3])), words_of(np.uint32(numbers[4])), words_of(np.uint32(numbers[5])),
    )  # fmt: skip
    addends, unit = (np.uint32(powers.sizes[1]), np.uint32(powers.sizes[2])), floats_of(powers.unit[0])
    largest, outers, own = scratch(ROOM, np.float32), scratch(ROOM, np.uint32), scratch(ROOM, np.uint32)
    octets, count, most, high = scratch(ROOM, np.uint8), blocks // per, words_of(low), words_of(low)
    block_amax(amax, _ZERO, blocks, per, FLOAT32, largest.view(np.uint32))
    for c in range(count, (count + WHOLE - _ONE) // WHOLE * WHOLE):
        largest[c] = np.float32(0)
    code, step = codes[2], codes[3]
    for c in range(_ZERO, count, WHOLE):
        first, asked, inner = _coarse_levels(largest, c, addends, ends, outers, own)
        most, high = larger_signed(most, asked), larger_signed(high, inner)
        second, asked, inner = _coarse_levels(largest, c + HALF, addends, ends, outers, own)
        most, high = larger_signed(most, asked), larger_signed(high, inner)
        store_lanes(octets, c, _codes_of(first, second, code, step))
    for c in range(count):
        coarse[c] = octets[c]
    past = np.int32(largest_signed_lane(most)) > numbers[5]
    if np.int32(largest_signed_lane(high)) > numbers[3]:
        past |= _beyond(largest, outers, own, count, numbers, powers.limits)
    spread(outers, blocks, per, own)
    code, step = codes[0], codes[1]
    for b in range(_ZERO, blocks, WHOLE):
        first = _fine_levels(amax, own, b, addends[0], ends, unit, factors)
        second = _fine_levels(amax, own, b + HALF, addends[0], ends, unit, factors)
        store_lanes(octets, b, _codes_of(first, second, code, step))
    for b in range(blocks):
        fine[b] = octets[b]
    return BAD_SCALE if past else OK


@device
def _reciprocals(factors: Any, count: Any, out: Any) -> Any:
    """Write the reciprocals of powers of two, which are exact; return whether all are normal or Inf.

    Gain that keeps it: a quotient takes three times as long as a product.
    """
    least, span = words_of(np.uint32(1 << 23)), np.uint32(252 << 23)
    worst, rest, all_bits = words_of(np.uint32(0)), words_of(np.uint32(0)), words_of(np.uint32(0xFFFFFFFF))
    for b in range(count, (count + HALF - _ONE) // HALF * HALF):
        factors[b] = np.float32(1)
    for b in range(_ZERO, count, HALF):
        x = load_lanes(factors, b)
        bits, finite = bits_of(x), above(x, floats_of(_LARGEST)) ^ all_bits
        worst = larger_bits(worst, (bits - least) & finite)
        rest = rest | (bits & finite & words_of(np.uint32(0x007FFFFF)))
        store_lanes(out, b, values_of((words_of(_TWO_BIASES) - bits) & finite))
    return largest_lane(worst) <= span and not any_lane(rest)


@device
def _encode_products(tile: Any, factors: Any, count: Any, element: Any, codes: Any) -> None:
    """Write the codes of ``tile[i] * factors[i]`` as bytes, whole steps."""
    without_mantissa = shl32(element.emin, element.mantissa) & np.uint32(1)
    for i in range(_ZERO, count, WHOLE):
        a = load_lanes(tile, i) * load_lanes(factors, i)
        b = load_lanes(tile, i + HALF) * load_lanes(factors, i + HALF)
        if element.kind == INTEGER:
            store_lanes(codes, i, low_octets(bounded_words(a, element), bounded_words(b, element)))
            continue
        a, b = float_words(a, element), float_words(b, element)
        if without_mantissa:
            a, b = a - words_of(np.uint32(1)), b - words_of(np.uint32(1))
        store_lanes(codes, i, finished(low_octets(a, b), element))


@device
def _encode_run(
    values: Any, count: Any, layout: Any, element: Any, order: Any, powers: Any, fine: Any, coarse: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Write both levels of ``count`` values and their codes; compiled once, whatever the source is."""
    amax, factors, inverse = scratch(ROOM, np.float32), scratch(ROOM, np.float32), scratch(ROOM, np.float32)
    own, none = scratch(FEW, np.float32), scratch(1, np.float32)
    codes, packed, blocks = scratch(TILE, np.uint8), scratch(PACKED, np.uint8), count // layout.block
    block_amax(values, _ZERO, count, layout.block, FLOAT32, amax.view(np.uint32))
    worst = np.uint32(0)
    for b in range(blocks):
        worst = max(worst, bits32(amax[b]))
    if worst >= NOT_FINITE:
        return BAD_VALUE
    state = power_levels(amax, blocks, powers, fine, coarse, factors)
    if state != OK or not len(out):
        return state
    known = element.kind != CODEBOOK and element.scaling == DIVIDE
    known = known and element.quotient == NO_ROUNDING and element.zero_place == ZERO_NONE
    inverted = known and _reciprocals(factors, blocks, inverse)
    spread(inverse if inverted else factors, count, layout.block, own)
    for i in range(_ZERO, count, np.uint64(TILE)):
        n, at = min(np.uint64(TILE), count - i), i * layout.bits // _EIGHT
        if inverted:
            _encode_products(values[i:], own[i:], n, element, codes)
        else:
            encode(values[i:], own[i:], none, n, element, order, codes)
        if layout.bits != _EIGHT:
            emit_packed(codes, n, layout.bits, packed, out, at)
        else:
            for j in range(n):
                out[at + j] = codes[j]
    return OK


@device
def power_level_rows(
    x: Any, desc: Any, order: Any, powers: Any, fine: Any, coarse: Any, out: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    """Write both levels of rows ``first`` to ``last``, a few at a time, and codes unless ``out`` is empty.

    desc: under given scales. Rows are whole coarse blocks, and have at most FEW values. Values are widened to
    float32 first, so that the rest is compiled for one dtype. Returns OK, BAD_VALUE or BAD_SCALE; after the
    latter two what was written means nothing.
    """
    layout, element = unpack_layout(desc), unpack_element(desc)
    values, coarse_block = scratch(FEW, np.float32), layout.block * powers.sizes[0]
    unit = coarse_block if coarse_block * layout.bits % _EIGHT == _ZERO else _EIGHT * coarse_block
    # Rows that end on bytes follow each other as the parts of one do.
    joined = layout.cols * layout.bits % _EIGHT == _ZERO and unit <= np.uint64(FEW)
    lines, run = _ONE, layout.cols
    if joined:
        lines, run = last - first, max(np.uint64(TILE) // unit, _ONE) * unit
    for r in range(first, last, lines):
        for done in range(_ZERO, layout.cols * lines, run):
            n, at = min(run, layout.cols * lines - done), r * layout.cols + done
            # What is written is fetched, too: stores that miss the cache take as long as the arithmetic.
            fetch_ahead(x, at + n, n)
            load(x, at, n, layout.kind, values)
            b, byte_at = at // layout.block, r * layout.row_bytes + done * layout.bits // _EIGHT
            if len(out):
                size = n * layout.bits // _EIGHT
                fetch_ahead(out, byte_at + size, size)
            fetch_ahead(fine, b + n // layout.block, n // layout.block)
            levels, target = (fine[b:], coarse[at // coarse_block :]), out[byte_at:] if len(out) else out
            state = _encode_run(values, n, layout, element, order, powers, *levels, target)
            if state != OK:
                return state
    return OK
