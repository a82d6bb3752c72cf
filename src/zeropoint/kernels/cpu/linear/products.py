"""Integer products in LLVM IR: input rows by weight rows, 32-bit sums.

All run along k in memory, so a weight is used as it is kept. The dtype of the input's codes says which:

int8      Where the processor adds the products of four neighbors to a sum (VNNI, ``vpdpbusd``), 64 to a step.
          It wants factors without sign on one side, so weights are taken as 128 more than they are, and sums
          begin with what that adds, below zero.
int16     Anywhere, 16 to a step: codes of the input less their zero point, by codes of the weight, widened.
          Products of neighbors are added in pairs into 8 lanes, for which x86-64 has one instruction
          (``vpmaddwd``). The one for 8-bit factors (``vpmaddubsw``) is not used: it adds its pairs in 16
          bits, where two products of 255 by 127 do not fit.
float32   An input that is not quantized: codes of the weight are made floats, and sums are rounded.

What x86-64 has an instruction for is said in portable IR elsewhere. Every sum of integers is exact as long as
it fits 32 bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from ..machine import intrinsics as m
from ..machine.compilers import x86_has
from ..machine.vector import in_all_lanes

HIGH = 4
"""Rows of the input of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileKind:
    """What a tile is made of.

    lanes: products of a step, of one row with one row. wide: rows of the weight. sums: lanes of a sum. LLVM
    unrolls the loop over steps, and then more sums do not fit registers.
    rows: of the input that are quantized at once. chunk: bytes of weight that all of these pass over before
    the next; both together fit the second cache.
    """

    lanes: int
    wide: int
    sums: int
    rows: int
    chunk: int


QUADS = TileKind(lanes=64, wide=4, sums=16, rows=256, chunk=1 << 18)
PAIRS = TileKind(lanes=16, wide=2, sums=8, rows=64, chunk=1 << 16)
_KINDS = {m.I8: QUADS, m.I16: PAIRS, m.F32: PAIRS}
SHIFT = 128
"""What 8-bit codes are moved by, from those with a sign to those without, or back."""


def adds_quads() -> bool:
    """Return whether that processor adds the products of four neighbors."""
    return x86_has("avx512vnni")


def shuffled(builder: Any, u: Any, v: Any, lanes: list[int]) -> Any:
    """Shuffle two vectors by lane numbers; the second's follow the first's."""
    return builder.shuffle_vector(u, v, ir.Constant(ir.VectorType(m.I32, len(lanes)), lanes))


def zeroed(builder: Any, kind: Any, count: int) -> list[Any]:
    """Return ``count`` variables for vectors, zero; LLVM keeps them in registers."""
    made = [m.tools.alloca_once(builder, kind) for _ in range(count)]
    for variable in made:
        builder.store(ir.Constant(kind, [0] * kind.count), variable)
    return made


def neighbor_sums(builder: Any, a: Any, b: Any) -> Any:
    """Add neighbors' products, 16 int16 each: 8 int32.

    In 32 bits.
    """
    if x86_has("avx2"):
        return m.call(builder, ir.VectorType(m.I32, a.type.count // 2), "llvm.x86.avx2.pmadd.wd", a, b)
    wide = ir.VectorType(m.I32, a.type.count)
    return _neighbors_added(builder, builder.mul(builder.sext(a, wide), builder.sext(b, wide)), 2)


def _neighbors_added(builder: Any, products: Any, count: int) -> Any:
    """Return the sums of each ``count`` neighbors of a vector."""
    every = range(0, products.type.count, count)
    parts = [shuffled(builder, products, products, [k + n for k in every]) for n in range(count)]
    return functools.reduce(builder.add, parts)


def add_quads(builder: Any, total: Any, positive: Any, signed: Any) -> Any:
    """Add products of 64 uint8 by 64 int8 to 16 int32."""
    if adds_quads():
        codes = (builder.bitcast(v, total.type) for v in (positive, signed))
        return m.call(builder, total.type, "llvm.x86.avx512.vpdpbusd.512", total, *codes)
    wide = ir.VectorType(m.I32, positive.type.count)
    products = builder.mul(builder.zext(positive, wide), builder.sext(signed, wide))
    return builder.add(total, _neighbors_added(builder, products, 4))


def add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Add ``a * b`` to floats, fused where the processor does that."""
    if not x86_has("fma"):
        return builder.fadd(total, builder.fmul(a, b))
    return m.call(builder, total.type, f"llvm.fma.v{total.type.count}f32", a, b, total)


def sums_of_lanes(builder: Any, add: Any, four: list[Any]) -> Any:
    """Return the sums of the lanes of four vectors as one vector."""

    def paired(u: Any, v: Any) -> Any:
        # As x86-64 adds horizontally: neighbors of both vectors, in halves of 128 bits.
        count = u.type.count
        even = [lane + own for half in range(0, count, 4) for own in (0, count) for lane in (half, half + 2)]
        return add(shuffled(builder, u, v, even), shuffled(builder, u, v, [lane + 1 for lane in even]))

    both = paired(paired(*four[:2]), paired(*four[2:]))
    while both.type.count > 4:
        half = both.type.count // 2
        low, high = list(range(half)), list(range(half, 2 * half))
        both = add(shuffled(builder, both, both, low), shuffled(builder, both, both, high))
    return both


class _Tile:
    """IR writer of a tile; arguments are the instructions'."""

    def __init__(self, builder: Any, codes: Any, weight: Any, steps: Any, starts: Any, out: Any) -> None:
        self.builder, self._steps, self._out = builder, steps, out
        lane, self.high = codes[0].type.pointee, len(codes[1])
        self.kind, self.floats = _KINDS[lane], lane == m.F32
        self.results = ir.VectorType(m.F32, self.kind.sums)
        self._sums = self.results if self.floats else ir.VectorType(m.I32, self.kind.sums)
        self._codes, self._weights = self._places(codes, lane), self._places(weight, m.I8)
        self._starts = self._places(starts, m.I32)

    def _places(self, operand: Any, lane: Any) -> list[Any]:
        array, indices = operand
        return [m.address(self.builder, array, index, lane) for index in indices]

    def variables(self, kind: Any) -> list[list[Any]]:
        """Return variables for a vector a pair of rows, zero."""
        return [zeroed(self.builder, kind, self.kind.wide) for _ in range(self.high)]

    def add_group(self, group: Any) -> list[list[Any]]:
        """Variables with each row's sums of products of a group."""
        builder, totals = self.builder, self.variables(self._sums)
        for row, place in zip(totals, self._starts, strict=True):
            begin = ir.Constant(self._sums, [0] * self.kind.sums)
            if self.kind is QUADS:
                begin = m.load_from(builder, place, builder.mul(group, m.I64(self.kind.sums)), self._sums)
            for total in row:
                builder.store(begin, total)
        start = builder.mul(group, builder.mul(self._steps, m.I64(self.kind.lanes)))
        with m.tools.for_range(builder, self._steps) as loop:
            at = builder.add(start, builder.mul(loop.index, m.I64(self.kind.lanes)))
            if self.floats:
                self._add_floats(totals, at)
            elif self.kind is QUADS:
                self._add_quads(totals, at)
            else:
                self._add_pairs(totals, at)
        return totals

    def _add_quads(self, totals: list[list[Any]], at: Any) -> None:
        builder, bytes_of = self.builder, ir.VectorType(m.I8, self.kind.lanes)
        shift = ir.Constant(bytes_of, [-SHIFT] * self.kind.lanes)
        weights = [builder.xor(m.load_from(builder, place, at, bytes_of), shift) for place in self._weights]
        for place, row in zip(self._codes, totals, strict=True):
            codes = m.load_from(builder, place, at, bytes_of)
            for total, weight in zip(row, weights, strict=True):
                builder.store(add_quads(builder, builder.load(total), weight, codes), total)

    def _add_pairs(self, totals: list[list[Any]], at: Any) -> None:
        builder, count = self.builder, self.kind.lanes
        wide, narrow = (ir.VectorType(lane, count) for lane in (m.I16, m.I8))
        weights = [builder.sext(m.load_from(builder, place, at, narrow), wide) for place in self._weights]
        for place, row in zip(self._codes, totals, strict=True):
            codes = m.load_from(builder, place, at, wide)
            for total, weight in zip(row, weights, strict=True):
                more = neighbor_sums(builder, codes, weight)
                builder.store(builder.add(builder.load(total), more), total)

    def _add_floats(self, totals: list[list[Any]], at: Any) -> None:
        builder, count = self.builder, self.results.count
        wide, narrow = (ir.VectorType(lane, count) for lane in (m.I32, m.I8))
        for half in range(0, self.kind.lanes, count):
            begin = builder.add(at, m.I64(half))
            weights = [
                builder.sitofp(builder.sext(m.load_from(builder, place, begin, narrow), wide), self.results)
                for place in self._weights
            ]
            for place, row in zip(self._codes, totals, strict=True):
                values = m.load_from(builder, place, begin, self.results)
                for total, weight in zip(row, weights, strict=True):
                    builder.store(add_product(builder, builder.load(total), values, weight), total)

    def added(self, totals: list[list[Any]]) -> list[Any]:
        """Lane sums of variables, four to a vector: one row's or two's."""
        builder, at_once, found = self.builder, 4 // self.kind.wide, []
        for r in range(0, self.high, at_once):
            four = [builder.load(total) for row in totals[r : r + at_once] for total in row]
            four += [ir.Constant(four[0].type, [0] * four[0].type.count)] * (4 - len(four))
            found.append(sums_of_lanes(builder, builder.fadd if self.floats else builder.add, four))
        return found

    def store(self, fours: list[Any]) -> None:
        """Store what :meth:`added` gives, each row at its place."""
        builder, (array, places), wide = self.builder, self._out, self.kind.wide
        at_once = 4 // wide
        for r, place in enumerate(places):
            four = fours[r // at_once]
            own = shuffled(builder, four, four, [wide * (r % at_once) + c for c in range(wide)])
            m.store_at(builder, own, array, place, 4)

    def scale_lanes(self, results: list[list[Any]], totals: list[list[Any]], scales: list[Any]) -> None:
        """Add a group's float sums, times its scale, to ``results``, lane-wise."""
        builder = self.builder
        for c, scale in enumerate(scales):
            factor = in_all_lanes(builder, scale, self.results)
            for row, result in zip(totals, results, strict=True):
                total = add_product(builder, builder.load(result[c]), builder.load(row[c]), factor)
                builder.store(total, result[c])

    def scale_sums(self, results: list[Any], totals: list[list[Any]], scales: list[Any]) -> None:
        """Add a group's integer sums, lanes first, times its scale, to ``results``."""
        builder, factor = self.builder, self._vector((scales * 4)[:4])
        for result, four in zip(results, self.added(totals), strict=True):
            found = builder.sitofp(four, factor.type)
            builder.store(add_product(builder, builder.load(result), found, factor), result)

    def _vector(self, numbers: list[Any]) -> Any:
        made = ir.Constant(ir.VectorType(m.F32, len(numbers)), ir.Undefined)
        for lane, number in enumerate(numbers):
            made = self.builder.insert_element(made, number, m.I32(lane))
        return made


def _number_of(number: Callable[[TileKind], int]) -> Any:
    """Build a number of the tile for codes like these."""

    @m.instruction(types.uint64, m.ANY)
    def find(builder: Any, codes: Any) -> Any:
        return m.I64(number(_KINDS[codes.type.pointee]))

    return find


lanes_of, wide_of, chunk_of = (_number_of(operator.attrgetter(name)) for name in ("lanes", "wide", "chunk"))
"""Products of two rows in a step, weight rows of a tile, and bytes of TileKind.chunk."""


def _few(given: Any) -> Any:
    return m.tuple_of(types.uint64, (QUADS if given[0].dtype == types.int8 else PAIRS).wide)


@m.instruction(_few, m.ANY, m.ANY)
def first_of(builder: Any, codes: Any, four: Any) -> Any:
    """First of four numbers, as many as a tile has weight rows."""
    return m.tools.pack_array(builder, four[: _KINDS[codes.type.pointee].wide])


@m.instruction(types.void, m.ANY, m.INDEX, m.INDEX, m.ANY, m.INDEX)
def start_sums(builder: Any, codes: Any, at: Any, steps: Any, starts: Any, place: Any) -> None:
    """Write 16 lanes of what shifted weights add to a sum, negated.

    codes: int8, ``steps`` of 64 from ``at`` on. starts: int32.
    """
    sums, bytes_of = ir.VectorType(m.I32, QUADS.sums), ir.VectorType(m.I8, QUADS.lanes)
    (total,) = zeroed(builder, sums, 1)
    first = m.address(builder, codes, at)
    with m.tools.for_range(builder, steps) as loop:
        found = m.load_from(builder, first, builder.mul(loop.index, m.I64(QUADS.lanes)), bytes_of)
        shift = ir.Constant(bytes_of, [-SHIFT] * QUADS.lanes)
        builder.store(add_quads(builder, builder.load(total), shift, found), total)
    m.store_at(builder, builder.neg(builder.load(total)), starts, place, 4)


@m.instruction(types.void, m.ANY, m.ANY, m.INDEX, m.ANY, m.ANY)
def multiply_rows(builder: Any, codes: Any, weight: Any, steps: Any, starts: Any, out: Any) -> None:
    """Write bits of int32 sums of products, row r by column c.

    Operands are pairs of an array and places. codes: row r begins at ``places[r]``. weight: bytes, read as
    int8; column c begins at ``places[c]``. steps: in a row. starts: int32; sums of row r begin with 16 lanes
    from ``places[r]`` on where codes are int8. out: float32, the sums from ``places[r]`` on.
    """
    tile = _Tile(builder, codes, weight, steps, starts, out)
    tile.store(tile.added(tile.add_group(m.I64(0))))


@m.instruction(types.void, m.ANY, m.ANY, m.INDEX, m.ANY, m.ANY, m.ANY, m.INDEX)
def multiply_groups(
    builder: Any, codes: Any, weight: Any, steps: Any, starts: Any, out: Any, scales: Any, groups: Any
) -> None:
    """Write sums over groups of products times the group's scale.

    Operands: as of :func:`multiply_rows`. steps: of one group. starts: the next group's follow. scales:
    float32; column c's begin at ``places[c]``. Lanes of floats are scaled before they are added;
    sums of integers are added first, which is the order of a panel's (:mod:`.panels`).
    """
    tile, (array, places) = _Tile(builder, codes, weight, steps, starts, out), scales
    lanes, numbers = [], []
    if tile.floats:
        lanes = tile.variables(tile.results)
    else:
        numbers = zeroed(builder, ir.VectorType(m.F32, 4), -(-tile.high * tile.kind.wide // 4))
    with m.tools.for_range(builder, groups) as group:
        totals = tile.add_group(group.index)
        own = [
            m.load_from(builder, m.address(builder, array, at, m.F32), group.index, m.F32, 4) for at in places
        ]
        if tile.floats:
            tile.scale_lanes(lanes, totals, own)
        else:
            tile.scale_sums(numbers, totals, own)
    tile.store(tile.added(lanes) if tile.floats else [builder.load(number) for number in numbers])
