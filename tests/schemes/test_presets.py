"""Presets: every line parses, means what its source says, and leaves no surprise at run time."""

from __future__ import annotations

import pytest

from zeropoint.codecs.compressed_tensors.presets import LAYER_PRESETS
from zeropoint.formats import get_format
from zeropoint.schemes import TENSOR_PRESETS, Granularity, ScaleLevel, Scheme, ZeroPoint
from zeropoint.schemes.rules import FLOOR

LAYER_SCHEMES = [
    text for preset in LAYER_PRESETS.values() for text in (preset.weight, preset.input) if text is not None
]


@pytest.mark.parametrize("name", TENSOR_PRESETS)
def test_a_tensor_preset_is_the_scheme_it_spells(name: str) -> None:
    scheme = Scheme.parse(name)
    assert scheme == Scheme.parse(TENSOR_PRESETS[name])
    assert str(scheme) == TENSOR_PRESETS[name]
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize("text", sorted(set(LAYER_SCHEMES)))
def test_a_layer_presets_scheme_is_written_in_its_canonical_form(text: str) -> None:
    scheme = Scheme.parse(text)
    assert str(scheme) == text
    assert Scheme.parse(str(scheme)) == scheme


def test_names_are_lower_case_so_that_any_case_finds_them() -> None:
    names = [*TENSOR_PRESETS, *LAYER_PRESETS]
    assert names == [name.lower() for name in names]
    assert Scheme.parse("NVFP4") == Scheme.parse("nvfp4")


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("mxfp8_e4m3", "float8_e4m3fn"),
        ("mxfp8_e5m2", "float8_e5m2"),
        ("mxfp6_e3m2", "float6_e3m2fn"),
        ("mxfp6_e2m3", "float6_e2m3fn"),
        ("mxfp4", "float4_e2m1fn"),
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


def test_only_presets_with_static_inputs_need_data() -> None:
    needy = {name for name, preset in LAYER_PRESETS.items() if preset.needs_calibration}
    assert needy == {"fp8", "nvfp4"}
    assert all(LAYER_PRESETS[name].input is None for name in needy)


def test_weights_for_compressed_tensors_follow_its_dialect() -> None:
    dialects = {name: Scheme.parse(preset.weight).dialect.name for name, preset in LAYER_PRESETS.items()}
    assert set(dialects.values()) == {"compressed-tensors"}


@pytest.mark.parametrize(
    ("name", "weight_bits", "input_bits"),
    [
        ("w4a16", 4, None), ("w4a16_asym", 4, None), ("w8a16", 8, None), ("w8a8", 8, 8), ("fp8", 8, None),
        ("fp8_dynamic", 8, 8), ("fp8_block", 8, 8), ("mxfp4", 4, 4), ("mxfp4a16", 4, None), ("mxfp8", 8, 8),
        ("mxfp8a16", 8, None), ("nvfp4", 4, None), ("nvfp4a16", 4, None),
    ],
)  # fmt: skip
def test_a_layer_preset_is_named_after_its_widths(
    name: str, weight_bits: int, input_bits: int | None
) -> None:
    preset = LAYER_PRESETS[name]
    assert Scheme.parse(preset.weight).bits == weight_bits
    assert (None if preset.input is None else Scheme.parse(preset.input).bits) == input_bits


def test_every_layer_preset_is_covered_above() -> None:
    assert len(LAYER_PRESETS) == 13
