"""Reference encoding and decoding of whole tensors, in plain torch.

It knows formats and rounding; scales and zero points have been applied before and are applied after. All
arithmetic is done in float64, where every step on float32 (and narrower) input is exact up to the one
requested rounding.
"""

from __future__ import annotations

import functools

import torch

from ..errors import RangeError, UnsupportedError
from .choices import ChoiceFormat
from .codebooks import CodebookFormat
from .digits import DigitsFormat
from .division import divided
from .floats import FloatFormat
from .integers import IntFormat
from .rounding import Overflow, RoundingMode
from .spec import Format
from .torch_dtypes import code_dtype
from .vectors import VectorFormat


def round_steps(x: torch.Tensor, mode: RoundingMode, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Round to integers; noise of the same shape drives stochastic rounding."""
    match mode:
        case RoundingMode.HALF_EVEN:
            return torch.round(x)
        case RoundingMode.FLOOR:
            return torch.floor(x)
        case RoundingMode.CEIL:
            return torch.ceil(x)
        case RoundingMode.TOWARD_ZERO:
            return torch.trunc(x)
        case RoundingMode.STOCHASTIC:
            assert noise is not None
            low = torch.floor(x)
            return low + (x - low > noise).to(x.dtype)
        case _:
            return _round_half(x, mode)


def _round_half(x: torch.Tensor, mode: RoundingMode) -> torch.Tensor:
    """Round to nearest with ties away from zero, up or down.

    Only the fraction of a magnitude is exact: ``x + 0.5`` rounds, ``x - floor(x)`` too for small ``x < 0``.
    """
    magnitude, negative = x.abs(), x < 0
    low = torch.floor(magnitude)
    part = magnitude - low
    tie_grows = torch.ones_like(negative) if mode is RoundingMode.HALF_AWAY else negative
    if mode is RoundingMode.HALF_UP:
        tie_grows = ~negative
    grown = low + ((part > 0.5) | (tie_grows & (part == 0.5))).to(x.dtype)
    return torch.where(negative, -grown, grown)


def uniform_noise(seed: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` float64 numbers in [0, 1) for flat indices from ``first``.

    A counter-based hash (the 32-bit finalizer of MurmurHash3, twice) of seed and index: tiles and threads do
    not matter.
    """
    index = torch.arange(first, first + count, dtype=torch.int64, device=device)
    low, high = index & _MASK, index >> 32
    mixed = _mix32(low ^ _mix32(high ^ _mix32(torch.full_like(index, seed & _MASK))))
    return mixed.to(torch.float64) * 2.0**-32


_MASK = 0xFFFFFFFF


def _mix32(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = _mul32(h, 0x85EBCA6B)
    h = h ^ (h >> 13)
    h = _mul32(h, 0xC2B2AE35)
    return h ^ (h >> 16)


def _mul32(h: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply modulo 2**32 without leaving the range of int64."""
    low, high = factor & 0xFFFF, factor >> 16
    return (h * low + (((h * high) & 0xFFFF) << 16)) & _MASK


def times_power_of_two(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return float64 ``x * 2 ** exponent``, exact but for subnormal results.

    Powers are built from bits: torch.ldexp goes through pow, which may be inexact.
    """
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def encode(
    x: torch.Tensor,
    fmt: Format,
    mode: RoundingMode = RoundingMode.HALF_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    noise: torch.Tensor | None = None,
    *,
    negative: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return codes of ``x``: uint8, int32 or int64 by the format's width.

    noise: as :func:`round_steps`. Integers saturate, and take finite numbers alone.
    negative: as :func:`second_grid` has it; unless given, scales are positive.
    """
    if isinstance(fmt, ChoiceFormat):
        codes = encode_float(x, fmt.first, mode, overflow, noise)
        if negative is None:
            return codes
        steps = round_steps(divided(-x.to(torch.float64), float(fmt.stretch)), mode, noise)
        most = fmt.second.qmax
        whole = int_patterns(steps.clamp(-most, most).nan_to_num(nan=0.0), fmt.second)
        return torch.where(negative, whole, codes)
    if isinstance(fmt, FloatFormat):
        return encode_float(x, fmt, mode, overflow, noise)
    if isinstance(fmt, IntFormat):
        steps = round_steps(x.to(torch.float64) / float(fmt.step), mode, noise)
        return int_patterns(steps.clamp(fmt.qmin, fmt.qmax), fmt)
    assert isinstance(fmt, CodebookFormat)
    return encode_codebook(x, fmt)


def fits(x: torch.Tensor, fmt: Format, mode: RoundingMode, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mask of numbers that round without clipping, NaN included."""
    if isinstance(fmt, ChoiceFormat):
        return fits(x, fmt.first, mode, noise)
    if not isinstance(fmt, FloatFormat):
        return (x >= float(fmt.min)) & (x <= float(fmt.max))
    magnitude, negative = magnitude_codes(x, fmt, mode, noise)
    inside = (magnitude <= fmt.max_code) & ~torch.isnan(x)
    return inside if fmt.signed else inside & ~(negative & (magnitude > 0))


def rounding_reach(magnitudes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the midpoint above each magnitude, or slightly more, which rounds down."""
    if not isinstance(fmt, FloatFormat):
        return magnitudes + (float(fmt.largest_gap) / 2 + fmt.boundary_error)
    _, exponent = torch.frexp(magnitudes)
    exponent = torch.where(magnitudes == 0, fmt.emin, (exponent.to(torch.int64) - 1).clamp(min=fmt.emin))
    half = torch.pow(2.0, (exponent - fmt.mantissa_bits - 1).to(torch.float64))
    return magnitudes + half * (1 + 2.0**-20)


def int_patterns(steps: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return integer-valued ``steps`` in range as code patterns."""
    return (steps.to(torch.int64) & (fmt.code_count - 1)).to(code_dtype(fmt.bits))


def encode_float(
    x: torch.Tensor,
    fmt: FloatFormat,
    mode: RoundingMode = RoundingMode.HALF_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return codes of ``x``; NaN becomes the format's NaN, else code 0.

    A negative number overflows an unsigned format unless it rounds to zero. Raises RangeError on overflow
    under Overflow.ERROR, UnsupportedError for Overflow.SPECIAL without special codes.
    """
    codes, negative = magnitude_codes(x, fmt, mode, noise)
    below = negative & (codes > 0) & (not fmt.signed)
    past = (codes > fmt.max_code) | below
    nan = torch.isnan(x)
    if overflow is Overflow.ERROR and bool(past.any()):
        raise RangeError(
            f"{int(past.sum())} values exceed the range of {fmt.spelling}; use overflow=saturate"
        )
    if overflow is Overflow.SPECIAL:
        if not (fmt.has_inf or fmt.has_nan):
            raise UnsupportedError(
                f"overflow=special needs a format with Inf or NaN, got {fmt.spelling}; use saturate"
            )
        nan = nan | (past if fmt.inf_code is None else below)
    top = fmt.max_code if overflow is not Overflow.SPECIAL or fmt.inf_code is None else fmt.inf_code
    codes = torch.where(below, 0, codes.clamp(max=top))
    if fmt.signed:
        keep = negative if fmt.has_negative_zero else negative & (codes > 0)
        codes = torch.where(keep, codes | fmt.sign_bit, codes)
    return torch.where(nan, fmt.nan_code or 0, codes).to(code_dtype(fmt.bits))


def magnitude_codes(
    x: torch.Tensor, fmt: FloatFormat, mode: RoundingMode, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 codes on an unbounded grid, and the sign mask.

    A code past ``fmt.max_code`` means overflow; Inf has such a code. NaN has code 0 and no sign.
    """
    wide = x.to(torch.float64)
    negative = torch.signbit(wide) & ~torch.isnan(wide)
    magnitude = torch.where(torch.isfinite(wide), wide.abs(), 0.0)
    exponent = torch.clamp(torch.frexp(magnitude).exponent.to(torch.int64) - 1, min=fmt.emin)
    exponent = torch.where(magnitude == 0, fmt.emin, exponent)
    scaled = times_power_of_two(magnitude, fmt.mantissa_bits - exponent)
    signed = torch.where(negative, -scaled, scaled)
    steps = round_steps(signed, mode, noise).abs().to(torch.int64)
    lead = 0 if fmt.subnormals else 1 << fmt.mantissa_bits
    codes = (((exponent - fmt.emin) << fmt.mantissa_bits) + steps - lead).clamp(min=0)
    return torch.where(torch.isinf(wide), fmt.max_code + 1, codes), negative


def encode_codebook(x: torch.Tensor, fmt: CodebookFormat) -> torch.Tensor:
    """Return the codes of the nearest values; boundaries go down."""
    bounds, order = _codebook_tables(fmt)
    slots = torch.bucketize(x.to(torch.float64).contiguous(), bounds.to(x.device))
    return order.to(x.device)[slots]


_PIECE = 1 << 22
"""Distances that are held at once."""
_FAR = 2.0**16
"""Numbers past so many times the largest are as far as this: their distances keep digits that differ."""


def encode_runs(runs: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return a code for each run, the last axis; NaN becomes 0."""
    if isinstance(fmt, DigitsFormat):
        return join_digits(encode_codebook(runs, fmt.digit), fmt)
    assert isinstance(fmt, VectorFormat)
    table = torch.tensor(fmt.rows, dtype=torch.float64, device=runs.device)
    end = float(fmt.max) * _FAR
    flat = runs.reshape(-1, fmt.per_code).double().nan_to_num(nan=0.0).clamp(-end, end)
    codes = [_nearest_rows(part, table) for part in torch.split(flat, max(1, _PIECE // fmt.code_count))]
    return torch.cat(codes).reshape(runs.shape[:-1]).to(code_dtype(fmt.bits))


def _nearest_rows(vectors: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the first row of least squared distance, summed in column order."""
    total = torch.zeros((len(vectors), len(table)), dtype=torch.float64, device=vectors.device)
    for n in range(table.shape[1]):
        off = vectors[:, n, None] - table[:, n]
        total += off * off
    return total.argmin(1)


def decode_runs(codes: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that codes represent, with the run as last axis."""
    return _run_values(fmt, dtype).to(codes.device)[codes.to(torch.int64)]


@functools.lru_cache(maxsize=64)
def _run_values(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of all codes, zeros for unused ones."""
    table = torch.zeros((1 << fmt.bits, fmt.per_code), dtype=dtype, device="cpu")
    if isinstance(fmt, DigitsFormat):
        table[: fmt.code_count] = decode(_digits(fmt)[: fmt.code_count], fmt.digit, dtype)
    else:
        assert isinstance(fmt, VectorFormat)
        table[: fmt.code_count] = torch.tensor(fmt.rows, dtype=dtype, device="cpu")
    return table


def join_digits(digits: torch.Tensor, fmt: DigitsFormat) -> torch.Tensor:
    """Return the code whose digits are the last axis, the highest first."""
    places = [float(fmt.base**n) for n in reversed(range(fmt.count))]
    # Sums below 2 ** 16 are exact in any order.
    total = digits.to(torch.float32) @ torch.tensor(places, device=digits.device)
    return total.to(code_dtype(fmt.bits))


def split_digits(codes: torch.Tensor, fmt: DigitsFormat) -> torch.Tensor:
    """Return the digits of codes as a new last axis, uint8."""
    return _digits(fmt).to(codes.device)[codes.to(torch.int64)]


@functools.lru_cache(maxsize=64)
def _digits(fmt: DigitsFormat) -> torch.Tensor:
    """Return the digits of all code patterns."""
    codes = torch.arange(1 << fmt.bits, device="cpu")[:, None]
    places = torch.tensor([fmt.base**n for n in reversed(range(fmt.count))], device="cpu")
    return (codes // places % fmt.base).to(torch.uint8)


@functools.lru_cache(maxsize=64)
def _codebook_tables(fmt: CodebookFormat) -> tuple[torch.Tensor, torch.Tensor]:
    thresholds = torch.tensor(fmt.thresholds, dtype=torch.float64, device="cpu")
    return thresholds, torch.tensor(fmt.order, dtype=torch.uint8, device="cpu")


def widest_gap(fmt: Format, negative: torch.Tensor | None) -> float | torch.Tensor:
    """Return the largest distance between neighboring values, by the sign of scales."""
    if negative is None or not isinstance(fmt, ChoiceFormat):
        return float(fmt.largest_gap)
    return torch.where(negative, float(fmt.stretch), float(fmt.first.largest_gap)).double()


def second_grid(scale: torch.Tensor | None, fmt: Format) -> torch.Tensor | None:
    """Return the mask of negative scales, or None where signs are irrelevant."""
    return torch.signbit(scale) if fmt.reads_sign and scale is not None else None


def decode(
    codes: torch.Tensor, fmt: Format, dtype: torch.dtype, negative: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the numbers that code patterns represent, in ``dtype`` (float32 or float64).

    negative: as :func:`encode`.
    """
    if isinstance(fmt, ChoiceFormat):
        values = _decode_float(codes, fmt.first).to(dtype)
        if negative is None:
            return values
        whole = decode(codes, fmt.second, torch.float64) * -float(fmt.stretch)
        return torch.where(negative, whole.to(dtype), values)
    if isinstance(fmt, FloatFormat):
        if codes.dtype == torch.uint8 and codes.numel() > _MANY:
            every = _decode_float(torch.arange(256, dtype=torch.int32, device=codes.device), fmt).to(dtype)
            # A quarter of the time of indexing.
            return every.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return _decode_float(codes, fmt).to(dtype)
    if isinstance(fmt, IntFormat):
        # Bytes in few bits and one step: scales of blocks are decoded for each tile that is measured.
        narrow = codes.dtype is torch.uint8
        wide = codes.to(torch.int16 if narrow else torch.int64)
        if fmt.signed:
            wide = wide - ((wide >> (fmt.bits - 1)) << fmt.bits)
        if narrow and fmt.step == 1:
            return wide.to(dtype)
        return (wide.to(torch.float64) * float(fmt.step)).to(dtype)
    assert isinstance(fmt, CodebookFormat)
    padded = [*fmt.values, *[0.0] * ((1 << fmt.bits) - len(fmt.values))]
    return torch.tensor(padded, dtype=dtype, device=codes.device)[codes.to(torch.int64)]


_MANY = 4096
"""Bytes for which looking values up is faster, computing all 256 included."""


def _decode_float(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    wide = codes.to(torch.int64)
    magnitude = wide & ((1 << fmt.magnitude_bits) - 1)
    field, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    normal = (field > 0) if fmt.subnormals else torch.ones_like(field, dtype=torch.bool)
    steps = torch.where(normal, mantissa + (1 << fmt.mantissa_bits), mantissa)
    exponent = torch.where(normal, field - fmt.bias, fmt.emin) - fmt.mantissa_bits
    value = times_power_of_two(steps.to(torch.float64), exponent)
    if fmt.nan_code is not None:
        special = magnitude > fmt.max_code
        inf = (
            torch.where(magnitude == fmt.inf_code, torch.inf, torch.nan)
            if fmt.inf_code is not None
            else torch.nan
        )
        value = torch.where(special, inf, value)
    negative = (wide & fmt.sign_bit) != 0
    value = torch.where(negative, -value, value)
    if fmt.signed and fmt.nan_code == fmt.sign_bit:
        value = torch.where(wide == fmt.sign_bit, torch.nan, value)
    return value
