"""Float16 conversions in LLVM IR: by the processor, or with integers.

LLVM makes calls of a library that Numba does not link of conversions that a processor of x86-64 lacks (those
before 2012, and virtual machines with a default model): the process would abort.
"""

from typing import Any

from llvmlite import ir

from .compilers import x86_features, x86_has

F16, F32, I16, I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
_REBIAS = 127 - 15 << 23
"""What the exponents of float32 and float16 differ by, in the bits of a float32."""


def _converts() -> bool:
    return x86_features() is None or x86_has("f16c")


def widened(builder: Any, x: Any) -> Any:
    """Float16 bits ``x``, scalar or vector, as float32 (exact)."""
    if _converts():
        return builder.fpext(builder.bitcast(x, _of(x, F16)), _of(x, F32))
    u = builder.zext(x, _of(x, I32))
    magnitude = builder.shl(_and(builder, u, 0x7FFF), _same(u, 13))
    moved = builder.add(magnitude, _same(u, _REBIAS))
    # Inf and NaN have the largest exponent in float32 too.
    special = builder.icmp_unsigned(">=", magnitude, _same(u, 31 << 23))
    moved = builder.select(special, builder.add(moved, _same(u, _REBIAS)), moved)
    # A subnormal has no first bit; with one it is larger by the least normal number.
    lifted = _as_float(builder, builder.add(moved, _same(u, 1 << 23)))
    exact = builder.fsub(lifted, _as_float(builder, _same(u, 127 - 14 << 23)))
    subnormal = builder.icmp_unsigned("<", magnitude, _same(u, 1 << 23))
    bits = builder.select(subnormal, builder.bitcast(exact, u.type), moved)
    sign = builder.shl(_and(builder, u, 0x8000), _same(u, 16))
    return _as_float(builder, builder.or_(bits, sign))


def narrowed(builder: Any, x: Any) -> Any:
    """Bits of float32 ``x``, scalar or vector, as float16, half to even."""
    if _converts():
        return builder.bitcast(builder.fptrunc(x, _of(x, F16)), _of(x, I16))
    u = builder.bitcast(x, _of(x, I32))
    magnitude = _and(builder, u, 0x7FFFFFFF)
    # Adding half of what is cut off, less the last bit for ties, rounds; a carry moves into the exponent.
    odd = _and(builder, builder.lshr(magnitude, _same(u, 13)), 1)
    lifted = builder.add(builder.add(magnitude, _same(u, (1 << 12) - 1)), odd)
    normal = builder.lshr(builder.sub(lifted, _same(u, _REBIAS)), _same(u, 13))
    # The sum with 0.5 has the step of subnormal float16, and their codes in its low bits.
    half = _same(u, 126 << 23)
    total = builder.fadd(_as_float(builder, magnitude), _as_float(builder, half))
    subnormal = builder.sub(builder.bitcast(total, u.type), half)
    small = builder.icmp_unsigned("<", magnitude, _same(u, 127 - 14 << 23))
    finite = builder.select(small, subnormal, normal)
    large = builder.icmp_unsigned(">=", magnitude, _same(u, 127 + 16 << 23))
    nan = builder.icmp_unsigned(">", magnitude, _same(u, 255 << 23))
    payload = builder.or_(_and(builder, builder.lshr(magnitude, _same(u, 13)), 0x3FF), _same(u, 0x7E00))
    special = builder.select(nan, payload, _same(u, 0x7C00))
    sign = _and(builder, builder.lshr(u, _same(u, 16)), 0x8000)
    bits = builder.or_(builder.select(large, special, finite), sign)
    return builder.trunc(bits, _of(x, I16))


def _count(x: Any) -> int:
    return x.type.count if isinstance(x.type, ir.VectorType) else 0


def _of(x: Any, lane: Any) -> Any:
    """Return the type of as many ``lane`` as ``x`` has."""
    return ir.VectorType(lane, _count(x)) if _count(x) else lane


def _same(x: Any, value: int) -> Any:
    """Return ``value`` in all lanes of the type of ``x``."""
    return x.type([value] * _count(x)) if _count(x) else x.type(value)


def _and(builder: Any, x: Any, mask: int) -> Any:
    return builder.and_(x, _same(x, mask))


def _as_float(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, _of(bits, F32))
