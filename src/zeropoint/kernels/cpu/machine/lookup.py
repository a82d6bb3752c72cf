"""Tables of 16 numbers in a vector, picked from by 32 codes at once."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import I8, I32, address, primitive
from .vector import HALVES, OCTETS, STEP, WORDS, indices

# It has no types.
_tools: Any = cgutils


def _picked_bytes(context: Any, builder: Any, table: Any, codes: Any) -> Any:
    """Pick bytes of two tables of 16: by the first for the first 16 codes, the second for the others.

    The one operation that LLVM has no portable instruction for; machines without a byte shuffle go through
    memory.
    """
    triple, _, features = context.codegen().magic_tuple()
    half = STEP // 2
    if triple.startswith("x86_64") and "+avx2" in features:
        kind = ir.FunctionType(OCTETS.lanes, [OCTETS.lanes, OCTETS.lanes])
        return builder.call(
            _tools.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b"), [table, codes]
        )
    memory = _tools.alloca_once_value(builder, table)
    entries = builder.bitcast(memory, I8.as_pointer())
    picked = ir.Constant(OCTETS.lanes, ir.Undefined)
    for lane in range(STEP):
        index = builder.zext(builder.extract_element(codes, I32(lane)), I32)
        place = builder.gep(entries, [builder.add(index, I32(lane // half * half))])
        picked = builder.insert_element(picked, builder.load(place), I32(lane))
    return picked


def _zip(builder: Any, low: Any, high: Any) -> Any:
    """Put two vectors of 32 numbers together, element by element, as one of twice as wide bytes' groups."""
    width = low.type.count // STEP
    lanes = [s * low.type.count + e * width + k for e in range(STEP) for s in (0, 1) for k in range(width)]
    return builder.shuffle_vector(low, high, indices(lanes))


def _picked(context: Any, builder: Any, table: Any, codes: Any) -> Any:
    """Return 32 numbers of a table's width: byte by byte looked up, then put together."""
    planes = []
    for shift in range(0, table.type.element.width, 8):
        moved = builder.lshr(table, table.type([shift] * STEP)) if shift else table
        planes.append(_picked_bytes(context, builder, builder.trunc(moved, OCTETS.lanes), codes))
    while len(planes) > 1:
        planes = [_zip(builder, *planes[n : n + 2]) for n in range(0, len(planes), 2)]
    return planes[0]


@primitive
def pick_octets(typingctx: Any, table: Any, codes: Any) -> Any:
    """Return ``table[code]`` of 32 codes below 16; the first 16 lanes are the table of the first 16 codes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _picked_bytes(context, builder, *args)

    return OCTETS(OCTETS, OCTETS), codegen


@primitive
def pick_halves(typingctx: Any, table: Any, codes: Any) -> Any:
    """Return ``table[code]`` of 32 codes; the first 16 lanes are the table of the first 16 codes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(_picked(context, builder, *args), HALVES.lanes)

    return HALVES(HALVES, OCTETS), codegen


@primitive
def store_picked(typingctx: Any, array: Any, at: Any, first: Any, second: Any, codes: Any) -> Any:
    """Store ``first[code]`` of the first 16 codes and ``second[code]`` of the others as 32 words."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = builder.shuffle_vector(args[2], args[3], indices(list(range(STEP))))
        value = _picked(context, builder, table, args[4])
        place = address(context, builder, signature.args[0], args[0], args[1], value.type)
        builder.store(value, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.uint64, WORDS, WORDS, OCTETS), codegen
