"""Quark's names are read into schemes, all of them, and nothing else is."""

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import RecipeError, SchemeError
from zeropoint.recipes import quark


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"dtype": "int8"}, "int8:tensor"),
        ({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1}, "int8:channel1"),
        (
            {"dtype": "int4", "qscheme": "per_group", "group_size": 128, "scale_type": "float"},
            "int4:g128:scale=input",
        ),
        ({"dtype": "uint8", "symmetric": False, "zero_point_type": "float32"}, "uint8:tensor:asym=real"),
        (
            {"dtype": "int8", "scale_type": "pof2", "round_method": "floor"},
            "int8:tensor:scale=ceil:round=floor",
        ),
        ({"dtype": "int8", "round_method": "round"}, "int8:tensor:round=half_away"),
        ({"dtype": "bfloat16"}, "bfloat16:cast"),
        ({"dtype": "fp8_e4m3", "scale_type": "float16"}, "float8_e4m3fn:tensor:scale=float16"),
        ({"dtype": "mx", "mx_element_dtype": "fp6_e3m2"}, "float6_e3m2fn:g32:scale=even"),
        ({"dtype": "mx", "mx_element_dtype": "int8", "group_size": 16}, "int8_mx:g16:scale=even:narrow"),
        ({"dtype": "mx9"}, "mx9"),
        ({"dtype": "bfp16", "is_dynamic": True}, "bfp16"),
    ],
)
def test_specifications_become_schemes(spec: dict[str, object], text: str) -> None:
    assert quark.scheme_from_quark(spec) == zp.Scheme.parse(text)


@pytest.mark.parametrize("dtype", quark.DTYPES)
def test_every_dtype_quantizes_a_tensor(dtype: str) -> None:
    scheme = quark.scheme_from_quark({"dtype": dtype, "mx_element_dtype": "fp4"})
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).abs()
    assert float((zp.dequantize(zp.quantize(x, scheme)) - x).norm() / x.norm()) < 0.75


@pytest.mark.parametrize("scale", quark.SCALES)
def test_every_scale_type_is_known_to_the_algebra(scale: str) -> None:
    scheme = quark.scheme_from_quark(
        {"dtype": "int8", "qscheme": "per_group", "group_size": 32, "scale_type": scale}
    )
    assert zp.Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "needs a dtype"),
        ({"dtype": "int9000"}, "dtype 'int9000' is unknown; did you mean"),
        (
            {"dtype": "int8", "qscheme": "per_tenser"},
            "qscheme 'per_tenser' is unknown; did you mean per_tensor",
        ),
        ({"dtype": "int4", "qscheme": "per_group"}, r"group_size \(=None\) must be a whole number"),
        ({"dtype": "int8", "round_method": "up"}, "round_method 'up' is unknown"),
        ({"dtype": "int8", "symmetrical": True}, "key 'symmetrical' is unknown; did you mean symmetric"),
        ({"dtype": "mx"}, "mx_element_dtype '' is unknown"),
    ],
)
def test_unknown_names_are_told_with_what_comes_close(spec: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        quark.scheme_from_quark(spec)


def test_a_float_with_a_zero_point_is_refused_as_a_scheme() -> None:
    with pytest.raises(SchemeError):
        quark.scheme_from_quark({"dtype": "fp8_e4m3", "symmetric": False})
