"""Blocks as lanes: 16 of them in the columns of an array, and the steps of ggml's arithmetic on vectors."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..linear.panels import columns_at
from ..machine.descriptor import NO_ROUNDING, TO_BFLOAT16
from ..machine.intrinsics import (
    F32,
    I64,
    address,
    bits32,
    bits64,
    device,
    float64_of,
    inlined,
    primitive,
    x86_has,
)
from ..machine.vector import (
    FLOATS,
    STEP,
    WORDS,
    any_below,
    bits_of,
    first_float16,
    float16_of_floats,
    floats_of,
    floats_of_integers,
    indices,
    larger,
    larger_bits,
    larger_signed,
    load_lanes,
    smaller,
    smaller_signed,
    store_lanes,
    values_of,
    words_of,
)

_tools: Any = cgutils  # has no types
LANES = np.uint64(STEP // 2)
"""Blocks that are searched at once."""
ONE, SUPER = np.uint64(1), np.uint64(256)
LEAST = np.float32(1e-15)
"""Blocks whose largest magnitude is below this are zeros to llama.cpp."""
_MAGIC = np.float32(12582912.0)
_VECTOR = ir.VectorType(F32, STEP // 2)


@primitive
def transpose(typingctx: Any, values: Any, begin: Any, pitch: Any, out: Any, place: Any, step: Any) -> Any:
    """Write 16 numbers of 16 rows as 16 columns: number i of row b to ``out[place + step * i + b]``.

    values: float32; row b begins at ``begin + b * pitch``.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        columns = columns_at(context, builder, (values, args[0]), (args[1], args[2]), _VECTOR)
        for n, column in enumerate(columns):
            at = builder.add(args[4], builder.mul(args[5], I64(n)))
            builder.store(column, address(context, builder, out, args[3], at, _VECTOR)).align = 4
        return context.get_dummy_value()

    number = types.uint64
    return types.void(values, number, number, out, number, number), codegen


@primitive
def where(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """Return the lanes of ``a`` where those of ``mask``, words, are not zero, else those of ``b``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        chosen = builder.icmp_unsigned("!=", args[0], ir.Constant(WORDS.lanes, [0] * WORDS.count))
        return builder.select(chosen, args[1], args[2])

    return a(WORDS, a, a), codegen


def _each(name: str) -> Any:
    """Build a function of each lane of floats, or doubles, of this name in LLVM."""

    @primitive
    def each(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(x.lanes, [x.lanes])
            full = f"llvm.{name}.v16f{x.scalar.bitwidth}"
            return builder.call(_tools.get_or_insert_function(builder.module, kind, full), args)

        return x(x), codegen

    return each


root, whole = _each("sqrt"), _each("rint")
"""Square roots, rounded, and whole numbers, rounded half to even."""


@primitive
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once or twice as the machine does faster.

    For estimates, and for floats or doubles whose sums are exact.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(a.lanes, [a.lanes] * 3)
        name = f"llvm.fmuladd.v16f{a.scalar.bitwidth}"
        return builder.call(_tools.get_or_insert_function(builder.module, kind, name), args)

    return a(a, a, a), codegen


@primitive
def integers(typingctx: Any, x: Any) -> Any:
    """Return floats that are whole numbers as words."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(args[0], WORDS.lanes)

    return WORDS(FLOATS), codegen


_QUARTERS = (0, *[2] * 2, *[4] * 2, *[6] * 2, *[8] * 3, *[12] * 4, *[16] * 6, *[24] * 12)
"""The closest value of e2m1 of each number of quarters, in quarters; middles of values are whole quarters."""


@primitive
def picks_from_tables(typingctx: Any) -> Any:
    """Return whether the machine picks from a table of 32 floats at once; it is known when it is compiled."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(x86_has("avx512f")))

    return types.boolean(), codegen


@primitive
def closest_quarters(typingctx: Any, words: Any) -> Any:
    """Return the closest value of e2m1, in quarters, of whole numbers of quarters below 32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = [ir.Constant(FLOATS.lanes, [float(n) for n in part]) for part in _halves(_QUARTERS)]
        if x86_has("avx512f"):
            kind = ir.FunctionType(FLOATS.lanes, [FLOATS.lanes, WORDS.lanes, FLOATS.lanes])
            pick = _tools.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.ps.512")
            return builder.call(pick, [halves[0], args[0], halves[1]])
        result = halves[0]
        for value in dict.fromkeys(_QUARTERS):
            first = ir.Constant(WORDS.lanes, [_QUARTERS.index(value)] * FLOATS.count)
            beyond = builder.icmp_unsigned(">=", args[0], first)
            result = builder.select(beyond, ir.Constant(FLOATS.lanes, [float(value)] * FLOATS.count), result)
        return result

    return FLOATS(WORDS), codegen


def _halves(values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


def _extreme(symbol: str) -> Any:
    """Build the extreme of the lanes; a transposition of 16 such vectors takes longer than 16 of these."""

    @primitive
    def extreme(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (value,), count = args, FLOATS.count
            while count > 1:
                count //= 2
                halves = [list(range(count)), list(range(count, 2 * count))]
                a, b = (builder.shuffle_vector(value, value, indices(half)) for half in halves)
                value = builder.select(builder.fcmp_ordered(symbol, a, b), a, b)
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return types.float32(FLOATS), codegen

    return extreme


least_lane, most_lane = _extreme("<"), _extreme(">")


@inlined
def magnitudes(x: Any) -> Any:
    """Return magnitudes of floats."""
    return values_of(bits_of(x) & words_of(np.uint32(0x7FFFFFFF)))


@inlined
def rounded(x: Any, low: Any, high: Any) -> Any:
    """Return ``x`` rounded half to even, within words ``low`` and ``high``, as floats.

    Past 2**22, the bits of the sum give other integers, which llama.cpp takes, too.
    """
    bits = bits_of(x + floats_of(_MAGIC)) & words_of(np.uint32(0x7FFFFF))
    whole = bits - words_of(np.uint32(0x400000))
    return floats_of_integers(larger_signed(smaller_signed(whole, high), low))


@inlined
def rounded_within(x: Any, low: Any, high: Any) -> Any:
    """Return ``x`` rounded half to even, within whole floats ``low`` and ``high`` of at most 2**22."""
    magic = floats_of(_MAGIC)
    return larger(smaller((x + magic) - magic, high), low)


@inlined
def code_of(t: Any, element: Any) -> Any:
    """Return the codes of an integer, as floats, that are nearest to ``t``."""
    return rounded_within(t, floats_of(element.low), floats_of(element.high))


@device
def power_of(exponent: Any) -> Any:
    """Return ``2 ** exponent``, a normal float64; exponent: int64."""
    return float64_of(np.uint64(exponent + np.int64(1023)) << np.uint64(52))


@device
def exponent_of(reach: Any) -> Any:
    """Return e with ``2 ** (e - 1) <= reach < 2 ** e``, int64, of a float64; 0 of zero."""
    field = np.int64((bits64(reach) >> np.uint64(52)) & np.uint64(0x7FF))
    return np.int64(0) if reach == np.float64(0) else field - np.int64(1022)


@device
def nearest(x: Any) -> Any:
    """Return a float32 rounded as :func:`rounded` does, int32."""
    return np.int32(np.int64(bits32(np.float32(x + _MAGIC)) & np.uint32(0x7FFFFF)) - np.int64(0x400000))


@primitive
def is_zero(typingctx: Any, x: Any) -> Any:
    """Return words of ones where floats are zeros of any sign, else of zeros."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.fcmp_ordered("==", args[0], ir.Constant(FLOATS.lanes, [0.0] * FLOATS.count))
        return builder.sext(zeros, WORDS.lanes)

    return WORDS(FLOATS), codegen


@inlined
def worse(worst: Any, x: Any) -> Any:
    """Return the larger of the words ``worst`` and the bits of magnitudes of ``x``."""
    return larger_bits(worst, bits_of(x) & words_of(np.uint32(0x7FFFFFFF)))


@inlined
def is_bad(worst: Any) -> Any:
    """Return whether a magnitude of :func:`worse` is not finite."""
    return any_below(words_of(np.uint32(0x7F7FFFFF)), worst)


@inlined
def negative(x: Any) -> Any:
    """Return ``-x``, also of zeros."""
    return values_of(bits_of(x) ^ words_of(np.uint32(0x80000000)))


@inlined
def divided(number: Any, x: Any) -> Any:
    """Return a float32 over each lane."""
    return floats_of(number) / x


@inlined
def narrowed(t: Any, to: Any) -> Any:
    """Return numbers rounded as descriptors say: to bfloat16, to float16, or not at all."""
    if to == TO_BFLOAT16:
        bits = bits_of(t)
        odd = (bits >> words_of(np.uint32(16))) & words_of(np.uint32(1))
        return values_of((bits + words_of(np.uint32(0x7FFF)) + odd) & words_of(np.uint32(0xFFFF0000)))
    if to != NO_ROUNDING:
        return first_float16(float16_of_floats(t, t))
    return t


@device
def add_neighbors(values: Any, count: Any) -> None:
    """Add ``count`` numbers of float64: halves of them, then those of the result, to the first."""
    while count > np.uint64(1):
        half = count // np.uint64(2)
        for i in range(half):
            values[i] = values[i] + values[half + i]
        if count % np.uint64(2) > np.uint64(0):
            values[half] = values[count - np.uint64(1)]
            half += np.uint64(1)
        count = half


@device
def add_pairwise(values: Any, count: Any) -> None:
    """Add ``count`` vectors of float64 lanes: halves of them, then those of the result, to the first."""
    while count > np.uint64(1):
        half = count // np.uint64(2)
        for i in range(half):
            pair = load_lanes(values, i * LANES) + load_lanes(values, (half + i) * LANES)
            store_lanes(values, i * LANES, pair)
        if count % np.uint64(2) > np.uint64(0):
            store_lanes(values, half * LANES, load_lanes(values, (count - np.uint64(1)) * LANES))
            half += np.uint64(1)
        count = half


@device
def sum_of_squares(x: Any, begin: Any, count: Any) -> Any:
    """Return the sum of squares of neighbors, added one after the other in float32."""
    total = np.float32(0)
    for i in range(count):
        total = np.float32(total + np.float32(x[begin + i] * x[begin + i]))
    return total
