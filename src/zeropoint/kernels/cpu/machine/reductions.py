"""Reductions of lanes, folds of vectors, and functions of float lanes.

Folds of 2, 4, 8 and then 16 vectors leave one whose lane n is the extreme of all lanes of vector n. That is
15 folds in place of 16 reductions of four steps.
"""

import itertools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import ANY, FIRST, I32, call, instruction
from .vector import DOUBLES, FLOATS, HALVES, WORDS, Vector, indices


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


def _tree(kind: Vector, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Build a reduction of float lanes in one order, a halving tree."""

    @instruction(kind.scalar, kind)
    def reduce(builder: Any, x: Any) -> Any:
        lanes = kind.count
        while lanes > 1:
            lanes //= 2
            low, high = (indices(list(range(at, at + lanes))) for at in (0, lanes))
            x = join(builder, builder.shuffle_vector(x, x, low), builder.shuffle_vector(x, x, high))
        return builder.extract_element(x, I32(0))

    return reduce


def _extreme(symbol: str) -> Any:
    return _tree(FLOATS, lambda builder, a, b: builder.select(builder.fcmp_ordered(symbol, a, b), a, b))


sum_of_lanes, sum_of_doubles = (
    _tree(kind, lambda builder, a, b: builder.fadd(a, b)) for kind in (FLOATS, DOUBLES)
)
least_lane, most_lane = _extreme("<"), _extreme(">")
"""Extremes of floats, faster than transposing 16 vectors."""


def _each(name: str) -> Any:
    """Build an LLVM function of each float or double lane."""

    @instruction(FIRST, ANY)
    def each(builder: Any, x: Any) -> Any:
        return call(builder, x.type, f"llvm.{name}.v16{x.type.element.intrinsic_name}", x)

    return each


root, whole = _each("sqrt"), _each("rint")
"""Square roots, rounded, and whole numbers, rounded half to even."""


@instruction(FIRST, ANY, FIRST, FIRST)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a * b + c``, rounded once if that is faster.

    For estimates, and for floats or doubles whose sums are exact.
    """
    return call(builder, a.type, f"llvm.fmuladd.v16{a.type.element.intrinsic_name}", a, b, c)


@instruction(WORDS, FLOATS)
def integers(builder: Any, x: Any) -> Any:
    """Return floats that are whole numbers as words."""
    return builder.fptosi(x, WORDS.lanes)


LANES = 16
_PART = 4
"""Lanes that a processor shuffles without crossing to others."""


def _halves(step: int) -> tuple[list[int], list[int]]:
    """Lanes of two vectors compared at step 1 to 4."""
    parts = range(0, LANES, _PART)
    if step == 1:
        first = [[p, LANES + p, p + 1, LANES + p + 1] for p in parts]
        second = [[n + 2 for n in part] for part in first]
    elif step == 2:
        first = [[p, p + 1, LANES + p, LANES + p + 1] for p in parts]
        second = [[n + 2 for n in part] for part in first]
    else:
        pairs = (0, 4) if step == 3 else (0, 8)
        first = [[*range(v + p, v + p + _PART)] for v in (0, LANES) for p in pairs]
        second = [[n + (8 if step == 3 else 4) for n in part] for part in first]
    return [*itertools.chain(*first)], [*itertools.chain(*second)]


def _folder(step: int, symbol: str) -> Any:
    """Build the fold of two vectors of signed words, or half pairs.

    Each is of ``2 ** (step - 1)`` vectors. Halves that are a word stay together: both belong to one vector in
    the end.
    """
    lanes = _halves(step)

    @instruction(FIRST, ANY, ANY)
    def fold(builder: Any, a: Any, b: Any) -> Any:
        words = [builder.bitcast(x, ir.VectorType(I32, LANES)) for x in (a, b)]
        shuffled = [builder.shuffle_vector(*words, indices(picked)) for picked in lanes]
        first, second = (builder.bitcast(x, a.type) for x in shuffled)
        return builder.select(builder.icmp_signed(symbol, first, second), first, second)

    return fold


smaller_of_2, smaller_of_4, smaller_of_8, smaller_of_16 = (_folder(step, "<") for step in range(1, 5))
larger_of_2, larger_of_4, larger_of_8, larger_of_16 = (_folder(step, ">") for step in range(1, 5))
"""Of two vectors that belong to so many vectors together."""


@instruction(HALVES, HALVES)
def interleaved_pairs(builder: Any, x: Any) -> Any:
    """Interleave the first 16 halves with the last, like a fold."""
    lanes = [n // 2 + n % 2 * (LANES // 2) for n in range(LANES)]
    words = builder.bitcast(x, ir.VectorType(I32, LANES))
    return builder.bitcast(builder.shuffle_vector(words, words, indices(lanes)), x.type)


def _shuffled(lanes: list[int]) -> Any:
    """Build the choice of lanes of a vector."""

    @instruction(FIRST, ANY)
    def shuffle(builder: Any, x: Any) -> Any:
        return builder.shuffle_vector(x, x, indices(lanes))

    return shuffle


swapped_by_1, swapped_by_2, swapped_by_4 = (_shuffled([n ^ by for n in range(LANES)]) for by in (1, 2, 4))
"""Lanes n and ``n ^ by`` exchanged."""
first_doubled, second_doubled = (_shuffled([at + n // 2 for n in range(LANES)]) for at in (0, LANES // 2))
"""8 lanes, each next to itself."""


def _every_other(begin: int) -> Any:
    """Build the choice of every other lane of two vectors."""

    @instruction(FIRST, ANY, FIRST)
    def choose(builder: Any, a: Any, b: Any) -> Any:
        return builder.shuffle_vector(a, b, indices(list(range(begin, 2 * LANES, 2))))

    return choose


even_lanes, odd_lanes = _every_other(0), _every_other(1)


def _lane(number: int) -> Any:
    """Build the choice of one lane."""

    @instruction(lambda given: given[0].scalar, ANY)
    def lane(builder: Any, x: Any) -> Any:
        return builder.extract_element(x, I32(number))

    return lane


first_lane, ninth_lane = _lane(0), _lane(8)
