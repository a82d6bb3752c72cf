"""Instructions that Numba lacks: bit casts, float16, prefetch, streaming stores.

Everything here is portable LLVM IR; nothing names an instruction set. This module also decides how kernels
are compiled and where their machine code is kept.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
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
# Neither has types: numba fills its configuration at import, and functions are not annotated.
_CONFIG: Any = numba.config
tools: Any = cgutils
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
    """Register a function of Numba's types that returns signature and IR writer."""
    return intrinsic(function)


tuple_of: Any = types.UniTuple
ANY, INDEX, FIRST, SECOND = None, types.uint64, operator.itemgetter(0), operator.itemgetter(1)
"""Types of arguments: whatever comes, places in arrays, the first and the second argument's."""


def instruction(result: Any, *kinds: Any) -> Any:
    """Register a function that writes the LLVM IR of an operation.

    It takes the builder and the values of arguments: of arrays a pointer to the first element, of tuples a
    tuple. result, kinds: types of Numba, ANY, or functions of the types of all arguments.
    """

    def register(write: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *given: Any) -> Any:
            def resolved(kind: Any, own: Any) -> Any:
                return own if kind is ANY else kind if isinstance(kind, types.Type) else kind(given)

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                values = (
                    _unpacked(context, builder, *each) for each in zip(signature.args, args, strict=True)
                )
                found = write(builder, *values)
                return context.get_dummy_value() if found is None else found

            return resolved(result, None)(*map(resolved, kinds, given)), codegen

        typed.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        return primitive(functools.wraps(write)(typed))

    return register


def _unpacked(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Pointer to the first element of an array, and tuples as tuples."""
    if isinstance(kind, types.Array):
        return context.make_array(kind)(context, builder, value).data
    if not isinstance(kind, types.BaseTuple):
        return value
    kinds: Any = kind
    items = [(own, builder.extract_value(value, n)) for n, own in enumerate(kinds)]
    return tuple([_unpacked(context, builder, *item) for item in items])


def _bit_cast(source: Any, target: Any, lane: Any) -> Any:
    @instruction(target, source)
    def cast_bits(builder: Any, x: Any) -> Any:
        return builder.bitcast(x, lane)

    return cast_bits


bits32, float32_of = _bit_cast(types.float32, types.uint32, I32), _bit_cast(types.uint32, types.float32, F32)
bits64, float64_of = _bit_cast(types.float64, types.uint64, I64), _bit_cast(types.uint64, types.float64, F64)
"""Bits of a float, and the float of such bits."""


@instruction(types.float32, types.uint16)
def widen_half(builder: Any, x: Any) -> Any:
    """Float16 of uint16 bits as float32 (exact)."""
    return widened(builder, x)


@instruction(types.uint16, types.float32)
def narrow_half(builder: Any, x: Any) -> Any:
    """Round a float32 to float16, half to even: its bits, uint16."""
    return narrowed(builder, x)


def address(builder: Any, array: Any, index: Any, bits: Any = I8) -> Any:
    """Address of ``array[index]`` as a pointer to ``bits``."""
    return builder.bitcast(builder.gep(array, [index]), bits.as_pointer())


def load_from(builder: Any, array: Any, index: Any, kind: Any, align: int = 1) -> Any:
    """Load a value that begins at ``array[index]``."""
    value = builder.load(address(builder, array, index, kind))
    value.align = align
    return value


def store_at(builder: Any, value: Any, array: Any, index: Any, align: int = 1) -> Any:
    """Store a value from ``array[index]`` on."""
    return builder.store(value, address(builder, array, index, value.type), align=align)


def stream_at(builder: Any, value: Any, array: Any, index: Any, align: int) -> None:
    """Store a value past the cache."""
    nontemporal = builder.module.add_metadata([I32(1)])
    store_at(builder, value, array, index, align).set_metadata("nontemporal", nontemporal)


def call(builder: Any, result: Any, name: str, *args: Any) -> Any:
    """Call a function of LLVM or of the processor."""
    kind = ir.FunctionType(result, [each.type for each in args])
    return builder.call(tools.get_or_insert_function(builder.module, kind, name), args)


def _scratch(typingctx: Any, count: Any, dtype: Any) -> Any:
    """Uninitialized array of ``count`` (constant) numbers on the kernel's stack.

    Call it outside of loops; the array lives until the kernel returns.
    """
    kind = types.Array(dtype.dtype, 1, "C")
    size = count.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = context.get_data_type(kind.dtype)
        memory = tools.alloca_once(builder, lane, size=size)
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

    @instruction(types.void, ANY, INDEX)
    def prefetch(builder: Any, array: Any, index: Any) -> None:
        numbers = I32(0), I32(locality), I32(1)
        call(builder, ir.VoidType(), "llvm.prefetch.p0", address(builder, array, index), *numbers)

    return prefetch


prefetch, prefetch_far = _prefetcher(3), _prefetcher(2)
"""Ask for a cache line: into all caches, or all but the first, where rows displace each other's lines."""


@instruction(types.void, ANY, INDEX, ANY, INDEX)
def stream32(builder: Any, target: Any, at: Any, source: Any, start: Any) -> None:
    """Copy 32 bytes to the 32-byte aligned ``target[at]``, past the cache."""
    value = load_from(builder, source, start, ir.VectorType(I64, 4))  # scratch alignment is not promised
    stream_at(builder, value, target, at, 32)


@instruction(types.void)
def stream_fence(builder: Any) -> None:
    """Make earlier streamed stores visible to other threads."""
    builder.fence("seq_cst")


def _lanes(name: str, bits: int) -> Any:
    """Build an operation on ``bits``-bit lanes.

    Numba's own operators widen to 64 bits and so shorten the vectors.
    """
    kind = types.uint32 if bits == 32 else types.uint16

    @instruction(kind, kind, kind)
    def lanes(builder: Any, x: Any, by: Any) -> Any:
        return getattr(builder, name)(x, by)

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


@instruction(types.float32, types.float32, ANY)
def count_above(builder: Any, t: Any, thresholds: Any) -> Any:
    """Count thresholds, a tuple of float32, strictly below ``t``; a float32.

    Counted in one expression of 32-bit masks and handed on as a float: an integer result would be narrowed to
    bytes and the sum transposed by the SLP vectorizer, at a tenth of the speed.
    """
    total = I32(0)
    for threshold in thresholds:
        above = builder.fcmp_ordered(">", t, threshold)
        total = builder.sub(total, builder.sext(above, I32))
    return builder.sitofp(total, F32)


@instruction(types.void, ANY, INDEX, INDEX)
def store64(builder: Any, target: Any, at: Any, word: Any) -> None:
    """Store a uint64 at ``target[at]``, unaligned, little-endian on every host."""
    store_at(builder, word, target, at)


@instruction(types.uint64, ANY, INDEX)
def address_of(builder: Any, array: Any, index: Any) -> Any:
    """Address of ``array[index]``, uint64, to align stores."""
    return builder.ptrtoint(address(builder, array, index), I64)


@instruction(types.uint64, ANY, INDEX)
def load64(builder: Any, source: Any, at: Any) -> Any:
    """Load the 8 bytes at ``source[at]``, any alignment, as uint64."""
    return load_from(builder, source, at, I64)


def _unit_amax(lanes: int) -> Any:
    """Build the largest magnitude of ``lanes`` neighbors: auto-vectorization misses it."""

    @instruction(lambda given: types.uint32 if given[0].dtype.bitwidth == 32 else types.uint16, ANY, INDEX)
    def unit_amax(builder: Any, array: Any, index: Any) -> Any:
        width = 16 if array.type.pointee == I16 else 32
        lane = ir.IntType(width)
        vector = ir.VectorType(lane, lanes)
        value = load_from(builder, array, index, vector)  # any element may begin a block
        value = builder.and_(value, vector([(1 << (width - 1)) - 1] * lanes))
        return call(builder, lane, f"llvm.vector.reduce.umax.v{lanes}i{width}", value)

    return unit_amax


amax16, amax32 = _unit_amax(16), _unit_amax(32)


def by_dtype(**functions: Any) -> Any:
    """Build a function that calls the one for its first argument's dtype.

    Other dtypes never come. uint16 are bits of bfloat16, int16 bits of float16. Only the function that is
    called is compiled.
    """
    (first, *_) = functions.values()
    parameters = inspect.signature(first.py_func).parameters.values()

    def pick(typingctx: Any, *args: Any) -> Any:
        dtype = getattr(args[0], "dtype", args[0])
        function = typingctx.resolve_value_type(functions[str(dtype)])
        sig = function.get_call_type(typingctx, args, {})
        compiled = function.dispatcher.get_compile_result(sig)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            context.add_linking_libs([compiled.library])
            _, result = context.call_internal_no_propagate(builder, compiled.fndesc, sig, values)
            return result

        return sig.return_type(*sig.args), codegen

    context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    pick.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    pick.__doc__, pick.__name__ = first.py_func.__doc__, first.py_func.__name__
    return primitive(pick)
