"""Names: catalog, aliases, spellings of formats without a name, and errors for names that mean nothing."""

import contextlib

import pytest
import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from tests.tables import each

from zeropoint.errors import DtypeError, FormatError
from zeropoint.formats import (
    ALIASES,
    CATALOG,
    SOURCES,
    CodebookFormat,
    FloatFormat,
    IntFormat,
    Specials,
    format_name,
    get_format,
)
from zeropoint.formats.torch_dtypes import (
    INPUT_DTYPES,
    code_dtype,
    dtype_of,
    format_of,
    storage_dtype,
    wide_dtype,
)


@each("name", CATALOG)
def test_a_name_its_spelling_and_its_format_are_one(name: str) -> None:
    fmt = CATALOG[name]
    assert get_format(name) is fmt
    assert get_format(fmt.spelling) == fmt
    assert format_name(fmt) == name


@each("alias", ALIASES)
def test_every_alias_leads_to_a_name_and_hides_none(alias: str) -> None:
    assert ALIASES[alias] in CATALOG
    assert alias not in CATALOG
    assert get_format(alias) is CATALOG[ALIASES[alias]]


def test_every_format_names_its_source_and_is_defined_once() -> None:
    assert SOURCES.keys() == CATALOG.keys()
    assert all(SOURCES.values())
    assert len(set(CATALOG.values())) == len(CATALOG)


def test_a_format_is_its_own_name() -> None:
    fmt = IntFormat(bits=5, signed=True)
    assert get_format(fmt) is fmt


def test_names_are_read_in_either_case_and_with_space_around() -> None:
    assert get_format("  Float8_E4M3FN ") is CATALOG["float8_e4m3fn"]
    assert get_format("E2M1") is CATALOG["float4_e2m1fn"]


def a_float(exponent: int, mantissa: int, bias: int, specials: Specials, **flags: bool) -> FloatFormat:
    return FloatFormat(exponent_bits=exponent, mantissa_bits=mantissa, bias=bias, specials=specials, **flags)


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("e3m4", a_float(3, 4, 3, Specials.FINITE)),
        ("e3m4ieee", a_float(3, 4, 3, Specials.IEEE)),
        ("e4m3b11fnuz", a_float(4, 3, 11, Specials.FNUZ)),
        ("e4m3b-2fn", a_float(4, 3, -2, Specials.FN)),
        ("ue5m3", a_float(5, 3, 15, Specials.FN, signed=False)),
        ("ue5m2", a_float(5, 2, 15, Specials.FINITE, signed=False)),
        ("ue4m2ns", a_float(4, 2, 7, Specials.FINITE, signed=False, subnormals=False)),
        ("e1m2", a_float(1, 2, 0, Specials.FINITE)),
        ("e0m7", a_float(0, 7, 0, Specials.FINITE)),
        ("int17", IntFormat(bits=17, signed=True)),
        ("uint1", IntFormat(bits=1, signed=False)),
        ("int8f6", IntFormat(bits=8, signed=True, fraction_bits=6)),
        ("codebook[-1, 0.5,3e2]", CodebookFormat((-1.0, 0.5, 300.0))),
    ],
)
def test_a_format_without_a_name_is_spelled(text: str, fmt: FloatFormat | IntFormat | CodebookFormat) -> None:
    assert get_format(text) == fmt
    assert get_format(format_name(fmt)) == fmt


def test_bare_e4m3_and_e5m2_are_the_formats_of_the_standard() -> None:
    assert get_format("e4m3") == a_float(4, 3, 7, Specials.FN)
    assert get_format("e5m2") == a_float(5, 2, 15, Specials.IEEE)


@given(
    st.integers(0, 11), st.integers(0, 52), st.integers(-1030, 1030), st.sampled_from(Specials),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_float_format_that_exists_can_be_spelled(
    exponent: int, mantissa: int, bias: int, specials: Specials, signed: bool, subnormals: bool
) -> None:
    try:
        fmt = a_float(exponent, mantissa, bias, specials, signed=signed, subnormals=subnormals)
    except FormatError:
        reject()
    assert get_format(format_name(fmt)) == fmt
    assert get_format(fmt.spelling) == fmt


@given(st.integers(2, 32), st.booleans(), st.integers(0, 31))
def test_every_integer_format_that_exists_can_be_spelled(bits: int, signed: bool, fraction: int) -> None:
    fmt = IntFormat(bits=bits, signed=signed, fraction_bits=min(fraction, bits - 1))
    assert get_format(format_name(fmt)) == fmt


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=256))
def test_every_codebook_can_be_spelled(values: list[float]) -> None:
    assume(len(set(values)) > 1)
    fmt = CodebookFormat(tuple(values))
    assert get_format(format_name(fmt)) == fmt


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flaot8_e4m3fn", r"format 'flaot8_e4m3fn' is unknown; did you mean float8_e4m3fn"),
        ("float8_e4m3fnz", r"did you mean .*float8_e4m3fnuz"),
        ("bf61", r"did you mean bf16"),
        ("nf5", r"did you mean .*nf4"),
        ("in4", r"did you mean .*int4"),
        ("int100", r"format 'int100' is unknown; did you mean .*int10"),
        ("", r"format '' is unknown; known are "),
        ("?", r"known are .*float8_e4m3fn.*, uint9"),
        ("int\uff14", "format 'int\uff14' is unknown"),  # a full-width 4 is a digit to Python
        ("e4m3 fn", r"format 'e4m3 fn' is unknown"),
        ("int1", r"bits \(=1\) of an integer format must lie in 2\.\.32"),
        ("int64", r"bits \(=64\) of an integer format must lie in 2\.\.32"),
        ("uint0", r"bits \(=0\) of an integer format must lie in 1\.\.32"),
        ("e12m3", r"exponent_bits \(=12\) must lie in 0\.\.11"),
        ("e8m60", r"mantissa_bits \(=60\) must lie in 0\.\.52"),
        ("e4m3b9999", r"bias \(=9999\) of e4m3b9999finite puts values outside float64"),
        ("ue4m3fnuz", r"specials \(=fnuz\) puts NaN at negative zero"),
        ("codebook[1,x]", r"values '1,x' of a codebook must be numbers separated by commas"),
        ("codebook[]", r"values '' of a codebook must be numbers separated by commas"),
        ("codebook[1]", r"values \(length 1\) of a codebook must number 2\.\.256"),
        ("codebook[1,nan]", r"values of a codebook must be finite in float32"),
        ("codebook[1,1]", r"values of a codebook must not all be equal \(to 1\.0\); give at least two"),
        ("codebook[0,-0.0,1e-60]", r"must not all be equal \(to 0\.0\); .* that float32 keeps apart"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_what_was_likely_meant(name: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        get_format(name)


@given(st.text(max_size=40))
def test_any_text_is_a_format_or_a_format_error(text: str) -> None:
    fmt = None
    with contextlib.suppress(FormatError):
        fmt = get_format(text)
    assert fmt is None or get_format(format_name(fmt)) == fmt


def test_formats_of_torch_dtypes_go_there_and_back() -> None:
    dtypes = [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.int8, torch.uint8,
        torch.int16, torch.uint16, torch.int32, torch.uint32,
    ]  # fmt: skip
    assert [dtype_of(format_of(dtype)) for dtype in dtypes] == dtypes
    assert [format_of(dtype).bits for dtype in dtypes] == [8 * dtype.itemsize for dtype in dtypes]
    assert [format_name(format_of(dtype)) for dtype in dtypes] == [str(dtype)[6:] for dtype in dtypes]
    assert set(INPUT_DTYPES) <= set(dtypes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_dtype_without_a_format_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=rf"dtype {dtype} has no number format; use one of torch\.float64, "):
        format_of(dtype)


def test_scales_are_kept_in_their_dtype_or_as_codes_wide_enough() -> None:
    assert storage_dtype(get_format("bfloat16")) == torch.bfloat16
    assert storage_dtype(get_format("ue4m3")) == torch.float8_e4m3fn
    assert storage_dtype(get_format("e8m0")) == torch.float8_e8m0fnu
    assert storage_dtype(get_format("ue5m3")) == torch.uint8
    assert storage_dtype(get_format("ue5m6")) == torch.int32
    assert dtype_of(get_format("ue5m3")) is None


def test_codes_and_arithmetic_have_dtypes_wide_enough() -> None:
    assert [code_dtype(bits) for bits in (1, 8, 9, 16, 17, 32)] == [
        torch.uint8, torch.uint8, torch.int32, torch.int32, torch.int64, torch.int64,
    ]  # fmt: skip
    assert [wide_dtype(dtype) for dtype in INPUT_DTYPES] == [torch.float32] * 3 + [torch.float64]
