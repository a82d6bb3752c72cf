"""Products of codes as LLVM IR: a tile of rows of the input by rows of a weight, summed in 32 bits.

An input that is not quantized is float32; the codes of the weight are then made floats, and sums rounded.

Both run along k in memory, so a weight is used as it is kept. A step takes 16 neighbors of each row: codes of
the input in 16 bits, those of the weight widened from 8. Products of neighbors are added in pairs into 8
lanes, for which x86-64 has one instruction (``vpmaddwd``); elsewhere the same is said in portable IR. Every
sum is exact as long as it fits 32 bits. The instruction for 8-bit factors (``vpmaddubsw``) is not used: it
adds its pairs in 16 bits, where two products of 255 by 127 do not fit.
"""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import F32, I8, I16, I32, I64, address, primitive

_tools: Any = cgutils  # has no types

HIGH, WIDE = 4, 2
"""Rows of input and of weight of a tile: 8 sums. LLVM unrolls the loop, and then 12 do not fit registers."""
LANES = 16
"""Products of a step, of one row with one row."""
_SUMS, _RESULTS = ir.VectorType(I32, LANES // 2), ir.VectorType(F32, LANES // 2)
_NEIGHBORS = [0, 2, 8, 10, 4, 6, 12, 14]
"""First lanes of pairs of two vectors, in halves of 128 bits, as x86-64 adds horizontally."""


def _shuffled(builder: Any, u: Any, v: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(u, v, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def neighbor_sums(context: Any, builder: Any, a: Any, b: Any) -> Any:
    """Return ``a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]`` of 16 int16 each, as 8 int32."""
    triple, _, features = context.codegen().magic_tuple()
    if triple.startswith("x86_64") and "+avx2" in features:
        kind = ir.FunctionType(_SUMS, [a.type, b.type])
        multiply = _tools.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        return builder.call(multiply, [a, b])
    wide = ir.VectorType(I32, LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even = _shuffled(builder, products, products, list(range(0, LANES, 2)))
    return builder.add(even, _shuffled(builder, products, products, list(range(1, LANES, 2))))


def _sums_of_lanes(builder: Any, add: Any, four: list[Any]) -> Any:
    """Return the sums of the lanes of four vectors as one vector."""

    def paired(u: Any, v: Any) -> Any:
        odd = [lane + 1 for lane in _NEIGHBORS]
        return add(_shuffled(builder, u, v, _NEIGHBORS), _shuffled(builder, u, v, odd))

    both = paired(paired(*four[:2]), paired(*four[2:]))
    return add(_shuffled(builder, both, both, [0, 1, 2, 3]), _shuffled(builder, both, both, [4, 5, 6, 7]))


class _Tile:
    """Writes the IR of a tile; arguments are those of the primitives below, by number."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.context, self.builder, self.types, self.args = context, builder, signature.args, args
        self.high = signature.args[1].count
        self.floats = signature.args[0].dtype == types.float32
        lane = F32 if self.floats else I16
        self._codes = [self.place(0, self._item(1, r), lane) for r in range(self.high)]
        self._weights = [self.place(2, self._item(3, c), I8) for c in range(WIDE)]

    def place(self, which: int, index: Any, lane: Any) -> Any:
        """Return the address of an element of an argument that is an array."""
        return address(self.context, self.builder, self.types[which], self.args[which], index, lane)

    def items(self, which: int) -> list[Any]:
        """Return the numbers of an argument that is a tuple."""
        return [self._item(which, n) for n in range(self.types[which].count)]

    def _item(self, which: int, n: int) -> Any:
        return self.builder.extract_value(self.args[which], n)

    def totals(self, kind: Any = None) -> list[list[Any]]:
        """Return variables for a vector a pair of rows, zero; LLVM keeps them in registers.

        kind: that of the sums of products unless another is given.
        """
        kind = kind or (_RESULTS if self.floats else _SUMS)
        count = range(WIDE)
        made = [[_tools.alloca_once(self.builder, kind) for _ in count] for _ in range(self.high)]
        self.clear(made)
        return made

    def clear(self, totals: list[list[Any]]) -> None:
        """Set variables to zero."""
        for variable in itertools.chain(*totals):
            kind = variable.type.pointee
            self.builder.store(ir.Constant(kind, [0] * kind.count), variable)

    def add_steps(self, totals: list[list[Any]], start: Any) -> None:
        """Add the products of all steps from element ``start`` of the rows on."""
        with _tools.for_range(self.builder, self.args[4]) as loop:
            at = self.builder.add(start, self.builder.mul(loop.index, I64(LANES)))
            if self.floats:
                self._add_floats(totals, at)
            else:
                self._add_integers(totals, at)

    def _add_integers(self, totals: list[list[Any]], at: Any) -> None:
        builder, wide = self.builder, ir.VectorType(I16, LANES)
        weights = [builder.sext(self._load(place, at, I8), wide) for place in self._weights]
        for place, row in zip(self._codes, totals, strict=True):
            codes = self._load(place, at, I16)
            for total, weight in zip(row, weights, strict=True):
                more = neighbor_sums(self.context, builder, codes, weight)
                builder.store(builder.add(builder.load(total), more), total)

    def _add_floats(self, totals: list[list[Any]], at: Any) -> None:
        builder = self.builder
        for half in range(0, LANES, _RESULTS.count):
            begin = builder.add(at, I64(half))
            weights = [
                builder.sitofp(builder.sext(self._load(place, begin, I8, _RESULTS.count), _SUMS), _RESULTS)
                for place in self._weights
            ]
            for place, row in zip(self._codes, totals, strict=True):
                values = self._load(place, begin, F32, _RESULTS.count)
                for total, weight in zip(row, weights, strict=True):
                    builder.store(builder.fadd(builder.load(total), builder.fmul(values, weight)), total)

    def _load(self, place: Any, at: Any, lane: Any, count: int = LANES) -> Any:
        kind = ir.VectorType(lane, count)
        value = self.builder.load(self.builder.bitcast(self.builder.gep(place, [at]), kind.as_pointer()))
        value.align = 1  # codes of a weight begin anywhere, and a wrong promise would crash
        return value

    def store(self, totals: list[list[Any]], add: Any) -> None:
        """Store the sums of the lanes of each row at its place, rows two by two."""
        builder, places = self.builder, self.items(6)
        for r in range(0, self.high, 2):
            rows = totals[r : r + 2]
            four = [builder.load(total) for row in rows for total in row]
            four += [ir.Constant(four[0].type, [0] * four[0].type.count)] * (2 * WIDE - len(four))
            found = _sums_of_lanes(builder, add, four)
            for k in range(len(rows)):
                own = _shuffled(builder, found, found, [WIDE * k + c for c in range(WIDE)])
                place = self.place(5, places[r + k], F32)
                builder.store(own, builder.bitcast(place, own.type.as_pointer())).align = 4


@primitive
def multiply_rows(
    typingctx: Any, codes: Any, rows: Any, weight: Any, columns: Any, steps: Any, out: Any, places: Any
) -> Any:
    """Set ``out[places[r] + c]`` to the bits of the sum of products of row r and column c, an int32.

    codes: int16; row r begins at ``rows[r]``. weight: bytes, read as int8; column c begins at ``columns[c]``.
    steps: of 16 products each. out: float32.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        totals = tile.totals()
        tile.add_steps(totals, I64(0))
        tile.store(totals, builder.fadd if tile.floats else builder.add)
        return context.get_dummy_value()

    return types.void(codes, rows, weight, columns, types.uint64, out, places), codegen


@primitive
def multiply_groups(
    typingctx: Any, codes: Any, rows: Any, weight: Any, columns: Any, steps: Any, out: Any, places: Any,
    scales: Any, scale_at: Any, groups: Any,
) -> Any:  # fmt: skip
    """Set ``out[places[r] + c]`` to the sum over groups of a sum of products times the scale of the group.

    codes: int16, or float32 values. steps: of one group. scales: float32; those of column c begin at
    ``scale_at[c]``. Each of 8 lanes is converted and scaled for itself, and they are added last: one order
    for every number of rows.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        totals, results = tile.totals(), tile.totals(_RESULTS)
        factors = [tile.place(7, at, F32) for at in tile.items(8)]
        length = builder.mul(args[4], I64(LANES))
        with _tools.for_range(builder, args[9]) as group:
            tile.clear(totals)
            tile.add_steps(totals, builder.mul(group.index, length))
            for c, place in enumerate(factors):
                scale = builder.load(builder.gep(place, [group.index]))
                one = builder.insert_element(ir.Constant(_RESULTS, ir.Undefined), scale, I32(0))
                factor = _shuffled(builder, one, one, [0] * _RESULTS.count)
                for row, result in zip(totals, results, strict=True):
                    total = builder.load(row[c])
                    scaled = builder.fmul(total if tile.floats else builder.sitofp(total, _RESULTS), factor)
                    builder.store(builder.fadd(builder.load(result[c]), scaled), result[c])
        tile.store(results, builder.fadd)
        return context.get_dummy_value()

    return types.void(
        codes, rows, weight, columns, types.uint64, out, places, scales, scale_at, types.uint64
    ), codegen
