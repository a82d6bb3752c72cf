"""Reductions of sixteen vectors: a fold of two halves each one's lanes.

Folds of 2, 4, 8 and then 16 vectors leave one whose lane n is the extreme of all lanes of vector n. That is
15 folds in place of 16 reductions of four steps.
"""

import itertools
from typing import Any

from llvmlite import ir

from .intrinsics import I32, primitive
from .vector import HALVES, indices

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

    @primitive
    def fold(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = [builder.bitcast(x, ir.VectorType(I32, LANES)) for x in args]
            shuffled = [builder.shuffle_vector(*words, indices(picked)) for picked in lanes]
            first, second = (builder.bitcast(x, args[0].type) for x in shuffled)
            return builder.select(builder.icmp_signed(symbol, first, second), first, second)

        return a(a, b), codegen

    return fold


smaller_of_2, smaller_of_4, smaller_of_8, smaller_of_16 = (_folder(step, "<") for step in range(1, 5))
larger_of_2, larger_of_4, larger_of_8, larger_of_16 = (_folder(step, ">") for step in range(1, 5))
"""Of two vectors that belong to so many vectors together."""


@primitive
def interleaved_pairs(typingctx: Any, x: Any) -> Any:
    """Interleave the first 16 halves with the last, like a fold."""
    lanes = [n // 2 + n % 2 * (LANES // 2) for n in range(LANES)]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.bitcast(args[0], ir.VectorType(I32, LANES))
        return builder.bitcast(builder.shuffle_vector(words, words, indices(lanes)), args[0].type)

    return HALVES(HALVES), codegen


def _swapper(distance: int) -> Any:
    """Build the exchange of lanes n and ``n ^ distance``."""

    @primitive
    def swap(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.shuffle_vector(args[0], args[0], indices([n ^ distance for n in range(LANES)]))

        return x(x), codegen

    return swap


swapped_by_1, swapped_by_2, swapped_by_4 = (_swapper(1 << n) for n in range(3))


def _doubler(begin: int) -> Any:
    """Build the doubling of 8 lanes from ``begin``, each next to itself."""

    @primitive
    def double(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lanes = indices([begin + n // 2 for n in range(LANES)])
            return builder.shuffle_vector(args[0], args[0], lanes)

        return x(x), codegen

    return double


first_doubled, second_doubled = _doubler(0), _doubler(LANES // 2)


def _every_other(begin: int) -> Any:
    """Build the choice of every other lane of two vectors."""

    @primitive
    def choose(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.shuffle_vector(*args, indices(list(range(begin, 2 * LANES, 2))))

        return a(a, a), codegen

    return choose


even_lanes, odd_lanes = _every_other(0), _every_other(1)


def _lane(number: int) -> Any:
    """Build the choice of one lane."""

    @primitive
    def lane(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.extract_element(args[0], I32(number))

        return x.scalar(x), codegen

    return lane


first_lane, ninth_lane = _lane(0), _lane(8)
