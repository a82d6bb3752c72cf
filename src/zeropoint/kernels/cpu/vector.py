"""Vectors of 16 lanes as values of a kernel, for the inner loops that the auto-vectorizer makes too slow.

Floats (float32), words, halves and octets (unsigned integers of 32, 16 and 8 bits) take ``+ - * /`` or
``+ - & | ^ << >>`` with their own kind. Everything is portable LLVM IR: the code generator splits 16 lanes into
the vectors that the machine has.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from .intrinsics import F16, F32, I8, I16, I32, address, primitive

UNIT = 16
"""Lanes of every vector."""


class Vector(types.Type):  # type: ignore[misc]
    """Numba's type of a vector; ``lane`` is LLVM's type of one number."""

    def __init__(self, name: str, lane: Any) -> None:
        super().__init__(name=name)
        self.lane = lane

    @property
    def lanes(self) -> Any:
        """Return LLVM's type of the whole vector."""
        return ir.VectorType(self.lane, UNIT)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """A vector is held in registers as it is."""

    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.lanes)


FLOATS, WORDS = Vector("floats", F32), Vector("words", I32)
HALVES, OCTETS = Vector("halves", I16), Vector("octets", I8)
_OF_BITS = {32: WORDS, 16: HALVES, 8: OCTETS}
_SCALAR = {FLOATS: types.float32, WORDS: types.uint32, HALVES: types.uint16, OCTETS: types.uint8}


def _define(symbol: Callable[..., Any], instruction: str, kind: Vector) -> None:
    """Let ``symbol`` work on two vectors of ``kind``."""

    @infer_global(symbol)
    class Rule(ConcreteTemplate):  # type: ignore[misc]
        cases = (signature(kind, kind, kind),)

    @lower_builtin(symbol, kind, kind)
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _symbol, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _define(getattr(operator, _symbol), _instruction, FLOATS)
for _kind in _OF_BITS.values():
    for _symbol in ("add", "sub", "and_", "or_", "xor"):
        _define(getattr(operator, _symbol), _symbol, _kind)
    _define(operator.lshift, "shl", _kind)
    _define(operator.rshift, "lshr", _kind)


def _splat(builder: Any, scalar: Any) -> Any:
    empty = ir.Constant(ir.VectorType(scalar.type, UNIT), ir.Undefined)
    first = builder.insert_element(empty, scalar, I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(I32, UNIT), [0] * UNIT))


def _splatter(kind: Vector) -> Any:
    @primitive
    def splat(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _splat(builder, args[0])

        return kind(_SCALAR[kind]), codegen

    return splat


floats_of, words_of, halves_of, octets_of = (_splatter(k) for k in (FLOATS, WORDS, HALVES, OCTETS))
"""A vector with one number in all lanes."""


@primitive
def load_lanes(typingctx: Any, array: Any, at: Any) -> Any:
    """Load 16 neighbors as floats, words, halves or octets, whichever the array holds."""
    kind = FLOATS if array.dtype == types.float32 else _OF_BITS[array.dtype.bitwidth]

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
    """Store 64 bytes at ``array[at]``, aligned to 64, past the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], FLOATS.lanes)
        store = builder.store(args[2], place, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(array, types.uint64, FLOATS), codegen


@primitive
def store_nibbles(typingctx: Any, array: Any, at: Any, codes: Any) -> Any:
    """Store 16 octets below 16 as 8 bytes at ``array[at]``, the first of each two in the low nibble."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = ir.VectorType(I16, UNIT // 2)
        value = builder.bitcast(args[2], pairs)
        value = builder.or_(value, builder.lshr(value, pairs([4] * (UNIT // 2))))
        value = builder.trunc(value, ir.VectorType(I8, UNIT // 2))
        place = address(context, builder, signature.args[0], args[0], args[1], value.type)
        builder.store(value, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, OCTETS), codegen


@primitive
def load_nibbles(typingctx: Any, array: Any, at: Any) -> Any:
    """Load the 8 bytes at ``array[at]`` as 16 octets, low nibble first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = UNIT // 2
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
words_of_halves, halves_of_words = _cast(HALVES, WORDS, "zext"), _cast(WORDS, HALVES, "trunc")
words_of_octets, octets_of_words = _cast(OCTETS, WORDS, "zext"), _cast(WORDS, OCTETS, "trunc")
halves_of_octets, octets_of_halves = _cast(OCTETS, HALVES, "zext"), _cast(HALVES, OCTETS, "trunc")
floats_of_integers = _cast(WORDS, FLOATS, "sitofp")


@primitive
def floats_of_float16(typingctx: Any, x: Any) -> Any:
    """Widen the bits of 16 float16 exactly."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.VectorType(F16, UNIT)), FLOATS.lanes)

    return FLOATS(HALVES), codegen


@primitive
def float16_of_floats(typingctx: Any, x: Any) -> Any:
    """Round 16 floats to float16, half to even, and return their bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.VectorType(F16, UNIT)), HALVES.lanes)

    return HALVES(FLOATS), codegen


@primitive
def shift_signed(typingctx: Any, x: Any, by: Any) -> Any:
    """Shift halves right and fill with the sign."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ashr(*args)

    return HALVES(HALVES, HALVES), codegen


def _choice(comparison: str, symbol: str) -> Any:
    """Build the lane-wise ``a if a <symbol> b else b``."""

    @primitive
    def choose(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.select(getattr(builder, comparison)(symbol, *args), *args)

        return a(a, a), codegen

    return choose


larger, smaller = _choice("fcmp_ordered", ">"), _choice("fcmp_ordered", "<")
"""Of floats; where a lane of the first is NaN, that of the second."""
larger_bits, smaller_bits = _choice("icmp_unsigned", ">"), _choice("icmp_unsigned", "<")


def _mask(comparison: str, symbol: str, kind: Vector, result: Vector) -> Any:
    """Build the lane-wise comparison that gives all ones or all zeros."""

    @primitive
    def compare(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.sext(getattr(builder, comparison)(symbol, *args), result.lanes)

        return result(kind, kind), codegen

    return compare


above = _mask("fcmp_ordered", ">", FLOATS, WORDS)
above_signed = _mask("icmp_signed", ">", HALVES, HALVES)
unequal = _mask("icmp_unsigned", "!=", OCTETS, OCTETS)


@primitive
def count_above(typingctx: Any, x: Any, thresholds: Any) -> Any:
    """Return how many of a tuple of int16 thresholds lie strictly below each lane of signed halves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = HALVES.lanes([0] * UNIT)
        for k in range(signature.args[1].count):
            threshold = _splat(builder, builder.extract_value(args[1], k))
            beyond = builder.icmp_signed(">", args[0], threshold)
            total = builder.sub(total, builder.sext(beyond, HALVES.lanes))
        return total

    return HALVES(HALVES, thresholds), codegen


@primitive
def largest_lane(typingctx: Any, x: Any) -> Any:
    """Return the largest lane of unsigned integers."""
    return _reduction("umax", x)


def _reduction(name: str, kind: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane, vector = kind.lane, args[0].type
        called = f"llvm.vector.reduce.{name}.v{UNIT}i{lane.width}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(lane, [vector]), called)
        return builder.call(function, [args[0]])

    return _SCALAR[kind](kind), codegen
