"""Presets: every line parses, means what its source says, and leaves no surprise at run time."""

import pytest
from tests.tables import each

from zeropoint.formats import get_format
from zeropoint.schemes import PRESETS, Granularity, ScaleLevel, Scheme, ZeroPoint
from zeropoint.schemes.scale_rules import FLOOR

TEXTS = [t for p in PRESETS.values() for t in (p.weight, p.input, p.output) if t is not None]
ENGINES = [name for name, preset in PRESETS.items() if "compressed-tensors" in preset.weight]


@each("name", PRESETS)
def test_a_preset_is_the_scheme_of_its_weight(name: str) -> None:
    assert str(Scheme.parse(name)) == PRESETS[name].weight


@each("text", sorted(set(TEXTS)))
def test_a_presets_scheme_is_written_in_its_canonical_form(text: str) -> None:
    scheme = Scheme.parse(text)
    assert str(scheme) == text
    assert Scheme.parse(str(scheme)) == scheme


def test_names_are_lower_case_so_that_any_case_finds_them() -> None:
    names = list(PRESETS)
    assert names == [name.lower() for name in names]
    assert Scheme.parse("NVFP4") == Scheme.parse("nvfp4")


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("mxfp8_e4m3", "float8_e4m3fn"),
        ("mxfp8_e5m2", "float8_e5m2"),
        ("mxfp6_e3m2", "float6_e3m2fn"),
        ("mxfp6_e2m3", "float6_e2m3fn"),
        ("mxfp4_e2m1", "float4_e2m1fn"),
        ("mxint8", "int8_mx"),
    ],
)
def test_mx_formats_share_one_power_of_two_among_thirty_two(name: str, element: str) -> None:
    # OCP Microscaling Formats 1.0, table 1 and section 6.3.
    scheme = Scheme.parse(name)
    level = ScaleLevel(granularity=Granularity.group(32), format=get_format("e8m0"), rule=FLOOR)
    assert (scheme.element_name, scheme.scales, scheme.zero_point) == (element, (level,), ZeroPoint.NONE)


def test_nvfp4_has_a_scale_for_sixteen_and_one_for_the_tensor() -> None:
    scheme = Scheme.parse("nvfp4")
    assert scheme.element == get_format("float4_e2m1fn")
    assert scheme.scales == (
        ScaleLevel(granularity=Granularity.group(16), format=get_format("ue4m3")),
        ScaleLevel(granularity=Granularity.tensor(), format=get_format("float32")),
    )


@pytest.mark.parametrize(("name", "magnitude_bits"), [("mx9", 7), ("mx6", 4), ("mx4", 2)])
def test_shared_microexponents_halve_pairs_within_sixteen(name: str, magnitude_bits: int) -> None:
    # arXiv:2302.08007, table 2: k1 = 16, k2 = 2, d1 = 8, d2 = 1.
    scheme = Scheme.parse(name)
    fine, coarse = scheme.scales
    assert (fine.granularity, coarse.granularity) == (Granularity.group(2), Granularity.group(16))
    assert (fine.format, coarse.format) == (get_format("microexponent"), get_format("e8m0"))
    assert scheme.bits == magnitude_bits + 1


def test_a_static_preset_names_one_that_needs_no_data() -> None:
    static = {name: PRESETS[preset.without_data or ""] for name, preset in PRESETS.items() if preset.static}
    assert static.keys() == {"fp8", "nvfp4", "w8a8_static", "int8_power_of_two"}
    assert not any(other.static for other in static.values())


@pytest.mark.parametrize(
    ("name", "weight_bits", "input_bits"),
    [
        ("w4a16", 4, None), ("w4a16_asym", 4, None), ("w8a16", 8, None), ("w8a8", 8, 8), ("fp8", 8, 8),
        ("fp8_dynamic", 8, 8), ("fp8_block", 8, 8), ("mxfp4", 4, 4), ("mxfp4a16", 4, None), ("mxfp8", 8, 8),
        ("mxfp6a16", 6, None), ("mxfp8a16", 8, None), ("nvfp4", 4, 4), ("w4a8", 4, 8), ("w8a8_static", 8, 8),
        ("mxfp4_mxfp8", 4, 8), ("nvfp4a16", 4, None), ("mxfp6a8", 6, 8), ("mxfp4xfp8", 4, 8),
    ],
)  # fmt: skip
def test_a_preset_for_layers_is_named_after_its_widths(
    name: str, weight_bits: int, input_bits: int | None
) -> None:
    preset = PRESETS[name]
    assert Scheme.parse(preset.weight).bits == weight_bits
    assert (None if preset.input is None else Scheme.parse(preset.input).bits) == input_bits


def test_presets_of_engines_are_covered_above() -> None:
    assert len(ENGINES) == 19
