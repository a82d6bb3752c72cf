"""What formats answer about themselves is what decoding every code says."""

from fractions import Fraction
from itertools import pairwise

from tests.tables import each

from zeropoint.formats import CATALOG, Format, get_format
from zeropoint.formats.exact import decode, encode
from zeropoint.formats.spec import exponent_of, power_of_two

SPELLED = ("e3m4", "ue4m2ns", "int7f3", "codebook[4,1]", "codebook[-1,0.25,1]", "e2m0finite", "ue3m0fnns")
FORMATS = {
    **{name: fmt for name, fmt in CATALOG.items() if fmt.bits <= 8},
    **{name: get_format(name) for name in SPELLED},
}


def values(fmt: Format) -> list[Fraction]:
    """Return the finite values of all codes, rising."""
    numbers = (decode(fmt, code) for code in range(fmt.code_count))
    return sorted({number for number in numbers if isinstance(number, Fraction)})


@each("name", FORMATS)
def test_ends_gaps_and_the_smallest_value_are_those_of_the_codes(name: str) -> None:
    fmt = FORMATS[name]
    found = values(fmt)
    assert (fmt.min, fmt.max) == (found[0], found[-1])
    assert fmt.smallest == min((value for value in found if value > 0), default=0)
    assert fmt.largest_gap == max(b - a for a, b in pairwise(found))


@each("name", FORMATS)
def test_the_ceiling_is_the_last_number_that_rounds_to_the_largest_value(name: str) -> None:
    fmt = FORMATS[name]
    assert decode(fmt, encode(fmt, fmt.ceiling)) == fmt.max
    if not fmt.is_table:  # half a step past the largest value on a grid that continues
        step = fmt.ceiling - fmt.max
        below = fmt.max - values(fmt)[-2] if fmt.is_integer else 2 * step
        assert step == below / 2


@each("name", FORMATS)
def test_formats_of_powers_of_two_list_their_exponents(name: str) -> None:
    fmt = FORMATS[name]
    positive = [value for value in values(fmt) if value > 0]
    powers = all(value == power_of_two(exponent_of(value)) for value in positive)
    if fmt.exponents is not None:
        assert powers
        assert list(fmt.exponents) == [exponent_of(value) for value in positive]
    elif powers:  # zeros, negative numbers and integers are not for scales that are powers of two
        assert fmt.is_integer or fmt.is_table or fmt.min <= 0


def test_a_level_takes_whole_bytes_as_a_float_and_its_code_otherwise() -> None:
    bits = {
        name: get_format(name).level_bits for name in ("ue4m3", "e2m1", "float16", "uint6", "microexponent")
    }
    assert bits == {"ue4m3": 8, "e2m1": 8, "float16": 16, "uint6": 6, "microexponent": 1}
