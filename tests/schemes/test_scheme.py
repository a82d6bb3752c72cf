"""Schemes as values: divisors, code ranges, bits, dialects, and the combinations that have no meaning."""

import copy
import itertools
import pickle
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest

from zeropoint.errors import SchemeError
from zeropoint.formats import CodebookFormat, IntFormat, Overflow, RoundingMode, get_format
from zeropoint.schemes import (
    DIALECTS,
    Granularity,
    RangeRule,
    Rounding,
    ScaleLevel,
    ScaleRule,
    Scheme,
    ZeroPoint,
    get_dialect,
)
from zeropoint.schemes.scale_rules import CEIL, EVEN, FLOOR, LINEAR_UP, RCEIL, RULES, Linear, Search

INT4, FP4, NF4 = get_format("int4"), get_format("fp4"), get_format("nf4")
E8M0, FLOAT32 = get_format("e8m0"), get_format("float32")
TENSOR = ScaleLevel(granularity=Granularity.tensor(), format=FLOAT32)
GROUP = ScaleLevel(granularity=Granularity.group(32), format=FLOAT32)
POWER = ScaleLevel(granularity=Granularity.group(32), format=E8M0, rule=FLOOR)


@pytest.mark.parametrize(
    ("text", "divisor"),
    [
        ("int2", 1.5), ("int4", 7.5), ("int8", 127.5), ("int16", 32767.5), ("int32", 2.0**31 - 0.5),
        ("int2:narrow", 1), ("int4:narrow", 7), ("int8:narrow", 127),
        ("uint2", 3), ("uint4", 15), ("uint8", 255),
        ("int8_mx", 127.5 / 64), ("int8_mx:narrow", 127 / 64),
        ("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("float8_e4m3fnuz", 240), ("float6_e3m2fn", 28),
        ("float6_e2m3fn", 7.5), ("float4_e2m1fn", 6), ("ue4m3", 448), ("nf4", 1), ("ternary", 1),
        ("codebook[-3,1]", 3), ("mx9_element", 127 / 64), ("mx6_element", 15 / 8), ("mx4_element", 1.5),
    ],
)  # fmt: skip
def test_the_divisor_is_the_largest_element_or_half_the_steps_of_a_full_integer(
    text: str, divisor: float
) -> None:
    assert Scheme.parse(text).divisor == divisor


@pytest.mark.parametrize(
    ("text", "lowest", "highest", "step"),
    [
        ("int4", -8, 7, 1),
        ("int4:narrow", -7, 7, 1),
        ("int2:narrow", -1, 1, 1),
        ("uint4", 0, 15, 1),
        ("int8_mx", -128, 127, Fraction(1, 64)),
        ("int8_mx:narrow", -127, 127, Fraction(1, 64)),
    ],
)
def test_a_narrow_range_leaves_out_the_most_negative_code(
    text: str, lowest: int, highest: int, step: Fraction | int
) -> None:
    scheme = Scheme.parse(text)
    assert (scheme.qmin, scheme.qmax, scheme.element_step) == (lowest, highest, step)


@pytest.mark.parametrize("text", ["fp4", "nf4"])
def test_only_integers_have_a_code_range(text: str) -> None:
    scheme = Scheme.parse(text)
    for ask in ("qmin", "qmax"):
        with pytest.raises(SchemeError, match=rf"{scheme.element_name} has no integer code range"):
            getattr(scheme, ask)


@pytest.mark.parametrize(
    ("text", "shape", "bits"),
    [
        ("int4:g128", (4, 256), 4 + 32 / 128),
        ("int4:g128:scale=bfloat16", (4, 256), 4 + 16 / 128),
        ("int4:g128:scale=input", (4, 256), 4 + 16 / 128),
        ("int4:g128:asym", (4, 256), 4 + (32 + 4) / 128),
        ("int4:g128:asym=real", (4, 256), 4 + (32 + 32) / 128),
        ("int4:g128", (1, 130), 4 + 2 * 32 / 130),  # the partial block takes a whole scale
        ("mxfp4", (8, 64), 4.25),
        ("mxfp8_e4m3", (8, 64), 8.25),
        ("nvfp4", (8, 64), 4.5 + 32 / 512),
        ("mx9", (2, 32), 9), ("mx6", (2, 32), 6), ("mx4", (2, 32), 4),  # arXiv:2302.08007, table 2
        ("nf4", (1, 64), 4.5),
        ("ternary:cast", (3, 3), 2),
        ("int8:channel", (2, 10), 8 + 3.2),
        ("int4:g128", (0, 5), 0),
        ("int4", (), 36),
    ],
)  # fmt: skip
def test_bits_of_a_value_count_scales_and_zero_points(text: str, shape: tuple[int, ...], bits: float) -> None:
    assert Scheme.parse(text).bits_per_value(shape) == bits


def test_parameters_lie_on_the_finest_level() -> None:
    assert Scheme.parse("nvfp4").granularity == Granularity.group(16)
    assert Scheme.parse("int8:cast").granularity == Granularity.tensor()
    assert Scheme.parse("int4:g128").bits == 4


def test_schemes_are_equal_hash_alike_and_frozen() -> None:
    one, other = Scheme.parse("int4:g128"), Scheme.parse("int4:g128")
    assert one.divisor == 7.5  # the cached divisor must not enter the comparison
    assert (one, hash(one)) == (other, hash(other))
    assert one != Scheme.parse("int4:g128:narrow")
    assert len({one, other, Scheme.parse("int4:g64")}) == 2
    with pytest.raises(FrozenInstanceError):
        one.element = FP4  # type: ignore[misc]


def test_a_scheme_parses_to_itself() -> None:
    scheme = Scheme.parse("int4:g128")
    assert Scheme.parse(scheme) is scheme


ERRORS = [
    ({"element": FP4, "scales": (TENSOR,), "zero_point": ZeroPoint.INTEGER},
     r"zero_point \(=integer\) needs a scaled integer format, got float4_e2m1fn"),
    ({"element": NF4, "scales": (TENSOR,), "zero_point": ZeroPoint.REAL},
     r"zero_point \(=real\) needs a scaled integer format, got nf4"),
    ({"element": INT4, "zero_point": ZeroPoint.INTEGER},
     r"zero_point \(=integer\) needs a scaled integer format, got int4"),
    ({"element": INT4, "scales": (GROUP, TENSOR), "zero_point": ZeroPoint.REAL},
     r"zero points under several levels or powers of two of int4 take no real zero point; use offset"),
    ({"element": INT4, "scales": (POWER,), "zero_point": ZeroPoint.REAL},
     r"zero points under several levels or powers of two of int4 take no real zero point; use offset"),
    ({"element": FP4, "range_rule": RangeRule.NARROW},
     r"range \(=narrow\) needs a signed integer format, got float4"),
    ({"element": get_format("uint4"), "range_rule": RangeRule.NARROW},
     r"range \(=narrow\) needs a signed integer format, got uint4"),
    ({"element": NF4, "rounding": Rounding(mode=RoundingMode.FLOOR)},
     r"rounding \(=floor\) has no meaning for a codebook, which takes the nearest value"),
    ({"element": FP4, "overflow": Overflow.SPECIAL},
     r"overflow \(=special\) needs a format with Inf or NaN, got float4_e2m1fn; use saturate"),
    ({"element": NF4, "overflow": Overflow.ERROR},
     r"overflow \(=error\) has no meaning for a codebook, which takes the nearest value"),
    ({"element": FP4, "scales": (GROUP, TENSOR, TENSOR, TENSOR)},
     r"scales \(4 levels\) must number at most 3"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), ERRORS)
def test_a_combination_without_meaning_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Scheme(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fmt", "rule", "message"),
    [
        (FLOAT32, FLOOR, r"scale format float32 does not fit rule floor; use e8m0, or a linear"),
        (None, EVEN, r"scale format input does not fit rule even; use e8m0, or a linear rule"),
        (get_format("int8"), CEIL, r"scale format int8 does not fit rule ceil; use e8m0"),
        (NF4, RCEIL, r"scale format nf4 does not fit rule rceil; use e8m0"),
        (CodebookFormat((1.0, 0.0)), FLOOR,
         r"scale format codebook\[1.0,0.0\] does not fit rule floor"),
        (INT4, LINEAR_UP, r"rule linear_up needs a floating-point scale format, got int4"),
        (get_format("microexponent"), LINEAR_UP,
         r"rule linear_up needs a floating-point scale format, got microexponent"),
    ],
)  # fmt: skip
def test_a_scale_format_that_its_rule_cannot_fill_is_refused(
    fmt: IntFormat | CodebookFormat | None, rule: ScaleRule, message: str
) -> None:
    with pytest.raises(SchemeError, match=message):
        ScaleLevel(granularity=Granularity.tensor(), format=fmt, rule=rule)


def test_scales_of_the_inputs_own_format_follow_the_input() -> None:
    level = ScaleLevel(granularity=Granularity.tensor(), format=None)
    assert level.format_for(get_format("bfloat16")) == get_format("bfloat16")
    assert TENSOR.format_for(get_format("bfloat16")) == FLOAT32


def test_all_but_the_linear_rules_yield_powers_of_two() -> None:
    assert [rule for rule in RULES.values() if rule.power_of_two] == [FLOOR, EVEN, CEIL, RCEIL]
    assert all(isinstance(rule, Linear | Search) != rule.power_of_two for rule in RULES.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4:g32:scale=minimum/float16", "rule minimum is not for scales; use linear or signed"),
        ("int4:g32:scale=signed_up/float16", "scale rule 'signed_up' is unknown"),
        ("int4:g32:scale=signed/ue4m3", "rule signed needs a format with negative numbers"),
        ("uint4:g32:scale=uint6:asym=real", "level uint6@g32 of uint4 take no real zero point; use offset"),
        ("uint4:g32:offset=float16:asym", "offsets of uint4 take no zero point; leave out asym or offset"),
        ("uint4:g32:scale=signed/float16:asym", "scales with an offset or a zero point have no sign"),
        ("uint4:g32:offset=ue4m3", "may be negative; use a format with both signs, or a coarser level that"),
        ("int4:g32:offset=uint6:offset2=signed/float16@tensor", "with negative numbers may have either"),
        ("uint4:g32:offset=linear/float16", "rule linear is not for offsets; use minimum or minimum_late"),
        ("uint4:g32:offset=float16:offset2=minimum/float16@tensor", "rule minimum is not for coarse offsets"),
        ("uint4:g32:offset2=float16@tensor", "offset2 .* is a factor of offset, which is missing"),
        ("uint4:g32:offset=floor:offset2=signed/float16@tensor", "rule floor is not for offsets"),
        ("uint4:g32:scale=signed/float16:offset=float16", "scales with an offset or a zero point have no"),
        ("float64:g32:offset=float16", "needs scales on the same blocks, and elements inside float32"),
        ("int4:g32:scale=uint6:scale2=float16@g256:center=float32@tensor", "around a center may be negative"),
        ("int4:g32:scale=int8:scale2=float16@g256:center=linear/float32@tensor", "must follow rule mean"),
        ("uint4:g32:offset=float16:dialect=compressed-tensors", "which is not defined for offsets"),
        ("int4:g32:scale=int8:scale2=signed_late/float16@g256", "rounded late on its finest level alone"),
    ],
)  # fmt: skip
def test_levels_that_do_not_go_with_each_other_are_refused(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Scheme.parse(text)


def test_a_seed_belongs_to_stochastic_rounding() -> None:
    with pytest.raises(SchemeError, match=r"seed \(=7\) belongs to stochastic rounding, not to half_even"):
        Rounding(seed=7)
    with pytest.raises(SchemeError, match=r"seed \(=-1\) must lie in 0\.\.2\*\*31-1"):
        Rounding(mode=RoundingMode.STOCHASTIC, seed=-1)
    with pytest.raises(SchemeError, match=r"seed \(=2147483648\) must lie in 0\.\.2\*\*31-1"):
        Rounding(mode=RoundingMode.STOCHASTIC, seed=1 << 31)


def test_a_new_dialect_brings_its_rounding_unless_the_scheme_chose_one() -> None:
    burn, ours = get_dialect("burn"), get_dialect("zeropoint")
    plain, chosen = Scheme.parse("int8"), Scheme.parse("int8:round=floor")
    assert plain.with_dialect(burn) == Scheme.parse("int8:dialect=burn")
    assert plain.with_dialect(burn).rounding.mode is RoundingMode.HALF_AWAY
    assert plain.with_dialect(burn).with_dialect(ours) == plain
    assert chosen.with_dialect(burn).rounding.mode is RoundingMode.FLOOR


def test_every_dialect_is_found_by_its_name() -> None:
    assert {get_dialect(name).name for name in DIALECTS} == set(DIALECTS)
    assert len(set(DIALECTS.values())) >= len(DIALECTS) - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tourch", "dialect 'tourch' is unknown; did you mean torch"),
        ("", "dialect '' is unknown; known are bitsandbytes, burn, "),
    ],
)
def test_an_unknown_dialect_is_refused_with_what_was_likely_meant(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        get_dialect(name)


def test_overflow_and_rounding_are_part_of_the_value() -> None:
    scheme = Scheme.parse("float8_e5m2")
    assert replace(scheme, overflow=Overflow.SPECIAL) != scheme
    assert replace(scheme, rounding=Rounding(mode=RoundingMode.CEIL)) != scheme


@pytest.mark.parametrize("text", ["int4:g32:asym", "mxfp4", "nvfp4", "int8:channel:round=stochastic(3)"])
def test_copies_and_pickles_of_a_scheme_are_the_object_that_its_text_gives(text: str) -> None:
    scheme = Scheme.parse(text)
    own = replace(scheme)
    assert own is not scheme
    for other in (copy.deepcopy(own), copy.copy(own), pickle.loads(pickle.dumps(own))):
        assert other is Scheme.parse(str(scheme))
        assert other == own


def test_schemes_are_ordered_as_their_texts() -> None:
    texts = ["uint4:g32:asym", "int8:tensor", "mxfp4", "int4:channel", "int4:tensor", "int8:tensor"]
    ordered = sorted(map(Scheme.parse, texts))
    assert [str(s) for s in ordered] == sorted(str(Scheme.parse(text)) for text in texts)
    for a, b in itertools.pairwise(ordered):
        assert (a < b) + (a == b) + (a > b) == 1
        assert a <= b
    with pytest.raises(TypeError, match="not supported between instances"):
        ordered[0] < 1  # noqa: B015 (the comparison itself is the test)
