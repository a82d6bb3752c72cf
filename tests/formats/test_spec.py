"""Facts that follow from a definition, against the tables of the standards; contradictory definitions."""

import math
from fractions import Fraction

import pytest

from zeropoint.errors import FormatError
from zeropoint.formats import CodebookFormat, FloatFormat, IntFormat, Specials, get_format
from zeropoint.formats.spec import exponent_of, power_of_two


def small_float(name: str) -> FloatFormat:
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt


# OCP OFP8 1.0, tables 1 and 2; OCP MX 1.0, tables 2 to 5; arXiv:2206.02915 for fnuz. Columns: largest, its
# code, emax, smallest normal, smallest, codes of NaN and +Inf.
FACTS = {
    "float8_e4m3fn": (448, 0x7E, 8, 2**-6, 2**-9, 0x7F, None),
    "float8_e5m2": (57344, 0x7B, 15, 2**-14, 2**-16, 0x7F, 0x7C),
    "float8_e4m3fnuz": (240, 0x7F, 7, 2**-7, 2**-10, 0x80, None),
    "float8_e5m2fnuz": (57344, 0x7F, 15, 2**-15, 2**-17, 0x80, None),
    "float6_e3m2fn": (28, 0x1F, 4, 0.25, 0.0625, None, None),
    "float6_e2m3fn": (7.5, 0x1F, 2, 1, 0.125, None, None),
    "float4_e2m1fn": (6, 0x7, 2, 1, 0.5, None, None),
    "float8_e8m0fnu": (2.0**127, 0xFE, 127, 2.0**-127, 2.0**-127, 0xFF, None),
    "float8_ue4m3fn": (448, 0x7E, 8, 2**-6, 2**-9, 0x7F, None),
    "float8_ue5m3fn": (114688, 0xFE, 16, 2**-14, 2**-17, 0xFF, None),
    "float16": (65504, 0x7BFF, 15, 2**-14, 2**-24, 0x7FFF, 0x7C00),
    "bfloat16": (2.0**128 - 2.0**120, 0x7F7F, 127, 2.0**-126, 2.0**-133, 0x7FFF, 0x7F80),
    "float32": (2.0**128 - 2.0**104, 0x7F7FFFFF, 127, 2.0**-126, 2.0**-149, 0x7FFFFFFF, 0x7F800000),
    "float64": (
        math.ldexp(2 - 2**-52, 1023), 0x7FEF << 48 | (1 << 48) - 1, 1023, 2.0**-1022, 2.0**-1074,
        (1 << 63) - 1, 0x7FF << 52,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_float_are_those_of_its_standard(name: str) -> None:
    fmt = small_float(name)
    derived = (fmt.max, fmt.max_code, fmt.emax, fmt.smallest_normal, fmt.smallest, fmt.nan_code, fmt.inf_code)
    assert derived == FACTS[name]
    assert (fmt.has_nan, fmt.has_inf) == (fmt.nan_code is not None, fmt.inf_code is not None)


@pytest.mark.parametrize("name", FACTS)
def test_the_smallest_value_mirrors_the_largest_unless_unsigned(name: str) -> None:
    fmt = small_float(name)
    lowest = {"float8_e8m0fnu": 2.0**-127, "float8_ue4m3fn": 0, "float8_ue5m3fn": 0}
    assert fmt.min == lowest.get(name, -fmt.max)


def test_only_signed_formats_with_their_zero_code_free_keep_the_sign_of_zero() -> None:
    keep = [name for name in FACTS if small_float(name).has_negative_zero]
    lose = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_ue4m3fn", "float8_ue5m3fn"]
    assert sorted(keep + lose) == sorted(FACTS)


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "emax", "mantissa_bits"),
    [
        ("int2", -2, 1, 0, 0),
        ("int4", -8, 7, 2, 2),
        ("int8", -128, 127, 6, 6),
        ("int16", -(2**15), 2**15 - 1, 14, 14),
        ("int32", -(2**31), 2**31 - 1, 30, 30),
        ("uint2", 0, 3, 1, 1),
        ("uint4", 0, 15, 3, 3),
        ("uint8", 0, 255, 7, 7),
        ("uint32", 0, 2**32 - 1, 31, 31),
    ],
)
def test_facts_of_an_integer_follow_from_its_width(
    name: str, lowest: int, highest: int, emax: int, mantissa_bits: int
) -> None:
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    assert (fmt.min, fmt.max, fmt.qmin, fmt.qmax) == (lowest, highest, lowest, highest)
    assert (fmt.emax, fmt.mantissa_bits, fmt.step, fmt.code_count) == (
        emax,
        mantissa_bits,
        1,
        highest - lowest + 1,
    )
    assert (fmt.has_nan, fmt.has_inf) == (False, False)


def test_mxint8_has_six_bits_after_the_point() -> None:
    fmt = get_format("int8_mx")
    assert isinstance(fmt, IntFormat)
    assert (fmt.max, fmt.min, fmt.step, fmt.emax) == (Fraction(127, 64), -2, Fraction(1, 64), 0)
    assert (fmt.qmin, fmt.qmax, fmt.bits) == (-128, 127, 8)


def test_a_codebook_knows_its_range_and_its_written_codes() -> None:
    fmt = CodebookFormat((3.0, -1.0, 3.0, 0.25))
    assert (fmt.max, fmt.min, fmt.bits, fmt.code_count, fmt.emax) == (3, -1, 2, 4, 1)
    assert fmt.order == (1, 3, 0)
    assert fmt.thresholds == (-0.375, 1.625)
    assert (fmt.has_nan, fmt.has_inf, fmt.mantissa_bits) == (False, False, 0)


@pytest.mark.parametrize(("length", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5), (256, 8)])
def test_a_codebook_takes_the_bits_its_length_needs(length: int, bits: int) -> None:
    assert CodebookFormat(tuple(map(float, range(length)))).bits == bits


def test_a_codebook_keeps_float32_values() -> None:
    assert CodebookFormat((0.0, 0.1)).values[1] == 0.10000000149011612
    assert CodebookFormat((0.0, 0.1)) == CodebookFormat((0.0, 0.10000000149011612))


def test_a_codebook_has_no_negative_zero() -> None:
    assert CodebookFormat((-0.0, 1.0)).spelling == "codebook[0.0,1.0]"


def test_the_boundary_of_wide_apart_values_is_rounded_once() -> None:
    # The exact middle lies just above a tie of float32, and float64 can tell.
    low, high = 2.0**-24 * (1 + 2.0**-23), 1.0
    middle = (Fraction(low) + Fraction(high)) / 2
    (threshold,) = CodebookFormat((low, high)).thresholds
    neighbors = [Fraction(0.5), Fraction(0.5) + Fraction(1, 1 << 24)]
    assert Fraction(threshold) == min(neighbors, key=lambda n: abs(n - middle))
    assert threshold > 0.5


def test_ieee_without_mantissa_bits_has_infinity_and_no_nan() -> None:
    fmt = FloatFormat(exponent_bits=4, mantissa_bits=0, bias=7, specials=Specials.IEEE)
    assert (fmt.has_inf, fmt.has_nan, fmt.inf_code, fmt.nan_code) == (True, False, 0xF, None)


def test_a_format_without_exponent_bits_is_sign_and_magnitude() -> None:
    fmt = small_float("mx6_element")
    assert (fmt.max, fmt.smallest, fmt.emax, fmt.bits) == (Fraction(15, 8), Fraction(1, 8), 0, 5)
    assert fmt.smallest_normal > fmt.max


def test_equal_definitions_are_equal_and_hash_alike() -> None:
    one = FloatFormat(exponent_bits=4, mantissa_bits=3, bias=7, specials=Specials.FN)
    other = get_format("float8_e4m3fn")
    assert one.max == other.max  # the cached maximum must not enter the comparison
    assert (one, hash(one)) == (other, hash(other))
    assert one != get_format("float8_ue4m3fn")
    assert IntFormat(bits=8, signed=True) != IntFormat(bits=8, signed=True, fraction_bits=6)


@pytest.mark.parametrize(
    "value", [Fraction(1), Fraction(2**80 - 1), Fraction(1, 2**80), Fraction(3, 7), Fraction(5, 2**9)]
)
def test_the_exponent_is_the_floor_of_the_logarithm(value: Fraction) -> None:
    exponent = exponent_of(value)
    assert power_of_two(exponent) <= value < power_of_two(exponent + 1)


INT_ERRORS = [
    ({"bits": 1, "signed": True}, r"bits \(=1\) of an integer format must lie in 2\.\.32"),
    ({"bits": 0, "signed": False}, r"bits \(=0\) of an integer format must lie in 1\.\.32"),
    ({"bits": 33, "signed": True}, r"bits \(=33\) of an integer format must lie in 2\.\.32"),
    ({"bits": -4, "signed": False}, r"bits \(=-4\) of an integer format must lie in 1\.\.32"),
    ({"bits": 8, "signed": True, "fraction_bits": 8}, r"fraction_bits \(=8\) must lie in 0\.\.7"),
    ({"bits": 8, "signed": True, "fraction_bits": -1}, r"fraction_bits \(=-1\) must lie in 0\.\.7"),
]


@pytest.mark.parametrize(("arguments", "message"), INT_ERRORS)
def test_an_integer_format_out_of_range_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        IntFormat(**arguments)


FINITE, FN, IEEE, FNUZ = Specials.FINITE, Specials.FN, Specials.IEEE, Specials.FNUZ
FLOAT_ERRORS = [
    ((12, 3, 7, FN, {}), r"exponent_bits \(=12\) must lie in 0\.\.11"),
    ((-1, 3, 7, FN, {}), r"exponent_bits \(=-1\) must lie in 0\.\.11"),
    ((4, 53, 7, FN, {}), r"mantissa_bits \(=53\) must lie in 0\.\.52"),
    ((4, -1, 7, FN, {}), r"mantissa_bits \(=-1\) must lie in 0\.\.52"),
    (
        (0, 0, 0, FINITE, {}),
        r"e0m0b0finite has no finite value other than zero; add exponent or mantissa bits",
    ),
    ((1, 0, 0, FN, {}), r"e1m0b0fn has no finite value other than zero"),
    ((0, 3, 0, IEEE, {}), r"e0m3b0ieee has no finite value other than zero"),
    ((1, 0, 0, IEEE, {}), r"e1m0b0ieee has no finite value other than zero"),
    (
        (4, 3, 8, FNUZ, {"signed": False}),
        r"specials \(=fnuz\) puts NaN at negative zero, .* use fn or finite",
    ),
    (
        (0, 3, 0, FINITE, {"subnormals": False}),
        r"exponent_bits \(=0\) leaves only subnormals; .* must be True",
    ),
    ((4, 3, 7, FN, {"subnormals": False}), r"subnormals \(=False\) leaves no zero, .* use signed=False"),
    ((4, 3, 1100, FN, {}), r"bias \(=1100\) of e4m3b1100fn puts values outside float64"),
    ((4, 3, -1020, FN, {}), r"bias \(=-1020\) of e4m3b-1020fn puts values outside float64"),
]


@pytest.mark.parametrize(("definition", "message"), FLOAT_ERRORS)
def test_a_contradictory_float_format_is_refused(
    definition: tuple[int, int, int, Specials, dict[str, bool]], message: str
) -> None:
    exponent, mantissa, bias, specials, flags = definition
    with pytest.raises(FormatError, match=message):
        FloatFormat(exponent_bits=exponent, mantissa_bits=mantissa, bias=bias, specials=specials, **flags)


@pytest.mark.parametrize("length", [0, 1, 257])
def test_a_codebook_of_the_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(FormatError, match=rf"values \(length {length}\) of a codebook must number 2\.\.256"):
        CodebookFormat(tuple(map(float, range(length))))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_a_codebook_value_that_float32_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(FormatError, match=r"values of a codebook must be finite in float32"):
        CodebookFormat((0.0, value))
