"""Vectors from and to bytes: strided words and sign bits."""

from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import ANY, I8, I32, I64, INDEX, instruction, load_from, store_at
from .vector import LONGS, OCTETS, STEP


@instruction(LONGS, ANY, INDEX, INDEX)
def load_strided(builder: Any, source: Any, at: Any, step: Any) -> Any:
    """Load 8 words of 8 bytes that begin ``step`` bytes apart."""
    value = ir.Constant(LONGS.lanes, ir.Undefined)
    for lane in range(LONGS.count):
        value = builder.insert_element(value, load_from(builder, source, at, I64), I32(lane))
        at = builder.add(at, step)
    return value


@instruction(types.void, ANY, INDEX, INDEX, LONGS)
def store_strided(builder: Any, target: Any, at: Any, step: Any, value: Any) -> None:
    """Store 8 words of 8 bytes, ``step`` bytes apart, first one first."""
    for lane in range(LONGS.count):
        store_at(builder, builder.extract_element(value, I32(lane)), target, at)
        at = builder.add(at, step)


@instruction(types.void, ANY, INDEX, ANY)
def store_bytes(builder: Any, target: Any, at: Any, value: Any) -> None:
    """Store the low bytes of 16 words, or of 8 longs."""
    store_at(builder, builder.trunc(value, ir.VectorType(I8, value.type.count)), target, at)


@instruction(types.void, ANY, INDEX, OCTETS, types.uint32)
def store_signs(builder: Any, target: Any, at: Any, value: Any, flip: Any) -> None:
    """Store which of 32 octets are nonzero as 4 bytes, xor ``flip``."""
    some = builder.icmp_unsigned("!=", value, OCTETS.lanes([0] * STEP))
    store_at(builder, builder.xor(builder.bitcast(some, I32), flip), target, at)


@instruction(OCTETS, ANY, INDEX, types.uint32)
def load_signs(builder: Any, source: Any, at: Any, flip: Any) -> Any:
    """Load 32 octets of ones or zeros; the inverse of :func:`store_signs`."""
    bits = builder.xor(load_from(builder, source, at, I32), flip)
    return builder.sext(builder.bitcast(bits, ir.VectorType(ir.IntType(1), STEP)), OCTETS.lanes)
