"""Functions of float lanes: roots, whole numbers, products with sums."""

from typing import Any

from .intrinsics import ANY, FIRST, call, instruction
from .vector import FLOATS, WORDS


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
