"""Reductions of a vector's lanes to one number."""

from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import I32, primitive
from .vector import DOUBLES, FLOATS, Vector, _tools, indices


def _reducer(name: str) -> Any:
    """Build a reduction over the lanes of unsigned integers."""

    @primitive
    def reduce(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            called = f"llvm.vector.reduce.{name}.v{x.count}i{x.lane.width}"
            shape = ir.FunctionType(x.lane, [args[0].type])
            return builder.call(_tools.get_or_insert_function(builder.module, shape, called), [args[0]])

        return x.scalar(x), codegen

    return reduce


largest_lane, smallest_lane, sum_of_words = _reducer("umax"), _reducer("umin"), _reducer("add")


largest_signed_lane, smallest_signed_lane = _reducer("smax"), _reducer("smin")
"""Of words that are signed, and given as words."""


@primitive
def any_lane(typingctx: Any, x: Any) -> Any:
    """Return whether any lane of integers is not zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.IntType(x.count * x.lane.width))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(x), codegen


@primitive
def any_below(typingctx: Any, a: Any, b: Any) -> Any:
    """Whether any unsigned lane is less than the other vector's lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(builder.icmp_unsigned("<", *args), ir.IntType(a.count))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(a, a), codegen


def _adder(kind: Vector) -> Any:
    """Build the sum of float lanes in one order, a halving tree."""

    @primitive
    def add(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, lanes = args[0], kind.count
            while lanes > 1:
                lanes //= 2
                low, high = indices(list(range(lanes))), indices(list(range(lanes, 2 * lanes)))
                value = builder.fadd(
                    builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high)
                )
            return builder.extract_element(value, I32(0))

        return kind.scalar(kind), codegen

    return add


sum_of_lanes, sum_of_doubles = _adder(FLOATS), _adder(DOUBLES)
