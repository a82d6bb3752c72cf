"""Base-3 digits in codes of five and in bytes of ggml.

Blocks of 256 digits take vectors of bytes and of 16-bit numbers, whose shuffles stay within 16 bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from . import intrinsics as m
from . import vector as v
from .compilers import x86_has
from .reductions import any_below

FEW = np.uint64(4)
"""Length of the run with four digits a byte, in bytes. Other runs have five digits a byte."""
FIVE = np.uint64(5)
"""Digits of a code, of base 3."""
DIGITS: Any = np.array(
    [sum(code // 3 ** (4 - n) % 3 << 8 * n for n in range(5)) for code in range(256)], np.uint64
)
"""The digits of each code as bytes, the highest one first."""
VALUED_DIGITS: Any = np.where(np.arange(256) < 243, DIGITS, np.uint64(0x0303030303))
"""Likewise, with digits of 3 for unused codes, whose values are zeros."""
_LARGEST = np.uint8(242)
_PLACES = np.uint64(81 << 32 | 27 << 24 | 9 << 16 | 3 << 8 | 1)
"""Powers of 3 as bytes: byte 4 of the product with five digits is their number."""
_SUPER = 256
"""Digits of a block that has vectors: 52 codes, the last one of a single digit."""
_BLOCK, _SECOND = np.uint64(_SUPER), np.uint64(20)
"""Such a block, and the first of its last 32 codes."""
_PART = 3507
"""Fixed-point ``13 / 243``, 16 bits: ``ceil(n * 256 / 243) == n + (n * _PART >> 16) + 1``, 1 <= n <= 242."""
_EIGHT, _OCTET, _WORDS = ir.VectorType(m.I8, 8), ir.VectorType(m.I8, 16), ir.VectorType(m.I16, 16)
_START = m.I64(0)
_Body = Callable[[Any, Any, Any, Any], None]
_LINE, _PAIRS = ir.VectorType(m.I8, m.LINE), ir.VectorType(m.I16, m.LINE // 2)
FRACTIONS = [-(-(3**k << 16) // 243) * pow(257, -1, 1 << 16) % (1 << 16) for k in range(5)]
"""Factors that turn a code, repeated in both bytes of a word, into the 16-bit fraction of digit k.

Three times the fraction has the digit above its 16 bits. A factor is :math:`3^k 65536 / 243`, rounded up,
times the inverse of 257. Codes are below 243."""


def _lanes(builder: Any, value: Any, lanes: Any) -> Any:
    return builder.shuffle_vector(value, value, v.indices(list(lanes)))


def _tripled(builder: Any, value: Any) -> Any:
    return builder.add(builder.add(value, value), value)


def _high(builder: Any, words: Any, factor: int) -> Any:
    """High halves of products of words: fractions, which LLVM does not widen."""
    count = words.type.count
    return m.call(
        builder, words.type, f"llvm.umul.fix.v{count}i16", words, words.type([factor] * count), m.I32(16)
    )


def _packed(builder: Any, first: Any, second: Any) -> Any:
    """Low bytes of two vectors of words, eight of each in turn."""
    octets = ir.VectorType(m.I8, 2 * first.type.count)
    eights = [16 * n + octets.count * part for n in range(octets.count // 16) for part in (0, 1)]
    lanes = [begin + 2 * n for begin in eights for n in range(8)]
    return builder.shuffle_vector(*(builder.bitcast(x, octets) for x in (first, second)), v.indices(lanes))


def _split(count: int) -> _Body:
    octets, pairs = ir.VectorType(m.I8, count), ir.VectorType(m.I16, count // 2)

    def body(builder: Any, source: Any, target: Any, run: Any) -> None:
        # Less half of their range, bytes are compared as signed numbers, and three times as much is so again.
        value = builder.xor(m.load_from(builder, source, _START, octets), octets([0x80] * count))
        for n in range(5):
            digit = octets([0] * count)
            for bound in (85 - 128, 170 - 128):
                beyond = builder.icmp_signed(">", value, octets([bound] * count))
                digit = builder.add(digit, builder.zext(beyond, octets))
            m.store_at(builder, digit, target, _START)
            target = builder.gep(target, [run])
            if n == 2:
                # Doubled as pairs, lest LLVM multiply by 27, for which bytes have no instruction.
                double = builder.shl(builder.bitcast(value, pairs), pairs([1] * pairs.count))
                double = builder.bitcast(builder.and_(double, pairs([0xFEFE] * pairs.count)), octets)
                value = builder.add(double, value)
            else:
                value = _tripled(builder, value)

    return body


def _split_few(builder: Any, source: Any, target: Any, run: Any) -> None:
    bytes_ = v.in_all_lanes(builder, m.load_from(builder, source, _START, m.I32), ir.VectorType(m.I32, 4))
    value = builder.zext(builder.bitcast(bytes_, _OCTET), _WORDS)
    digits = _high(builder, builder.mul(value, _WORDS([3 ** (n // 4) << 8 for n in range(16)])), 3)
    m.store_at(
        builder, _packed(builder, *(_lanes(builder, digits, range(n, n + 8)) for n in (0, 8))), target, _START
    )


def _stored_byte(builder: Any, number: Any) -> Any:
    """Bytes of numbers of five digits; see ``Digits`` in layout/bit_places.py."""
    pairs = ir.VectorType(m.I16, number.type.count // 2)
    low, high = pairs([0x00FF] * pairs.count), pairs([0xFF00] * pairs.count)
    even, odd = (
        _high(builder, builder.and_(builder.bitcast(number, pairs), mask), _PART) for mask in (low, high)
    )
    part = builder.bitcast(builder.or_(even, builder.and_(odd, high)), number.type)
    some = builder.icmp_unsigned("!=", number, number.type([0] * number.type.count))
    return builder.add(builder.add(number, part), builder.zext(some, number.type))


def _join(count: int) -> _Body:
    octets = ir.VectorType(m.I8, count)

    def body(builder: Any, source: Any, target: Any, run: Any) -> None:
        number = m.load_from(builder, source, _START, octets)
        for _ in range(4):
            source = builder.gep(source, [run])
            number = builder.add(_tripled(builder, number), m.load_from(builder, source, _START, octets))
        m.store_at(builder, _stored_byte(builder, number), target, _START)

    return body


def _join_few(builder: Any, source: Any, target: Any, run: Any) -> None:
    value = builder.zext(m.load_from(builder, source, _START, _OCTET), _WORDS)
    value = builder.mul(value, _WORDS([3 ** (4 - n // 4) for n in range(16)]))
    for half in (8, 4):
        value = builder.add(*(_lanes(builder, value, range(n, n + half)) for n in (0, half)))
    m.store_at(builder, _stored_byte(builder, builder.trunc(value, ir.VectorType(m.I8, 4))), target, _START)


def _moved(body: _Body) -> Any:
    """Build the move of the digits of a run of all blocks.

    Places are an array, the first byte, and the distance of blocks.
    """

    @m.instruction(types.void, m.ANY, m.ANY, m.INDEX, m.INDEX)
    def move(builder: Any, source: Any, target: Any, run: Any, blocks: Any) -> None:
        with m.tools.for_range(builder, blocks) as loop:
            here, there = (
                m.address(builder, array, builder.add(begin, builder.mul(loop.index, pitch)))
                for array, begin, pitch in (source, target)
            )
            body(builder, here, there, run)

    return move


_split32, _split16, _split4 = _moved(_split(32)), _moved(_split(16)), _moved(_split_few)
_join32, _join16, _join4 = _moved(_join(32)), _moved(_join(16)), _moved(_join_few)


def _of_runs(by_32: Any, by_16: Any, by_few: Any) -> Any:
    """Build the move of digits of a run of bytes.

    source, target: an array, the first byte, and the distance of blocks, of which each has a run.
    """

    @m.device
    def move(source: Any, target: Any, run: Any, blocks: Any) -> None:
        (array, begin, pitch), (other, at, step) = source, target
        whole = run // v.WHOLE * v.WHOLE
        for j in range(np.uint64(0), whole, v.WHOLE):
            by_32((array, begin + j, pitch), (other, at + j, step), run, blocks)
        if run == FEW:
            by_few(source, target, run, blocks)
        elif whole < run:
            by_16((array, begin + whole, pitch), (other, at + whole, step), run, blocks)

    return move


join_digits = _of_runs(_join32, _join16, _join4)
"""Write bytes of digits. Gain that keeps vectors of bytes, with :func:`load_digits`: twice the speed."""
split_digits = _of_runs(_split32, _split16, _split4)
"""Write the digits of bytes. Gain that keeps vectors, with :func:`emit_digits`: 2.3 times the speed."""


@m.instruction(types.void, m.ANY, m.INDEX, m.ANY, m.INDEX)
def _spread_codes(builder: Any, source: Any, at: Any, target: Any, to: Any) -> None:
    """Write the 256 digits of 52 used codes."""
    codes, digits = m.address(builder, source, at), m.address(builder, target, to)
    for start in range(0, _SUPER, v.STEP):
        eight = m.load_from(builder, codes, m.I64(start // 5), _EIGHT)
        parts = []
        for first in (start, start + 8):
            places = [*range(first, first + 8), *range(first + 16, first + 24)]
            both = (place // 5 - start // 5 for place in places for _ in range(2))
            word = builder.bitcast(_lanes(builder, eight, both), _WORDS)
            fraction = builder.mul(word, _WORDS([FRACTIONS[place % 5] for place in places]))
            parts.append(_high(builder, fraction, 3))
        m.store_at(builder, _packed(builder, *parts), digits, m.I64(start))


@m.instruction(v.OCTETS, m.ANY, m.INDEX)
def _load_fives(builder: Any, source: Any, at: Any) -> Any:
    """Load 32 codes of five digits each.

    Of each 16 codes, digits k lie at 16 different places of five rows of 16 bytes.
    """
    digits, both = m.address(builder, source, at), v.indices(list(range(v.STEP)))
    parts = [m.load_from(builder, digits, m.I64(n), _OCTET) for n in range(0, 160, 16)]
    rows = [builder.shuffle_vector(*pair, both) for pair in zip(parts[:5], parts[5:], strict=True)]
    total = v.OCTETS.lanes([0] * v.STEP)
    for k in range(5):
        places = range(k, 80, 5)
        row_of, mixed = {place % 16: place // 16 for place in places}, rows[0]
        for n in range(1, 5):
            lanes = [lane + v.STEP * (row_of[lane % 16] == n) for lane in range(v.STEP)]
            mixed = builder.shuffle_vector(mixed, rows[n], v.indices(lanes))
        digit = _lanes(builder, mixed, (half + place % 16 for half in (0, 16) for place in places))
        total = builder.add(_tripled(builder, total), digit)
    return total


@m.device
def load_digits(table: Any, data: Any, at: Any, blocks: Any, block: Any, numbers: Any) -> None:
    """Write the digits of codes of five.

    Blocks end with their digits. table: the digits of each code, read for unused ones and other blocks.
    """
    codes, largest = (block + FIVE - np.uint64(1)) // FIVE, v.octets_of(np.uint8(0))
    if block == _BLOCK:
        for b in range(blocks):
            source = at + b * codes
            largest = v.larger_bits(largest, v.load_lanes(data, source))
            largest = v.larger_bits(largest, v.load_lanes(data, source + _SECOND))
    used = block == _BLOCK and not any_below(v.octets_of(_LARGEST), largest)
    for b in range(blocks):
        source, target = at + b * codes, b * block
        if used:
            _spread_codes(data, source, numbers, target)
        else:
            for i in range(codes):
                m.store64(numbers, target + i * FIVE, table[data[source + i]])


@m.device
def emit_digits(numbers: Any, blocks: Any, block: Any, missing: Any, target: Any, at: Any) -> None:
    """Write codes of five digits, highest first; missing: fills a block's last.

    No partial sum of five products reaches a byte's end. Up to 7 bytes behind the last digit are read.
    """
    whole, rest, high = block // FIVE, block % FIVE, np.uint64(32)
    codes = (block + FIVE - np.uint64(1)) // FIVE
    mask = (np.uint64(1) << (rest * np.uint64(8))) - np.uint64(1)
    fill = missing * np.uint64(0x0101010101) & ~mask
    for b in range(blocks):
        place, own = at + b * codes, b * block
        if block == _BLOCK:
            v.store_lanes(target, place, _load_fives(numbers, own))
            v.store_lanes(target, place + _SECOND, _load_fives(numbers, own + _SECOND * FIVE))
        else:
            for i in range(whole):
                target[place + i] = np.uint8(m.load64(numbers, own + i * FIVE) * _PLACES >> high)
        if rest > np.uint64(0):
            last = m.load64(numbers, own + whole * FIVE) & mask | fill
            target[place + whole] = np.uint8(last * _PLACES >> high)


TABLES = 2 * int(FIVE) * 2 * m.LINE
"""Bytes of the tables of digits."""
DIGIT = np.uint64(86)
"""Bytes whose first digit is 1; twice as much for 2."""


@m.instruction(types.boolean)
def permutes_lines(builder: Any) -> Any:
    """Whether the processor permutes 64 bytes, at compile time."""
    return ir.Constant(m.I1, int(x86_has("avx512vbmi")))


def _regrouper(*, joins: bool) -> Any:
    """Build the move of digits between codes and bytes of blocks."""

    def digits(builder: Any, line: Any, tables: Any) -> Any:
        """Look up fractions as words and take their thirds."""
        both = []
        for (places, factors), third in zip(tables, (3, 3 << 8), strict=True):
            word = m.call(builder, _LINE, "llvm.x86.avx512.permvar.qi.512", line, places)
            fraction = builder.mul(builder.bitcast(word, _PAIRS), factors)
            thirds = _PAIRS([third] * _PAIRS.count)
            both.append(m.call(builder, _PAIRS, "llvm.x86.avx512.pmulhu.w.512", fraction, thirds))
        odd = builder.and_(both[1], _PAIRS([0xFF00] * _PAIRS.count))
        return builder.bitcast(builder.or_(both[0], odd), _LINE)

    def move(builder: Any, line: Any, tables: list[Any]) -> Any:
        if joins:
            # A code of 243 and more has the digits of what it is above 243.
            less = builder.add(line, _LINE([256 - 243] * m.LINE))
            line = builder.select(builder.icmp_unsigned("<", less, line), less, line)
        total = digits(builder, line, tables[:2])
        for n in range(2, len(tables), 2):
            total = builder.add(_tripled(builder, total), digits(builder, line, tables[n : n + 2]))
        return _stored_byte(builder, total) if joins else total

    @m.instruction(types.void, m.ANY, m.ANY, m.ANY, m.INDEX, m.INDEX)
    def regroup(builder: Any, source: Any, target: Any, tables: Any, filler: Any, blocks: Any) -> None:
        """Regroup the digits of blocks, each of which a vector holds.

        source, target: an array, the first byte, the distance of blocks, and bits of the bytes to read or to
        write. tables: for each digit, of bytes at even places and of others, where it comes from, twice, and
        the factor that makes a fraction of both bytes. filler: for bytes that are not read.

        Gain that keeps it: 1.4 times the speed of the moves of vectors of bytes to join, 1.9 to split.
        """
        (origin, begin, pitch, held), (into, at, step, kept) = source, target
        read, written = (builder.bitcast(bits, ir.VectorType(m.I1, m.LINE)) for bits in (held, kept))
        others = v.in_all_lanes(builder, builder.trunc(filler, m.I8), _LINE)
        pairs = [
            (
                m.load_from(builder, tables, m.I64(n), _LINE),
                m.load_from(builder, tables, m.I64(n + m.LINE), _PAIRS),
            )
            for n in range(0, TABLES, 2 * m.LINE)
        ]
        with m.tools.for_range(builder, blocks) as loop:
            here = builder.add(begin, builder.mul(loop.index, pitch))
            there = builder.add(at, builder.mul(loop.index, step))
            here, there = (
                m.address(builder, array, place, _LINE) for array, place in ((origin, here), (into, there))
            )
            line = m.call(builder, _LINE, "llvm.masked.load.v64i8.p0", here, m.I32(1), read, others)
            line = move(builder, line, pairs)
            m.call(builder, ir.VoidType(), "llvm.masked.store.v64i8.p0", line, there, m.I32(1), written)

    return regroup


codes_to_bytes, bytes_to_codes = _regrouper(joins=True), _regrouper(joins=False)
