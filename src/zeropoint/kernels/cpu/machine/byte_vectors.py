"""Vectors from and to bytes: strided words and sign bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import I8, I32, I64, address, primitive
from .vector import LONGS, OCTETS, STEP


def _place(context: Any, builder: Any, signature: Any, args: Any, bits: Any) -> Any:
    return address(context, builder, signature.args[0], args[0], args[1], bits)


def _loaded(builder: Any, place: Any) -> Any:
    value = builder.load(place)
    value.align = 1
    return value


@primitive
def load_strided(typingctx: Any, source: Any, at: Any, step: Any) -> Any:
    """Load 8 words of 8 bytes that begin ``step`` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, step = args
        value = ir.Constant(LONGS.lanes, ir.Undefined)
        for lane in range(LONGS.count):
            word = _loaded(builder, _place(context, builder, signature, (array, at), I64))
            value = builder.insert_element(value, word, I32(lane))
            at = builder.add(at, step)
        return value

    return LONGS(source, types.uint64, types.uint64), codegen


@primitive
def store_strided(typingctx: Any, target: Any, at: Any, step: Any, value: Any) -> Any:
    """Store 8 words of 8 bytes, ``step`` bytes apart, first one first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, step, value = args
        for lane in range(LONGS.count):
            place = _place(context, builder, signature, (array, at), I64)
            builder.store(builder.extract_element(value, I32(lane)), place).align = 1
            at = builder.add(at, step)
        return context.get_dummy_value()

    return types.void(target, types.uint64, types.uint64, LONGS), codegen


@primitive
def store_bytes(typingctx: Any, target: Any, at: Any, value: Any) -> Any:
    """Store the low bytes of 16 words, or of 8 longs."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = builder.trunc(args[2], ir.VectorType(I8, value.count))
        builder.store(low, _place(context, builder, signature, args, low.type)).align = 1
        return context.get_dummy_value()

    return types.void(target, types.uint64, value), codegen


@primitive
def store_signs(typingctx: Any, target: Any, at: Any, value: Any, flip: Any) -> Any:
    """Store which of 32 octets are nonzero as 4 bytes, xor ``flip``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        some = builder.icmp_unsigned("!=", args[2], OCTETS.lanes([0] * STEP))
        place = _place(context, builder, signature, args, I32)
        builder.store(builder.xor(builder.bitcast(some, I32), args[3]), place).align = 1
        return context.get_dummy_value()

    return types.void(target, types.uint64, OCTETS, types.uint32), codegen


@primitive
def load_signs(typingctx: Any, source: Any, at: Any, flip: Any) -> Any:
    """Load 32 octets of ones or zeros; the inverse of :func:`store_signs`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.xor(_loaded(builder, _place(context, builder, signature, args, I32)), args[2])
        return builder.sext(builder.bitcast(bits, ir.VectorType(ir.IntType(1), STEP)), OCTETS.lanes)

    return OCTETS(source, types.uint64, types.uint32), codegen
