"""Rules by name: which names there are, what they mean, and where they have no meaning."""

import pytest

from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import SchemeError
from zeropoint.schemes import Scheme
from zeropoint.schemes.scale_rules import FLOOR, LINEAR, RULES, Ceiling, Search, rule_named
from zeropoint.schemes.text import overridden


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("int4:g128:scale=search", "int4:g128:scale=search"),
        ("int4:g128:scale=search/float32", "int4:g128:scale=search"),
        ("int4:g128:scale=search2", "int4:g128:scale=search"),
        ("int4:g128:asym:scale=search2.4/input", "int4:g128:asym:scale=search2.4/input"),
        ("e2m1:g16:scale=search/ue4m3", "float4_e2m1fn:g16:scale=search/float8_ue4m3fn"),
        ("e2m1:g32:scale=search/e8m0", "float4_e2m1fn:g32:scale=search/float8_e8m0fnu"),
        ("mxfp4_e2m1:scale=search", "float4_e2m1fn:g32:scale=search/float8_e8m0fnu"),
        ("mxfp4_e2m1:scale=ceil7.25", "float4_e2m1fn:g32:scale=ceil7.25"),
        ("w4a16:scale=search", "int4:g128:scale=search/input:dialect=compressed-tensors"),
        ("e2m1:g16:scale=ue5m3:scale=four_over_six", "float4_e2m1fn:g16:scale=four_over_six/float8_ue5m3fn"),
        ("nvfp4:scale=search:scale=linear/ue4m3", str(Scheme.parse("nvfp4"))),
    ],
)
def test_a_rule_alone_keeps_the_format_that_was_given_before(text: str, whole: str) -> None:
    assert str(Scheme.parse(text)) == whole
    assert Scheme.parse(whole) == Scheme.parse(text)


def test_options_of_a_preset_keep_its_format_wherever_they_come_from() -> None:
    assert overridden("nvfp4", "scale=search").count("scale=search/float8_ue4m3fn") == 1
    layer = layer_scheme("nvfp4:scale=search", get_codec("compressed-tensors"))
    assert layer.weight == Scheme.parse("nvfp4:scale=search")
    own = layer_scheme("int4:g128:scale=search", get_codec("compressed-tensors"))
    assert str(own.weight.scales[0]) == "search/input@g128"


def test_a_search_starts_from_the_rule_that_its_format_means() -> None:
    assert Scheme.parse("int4:g32:scale=search").start == Scheme.parse("int4:g32")
    assert Scheme.parse("mxfp4:scale=search").scales[0].rule == Search(start=FLOOR)
    assert Scheme.parse("mxfp4_e2m1:scale=search").start == Scheme.parse("mxfp4_e2m1")
    assert Search().start == LINEAR
    assert Scheme.parse("nvfp4").start is Scheme.parse("nvfp4")


def test_names_give_rules_and_rules_their_names() -> None:
    for name, rule in RULES.items():
        assert rule_named(name) == rule
        assert rule.text == name
    assert rule_named("search2.4") == Search(power=2.4)
    assert rule_named("ceil7.25") == Ceiling(limit=7.25)
    assert rule_named("ceil7.25").text == "ceil7.25"  # type: ignore[union-attr]
    assert all(rule_named(text) is None for text in ("search-2", "searching", "7.25", "search1e3", "ceil7."))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int4:g32:scale=search0.5", r"power \(=0.5\) of rule search must lie in 1..8"),
        ("int4:g32:scale=search9", r"power \(=9\) of rule search must lie in 1..8"),
        ("int4:g32:asym=real:scale=search", "rule search takes no real zero point; use asym, or method"),
        ("q4_k:scale=search", "rule search is not for offsets; use method mse"),
        ("int16:tensor:scale=search", "elements of at most 8 bits, got int16; use method mse"),
        (
            "int4:g32:scale=search:round=floor",
            "floor with overflow=saturate takes others; use rounding to nearest",
        ),
        ("int4:g32:scale=search:round=stochastic(3)", "compares errors of the closest codes"),
        ("float8_e4m3fn:g32:scale=search:overflow=special", "use rounding to nearest and overflow=saturate"),
        ("e2m1:g16:scale=ue4m3:scale2=search@tensor", "for the finest scales alone, got search@tensor"),
        ("int4:g32:scale=four_over_six", "needs scales in a float format of at most 8 bits, got"),
        ("int4:g32:asym:scale=four_over_six/ue4m3", "takes no integer zero point; use a symmetric scheme"),
        ("mxfp4:scale=four_over_six", "needs scales in a float format of at most 8 bits, got"),
        ("mxfp4:scale=ceil9", "rule ceil9 needs a limit from 4 to below 8 for elements of float4_e2m1fn"),
        ("mxfp4:scale=ceil3.9", "rule ceil3.9 needs a limit from 4 to below 8"),
        ("int4:g32:scale=sarch/float32", "scale rule 'sarch' is unknown; known are linear"),
    ],
)
def test_where_a_rule_has_no_meaning_one_sentence_says_so(text: str, said: str) -> None:
    with pytest.raises(SchemeError, match=said):
        Scheme.parse(text)
