"""Codes and exact numbers, by hand: the tables of the standards, ties, saturation, and the errors."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropoint.errors import FormatError, RangeError
from zeropoint.formats import (
    CATALOG,
    CodebookFormat,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
    RoundingMode,
    get_format,
)
from zeropoint.formats.exact import Special, decode, encode

SATURATE, SPECIAL, ERROR = Overflow.SATURATE, Overflow.SPECIAL, Overflow.ERROR
NEAREST = [mode for mode in RoundingMode if mode.to_nearest]


def test_float4_decodes_to_the_table_of_the_standard() -> None:
    fmt = get_format("float4_e2m1fn")
    positive = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    negative = [Special.NEGATIVE_ZERO, *(-v for v in positive[1:])]
    assert [decode(fmt, code) for code in range(16)] == positive + negative


@pytest.mark.parametrize(
    ("tie", "value"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6)]
)
def test_ties_of_float4_go_to_the_even_code(tie: float, value: float) -> None:
    fmt, eps = get_format("float4_e2m1fn"), Fraction(1, 10**30)
    code = encode(fmt, Fraction(tie))
    assert decode(fmt, code) == value
    assert decode(fmt, encode(fmt, -Fraction(tie))) == (-value or Special.NEGATIVE_ZERO)
    sides = {encode(fmt, Fraction(tie) - eps), encode(fmt, Fraction(tie) + eps)}
    assert code in sides
    assert len(sides) == (1 if tie == 7 else 2)


# The point at which rounding passes the largest value, whether the tie itself passes it, and the largest
# number that rounds to zero. OCP OFP8 1.0, section 5, for E4M3 and E5M2.
EDGES = [
    ("float8_e4m3fn", 464, False, 2**-10),
    ("float8_e5m2", 61440, True, 2**-17),
    ("float8_e4m3fnuz", 248, True, 2**-11),
    ("float8_e5m2fnuz", 61440, True, 2**-18),
    ("float8_ue4m3fn", 464, False, 2**-10),
    ("float16", 65520, True, 2**-25),
]


@pytest.mark.parametrize(("name", "edge", "tie_overflows", "underflow"), EDGES)
def test_overflow_and_underflow_begin_where_the_standard_says(
    name: str, edge: int, tie_overflows: bool, underflow: float
) -> None:
    fmt, eps = get_format(name), Fraction(1, 10**30)
    assert isinstance(fmt, FloatFormat)
    special = fmt.inf_code if fmt.has_inf else fmt.nan_code
    assert encode(fmt, edge - eps, overflow=SPECIAL) == fmt.max_code
    assert encode(fmt, edge + eps, overflow=SPECIAL) == special
    assert encode(fmt, Fraction(edge), overflow=SPECIAL) == (special if tie_overflows else fmt.max_code)
    assert encode(fmt, edge + eps, overflow=SATURATE) == fmt.max_code
    assert encode(fmt, Fraction(underflow)) == 0
    assert encode(fmt, Fraction(underflow) + eps) == 1


@pytest.mark.parametrize(
    ("name", "half"), [("float6_e3m2fn", 30), ("float6_e2m3fn", 7.75), ("float4_e2m1fn", 7)]
)
def test_formats_without_nan_saturate_or_refuse(name: str, half: float) -> None:
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    assert encode(fmt, Fraction(half) * 9) == fmt.max_code
    assert encode(fmt, -Fraction(half) * 9) == fmt.max_code | fmt.sign_bit
    for overflow in (SPECIAL, ERROR):
        with pytest.raises(
            RangeError, match=rf"a value lies outside {fmt.spelling}, -.* to .*; use overflow=saturate"
        ):
            encode(fmt, Fraction(half), overflow=overflow)


def test_zero_keeps_its_sign_where_the_format_has_two() -> None:
    signs = {
        name: encode(get_format(name), Special.NEGATIVE_ZERO)
        for name in ("e4m3", "e4m3fnuz", "fp4", "int8", "nf4")
    }
    assert signs == {"e4m3": 0x80, "e4m3fnuz": 0, "fp4": 8, "int8": 0, "nf4": 7}


def test_negative_numbers_that_round_to_zero_keep_their_sign_likewise() -> None:
    tiny = -Fraction(1, 10**9)
    assert [encode(get_format(n), tiny) for n in ("e4m3", "e4m3fnuz", "fp4", "ue4m3")] == [0x80, 0, 8, 0]


@pytest.mark.parametrize(
    ("name", "code"),
    [("float8_e4m3fn", 0x7F), ("float8_e5m2", 0x7F), ("float8_e4m3fnuz", 0x80), ("e8m0", 0xFF)],
)
def test_nan_has_one_code(name: str, code: int) -> None:
    fmt = get_format(name)
    for overflow in Overflow:
        assert encode(fmt, Special.NAN, overflow=overflow) == code
    assert decode(fmt, code) is Special.NAN


@pytest.mark.parametrize("name", ["fp4", "e3m2", "e2m3", "int8", "nf4", "mx9_element", "e4m0ieee"])
def test_nan_is_refused_where_there_is_none(name: str) -> None:
    fmt = get_format(name)
    with pytest.raises(FormatError, match="nan has no code in "):
        encode(fmt, Special.NAN)


@pytest.mark.parametrize(
    ("name", "saturated", "special"),
    [
        ("float8_e4m3fn", (0x7E, 0xFE), (0x7F, 0x7F)),
        ("float8_e5m2", (0x7B, 0xFB), (0x7C, 0xFC)),
        ("float8_e4m3fnuz", (0x7F, 0xFF), (0x80, 0x80)),
        ("float8_ue4m3fn", (0x7E, 0x00), (0x7F, 0x7F)),
        ("float8_e8m0fnu", (0xFE, 0x00), (0xFF, 0xFF)),
        ("ue5m2ieee", (0x7B, 0x00), (0x7C, 0x7F)),
        ("e4m0ieee", (0x0E, 0x1E), (0x0F, 0x1F)),
    ],
)
def test_infinity_and_numbers_past_the_end_become_the_same(
    name: str, saturated: tuple[int, int], special: tuple[int, int]
) -> None:
    fmt = get_format(name)
    for high, low in ((Special.INF, Special.NEGATIVE_INF), (4 * fmt.max, -4 * fmt.max)):
        assert (encode(fmt, high), encode(fmt, low)) == saturated
        assert (encode(fmt, high, overflow=SPECIAL), encode(fmt, low, overflow=SPECIAL)) == special
        for number in (high, low):
            with pytest.raises(RangeError, match=f"a value lies outside {fmt.spelling}, "):
                encode(fmt, number, overflow=ERROR)


@pytest.mark.parametrize("name", ["int4", "uint4", "int8_mx", "nf4"])
def test_infinity_saturates_where_there_is_none(name: str) -> None:
    fmt = get_format(name)
    assert decode(fmt, encode(fmt, Special.INF)) == fmt.max
    assert decode(fmt, encode(fmt, Special.NEGATIVE_INF)) == fmt.min
    for overflow in (SPECIAL, ERROR):
        with pytest.raises(RangeError, match="use overflow=saturate"):
            encode(fmt, Special.INF, overflow=overflow)


@pytest.mark.parametrize("overflow", [SPECIAL, ERROR])
@pytest.mark.parametrize(
    ("name", "inside", "outside"), [("int4", 7.5, 7.51), ("int4", -8.5, -8.51), ("uint4", -0.5, -0.51)]
)
def test_integers_overflow_after_rounding(
    name: str, inside: float, outside: float, overflow: Overflow
) -> None:
    fmt = get_format(name)
    toward_zero = RoundingMode.HALF_UP if inside < 0 else RoundingMode.HALF_DOWN
    assert decode(fmt, encode(fmt, Fraction(inside), toward_zero, overflow)) in (fmt.max, fmt.min)
    with pytest.raises(RangeError, match=rf"a value lies outside {name}, .*; use overflow=saturate"):
        encode(fmt, Fraction(outside), overflow=overflow)


def test_a_codebook_takes_the_nearest_end_past_its_values() -> None:
    fmt = get_format("ternary")
    for overflow in Overflow:
        assert [encode(fmt, Fraction(v), overflow=overflow) for v in (-9, 9)] == [0, 2]


def test_a_number_on_a_boundary_of_a_codebook_goes_down() -> None:
    fmt, eps = get_format("ternary"), Fraction(1, 10**30)
    assert [encode(fmt, v) for v in (Fraction(-1, 2), Fraction(-1, 2) + eps, Fraction(1, 2))] == [0, 1, 1]


def test_equal_values_of_a_codebook_are_written_as_the_lowest_code() -> None:
    fmt = get_format("codebook[2,1,2,1]")
    assert [encode(fmt, Fraction(v)) for v in (1, 2)] == [1, 0]


def test_powers_of_two_have_neither_zero_nor_sign() -> None:
    fmt = get_format("e8m0")
    assert [encode(fmt, Fraction(0)), encode(fmt, Special.NEGATIVE_ZERO)] == [0, 0]
    assert [decode(fmt, code) for code in (0, 127, 254)] == [Fraction(1, 2**127), 1, 2**127]
    assert decode(fmt, 255) is Special.NAN


def test_powers_of_two_round_ties_up() -> None:
    fmt = get_format("e8m0")
    assert [encode(fmt, Fraction(v)) for v in (1.5, 3, 6)] == [128, 129, 130]
    assert [encode(fmt, Fraction(v) - Fraction(1, 10**30)) for v in (1.5, 3, 6)] == [127, 128, 129]


def test_mxint8_reads_minus_two_and_saturates_above() -> None:
    fmt = get_format("int8_mx")
    assert decode(fmt, 0x80) == -2
    assert encode(fmt, Fraction(255, 128)) == 0x7F
    assert encode(fmt, Fraction(2)) == 0x7F


ROUNDINGS = {
    RoundingMode.HALF_EVEN: (2, 2, -2, -2, 2, -2),
    RoundingMode.HALF_AWAY: (2, 3, -2, -3, 2, -2),
    RoundingMode.HALF_UP: (2, 3, -1, -2, 2, -2),
    RoundingMode.HALF_DOWN: (1, 2, -2, -3, 2, -2),
    RoundingMode.FLOOR: (1, 2, -2, -3, 1, -2),
    RoundingMode.CEIL: (2, 3, -1, -2, 2, -1),
    RoundingMode.TOWARD_ZERO: (1, 2, -1, -2, 1, -1),
}


@pytest.mark.crossed
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("name", ["int8", "e4m5"])
def test_the_modes_of_rounding_agree_on_integers_and_floats(name: str, mode: RoundingMode) -> None:
    # On these numbers the steps of the float are those of the integer, once both are scaled by 32.
    fmt = get_format(name)
    scale = 1 if isinstance(fmt, IntFormat) else Fraction(1, 2**11)
    samples = [Fraction(v) for v in (1.5, 2.5, -1.5, -2.5, 1.75, -1.75)]
    values = [decode(fmt, encode(fmt, v * scale, mode)) for v in samples]
    assert [v / scale for v in values if isinstance(v, Fraction)] == list(ROUNDINGS[mode])


def test_stochastic_rounding_has_no_exact_result() -> None:
    for name in ("int8", "e4m3"):
        with pytest.raises(
            FormatError, match=r"rounding \(=stochastic\) needs random bits and has no exact result"
        ):
            encode(get_format(name), Fraction(1, 3), RoundingMode.STOCHASTIC)


@pytest.mark.parametrize(
    ("name", "code", "last"), [("int4", 16, 15), ("int4", -1, 15), ("ternary", 3, 2), ("e4m3", 256, 255)]
)
def test_a_code_without_meaning_is_refused(name: str, code: int, last: int) -> None:
    with pytest.raises(FormatError, match=rf"code \(={code}\) must lie in 0\.\.{last}"):
        decode(get_format(name), code)


NAMES = sorted(CATALOG)
FRACTIONS = st.fractions() | st.floats(allow_nan=False, allow_infinity=False).map(Fraction)


def value_of(fmt: Format, number: Fraction, mode: RoundingMode) -> Fraction:
    value = decode(fmt, encode(fmt, number, mode))
    return Fraction(0) if isinstance(value, Special) else value


@given(
    st.sampled_from(NAMES),
    FRACTIONS,
    st.sampled_from(sorted(set(RoundingMode) - {RoundingMode.STOCHASTIC}, key=str)),
)
def test_rounding_twice_is_rounding_once(name: str, number: Fraction, mode: RoundingMode) -> None:
    fmt = get_format(name)
    code = encode(fmt, number, mode)
    assert encode(fmt, decode(fmt, code), mode) == code


@given(st.sampled_from(NAMES), FRACTIONS, FRACTIONS, st.sampled_from(NEAREST))
def test_larger_numbers_never_get_smaller_values(
    name: str, a: Fraction, b: Fraction, mode: RoundingMode
) -> None:
    fmt = get_format(name)
    low, high = sorted((a, b))
    assert value_of(fmt, low, mode) <= value_of(fmt, high, mode)


@given(st.sampled_from([n for n in NAMES if CATALOG[n].bits <= 8]), FRACTIONS, st.sampled_from(NEAREST))
def test_no_value_is_nearer_than_the_one_that_was_taken(
    name: str, number: Fraction, mode: RoundingMode
) -> None:
    fmt = get_format(name)
    values = [v for v in (decode(fmt, c) for c in range(fmt.code_count)) if isinstance(v, Fraction)]
    error = abs(value_of(fmt, number, mode) - number)
    # Boundaries of a table are midpoints in float32, below 1 and so off by at most 2**-25.
    slack = Fraction(1, 1 << 24) if isinstance(fmt, CodebookFormat) else Fraction(0)
    assert error <= min(abs(v - number) for v in values) + slack


@given(st.sampled_from([n for n in NAMES if not isinstance(CATALOG[n], CodebookFormat)]), FRACTIONS)
def test_floor_and_ceil_enclose_the_number(name: str, number: Fraction) -> None:
    fmt = get_format(name)
    number = min(max(number, fmt.min), fmt.max)
    low = value_of(fmt, number, RoundingMode.FLOOR)
    assert low <= number <= value_of(fmt, number, RoundingMode.CEIL)
