"""Reductions of a vector's lanes to one number."""

from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import ANY, FIRST, I32, call, instruction
from .vector import DOUBLES, FLOATS, Vector, indices


def _reducer(name: str) -> Any:
    """Build a reduction over the lanes of unsigned integers."""

    @instruction(lambda given: given[0].scalar, ANY)
    def reduce(builder: Any, x: Any) -> Any:
        lane = x.type.element
        return call(builder, lane, f"llvm.vector.reduce.{name}.v{x.type.count}i{lane.width}", x)

    return reduce


largest_lane, smallest_lane, sum_of_words = _reducer("umax"), _reducer("umin"), _reducer("add")
largest_signed_lane, smallest_signed_lane = _reducer("smax"), _reducer("smin")
"""Of words that are signed, and given as words."""


@instruction(types.boolean, ANY)
def any_lane(builder: Any, x: Any) -> Any:
    """Return whether any lane of integers is not zero."""
    bits = builder.bitcast(x, ir.IntType(x.type.count * x.type.element.width))
    return builder.icmp_unsigned("!=", bits, bits.type(0))


@instruction(types.boolean, ANY, FIRST)
def any_below(builder: Any, a: Any, b: Any) -> Any:
    """Whether any unsigned lane is less than the other vector's lane."""
    bits = builder.bitcast(builder.icmp_unsigned("<", a, b), ir.IntType(a.type.count))
    return builder.icmp_unsigned("!=", bits, bits.type(0))


def _adder(kind: Vector) -> Any:
    """Build the sum of float lanes in one order, a halving tree."""

    @instruction(kind.scalar, kind)
    def add(builder: Any, x: Any) -> Any:
        value, lanes = x, kind.count
        while lanes > 1:
            lanes //= 2
            low, high = indices(list(range(lanes))), indices(list(range(lanes, 2 * lanes)))
            value = builder.fadd(
                builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high)
            )
        return builder.extract_element(value, I32(0))

    return add


sum_of_lanes, sum_of_doubles = _adder(FLOATS), _adder(DOUBLES)
