"""Instructions that Numba lacks: bit casts, float16, prefetch, streaming stores.

Everything here is portable LLVM IR; nothing names an instruction set. This module also decides how kernels
are compiled and where their machine code is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .cache import KernelCache, cache_directory
from .compilers import DeviceCompiler, KernelCompiler, rebuilt_device, rebuilt_kernel
from .float16 import narrowed, widened

F = TypeVar("F", bound=Callable[..., Any])

F32 = ir.FloatType()
F64 = ir.DoubleType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
LINE = 64
"""Bytes of a cache line; a wrong value costs speed, never bytes."""
# Neither has types: numba fills its configuration at import, and the other function is not annotated.
_CONFIG: Any = numba.config
_declare: Any = cgutils.get_or_insert_function
_reserve: Any = cgutils.alloca_once
# Unrolled short loops vectorize only in this pass, which Numba leaves off. Kernels compile at their first
# call, so it stays on.
_CONFIG.SLP_VECTORIZE = 1


def kernel(function: F) -> F:
    """Compile an entry point: no GIL, fast-math or contraction; cached on disk."""
    return _compiled(function, wrapped=True)


def device(function: F) -> F:
    """Compile a function that kernels call, without wrappers and own machine code."""
    return _compiled(function, wrapped=False)


def inlined(function: F) -> F:
    """Compile a device function into its callers: calls pass vectors through memory."""
    return _compiled(function, wrapped=False, forceinline=True)


def _compiled(function: F, *, wrapped: bool, forceinline: bool = False) -> F:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    # Without Numba's reference counts, atomic additions in every call that an array is handed to.
    options |= {"_nrt": False, "forceinline": forceinline}
    if wrapped:
        made: Any = njit(**options, pipeline_class=KernelCompiler)(function)
    else:
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        made = njit(**options, pipeline_class=DeviceCompiler)(function)
    made._cache = KernelCache(function, cache_directory(), rebuilt_kernel if wrapped else rebuilt_device)
    return cast("F", made)


def primitive(function: Callable[..., Any]) -> Any:
    """Register a function that writes LLVM IR; Numba passes its first argument."""
    return intrinsic(function)


def x86_has(feature: str) -> bool:
    """Whether kernels are compiled for an x86-64 processor with ``feature``."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith("x86_64") and f"+{feature}" in features.split(",")


@primitive
def bits32(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@primitive
def float32_of(typingctx: Any, x: Any) -> Any:
    """Return the float32 whose bits are the given uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@primitive
def bits64(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float64 as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I64)

    return types.uint64(types.float64), codegen


@primitive
def float64_of(typingctx: Any, x: Any) -> Any:
    """Return the float64 whose bits are the given uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F64)

    return types.float64(types.uint64), codegen


@primitive
def widen_half(typingctx: Any, x: Any) -> Any:
    """Return the float16 with the given uint16 bits as float32 (exact)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widened(context, builder, args[0])

    return types.float32(types.uint16), codegen


@primitive
def narrow_half(typingctx: Any, x: Any) -> Any:
    """Round a float32 to float16, half to even: its bits, uint16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return narrowed(context, builder, args[0])

    return types.uint16(types.float32), codegen


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, bits: Any = I8) -> Any:
    """Return the address of ``array[index]`` as a pointer to ``bits``."""
    view = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(view.data, [index]), bits.as_pointer())


def flattened(builder: Any, signature: Any, args: Any) -> tuple[list[Any], list[Any]]:
    """Types and values of a primitive's arguments, tuples as their items."""
    kinds: list[Any] = []
    values: list[Any] = []
    for kind, value in zip(signature.args, args, strict=True):
        items = isinstance(kind, types.BaseTuple)
        kinds += kind.types if items else [kind]
        values += [builder.extract_value(value, n) for n in range(kind.count)] if items else [value]
    return kinds, values


def _scratch(typingctx: Any, count: Any, dtype: Any) -> Any:
    """Uninitialized array of ``count`` (constant) numbers on the kernel's stack.

    Call it outside of loops; the array lives until the kernel returns.
    """
    kind = types.Array(dtype.dtype, 1, "C")
    size = count.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = context.get_data_type(kind.dtype)
        memory = _reserve(builder, lane, size=size)
        memory.align = LINE
        array = context.make_array(kind)(context, builder)
        width = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
        length = context.get_constant(types.intp, size)
        context.populate_array(
            array, data=memory, shape=[length], strides=[width], itemsize=width, meminfo=None
        )
        return array._getvalue()

    return kind(count, dtype), codegen


scratch: Any = intrinsic(prefer_literal=True)(_scratch)


def _prefetcher(locality: int) -> Any:
    """Build a prefetch of ``array[index]``; reading past the end is harmless."""

    @primitive
    def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = address(context, builder, signature.args[0], args[0], args[1])
            kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
            function = _declare(builder.module, kind, "llvm.prefetch.p0")
            builder.call(function, [place, I32(0), I32(locality), I32(1)])
            return context.get_dummy_value()

        return types.void(array, types.uint64), codegen

    return prefetch


prefetch, prefetch_far = _prefetcher(3), _prefetcher(2)
"""Ask for a cache line: into all caches, or all but the first, where rows displace each other's lines."""


@primitive
def stream32(typingctx: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    """Copy 32 bytes to the 32-byte aligned ``target[at]``, past the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(I64, 4)
        to = address(context, builder, signature.args[0], args[0], args[1], vector)
        origin = address(context, builder, signature.args[2], args[2], args[3], vector)
        value = builder.load(origin)
        value.align = 1  # scratch alignment is not promised
        store = builder.store(value, to, align=32)
        store.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64), codegen


@primitive
def stream_fence(typingctx: Any) -> Any:
    """Make earlier streamed stores visible to other threads."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _lanes(name: str, bits: int) -> Any:
    """Build an operation on ``bits``-bit lanes.

    Numba's own operators widen to 64 bits and so shorten the vectors.
    """
    kind = types.uint32 if bits == 32 else types.uint16

    @primitive
    def lanes(typingctx: Any, x: Any, by: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(args[0], args[1])

        return kind(kind, kind), codegen

    return lanes


shl32, shr32 = _lanes("shl", 32), _lanes("lshr", 32)
add32, and32 = _lanes("add", 32), _lanes("and_", 32)
shl16, shr16 = _lanes("shl", 16), _lanes("lshr", 16)


@device
def near_bfloat16(x: Any) -> Any:
    """Round a finite float32 to bfloat16, half to even: upper bits."""
    u = bits32(x)
    odd = and32(shr32(u, np.uint32(16)), np.uint32(1))
    return add32(add32(u, np.uint32(0x7FFF)), odd)


@device
def to_bfloat16(x: Any) -> Any:
    """Round a finite float32 to bfloat16, half to even, and widen it."""
    return float32_of(and32(near_bfloat16(x), np.uint32(0xFFFF0000)))


@primitive
def count_above(typingctx: Any, t: Any, thresholds: Any) -> Any:
    """Count thresholds, a tuple of float32, strictly below ``t``; a float32.

    Counted in one expression of 32-bit masks and handed on as a float: an integer result would be narrowed to
    bytes and the sum transposed by the SLP vectorizer, at a tenth of the speed.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = I32(0)
        for k in range(signature.args[1].count):
            above = builder.fcmp_ordered(">", args[0], builder.extract_value(args[1], k))
            total = builder.sub(total, builder.sext(above, I32))
        return builder.sitofp(total, F32)

    return types.float32(types.float32, thresholds), codegen


@primitive
def store64(typingctx: Any, target: Any, at: Any, word: Any) -> Any:
    """Store a uint64 at ``target[at]``, unaligned, little-endian on every host."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store = builder.store(args[2], address(context, builder, signature.args[0], args[0], args[1], I64))
        store.align = 1
        return context.get_dummy_value()

    return types.void(target, types.uint64, types.uint64), codegen


@primitive
def address_of(typingctx: Any, array: Any, index: Any) -> Any:
    """Address of ``array[index]``, uint64, to align stores."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(address(context, builder, signature.args[0], args[0], args[1]), I64)

    return types.uint64(array, types.uint64), codegen


@primitive
def load64(typingctx: Any, source: Any, at: Any) -> Any:
    """Load the 8 bytes at ``source[at]``, any alignment, as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(address(context, builder, signature.args[0], args[0], args[1], I64))
        word.align = 1
        return word

    return types.uint64(source, types.uint64), codegen


def _unit_amax(lanes: int) -> Any:
    """Build the largest magnitude of ``lanes`` neighbors: auto-vectorization misses it."""

    @primitive
    def unit_amax(typingctx: Any, array: Any, index: Any) -> Any:
        width = array.dtype.bitwidth
        kind = types.uint32 if width == 32 else types.uint16

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lane = ir.IntType(width)
            vector = ir.VectorType(lane, lanes)
            value = builder.load(address(context, builder, signature.args[0], args[0], args[1], vector))
            value.align = 1  # any element may begin a block
            value = builder.and_(value, vector([(1 << (width - 1)) - 1] * lanes))
            reduce = _declare(
                builder.module, ir.FunctionType(lane, [vector]), f"llvm.vector.reduce.umax.v{lanes}i{width}"
            )
            return builder.call(reduce, [value])

        return kind(array, types.uint64), codegen

    return unit_amax


amax16, amax32 = _unit_amax(16), _unit_amax(32)
