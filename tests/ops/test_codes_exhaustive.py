"""Codes of the reference against the exact scalar specification, input by input."""

import functools
import itertools
import math
from fractions import Fraction

import pytest
import torch

import zeropoint as zp
from zeropoint.formats import CATALOG, CodebookFormat, FloatFormat, Format, Overflow, RoundingMode, exact
from zeropoint.formats.codes import decode, encode, encode_codebook, encode_float

pytestmark = pytest.mark.rotating

SMALL = {name: fmt for name, fmt in CATALOG.items() if fmt.bits <= 8}
FLOATS = {name: fmt for name, fmt in SMALL.items() if isinstance(fmt, FloatFormat)}
USERS = {
    name: zp.get_format(name)
    for name in (
        "e3m4",
        "e2m5ieee",
        "e5m2b20fnuz",
        "e1m2",
        "e0m3",
        "ue4m4fn",
        "e2m2fn",
        "codebook[-3,0.1,0.2,9]",
    )
}
MODES = [mode for mode in RoundingMode if mode is not RoundingMode.STOCHASTIC]
HALVES = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def number(value: float) -> exact.Number:
    if math.isnan(value):
        return exact.Special.NAN
    if math.isinf(value):
        return exact.Special.INF if value > 0 else exact.Special.NEGATIVE_INF
    if value == 0 and math.copysign(1, value) < 0:
        return exact.Special.NEGATIVE_ZERO
    return Fraction(value)


def expected(fmt: Format, values: list[float], mode: RoundingMode = RoundingMode.HALF_EVEN) -> list[int]:
    """Return the codes that the specification gives; NaN without a NaN code is written as 0."""
    codes = []
    for value in values:
        nan = math.isnan(value) and not fmt.has_nan
        codes.append(0 if nan else exact.encode(fmt, number(value), mode))
    return codes


def landmarks(fmt: Format) -> list[float]:
    """Return every value, every middle of neighbors and the points past the ends, with float32 neighbors."""
    decoded = [exact.decode(fmt, code) for code in range(fmt.code_count)]
    ordered = sorted({n for n in decoded if isinstance(n, Fraction)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(ordered)]
    top, below = ordered[-1], ordered[-2]
    past = [top + (top - below) / 2, top + (top - below), ordered[0] - (ordered[1] - ordered[0]) / 2]
    tie = [ordered[0] / 2, -ordered[0] / 2]
    points = [float(p) for p in (*ordered, *middles, *past, *tie)]
    points += [-p for p in points]
    exactly = torch.tensor([p for p in points if abs(p) < 3e38], dtype=torch.float64)
    single = exactly.to(torch.float32)
    up, down = (torch.nextafter(single, torch.tensor(way)) for way in (math.inf, -math.inf))
    ends = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 2.0**-149, -(2.0**-149)])
    return torch.cat([exactly, single.double(), up.double(), down.double(), ends.double()]).tolist()


@functools.cache
def halves(dtype: torch.dtype) -> torch.Tensor:
    """Return all 65,536 numbers of a 16-bit dtype."""
    return HALVES.view(dtype)


@functools.cache
def finite_halves() -> list[float]:
    both = torch.cat([halves(torch.float16).double(), halves(torch.bfloat16).double()])
    return torch.unique(both[torch.isfinite(both)]).tolist()


@functools.cache
def boundaries(fmt: Format) -> tuple[list[Fraction], list[int]]:
    """Return where the code of the specification changes over the 16-bit numbers, found by search.

    Encoding is monotonic, so between two equal codes there is no other.
    """
    values = finite_halves()
    starts: list[Fraction] = []
    codes: list[int] = []

    def search(low: int, high: int, low_code: int, high_code: int) -> None:
        if low_code == high_code or high - low <= 1:
            if low_code != high_code:
                starts.append(Fraction(values[high]))
                codes.append(high_code)
            return
        middle = (low + high) // 2
        code = encode_finite(fmt, values[middle])
        search(low, middle, low_code, code)
        search(middle, high, code, high_code)

    first, last = encode_finite(fmt, values[0]), encode_finite(fmt, values[-1])
    starts.append(Fraction(values[0]))
    codes.append(first)
    search(0, len(values) - 1, first, last)
    return starts, codes


def encode_finite(fmt: Format, value: float) -> int:
    return exact.encode(fmt, Fraction(value))


def specified(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    """Return the specification's code of every element, through its boundaries."""
    starts, codes = boundaries(fmt)
    places = torch.tensor([float(s) for s in starts], dtype=torch.float64)
    wide = x.double()
    out = torch.tensor(codes)[(torch.bucketize(wide.nan_to_num(), places, right=True) - 1).clamp(min=0)]
    special = ~torch.isfinite(wide) | ((wide == 0) & torch.signbit(wide))
    kinds, back = torch.unique(wide[special].view(torch.int64), return_inverse=True)
    out[special] = torch.tensor(expected(fmt, kinds.view(torch.float64).tolist()), dtype=torch.int64)[back]
    return out


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_every_16_bit_input_has_the_code_of_the_specification(name: str, dtype: torch.dtype) -> None:
    fmt, x = SMALL[name], halves(dtype)
    keep = torch.isfinite(x) | isinstance(fmt, FloatFormat)
    x = x[keep]
    codes = encode(x, fmt, RoundingMode.HALF_EVEN)
    assert torch.equal(codes.to(torch.int64), specified(fmt, x))


@pytest.mark.parametrize("name", [*SMALL, *USERS])
def test_every_value_and_midpoint_and_their_neighbors_have_the_code_of_the_specification(name: str) -> None:
    """Ties go to even, and what rounds to the largest is not overflow."""
    fmt = (SMALL | USERS)[name]
    points = [p for p in landmarks(fmt) if math.isfinite(p) or isinstance(fmt, FloatFormat)]
    codes = encode(torch.tensor(points, dtype=torch.float64), fmt, RoundingMode.HALF_EVEN)
    assert codes.tolist() == expected(fmt, points)


@pytest.mark.crossed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n, f in (SMALL | USERS).items() if not isinstance(f, CodebookFormat)])
def test_every_rounding_mode_follows_the_specification(name: str, mode: RoundingMode) -> None:
    fmt = (SMALL | USERS)[name]
    points = [p for p in landmarks(fmt) if math.isfinite(p) or isinstance(fmt, FloatFormat)]
    codes = encode(torch.tensor(points, dtype=torch.float64), fmt, mode)
    assert codes.tolist() == expected(fmt, points, mode)


def specified_special(fmt: Format, value: float) -> int:
    try:
        return exact.encode(fmt, number(value), overflow=Overflow.SPECIAL)
    except zp.FormatError:
        return 0


@pytest.mark.parametrize("name", [n for n, f in FLOATS.items() if f.has_nan or f.has_inf])
def test_overflow_becomes_the_special_code_of_the_specification(name: str) -> None:
    """Negative overflow of e4m3fn is the one NaN 0x7F, without a sign."""
    fmt = FLOATS[name]
    points = landmarks(fmt)
    codes = encode_float(torch.tensor(points, dtype=torch.float64), fmt, overflow=Overflow.SPECIAL)
    assert codes.tolist() == [specified_special(fmt, p) for p in points]


@pytest.mark.parametrize("name", FLOATS)
def test_overflow_is_an_error_where_the_specification_says_so(name: str) -> None:
    fmt = FLOATS[name]
    inside: list[tuple[float, int]] = []
    outside = []
    for value in [p for p in landmarks(fmt) if not math.isnan(p)]:
        try:
            inside.append((value, exact.encode(fmt, number(value), overflow=Overflow.ERROR)))
        except zp.RangeError:
            outside.append(value)
    values, expected = zip(*inside, strict=True)
    codes = encode_float(torch.tensor(values, dtype=torch.float64), fmt, overflow=Overflow.ERROR)
    assert codes.tolist() == list(expected)
    assert outside
    for value in outside[::7]:
        with pytest.raises(zp.RangeError, match=r"1 values exceed the range of .*; use overflow=saturate"):
            encode_float(torch.tensor([value], dtype=torch.float64), fmt, overflow=Overflow.ERROR)


@pytest.mark.parametrize("name", [n for n, f in FLOATS.items() if not f.has_nan and not f.has_inf])
def test_formats_without_special_codes_refuse_special_overflow(name: str) -> None:
    with pytest.raises(zp.UnsupportedError, match="overflow=special needs a format with Inf or NaN"):
        encode_float(torch.tensor([1.0]), FLOATS[name], overflow=Overflow.SPECIAL)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*SMALL, *USERS])
def test_every_code_decodes_to_the_number_of_the_specification(name: str, dtype: torch.dtype) -> None:
    fmt = (SMALL | USERS)[name]
    values = decode(torch.arange(fmt.code_count, dtype=torch.uint8), fmt, dtype).double().tolist()
    assert [number(v) for v in values] == [
        n if isinstance(n, exact.Special) else Fraction(n)
        for n in (exact.decode(fmt, c) for c in range(fmt.code_count))
    ]


@pytest.mark.parametrize("name", ["int16", "uint16", "int12", "uint9", "float16", "bfloat16"])
def test_every_wide_code_decodes_to_the_number_of_the_specification(name: str) -> None:
    fmt = CATALOG[name]
    values = decode(torch.arange(fmt.code_count), fmt, torch.float64).tolist()
    assert [number(v) for v in values] == [exact.decode(fmt, c) for c in range(fmt.code_count)]


@pytest.mark.parametrize("name", [n for n, f in FLOATS.items()])
def test_encoding_a_decoded_code_returns_it(name: str) -> None:
    """Only the further names of NaN are canonicalized."""
    fmt = FLOATS[name]
    codes = torch.arange(fmt.code_count, dtype=torch.uint8)
    values = decode(codes, fmt, torch.float64)
    back = encode_float(values, fmt, overflow=Overflow.SPECIAL) if fmt.has_nan else encode_float(values, fmt)
    nan = torch.isnan(values)
    assert torch.equal(back[~nan], codes[~nan])
    assert set(back[nan].tolist()) <= {fmt.nan_code}


@pytest.mark.crossed
@pytest.mark.parametrize("payload", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF])
@pytest.mark.parametrize(
    ("name", "code"),
    [("float8_e4m3fn", 0x7F), ("float8_e5m2", 0x7F), ("float8_e4m3fnuz", 0x80), ("float8_e5m2fnuz", 0x80)],
)
def test_every_nan_becomes_the_one_canonical_code(name: str, code: int, payload: int) -> None:
    """Quiet, signaling, with either sign and any payload."""
    x = torch.tensor([payload]).to(torch.int32).view(torch.float32)
    assert torch.isnan(x).all()
    assert encode(x, CATALOG[name], RoundingMode.HALF_EVEN).tolist() == [code]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("float8_e4m3fn", 0x80),
        ("float8_e5m2", 0x80),
        ("float8_e4m3fnuz", 0),
        ("float4_e2m1fn", 8),
        ("int8", 0),
        ("uint4", 0),
    ],
)
def test_negative_zero_keeps_its_sign_where_the_format_has_one(name: str, code: int) -> None:
    q = zp.quantize(torch.tensor([-0.0, 1.0]), name)
    assert q.codes.tolist()[0] == code


def test_float64_is_not_rounded_to_float32_on_the_way() -> None:
    """Just above a tie of e4m3, by less than float32 can tell."""
    tie = 1.0625  # between 1.0 and 1.125, even is 1.0
    x = torch.tensor([tie + 2.0**-40, tie, tie - 2.0**-40], dtype=torch.float64)
    codes = zp.quantize(x, "float8_e4m3fn:cast").codes.tolist()
    assert codes == [0x39, 0x38, 0x38]
    assert zp.quantize(x.float(), "float8_e4m3fn:cast").codes.tolist() == [0x38] * 3


def test_float64_scales_divide_in_float64() -> None:
    x = torch.tensor([0.5 + 2.0**-40, 127.0], dtype=torch.float64)
    assert zp.quantize(x, "int8:narrow").codes.tolist() == [1, 127]
    assert zp.quantize(x.float(), "int8:narrow").codes.tolist() == [0, 127]


def test_a_value_on_a_boundary_of_a_codebook_goes_down() -> None:
    fmt = CATALOG["nf4"]
    assert isinstance(fmt, CodebookFormat)
    bounds = torch.tensor(fmt.thresholds)
    codes = encode_codebook(bounds, fmt).tolist()
    assert codes == list(range(15))
    assert encode_codebook(torch.nextafter(bounds, torch.tensor(math.inf)), fmt).tolist() == list(
        range(1, 16)
    )


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu", "float6_e3m2fn"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_bytes_are_looked_up_with_the_values_that_few_have(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    one_by_one = decode(every, zp.get_format(name), dtype)
    together = decode(every.repeat(40), zp.get_format(name), dtype)
    assert torch.equal(together.view(torch.uint8), one_by_one.repeat(40).view(torch.uint8))
