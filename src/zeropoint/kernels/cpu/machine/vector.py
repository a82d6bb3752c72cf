"""Explicit SIMD vectors, where the auto-vectorizer is too slow.

A step is 32 neighboring elements: two vectors of 16 floats (float32) or words (uint32), or one of 32 halves
(uint16) or octets (uint8), or of 4 longs (uint64) of 8 octets. Sums may need doubles. Vectors take
``+ - * /`` or ``+ - & | ^ << >>`` with their own kind. Everything is portable LLVM IR: the code generator
makes of them the vectors that the machine has.

Between 16 and 32 bits, two words are taken out of each pair of halves without shuffles when the first vector
holds the even elements and the second the odd ones; that is the order for arrays of uint16 (bfloat16), and
the first 16 elements before the last 16 that for all others.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from .float16 import narrowed, widened
from .intrinsics import F32, F64, I8, I16, I32, I64, address, primitive

# None of these has types.
_tools: Any = cgutils
_lower: Any = lower_builtin
_typed: Any = infer_global
_signature: Any = signature

STEP = 32
"""Elements of a step."""
WHOLE, HALF = np.uint64(STEP), np.uint64(STEP // 2)
"""Elements of a step and of half of one, as indices."""


class Vector(types.Type):
    """Numba's type of a vector; ``lane`` is LLVM's type of one number."""

    def __init__(self, name: str, lane: Any, count: int, scalar: Any) -> None:
        super().__init__(name=name)
        self.lane, self.count, self.scalar = lane, count, scalar

    @property
    def lanes(self) -> Any:
        """Return LLVM's type of the whole vector."""
        return ir.VectorType(self.lane, self.count)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is held in registers as it is."""

    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.lanes)  # type: ignore[no-untyped-call]


FLOATS = Vector("floats", F32, STEP // 2, types.float32)
WORDS = Vector("words", I32, STEP // 2, types.uint32)
HALVES = Vector("halves", I16, STEP, types.uint16)
OCTETS = Vector("octets", I8, STEP, types.uint8)
DOUBLES = Vector("doubles", F64, STEP // 2, types.float64)
LONGS = Vector("longs", I64, STEP // 4, types.uint64)


def _define(symbol: Callable[..., Any], instruction: str, kind: Vector) -> None:
    """Let ``symbol`` work on two vectors of ``kind``."""

    @_typed(symbol)
    class Typing(ConcreteTemplate):
        cases = (_signature(kind, kind, kind),)

    @_lower(symbol, kind, kind)
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _symbol, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    for _kind in (FLOATS, DOUBLES):
        _define(getattr(operator, _symbol), _instruction, _kind)
_define(operator.mul, "mul", WORDS)
for _kind in (WORDS, HALVES, OCTETS, LONGS):
    for _symbol in ("add", "sub", "and_", "or_", "xor"):
        _define(getattr(operator, _symbol), _symbol, _kind)
    _define(operator.lshift, "shl", _kind)
    _define(operator.rshift, "lshr", _kind)


def indices(lanes: list[int]) -> Any:
    """Return the constant that a shuffle takes."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


def _constant(kind: Vector, value: int) -> Any:
    return kind.lanes([value] * kind.count)


def in_all_lanes(builder: Any, scalar: Any, lanes: Any) -> Any:
    """Vector of LLVM type ``lanes`` with one number in all lanes."""
    empty = ir.Constant(lanes, ir.Undefined)
    first = builder.insert_element(empty, scalar, I32(0))
    return builder.shuffle_vector(first, empty, indices([0] * lanes.count))


def _splatter(kind: Vector) -> Any:
    @primitive
    def splat(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return in_all_lanes(builder, args[0], kind.lanes)

        return kind(kind.scalar), codegen

    return splat


floats_of, words_of, halves_of, octets_of, doubles_of, longs_of = (
    _splatter(k) for k in (FLOATS, WORDS, HALVES, OCTETS, DOUBLES, LONGS)
)
"""A vector with one number in all lanes."""


def _joiner(kind: Vector) -> Any:
    @primitive
    def join(typingctx: Any, first: Any, second: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pair = ir.Constant(kind.lanes, ir.Undefined)
            for lane, scalar in enumerate(args):
                pair = builder.insert_element(pair, scalar, I32(lane))
            half = kind.count // 2
            return builder.shuffle_vector(pair, pair, indices([0] * half + [1] * half))

        return kind(kind.scalar, kind.scalar), codegen

    return join


two_floats, two_halves = _joiner(FLOATS), _joiner(HALVES)
"""A vector with one number in its first half and another in its second."""


@primitive
def load_lanes(typingctx: Any, array: Any, at: Any) -> Any:
    """Load neighbors: 32 of 16 or 8 bits, 8 uint64, else 16."""
    kind = next((k for k in (FLOATS, WORDS, DOUBLES, LONGS) if k.scalar == array.dtype), None)
    kind = kind or {16: HALVES, 8: OCTETS}[array.dtype.bitwidth]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(address(context, builder, signature.args[0], args[0], args[1], kind.lanes))
        value.align = 1
        return value

    return kind(array, types.uint64), codegen


@primitive
def store_lanes(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """Store all lanes at ``array[at]``, any alignment."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], args[2].type)
        builder.store(args[2], place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, value), codegen


@primitive
def stream_lanes(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """Store 64 bytes at an aligned ``array[at]``, past the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], args[2].type)
        store = builder.store(args[2], place, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(array, types.uint64, value), codegen


@primitive
def store_nibbles(typingctx: Any, array: Any, at: Any, codes: Any) -> Any:
    """Store the low nibbles of 32 octets as 16 bytes, low first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = STEP // 2
        pairs = ir.VectorType(I16, count)
        value = builder.bitcast(args[2], pairs)
        low = builder.and_(value, pairs([0x000F] * count))
        high = builder.and_(builder.lshr(value, pairs([4] * count)), pairs([0x00F0] * count))
        value = builder.trunc(builder.or_(low, high), ir.VectorType(I8, count))
        place = address(context, builder, signature.args[0], args[0], args[1], value.type)
        builder.store(value, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, OCTETS), codegen


@primitive
def store_low_nibbles(typingctx: Any, array: Any, at: Any, codes: Any) -> Any:
    """Store the low nibbles of 32 halves as 16 bytes, low first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = builder.bitcast(args[2], WORDS.lanes)
        high = builder.and_(builder.lshr(pairs, _constant(WORDS, 12)), _constant(WORDS, 0xF0))
        both = builder.or_(builder.and_(pairs, _constant(WORDS, 0xF)), high)
        value = builder.trunc(both, ir.VectorType(I8, STEP // 2))
        place = address(context, builder, signature.args[0], args[0], args[1], value.type)
        builder.store(value, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, HALVES), codegen


@primitive
def store_nibble_pairs(typingctx: Any, array: Any, at: Any, first: Any, second: Any) -> Any:
    """Store low nibbles of two vectors' words, first below second: 16 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = builder.and_(args[2], _constant(WORDS, 0xF))
        both = builder.or_(low, builder.shl(args[3], _constant(WORDS, 4)))
        value = builder.trunc(both, ir.VectorType(I8, STEP // 2))
        place = address(context, builder, signature.args[0], args[0], args[1], value.type)
        builder.store(value, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, WORDS, WORDS), codegen


@primitive
def store_low_octets(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """Store the low bytes of 16 words."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = builder.trunc(args[2], ir.VectorType(I8, STEP // 2))
        place = address(context, builder, signature.args[0], args[0], args[1], low.type)
        builder.store(low, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, WORDS), codegen


@primitive
def load_nibbles(typingctx: Any, array: Any, at: Any) -> Any:
    """Load 16 bytes as 32 octets below 16, low nibble first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = STEP // 2
        place = address(context, builder, signature.args[0], args[0], args[1], ir.VectorType(I8, count))
        value = builder.load(place)
        value.align = 1
        pairs = ir.VectorType(I16, count)
        wide = builder.zext(value, pairs)
        wide = builder.or_(wide, builder.shl(wide, pairs([4] * count)))
        return builder.bitcast(builder.and_(wide, pairs([0x0F0F] * count)), OCTETS.lanes)

    return OCTETS(array, types.uint64), codegen


def _cast(source: Vector, target: Vector, instruction: str) -> Any:
    @primitive
    def cast(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(args[0], target.lanes)

        return target(source), codegen

    return cast


bits_of, values_of = _cast(FLOATS, WORDS, "bitcast"), _cast(WORDS, FLOATS, "bitcast")
wide_floats, narrow_doubles = _cast(FLOATS, DOUBLES, "fpext"), _cast(DOUBLES, FLOATS, "fptrunc")
floats_of_integers = _cast(WORDS, FLOATS, "sitofp")
octets_of_halves, halves_of_octets = _cast(HALVES, OCTETS, "trunc"), _cast(OCTETS, HALVES, "zext")


def _part(second: bool, source: Vector, convert: Callable[[Any, Any, Any], Any], target: Vector) -> Any:
    """Build the conversion of the first or second 16 lanes."""
    half = STEP // 2
    lanes = list(range(half, STEP) if second else range(half))

    @primitive
    def part(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(context, builder, builder.shuffle_vector(args[0], args[0], indices(lanes)))

        return target(source), codegen

    return part


def _widen_octets(context: Any, builder: Any, x: Any) -> Any:
    return builder.zext(x, WORDS.lanes)


def _widen_bfloat16(context: Any, builder: Any, x: Any) -> Any:
    moved = builder.shl(builder.zext(x, WORDS.lanes), _constant(WORDS, 16))
    return builder.bitcast(moved, FLOATS.lanes)


first_bfloat16, second_bfloat16 = (_part(second, HALVES, _widen_bfloat16, FLOATS) for second in (False, True))
"""Half of 32 bfloat16, by their bits, as floats (exact)."""
first_float16, second_float16 = (_part(second, HALVES, widened, FLOATS) for second in (False, True))
"""Half of 32 float16, by their bits, as floats (exact)."""
first_octets, second_octets = (_part(second, OCTETS, _widen_octets, WORDS) for second in (False, True))
"""Half of 32 octets as words."""


@primitive
def pairs_of(typingctx: Any, x: Any) -> Any:
    """View 32 halves as 16 words, even elements in low bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], WORDS.lanes)

    return WORDS(HALVES), codegen


@primitive
def halves_of_pairs(typingctx: Any, x: Any) -> Any:
    """Return 16 words of two halves each as 32 halves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], HALVES.lanes)

    return HALVES(WORDS), codegen


def _narrow(target: Vector, shift: int) -> Any:
    """Build the conversion of 2 x 16 words to ``target``, from ``shift``."""

    @primitive
    def narrow(typingctx: Any, first: Any, second: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            both = builder.shuffle_vector(*args, indices(list(range(STEP))))
            if shift:
                both = builder.lshr(both, ir.VectorType(I32, STEP)([shift] * STEP))
            return builder.trunc(both, target.lanes)

        return target(WORDS, WORDS), codegen

    return narrow


low_halves, high_halves, low_octets = _narrow(HALVES, 0), _narrow(HALVES, 16), _narrow(OCTETS, 0)
"""The low 16, high 16 or low 8 bits of the first and last 16 elements."""


@primitive
def float16_of_floats(typingctx: Any, first: Any, second: Any) -> Any:
    """Round 2 x 16 floats to float16 bits, half to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        both = builder.shuffle_vector(*args, indices(list(range(STEP))))
        return narrowed(context, builder, both)

    return HALVES(FLOATS, FLOATS), codegen


@primitive
def shift_signed(typingctx: Any, x: Any, by: Any) -> Any:
    """Shift halves or words right and fill with the sign."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ashr(*args)

    return x(x, x), codegen


def _choice(comparison: str, symbol: str) -> Any:
    """Build the lane-wise ``a if a <symbol> b else b``."""

    @primitive
    def choose(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.select(getattr(builder, comparison)(symbol, *args), *args)

        return a(a, a), codegen

    return choose


larger, smaller = _choice("fcmp_ordered", ">"), _choice("fcmp_ordered", "<")
"""Of floats; where a lane of the first is NaN, the second's lane."""
larger_bits, smaller_bits = _choice("icmp_unsigned", ">"), _choice("icmp_unsigned", "<")
larger_signed, smaller_signed = _choice("icmp_signed", ">"), _choice("icmp_signed", "<")


def _mask(comparison: str, symbol: str, kind: Vector, result: Vector) -> Any:
    """Build the lane-wise comparison that gives all ones or all zeros."""

    @primitive
    def compare(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.sext(getattr(builder, comparison)(symbol, *args), result.lanes)

        return result(kind, kind), codegen

    return compare


above, above_doubles = (_mask("fcmp_ordered", ">", kind, WORDS) for kind in (FLOATS, DOUBLES))
above_or_unordered = _mask("fcmp_unordered", ">", FLOATS, WORDS)
above_signed = _mask("icmp_signed", ">", HALVES, HALVES)
above_octets = _mask("icmp_unsigned", ">", OCTETS, OCTETS)
unequal = _mask("icmp_unsigned", "!=", OCTETS, OCTETS)
