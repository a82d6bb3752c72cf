"""Every code and every rounding boundary of the formats, against implementations that are not ours.

What each oracle can say, and where it is known to deviate:

- ml_dtypes and torch decode every code. They encode from float64 through float32, which rounds twice, so they
  are asked about float32 numbers only. Past the largest value ml_dtypes gives NaN or Inf for eight bits and
  the largest value below; torch saturates float8_e4m3fn (since 2.13) and gives NaN or Inf for its other
  types. Both keep the sign of NaN where we write one NaN.
- gfloat decodes and encodes any format from float64. It follows IEEE 754 in that directed rounding never
  overflows; it rounds ties of one-bit significands to the even exponent; its ties away from zero add 0.5 in
  float64, which takes the number just below a tie with them; numbers near 2**-1074 become zero before they
  are rounded; it has no rule for negative numbers in unsigned formats, and it takes a wrong maximum of
  formats that are all subnormal.
- numpy has float16, float32 and all integers.
- onnx 1.22 takes its element types from ml_dtypes, so that only its unpacking and its saturation are its own.
"""

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import onnx.numpy_helper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropoint.errors import FormatError
from zeropoint.formats import (
    CATALOG,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
    RoundingMode,
    Specials,
    get_format,
)
from zeropoint.formats.exact import Number, Special, decode, encode

pytestmark = pytest.mark.crossed

ML_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "int2", "int4", "uint2", "uint4", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
        "float8_e4m3fnuz", "float8_e8m0fnu", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn",
    )
} | {
    "e3m4ieee": np.dtype(ml_dtypes.float8_e3m4),
    "e4m3b7ieee": np.dtype(ml_dtypes.float8_e4m3),
    "e4m3b11fnuz": np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    "uint1": np.dtype(ml_dtypes.uint1),
}  # fmt: skip
NUMPY = {name: np.dtype(name) for name in ("int8", "int16", "uint8", "uint16", "float16")}
TORCH = {
    name: getattr(torch, name)
    for name in (
        "int8", "int16", "uint8", "uint16", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn",
        "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
ONNX = {
    "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float8_e4m3fn": "FLOAT8E4M3FN",
    "float8_e5m2": "FLOAT8E5M2",
    "float8_e4m3fnuz": "FLOAT8E4M3FNUZ", "float8_e5m2fnuz": "FLOAT8E5M2FNUZ", "float8_e8m0fnu": "FLOAT8E8M0",
    "float4_e2m1fn": "FLOAT4E2M1", "int2": "INT2", "uint2": "UINT2", "int4": "INT4", "uint4": "UINT4",
    "int8": "INT8", "uint8": "UINT8", "int16": "INT16", "uint16": "UINT16",
}  # fmt: skip


def info(fmt: FloatFormat) -> gfloat.FormatInfo:
    """Return gfloat's description of a format, from the definition and nothing derived."""
    high_nans = {
        Specials.IEEE: (1 << fmt.mantissa_bits) - 1,
        Specials.FN: 1,
        Specials.FNUZ: 0,
        Specials.FINITE: 0,
    }
    return gfloat.FormatInfo(
        name=fmt.spelling,
        k=fmt.exponent_bits + fmt.mantissa_bits + fmt.signed,
        precision=fmt.mantissa_bits + 1,
        bias=fmt.bias,
        is_signed=fmt.signed,
        domain=gfloat.Domain.Extended if fmt.specials is Specials.IEEE else gfloat.Domain.Finite,
        has_nz=fmt.signed and fmt.specials is not Specials.FNUZ,
        num_high_nans=high_nans[fmt.specials],
        has_subnormals=fmt.subnormals,
        is_twos_complement=False,
    )


GFLOAT_OWN = {
    "float16": gfloat.formats.format_info_binary16,
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "float8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "float8_e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "float8_e8m0fnu": gfloat.formats.format_info_ocp_e8m0,
    "float6_e3m2fn": gfloat.formats.format_info_ocp_e3m2,
    "float6_e2m3fn": gfloat.formats.format_info_ocp_e2m3,
    "float4_e2m1fn": gfloat.formats.format_info_ocp_e2m1,
    "int8_mx": gfloat.formats.format_info_ocp_int8,
}
GFLOAT_MADE = {
    name: info(fmt)
    for name in (
        "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_ue4m3fn", "float8_ue5m3fn",
        "e3m4ieee", "e4m3b7ieee", "e4m3b11fnuz", "e2m2", "e5m1fnuz", "e3m0", "e2m3fn", "ue5m3ieee",
        "e4m5b3fn",
    )
    if isinstance(fmt := get_format(name), FloatFormat)
}  # fmt: skip
GFLOAT = GFLOAT_OWN | GFLOAT_MADE

SMALL_FLOATS = [name for name in GFLOAT if get_format(name).bits <= 10 and name != "float8_e8m0fnu"]


def as_float(number: Number) -> float:
    return float(number.value) if isinstance(number, Special) else float(number)


def as_number(value: float) -> Number:
    if value != value:
        return Special.NAN
    if value in (float("inf"), float("-inf")):
        return Special.INF if value > 0 else Special.NEGATIVE_INF
    if value == 0 and str(value)[0] == "-":
        return Special.NEGATIVE_ZERO
    return Fraction(value)


def bits_of(values: list[float] | np.ndarray) -> list[int]:
    """Return the bits of float64 numbers, one NaN for all, so that -0.0 and 0.0 differ and NaN equals NaN."""
    array = np.array(values, np.float64)
    array[np.isnan(array)] = np.nan
    return [int(b) for b in array.view(np.uint64)]


def our_values(fmt: Format) -> list[int]:
    return bits_of([as_float(decode(fmt, code)) for code in range(fmt.code_count)])


def patterns(fmt: Format) -> np.ndarray:
    return np.arange(1 << fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)


def without_nan_sign(fmt: Format, codes: np.ndarray) -> list[int]:
    """Replace every NaN code by ours: libraries keep the sign of NaN, or its payload, and we write one."""
    nan = {c for c in range(fmt.code_count) if decode(fmt, c) is Special.NAN} if fmt.bits <= 10 else set()
    canonical = fmt.nan_code if isinstance(fmt, FloatFormat) else None
    return [canonical if c in nan and canonical is not None else c for c in map(int, codes)]


# Decoding: all codes.


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    fmt = get_format(name)
    with np.errstate(invalid="ignore"):  # signalling NaN
        theirs = patterns(fmt).view(ML_DTYPES[name]).astype(np.float64)
    assert our_values(fmt) == bits_of(theirs)


@pytest.mark.parametrize("name", NUMPY)
def test_every_code_decodes_as_in_numpy(name: str) -> None:
    fmt = get_format(name)
    assert our_values(fmt) == bits_of(patterns(fmt).view(NUMPY[name]).astype(np.float64))


@pytest.mark.parametrize("name", TORCH)
def test_every_code_decodes_as_in_torch(name: str) -> None:
    fmt = get_format(name)
    theirs = torch.from_numpy(patterns(fmt)).view(TORCH[name]).to(torch.float64)
    assert our_values(fmt) == bits_of(theirs.numpy())


@pytest.mark.parametrize("name", GFLOAT)
def test_every_code_decodes_as_in_gfloat(name: str) -> None:
    fmt = get_format(name)
    codes = range(0, fmt.code_count, 1 if fmt.bits <= 10 else 61)
    theirs = [gfloat.decode_float(GFLOAT[name], code).fval for code in codes]
    assert bits_of([as_float(decode(fmt, code)) for code in codes]) == bits_of(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_code_of_sixteen_bits_decodes_as_in_gfloat(name: str) -> None:
    fmt = get_format(name)
    assert our_values(fmt) == bits_of(
        [gfloat.decode_float(GFLOAT[name], code).fval for code in range(fmt.code_count)]
    )


@pytest.mark.parametrize("name", ONNX)
def test_every_code_decodes_as_in_onnx(name: str) -> None:
    fmt = get_format(name)
    packed = patterns(fmt)
    if fmt.bits < 8:  # onnx packs the first element into the lowest bits of its byte
        lanes = packed.reshape(-1, 8 // fmt.bits)
        packed = sum(lanes[:, i] << (i * fmt.bits) for i in range(8 // fmt.bits)).astype(np.uint8)
    kind = getattr(onnx.TensorProto, ONNX[name])
    proto = onnx.TensorProto(data_type=kind, dims=[1 << fmt.bits], raw_data=packed.tobytes())
    with np.errstate(invalid="ignore"):  # signalling NaN
        theirs = onnx.numpy_helper.to_array(proto).astype(np.float64)
    assert our_values(fmt) == bits_of(theirs)


@pytest.mark.parametrize("name", [n for n, f in CATALOG.items() if isinstance(f, IntFormat) and f.bits <= 16])
def test_integers_of_every_width_decode_as_shifted_sixteen_bit_integers(name: str) -> None:
    fmt = CATALOG[name]
    assert isinstance(fmt, IntFormat)
    unused = 16 - fmt.bits
    left = np.arange(fmt.code_count, dtype=np.int64).astype(np.uint16) << np.uint16(unused)
    theirs = left.view(np.int16 if fmt.signed else np.uint16) >> unused
    assert our_values(fmt) == bits_of(theirs.astype(np.float64) / 2**fmt.fraction_bits)


@pytest.mark.parametrize("bits", [7, 4, 2])
def test_shared_microexponent_elements_are_sign_and_magnitude(bits: int) -> None:
    # arXiv:2302.08007, table 2: no hidden bit, one bit before the point.
    fmt = get_format(f"mx{bits + 2}_element")
    magnitudes = np.arange(1 << bits) / 2 ** (bits - 1)
    assert our_values(fmt) == bits_of(np.concatenate([magnitudes, -magnitudes]))


@given(st.integers(0, 2**32 - 1))
def test_codes_of_float32_decode_as_the_machine_reads_them(code: int) -> None:
    (theirs,) = struct.unpack("<f", struct.pack("<I", code))
    assert bits_of([as_float(decode(get_format("float32"), code))]) == bits_of([theirs])


@given(st.integers(0, 2**64 - 1))
def test_codes_of_float64_decode_as_the_machine_reads_them(code: int) -> None:
    (theirs,) = struct.unpack("<d", struct.pack("<Q", code))
    assert bits_of([as_float(decode(get_format("float64"), code))]) == bits_of([theirs])


@given(st.floats(allow_nan=False))
def test_float64_is_encoded_as_the_machine_stores_it(value: float) -> None:
    (theirs,) = struct.unpack("<Q", struct.pack("<d", value))
    assert encode(get_format("float64"), as_number(value), overflow=Overflow.SPECIAL) == theirs


@given(st.floats(allow_nan=False))
def test_float64_rounds_to_float32_as_in_numpy(value: float) -> None:
    with np.errstate(over="ignore"):
        theirs = int(np.float64(value).astype(np.float32).view(np.uint32))
    assert encode(get_format("float32"), as_number(value), overflow=Overflow.SPECIAL) == theirs


def float_formats() -> st.SearchStrategy[FloatFormat]:
    """Return formats that nobody has: every combination of widths, bias, specials and sign with a meaning."""

    def build(
        exponent: int, mantissa: int, bias: int, specials: Specials, signed: bool
    ) -> FloatFormat | None:
        try:
            return FloatFormat(
                exponent_bits=exponent, mantissa_bits=mantissa, bias=bias, specials=specials, signed=signed
            )
        except FormatError:
            return None

    made = st.builds(
        build,
        st.integers(1, 5),
        st.integers(0, 4),
        st.integers(-9, 33),
        st.sampled_from(Specials),
        st.booleans(),
    )
    return made.filter(lambda fmt: fmt is not None)  # type: ignore[return-value]


@settings(max_examples=60, deadline=None)
@given(float_formats())
def test_a_format_of_ones_own_decodes_as_in_gfloat(fmt: FloatFormat) -> None:
    theirs = info(fmt)
    assert our_values(fmt) == bits_of([gfloat.decode_float(theirs, c).fval for c in range(fmt.code_count)])


# Encoding: all values, all midpoints, and the numbers next to them.


def finite_values(fmt: Format) -> list[Fraction]:
    numbers = (decode(fmt, code) for code in range(fmt.code_count))
    return sorted({n for n in numbers if isinstance(n, Fraction)})


def boundaries(fmt: Format) -> list[float]:
    """Return values, midpoints between them, and where rounding passes either end."""
    values = finite_values(fmt)
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    top = (values[-1] - values[-2]) / 2
    outside = [values[-1] + top, values[-1] + 2 * top, 3 * values[-1], values[0] - top, values[0] - 2 * top]
    points = [float(p) for p in [*values, *middles, *outside]]
    return [p for p in points if p >= 0 or fmt.min < 0]


def with_neighbors(points: list[float], dtype: type[np.floating]) -> list[float]:
    """Return the points that ``dtype`` holds, their neighbors in it, and both zeros."""
    with np.errstate(over="ignore"):  # the points past the largest float32
        array = np.array(points).astype(dtype)
    array = array[array.astype(np.float64) == np.array(points)]
    down, up = (np.nextafter(array, dtype(end)) for end in (-np.inf, np.inf))
    everything = np.concatenate([array, down, up, np.array([0.0, -0.0], dtype)]).astype(np.float64)
    return [float(v) for v in everything[np.isfinite(everything)]]


def our_codes(fmt: Format, values: list[float], overflow: Overflow) -> list[int]:
    return [encode(fmt, as_number(v), overflow=overflow) for v in values]


NARROW_ML_DTYPES = [n for n in ML_DTYPES if isinstance(f := get_format(n), FloatFormat) and f.bits <= 8]


@pytest.mark.parametrize("name", [n for n in NARROW_ML_DTYPES if n != "float8_e8m0fnu"])
def test_every_boundary_rounds_as_in_ml_dtypes(name: str) -> None:
    fmt = get_format(name)
    values = with_neighbors(boundaries(fmt), np.float32)
    overflow = Overflow.SPECIAL if fmt.has_nan else Overflow.SATURATE
    if fmt.has_nan:
        values += [float("inf"), float("-inf"), float("nan")]
    theirs = np.array(values, np.float32).astype(ML_DTYPES[name]).view(np.uint8)
    assert our_codes(fmt, values, overflow) == without_nan_sign(fmt, theirs)


def test_narrow_formats_without_nan_saturate_infinity_as_in_ml_dtypes() -> None:
    names = [n for n in NARROW_ML_DTYPES if not get_format(n).has_nan]
    for name in names:
        theirs = np.array([np.inf, -np.inf], np.float32).astype(ML_DTYPES[name]).view(np.uint8)
        assert our_codes(get_format(name), [np.inf, -np.inf], Overflow.SATURATE) == theirs.tolist()
    assert len(names) == 3


@pytest.mark.parametrize(
    ("name", "overflow"),
    [
        ("float8_e4m3fn", Overflow.SATURATE),
        ("float8_e5m2", Overflow.SPECIAL),
        ("float8_e4m3fnuz", Overflow.SPECIAL),
        ("float8_e5m2fnuz", Overflow.SPECIAL),
    ],
)
def test_every_boundary_rounds_as_in_torch(name: str, overflow: Overflow) -> None:
    fmt = get_format(name)
    values = [*with_neighbors(boundaries(fmt), np.float32), float("inf"), float("-inf"), float("nan")]
    theirs = torch.tensor(values, dtype=torch.float32).to(TORCH[name]).view(torch.uint8)
    assert our_codes(fmt, values, overflow) == without_nan_sign(fmt, theirs.numpy())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_saturation_is_that_of_onnx(name: str) -> None:
    fmt = get_format(name)
    values = [*with_neighbors(boundaries(fmt), np.float32), float("inf"), float("-inf"), float("nan")]
    theirs = onnx.numpy_helper.saturate_cast(np.array(values, np.float32), ML_DTYPES[name]).view(np.uint8)
    assert our_codes(fmt, values, Overflow.SATURATE) == without_nan_sign(fmt, theirs)


@pytest.mark.crossed
@pytest.mark.parametrize("name", SMALL_FLOATS)
@pytest.mark.parametrize("overflow", [Overflow.SATURATE, Overflow.SPECIAL])
def test_every_boundary_rounds_as_in_gfloat(name: str, overflow: Overflow) -> None:
    fmt, theirs = get_format(name), GFLOAT[name]
    values = gfloat_values(fmt)
    if overflow is Overflow.SPECIAL and not fmt.has_nan:
        values = [v for v in values if fmt.min <= Fraction(v) <= fmt.max]
    if fmt.mantissa_bits == 0:
        values = without_ties(fmt, values)
    saturate = overflow is Overflow.SATURATE
    rounded = [gfloat.round_float(theirs, v, sat=saturate) for v in values]
    codes = np.array([gfloat.encode_float(theirs, v) for v in rounded])
    assert our_codes(fmt, values, overflow) == without_nan_sign(fmt, codes)


def gfloat_values(fmt: Format, step: int = 1) -> list[float]:
    values = with_neighbors(boundaries(fmt)[::step], np.float64)
    values = [math.copysign(2.0**-1000, v) if 0 < abs(v) < 2.0**-1000 else v for v in values]
    return values if fmt.min < 0 else [v for v in values if v >= 0]


def ties(fmt: Format) -> set[float]:
    values = finite_values(fmt)
    above = values[-1] + (values[-1] - values[-2]) / 2
    below = values[0] - (values[-1] - values[-2]) / 2
    return {float(v) for v in [*((a + b) / 2 for a, b in pairwise(values)), above, below]}


def without_ties(fmt: Format, values: list[float]) -> list[float]:
    tied = ties(fmt)
    return [v for v in values if v not in tied]


PLAIN_MODES = {
    RoundingMode.HALF_EVEN: gfloat.RoundMode.TiesToEven,
    RoundingMode.FLOOR: gfloat.RoundMode.TowardNegative,
    RoundingMode.CEIL: gfloat.RoundMode.TowardPositive,
    RoundingMode.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
}
# gfloat has no such ties, but a tie that goes up is a tie rounded toward positive. (Positive, negative.)
TIED_MODES = {
    RoundingMode.HALF_UP: (gfloat.RoundMode.TowardPositive, gfloat.RoundMode.TowardPositive),
    RoundingMode.HALF_DOWN: (gfloat.RoundMode.TowardNegative, gfloat.RoundMode.TowardNegative),
    RoundingMode.HALF_AWAY: (gfloat.RoundMode.TowardPositive, gfloat.RoundMode.TowardNegative),
}


def gfloat_code(theirs: gfloat.FormatInfo, value: float, mode: RoundingMode, tied: set[float]) -> int:
    if mode in PLAIN_MODES:
        theirs_mode = PLAIN_MODES[mode]
    else:
        theirs_mode = TIED_MODES[mode][value < 0] if value in tied else gfloat.RoundMode.TiesToEven
    return gfloat.encode_float(theirs, gfloat.round_float(theirs, value, theirs_mode, sat=True))


def test_ties_away_from_zero_are_those_of_gfloat_but_for_the_number_below_a_tie() -> None:
    fmt, theirs = get_format("float8_e4m3fn"), GFLOAT["float8_e4m3fn"]
    away = gfloat.RoundMode.TiesToAway
    for tie in (v for v in ties(fmt) if abs(v) < fmt.max):
        rounded = gfloat.round_float(theirs, tie, away)
        assert decode(fmt, encode(fmt, Fraction(tie), RoundingMode.HALF_AWAY)) == Fraction(rounded)
    below = float(np.nextafter(2.0**-10, 0))
    assert gfloat.round_float(theirs, below, away) == 2.0**-9  # 0.5 - 2**-54 + 0.5 rounds to 1
    assert encode(fmt, Fraction(below), RoundingMode.HALF_AWAY) == 0


@pytest.mark.crossed
@pytest.mark.parametrize("mode", [*PLAIN_MODES, *TIED_MODES])
@pytest.mark.parametrize("name", [n for n in SMALL_FLOATS if get_format(n).mantissa_bits])
def test_every_rounding_mode_is_that_of_gfloat(name: str, mode: RoundingMode) -> None:
    fmt, tied = get_format(name), ties(get_format(name))
    values = gfloat_values(fmt)
    ours = [encode(fmt, as_number(v), mode) for v in values]
    assert ours == [gfloat_code(GFLOAT[name], v, mode, tied) for v in values]


@settings(max_examples=60, deadline=None)
@given(
    float_formats().filter(lambda fmt: fmt.mantissa_bits > 0 and fmt.exponent_bits > 1),
    st.sampled_from([*PLAIN_MODES, *TIED_MODES]),
)
def test_a_format_of_ones_own_rounds_as_in_gfloat(fmt: FloatFormat, mode: RoundingMode) -> None:
    theirs, tied = info(fmt), ties(fmt)
    values = gfloat_values(fmt, step=1 + fmt.code_count // 40)
    assert [encode(fmt, as_number(v), mode) for v in values] == [
        gfloat_code(theirs, v, mode, tied) for v in values
    ]


def test_directed_rounding_still_overflows_where_ieee_and_gfloat_stop_at_the_largest_value() -> None:
    # Overflow decides what lies past the largest value, whichever way the number was going.
    fmt = get_format("float8_e5m2")
    largest = float(fmt.max)
    kept = gfloat.round_float(GFLOAT["float8_e5m2"], 2 * largest, gfloat.RoundMode.TowardZero)
    assert kept == largest
    ours = encode(fmt, 2 * fmt.max, RoundingMode.TOWARD_ZERO, Overflow.SPECIAL)
    assert decode(fmt, ours) is Special.INF


STEP_16_BIT = 37  # prime to every mantissa width, so that each position within a binade is met


@pytest.mark.parametrize("step", [STEP_16_BIT, pytest.param(1, marks=pytest.mark.slow)])
def test_boundaries_of_float16_round_as_in_numpy(step: int) -> None:
    fmt = get_format("float16")
    values = with_neighbors(boundaries(fmt)[::step], np.float64)
    with np.errstate(over="ignore"):
        theirs = np.array(values).astype(np.float16).view(np.uint16)
    assert our_codes(fmt, values, Overflow.SPECIAL) == theirs.tolist()


@pytest.mark.parametrize("step", [STEP_16_BIT, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_boundaries_of_sixteen_bits_round_as_in_torch(name: str, step: int) -> None:
    fmt = get_format(name)
    values = with_neighbors(boundaries(fmt)[::step], np.float32)
    theirs = torch.tensor(values, dtype=torch.float32).to(TORCH[name]).view(torch.uint16)
    assert our_codes(fmt, values, Overflow.SPECIAL) == theirs.tolist()


@pytest.mark.parametrize("step", [STEP_16_BIT, pytest.param(1, marks=pytest.mark.slow)])
def test_boundaries_of_bfloat16_round_as_in_ml_dtypes(step: int) -> None:
    fmt = get_format("bfloat16")
    values = with_neighbors(boundaries(fmt)[::step], np.float32)
    theirs = np.array(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    assert our_codes(fmt, values, Overflow.SPECIAL) == theirs.tolist()


# Exponents: E8M0.


def test_powers_of_two_round_as_in_torch_and_ml_dtypes() -> None:
    # Both round ties up. Both make NaN of what rounds past 2**127, and of Inf.
    fmt = get_format("e8m0")
    tie = 1.5 * 2.0**-127
    values = [v for v in with_neighbors(boundaries(fmt), np.float32) if v >= tie or 0 < v <= 2.0**-127]
    single = np.array(values, np.float32)
    ours = our_codes(fmt, values, Overflow.SPECIAL)
    assert ours == single.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist()
    assert ours == torch.from_numpy(single).to(torch.float8_e8m0fnu).view(torch.uint8).tolist()


def test_subnormal_numbers_round_to_the_nearest_power_where_torch_and_ml_dtypes_go_up() -> None:
    # Between 2**-127 and its middle to 2**-126 both round up, whatever is nearest.
    single = np.array([2.0**-127 + 2.0**-149, 1.5 * 2.0**-127 - 2.0**-149], np.float32)
    assert single.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == [1, 1]
    assert torch.from_numpy(single).to(torch.float8_e8m0fnu).view(torch.uint8).tolist() == [1, 1]
    assert our_codes(get_format("e8m0"), single.tolist(), Overflow.SPECIAL) == [0, 0]


def test_powers_of_two_round_up_and_down_as_in_onnx() -> None:
    fmt = get_format("e8m0")
    values = [v for v in with_neighbors(boundaries(fmt), np.float32) if 2.0**-126 <= v < 2.0**127]
    for mode, word in (
        (RoundingMode.CEIL, "up"),
        (RoundingMode.FLOOR, "down"),
        (RoundingMode.HALF_UP, "nearest"),
    ):
        theirs = onnx.numpy_helper.to_float8e8m0(np.array(values, np.float32), round_mode=word).view(np.uint8)
        assert [encode(fmt, Fraction(v), mode) for v in values] == theirs.tolist()


def test_powers_of_two_round_as_in_gfloat_but_for_ties() -> None:
    fmt, theirs = get_format("e8m0"), GFLOAT["float8_e8m0fnu"]
    values = [v for v in without_ties(fmt, with_neighbors(boundaries(fmt), np.float64)) if v >= 2.0**-127]
    assert our_codes(fmt, values, Overflow.SATURATE) == [
        gfloat.encode_float(theirs, gfloat.round_float(theirs, v, sat=True)) for v in values
    ]
    # gfloat takes the even exponent, as P3109 does; torch, ml_dtypes and we go up.
    assert [gfloat.round_float(theirs, tie) for tie in (1.5, 3.0)] == [2, 2]
    assert our_codes(fmt, [1.5, 3.0], Overflow.SATURATE) == [128, 129]


def test_negative_numbers_have_no_exponent_code_as_in_ml_dtypes() -> None:
    fmt = get_format("e8m0")
    values = [-1.0, -3.0, float("-inf")]
    theirs = np.array(values, np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert our_codes(fmt, values, Overflow.SPECIAL) == theirs.tolist() == [fmt.nan_code] * 3  # type: ignore[union-attr]


# Integers.

INTEGER_MODES: dict[RoundingMode, Callable[[np.ndarray], np.ndarray]] = {
    RoundingMode.HALF_EVEN: np.rint,
    RoundingMode.FLOOR: np.floor,
    RoundingMode.CEIL: np.ceil,
    RoundingMode.TOWARD_ZERO: np.trunc,
}


@pytest.mark.crossed
@pytest.mark.parametrize("mode", INTEGER_MODES)
@pytest.mark.parametrize(
    "name", ["int2", "uint2", "int3", "uint3", "int4", "uint5", "int8", "uint8", "int11"]
)
def test_integers_round_and_saturate_as_in_numpy(name: str, mode: RoundingMode) -> None:
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    values = with_neighbors([*boundaries(fmt), -0.5, -3.0, -1e30, 1e30], np.float64)
    steps = np.clip(INTEGER_MODES[mode](np.array(values)), float(fmt.min), float(fmt.max)).astype(np.int64)
    ours = [encode(fmt, as_number(v), mode) for v in values]
    assert ours == [int(s) for s in steps % (1 << fmt.bits)]


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4"])
def test_narrow_integers_round_and_saturate_as_in_onnx(name: str) -> None:
    fmt = get_format(name)
    values = with_neighbors([*boundaries(fmt), -0.5, -30.0, 30.0], np.float32)
    theirs = onnx.numpy_helper.saturate_cast(np.array(values, np.float32), ML_DTYPES[name]).view(np.uint8)
    assert our_codes(fmt, values, Overflow.SATURATE) == [int(c) & (fmt.code_count - 1) for c in theirs]


@pytest.mark.parametrize("mode", [*PLAIN_MODES, *TIED_MODES])
def test_fixed_point_integers_round_as_in_gfloat(mode: RoundingMode) -> None:
    fmt, tied = get_format("int8_mx"), ties(get_format("int8_mx"))
    values = with_neighbors(boundaries(fmt), np.float64)
    ours = [encode(fmt, as_number(v), mode) for v in values]
    assert ours == [gfloat_code(GFLOAT["int8_mx"], v, mode, tied) for v in values]


# Tables.

# QLoRA, arXiv:2305.14314, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
# bitsandbytes, csrc/kernels.cu, dQuantizeNF4: x above the threshold takes the upper code.
NF4_THRESHOLDS = (
    -0.8480963706970215, -0.6106328964233398, -0.4599952697753906, -0.33967941999435425, -0.23460739850997925,
    -0.13791173696517944, -0.045525018125772476, 0.03979014977812767, 0.120255246758461, 0.2035212516784668,
    0.2920137643814087, 0.3893125355243683, 0.5016634464263916, 0.6427869200706482, 0.8614784479141235,
)  # fmt: skip
# bitsandbytes, csrc/kernels.cu, dDequantizeFP4: the magnitudes of codes 0 to 7, as printed there.
FP4_MAGNITUDES = (0.0, 0.005208333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)


def test_nf4_is_the_table_of_the_paper() -> None:
    fmt = get_format("nf4")
    assert [decode(fmt, code) for code in range(16)] == [Fraction(v) for v in NF4]


def test_nf4_holds_quantiles_of_the_normal_distribution() -> None:
    # bitsandbytes.functional.create_normal_map, whose offset this is.
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    low = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    high = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted([*low, *high, 0.0])
    scaled = [v / expected[-1] for v in expected]
    # The authors computed in float32: one unit in the last place of quantiles between 1 and 2.
    values = [float(decode(get_format("nf4"), code)) for code in range(16)]  # type: ignore[arg-type]
    np.testing.assert_allclose(values, scaled, rtol=0, atol=2.0**-23)


def test_nf4_boundaries_are_those_of_bitsandbytes() -> None:
    fmt = get_format("nf4")
    for code, threshold in enumerate(NF4_THRESHOLDS):
        above = float(np.nextafter(threshold, 9))
        assert encode(fmt, Fraction(threshold)) == code
        assert encode(fmt, Fraction(above)) == code + 1


def test_fp4_of_bitsandbytes_is_its_table() -> None:
    fmt = get_format("fp4_bnb")
    values = [float(decode(fmt, code)) for code in range(16)]  # type: ignore[arg-type]
    # The constants are printed there with eight decimals.
    np.testing.assert_allclose(values, [*FP4_MAGNITUDES, *(-m for m in FP4_MAGNITUDES)], atol=5e-9, rtol=1e-6)


def test_fp4_of_bitsandbytes_takes_the_nearest_value() -> None:
    fmt = get_format("fp4_bnb")
    values = [float(decode(fmt, code)) for code in range(16)]  # type: ignore[arg-type]
    samples = np.linspace(-1.2, 1.2, 997)
    nearest = [values[int(np.abs(np.array(values) - s).argmin())] for s in samples]
    assert [values[encode(fmt, Fraction(float(s)))] for s in samples] == nearest


# Every code survives the round trip.


def codes_with_a_value_of_their_own(fmt: Format) -> list[int]:
    seen: set[Number] = set()
    own = []
    for code in range(fmt.code_count):
        number = decode(fmt, code)
        if number not in seen:
            own.append(code)
        seen.add(number)
    return own


WIDE_INTEGERS = [n for n, f in CATALOG.items() if isinstance(f, IntFormat) and 12 < f.bits <= 16]
ROUND_TRIPS = [
    *(n for n, f in CATALOG.items() if f.bits <= 16 and n not in WIDE_INTEGERS),
    *(pytest.param(n, marks=pytest.mark.slow) for n in WIDE_INTEGERS),
    *GFLOAT_MADE,
    "codebook[3,1,3]",
]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_every_code_is_what_its_own_value_encodes_to(name: str) -> None:
    fmt = get_format(name)
    expected = codes_with_a_value_of_their_own(fmt)
    if isinstance(fmt, FloatFormat) and fmt.nan_code is not None:
        expected = [c if decode(fmt, c) is not Special.NAN else fmt.nan_code for c in expected]
    overflow = Overflow.SPECIAL if fmt.has_inf else Overflow.ERROR
    assert [
        encode(fmt, decode(fmt, c), overflow=overflow) for c in codes_with_a_value_of_their_own(fmt)
    ] == expected
