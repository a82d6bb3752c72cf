"""The text form: every scheme is spelled and read back; what errors say of a wrong text."""

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.random_schemes import random_chained_scheme

from zeropoint.errors import FormatError, SchemeError, ZeropointError
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
from zeropoint.schemes import (
    DIALECTS,
    PRESETS,
    Granularity,
    RangeRule,
    Rounding,
    ScaleLevel,
    Scheme,
    ZeroPoint,
)
from zeropoint.schemes.granularity import Anchor
from zeropoint.schemes.scale_rules import CEIL, EVEN, FLOOR, LINEAR, LINEAR_UP, RCEIL
from zeropoint.schemes.scales import choice_text, parse_choice
from zeropoint.schemes.text import OPTIONS, join, words

# Formats that read the sign of the scale go with few levels; tests/formats/test_choices.py has them.
ELEMENTS = [fmt for fmt in CATALOG.values() if not fmt.reads_sign]
ELEMENTS += [*map(get_format, ("e3m4", "ue4m2ns", "int7f3", "codebook[-1,0.25,1]"))]
SCALE_FORMATS = [fmt for fmt in ELEMENTS if isinstance(fmt, FloatFormat)]
POWER_FORMATS = [fmt for fmt in SCALE_FORMATS if fmt.mantissa_bits == 0] + [get_format("microexponent")]


def levels() -> st.SearchStrategy[ScaleLevel]:
    granularity = st.builds(
        Granularity,
        extents=st.lists(st.integers(0, 256), max_size=3).map(tuple),
        rest=st.sampled_from([0, 1]),
        anchor=st.sampled_from(Anchor),
    )
    linear = st.sampled_from([LINEAR, LINEAR_UP])
    power = st.sampled_from([FLOOR, EVEN, CEIL, RCEIL])
    return st.builds(
        ScaleLevel, granularity=granularity, format=st.sampled_from([None, *SCALE_FORMATS]), rule=linear
    ) | st.builds(ScaleLevel, granularity=granularity, format=st.sampled_from(POWER_FORMATS), rule=power)


ROUNDINGS = st.sampled_from(
    [Rounding(mode=mode) for mode in RoundingMode if mode is not RoundingMode.STOCHASTIC]
) | st.builds(Rounding, mode=st.just(RoundingMode.STOCHASTIC), seed=st.integers(0, 2**31 - 1))


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    """Draw any scheme that means something: the choices are drawn within what the earlier ones leave."""
    element = draw(st.sampled_from(ELEMENTS))
    scales = draw(st.lists(levels(), max_size=3))
    integer = isinstance(element, IntFormat)
    affine = integer and len(scales) == 1 and not scales[0].rule.power_of_two
    narrow = integer and element.signed
    return Scheme(
        element=element,
        scales=tuple(scales),
        zero_point=draw(st.sampled_from(ZeroPoint)) if affine else ZeroPoint.NONE,
        range_rule=draw(st.sampled_from(RangeRule)) if narrow else RangeRule.FULL,
        rounding=Rounding() if isinstance(element, CodebookFormat) else draw(ROUNDINGS),
        overflow=draw(st.sampled_from(overflows(element))),
        dialect=draw(st.sampled_from(list(DIALECTS.values()))),
    )


def overflows(element: Format) -> list[Overflow]:
    """Return what may become of numbers past the end of an element."""
    if isinstance(element, CodebookFormat):
        return [Overflow.SATURATE]
    special = element.has_inf or element.has_nan
    return [mode for mode in Overflow if special or mode is not Overflow.SPECIAL]


@given(schemes())
def test_every_scheme_is_spelled_and_read_back(scheme: Scheme) -> None:
    again = Scheme.parse(str(scheme))
    assert again == scheme
    assert hash(again) == hash(scheme)
    assert str(again) == str(scheme)


@given(schemes())
def test_words_and_join_are_inverses(scheme: Scheme) -> None:
    text = str(scheme)
    parts = words(text)
    # The head of a spelling may also be a preset's name, as in nf4:tensor; its own words then win.
    if parts["element"] not in PRESETS:
        assert join(parts) == text
    assert words(join(parts)) == parts


@given(levels())
def test_every_choice_of_scale_is_spelled_and_read_back(level: ScaleLevel) -> None:
    assert parse_choice(choice_text(level)) == (level.format, level.rule)


def test_schemes_with_offsets_and_levels_of_any_format_are_spelled_and_read_back() -> None:
    read = 0
    for seed in range(2000):
        text = random_chained_scheme(random.Random(seed))
        try:
            scheme = Scheme.parse(text)
        except (SchemeError, FormatError):
            continue
        read += 1
        assert Scheme.parse(str(scheme)) is scheme
        assert replace(scheme) == scheme
    assert read > 800


def test_the_linear_rule_of_powers_of_two_is_spelled_out() -> None:
    assert parse_choice("e8m0") == (get_format("e8m0"), FLOOR)
    linear = ScaleLevel(granularity=Granularity.tensor(), format=get_format("e8m0"))
    assert choice_text(linear) == "linear/float8_e8m0fnu"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("int4", "int4:tensor"),
        (" int4 : g128 ", "int4:g128"),
        ("INT4:channel0", "int4:channel"),
        ("int4:block32", "int4:g32"),
        ("int4:asym=integer", "int4:tensor:asym"),
        ("int4:asym:asym=none", "int4:tensor"),
        ("int4:narrow=yes", "int4:tensor:narrow"),
        ("int4:g32:scale=float32", "int4:g32"),
        ("int4:g32:scale=bf16", "int4:g32:scale=bfloat16"),
        ("int4:g32:scale=linear", "int4:g32"),
        (
            "fp4:g16:scale=ue4m3:scale2=float32@tensor",
            "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor",
        ),
        ("fp4:g32:scale=e8m0", "float4_e2m1fn:g32:scale=floor"),
        ("fp4:g32:scale=even/e8m0", "float4_e2m1fn:g32:scale=even"),
        ("fp4:g32:scale=linear_up/fp16", "float4_e2m1fn:g32:scale=linear_up/float16"),
        ("e4m3:cast", "float8_e4m3fn:cast"),
        ("e4m3:g32:cast", "float8_e4m3fn:cast"),
        ("e4m3:cast:cast=no", "float8_e4m3fn:tensor"),
        ("e4m3:round=stochastic(07)", "float8_e4m3fn:tensor:round=stochastic(7)"),
        ("e4m3:round=half_even:overflow=saturate:dialect=zeropoint", "float8_e4m3fn:tensor"),
        ("e4m3:round=half_away:dialect=burn", "float8_e4m3fn:tensor:dialect=burn"),
        ("e4m3:round=half_even:dialect=burn", "float8_e4m3fn:tensor:round=half_even:dialect=burn"),
        ("mxfp4_e2m1:scale=even", "float4_e2m1fn:g32:scale=even"),
        ("MXFP4_E2M1:g16", "float4_e2m1fn:g16:scale=floor"),
        ("mxint8:narrow=no", "int8_mx:g32:scale=floor"),
        ("nf4:tensor", "nf4:tensor"),
        ("nf4", "nf4:g64"),
    ],
)
def test_a_text_has_one_canonical_form(text: str, canonical: str) -> None:
    assert str(Scheme.parse(text)) == canonical
    assert Scheme.parse(canonical) == Scheme.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"scheme '' is empty; write ELEMENT\[:GRANULARITY\]\[:OPTION\.\.\.\], for example int4:g128"),
        ("  ", r"scheme '  ' is empty"),
        (":g32", r"scheme ':g32' is empty"),
        ("int4:", r"option '' of scheme 'int4:' is unknown; known are asym, "),
        (
            "int4:g32:rond=floor",
            r"option 'rond=floor' of scheme 'int4:g32:rond=floor' is unknown; did you mean round",
        ),
        ("int4:asymm", r"option 'asymm' of scheme 'int4:asymm' is unknown; did you mean asym\?"),
        ("int4:element=int8", r"option 'element=int8' of scheme .* is unknown"),
        ("int4:g-1", r"option 'g-1' of scheme 'int4:g-1' is unknown"),
        ("int4:scale4=float32@tensor", r"option 'scale4=float32@tensor' .* is unknown; did you mean scale"),
        ("int4:round", r"option 'round' of scheme 'int4:round' needs a value, as in round=\.\.\."),
        ("int4:g0", r"group size \(=0\) must be at least 1"),
        ("int4:block0x2", r"block shape \(=\(0, 2\)\) must name at least one positive extent"),
        ("int4:channel99", r"channel axis \(=99\) must lie in -64\.\.63"),
        ("int4:asym=yes", r"asym \(='yes'\) is unknown; known are none, integer, real"),
        ("int4:narrow=maybe", r"narrow \(='maybe'\) must be yes or no"),
        ("int4:cast=", r"cast \(=''\) must be yes or no"),
        ("int4:round=up", r"round \(='up'\) is unknown; known are half_even, half_away, .*, stochastic"),
        ("int4:round=stochastic", r"stochastic rounding needs a seed, as in round=stochastic\(7\)"),
        ("int4:round=stochastic(9999999999)", r"seed \(=9999999999\) must lie in 0\.\.2\*\*31-1"),
        ("int4:round=stochastic(x)", r"round \(='stochastic\(x\)'\) is unknown"),
        ("int4:overflow=wrap", r"overflow \(='wrap'\) is unknown; known are saturate, special, error"),
        ("int4:dialect=pytorch", r"dialect 'pytorch' is unknown; did you mean torch"),
        (
            "fp4:scale=flor/e8m0",
            r"scale rule 'flor' is unknown; known are linear, linear_up, linear_late, signed, ",
        ),
        (
            "fp4:scale=floor/float32",
            r"scale format float32 does not fit rule floor; use e8m0, or a linear rule",
        ),
        ("fp4:scale=floor/input", r"scale format input does not fit rule floor"),
        ("fp4:scale=linear_up/int8", r"rule linear_up needs a floating-point scale format, got int8"),
        (
            "fp4:scale2=float32",
            r"scale2 \(='float32'\) must say where it applies, as in scale2=float32@tensor",
        ),
        (
            "fp4:scale2=float32@row",
            r"granularity 'row' is unknown; known are tensor, channel, token, g<N>, block",
        ),
        ("fp4:asym", r"zero_point \(=integer\) needs a scaled integer format, got float4_e2m1fn"),
        ("int4:cast:asym", r"zero_point \(=integer\) needs a scaled integer format, got int4"),
        ("uint4:narrow", r"range \(=narrow\) needs a signed integer format, got uint4"),
        ("int4:scale=floor:asym=real", r"powers of two of int4 take no real zero point; use offset"),
        ("int4:g32:scale2=float32@tensor:asym=real", "take no real zero point; use offset"),
        ("digits5[-1,0,1]:round=floor", r"rounding \(=floor\) has no meaning for a codebook"),
        ("int4:g32:scale=vector2[higgs16]", "has no codes of single numbers"),
        ("nf4:round=floor", r"rounding \(=floor\) has no meaning for a codebook"),
        ("int4:g32:overflow=special", r"overflow \(=special\) needs a format with Inf or NaN, got int4"),
        (
            "int4:g32:scale=ue8m3",
            r"scale format ue8m3b127finite has 11 bits; use one of at most 8, or float32",
        ),
        ("int4:g32:scale=e5m7", r"scale format e5m7b15finite has 13 bits"),
        ("int4:g32:scale=ue4m3b200finite", r"scale format .* has values outside float32; move its bias"),
    ],
)
def test_a_wrong_text_is_refused_with_the_part_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Scheme.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("in4:g128", r"format 'in4' is unknown; did you mean .*int4"),
        ("int1", r"bits \(=1\) of an integer format must lie in 2\.\.32"),
        ("fp4:scale=flaot32", r"format 'flaot32' is unknown; did you mean float32"),
        ("mxfp4:scale=flor", r"format 'flor' is unknown; did you mean floor"),
        ("fp4:scale=inptu", r"format 'inptu' is unknown; did you mean input"),
        ("fp4:scale=linear/flor", r"format 'flor' is unknown; did you mean float64"),
        ("fp4:scale=", r"format '' is unknown"),
        ("fp4:scale2=@tensor", r"format '' is unknown"),
        ("mxfp5", r"format 'mxfp5' is unknown; did you mean "),
    ],
)
def test_a_wrong_format_in_a_text_is_refused_with_its_near_misses(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Scheme.parse(text)


PIECES = st.sampled_from(
    ["int4", "nf4", "mxfp4", "e4m3", "g128", "g0", "block2x2", "first[1]rest0", "cast", "asym", "narrow", "=",
     "@", ":", "scale", "scale2", "floor", "float32", "/", "round", "stochastic(3)", "dialect", "burn", "[",
     "9" * 4400, "\u0663"]
)  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=4), max_size=9), st.sampled_from(["", ":"]))
def test_any_text_is_a_scheme_or_an_error_of_ours(pieces: list[str], separator: str) -> None:
    scheme = None
    with contextlib.suppress(ZeropointError):
        scheme = Scheme.parse(separator.join(pieces))
    assert scheme is None or Scheme.parse(str(scheme)) == scheme


def test_every_option_of_the_grammar_is_read() -> None:
    scales = "scale=bf16:scale2=float32@tensor:scale3=float32@tensor"
    text = f"int4:g32:{scales}:narrow:round=ceil:overflow=error:dialect=torch"
    assert str(Scheme.parse(text)) == text.replace("bf16", "bfloat16")
    scales = "scale=int8:scale2=float16@tensor:center=float32@tensor"
    offsets = "offset=int8:offset2=signed/float16@tensor:offset3=float32@tensor"
    other = f"uint4:g32:{scales}:{offsets}"
    assert str(Scheme.parse(other)) == other
    known = {"element", "granularity", *OPTIONS}
    assert {*words(text), *words(other), "asym", "cast"} == known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4:g32:g64", r"scheme 'int4:g32:g64' has two granularities, g32 and g64; keep one"),
        ("int4:g128:sym", r"option 'sym' .* leave it out, schemes are symmetric unless they say asym"),
        ("int4:128", r"option '128' .* did you mean g128\?"),
        ("int4-g128", r"scheme 'int4-g128' has its parts without colons .*; did you mean int4:g128\?"),
        ("int8_channel:asym", r"without colons between them; did you mean int8:channel:asym\?"),
        ("int4,g32,asym", r"did you mean int4:g32:asym\?"),
        ("fp6", r"format 'fp6' is unknown; did you mean fp64 or fp6_e2m3 or fp6_e3m2\?"),
    ],
)
def test_what_is_meant_by_a_slip_is_said(text: str, message: str) -> None:
    with pytest.raises(ZeropointError, match=message):
        Scheme.parse(text)


def test_upper_case_is_read_and_a_preset_takes_another_granularity() -> None:
    assert Scheme.parse("INT4:G32") == Scheme.parse("int4:g32")
    assert str(Scheme.parse("nf4:G32")) == "nf4:g32"


@pytest.mark.parametrize("value", [None, 42, 1.5])
def test_what_is_no_text_is_no_scheme(value: object) -> None:
    with pytest.raises(SchemeError, match=r"must be a text such as int4:g128, or a Scheme"):
        Scheme.parse(value)  # type: ignore[arg-type]
