"""Functions of float lanes: roots, whole numbers, products with sums."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .intrinsics import primitive
from .vector import FLOATS, WORDS

_tools: Any = cgutils  # has no types


def _each(name: str) -> Any:
    """Build an LLVM function of each float or double lane."""

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
    """Compute ``a * b + c``, rounded once if that is faster.

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
