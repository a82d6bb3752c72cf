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
            "int8:tensor:scale=rceil:round=floor",
        ),
        ({"dtype": "int8", "round_method": "round"}, "int8:tensor:round=half_away"),
        ({"dtype": "bfloat16"}, "bfloat16:cast"),
        ({"dtype": "fp8_e4m3", "scale_type": "float16"}, "float8_e4m3fn:tensor:scale=float16"),
        ({"dtype": "mx", "mx_element_dtype": "fp6_e3m2"}, "float6_e3m2fn:g32:scale=even"),
        ({"dtype": "mx", "mx_element_dtype": "int8", "group_size": 16}, "int8_mx:g16:scale=even:narrow"),
        ({"dtype": "mx9"}, "mx9"),
        ({"dtype": "mx9", "group_size": 32, "ch_axis": -1}, "mx9:scale2=floor@g32"),
        ({"dtype": "bfp16", "is_dynamic": True}, "bfp16"),
        ({"dtype": "bfp16", "scale_calculation_mode": "even", "group_size": 16}, "bfp16:g16"),
        ({"dtype": "int4", "qscheme": "per_group", "group_size": 32, "ch_axis": 0}, "int4:first[32]rest1"),
        ({"dtype": "int4", "qscheme": "per_group", "group_size": 32, "ch_axis": -2}, "int4:block32x1"),
        ({"dtype": "int4", "qscheme": "per_group", "group_size": -1, "ch_axis": -1}, "int4:token"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [64, 32]}, "float8_e4m3fn:block64x32"),
        ({"dtype": "int8", "symmetric": None, "scale_type": "float8_e8m0fnu"}, "int8:tensor:scale=even"),
        ({"dtype": "int8", "scale_type": "float8_e5m3"}, "int8:tensor:scale=ue5m3"),
        ({"dtype": "fp4", "scale_format": "e8m0", "scale_calculation_mode": "floor"}, "fp4:scale=floor"),
        ({"dtype": "fp4", "scale_type": "float", "scale_format": "e4m3"}, "fp4:scale=ue4m3"),
        ({"dtype": "fp4", "scale_type": "float", "scale_format": "float32"}, "fp4:scale=input"),
        (
            {"dtype": "mx", "mx_element_dtype": "fp4", "scale_calculation_mode": "ceil", "ch_axis": 0},
            "float4_e2m1fn:first[32]rest1:scale=ceil",
        ),
        ({"dtype": "int8", "target_device": "IPU", "quant_mode": "fx_graph_mode"}, "int8"),
    ],
)
def test_specifications_become_schemes(spec: dict[str, object], text: str) -> None:
    assert quark.scheme_from_quark(spec) == zp.Scheme.parse(text)


AMD_FP4 = {
    "dtype": "fp4", "is_dynamic": True, "qscheme": "per_group", "ch_axis": -1, "group_size": 16,
    "block_size": None, "symmetric": None, "round_method": "half_even", "scale_type": "float8_e5m3",
    "zero_point_type": "int32", "scale_format": "e5m3", "scale_calculation_mode": None,
    "mx_element_dtype": None, "is_scale_quant": False,
    "observer_cls": "PerBlockMXObserver", "enable_buffer_reuse": False, "max_input_numel": 4194304,
}  # fmt: skip
"""``AmdFP4Spec(ch_axis=-1, group_size=16).to_quantization_spec().to_dict()`` of amd-quark 0.13."""
MX_INT8 = AMD_FP4 | {
    "dtype": "mx", "is_dynamic": None, "qscheme": None, "group_size": 32, "round_method": None,
    "scale_type": None, "scale_format": None, "scale_calculation_mode": "even", "mx_element_dtype": "int8",
    "observer_cls": None,
}  # fmt: skip
"""The same of ``OCP_MXINT8Spec(ch_axis=-1)``."""


def test_what_quark_writes_of_its_own_specifications_is_read() -> None:
    assert str(quark.scheme_from_quark(AMD_FP4)) == "float4_e2m1fn:g16:scale=float8_ue5m3fn"
    assert str(quark.scheme_from_quark(MX_INT8)) == "int8_mx:g32:scale=even:narrow"
    assert set(AMD_FP4) | {"qat_spec", "target_device", "device", "quant_mode"} == set(quark.KEYS)


@pytest.mark.parametrize("dtype", quark.Dtype)
def test_every_dtype_quantizes_a_tensor(dtype: quark.Dtype) -> None:
    inner = {"mx_element_dtype": "fp4"} if dtype == "mx" else {}
    scheme = quark.scheme_from_quark({"dtype": dtype, **inner})
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).abs()
    assert float((zp.dequantize(zp.quantize(x, scheme)) - x).norm() / x.norm()) < 0.75


@pytest.mark.parametrize("scale", quark.ScaleType)
def test_every_scale_type_is_known_to_the_algebra(scale: quark.ScaleType) -> None:
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
        ({"dtype": "mx", "mx_element_dtype": "mx9"}, r"mx_element_dtype \(=mx9\) must be one of"),
        ({"dtype": "mx", "mx_element_dtype": "uint8"}, r"mx_element_dtype \(=uint8\) must be one of"),
        (
            {"dtype": "mx", "mx_element_dtype": "fp4", "scale_type": "float16"},
            r"scale_type \(=float16\) must be pof2 for dtype mx",
        ),
        (
            {"dtype": "mx", "mx_element_dtype": "fp4", "qscheme": "per_tensor"},
            r"qscheme \(=per_tensor\) must be per_group for dtype mx",
        ),
        ({"dtype": "mx6", "group_size": 3}, r"group_size \(=3\) must be even for dtype mx6"),
        ({"dtype": "mx6", "group_size": 0}, r"group_size \(=0\) must be positive, or -1"),
        (
            {"dtype": "mx6", "scale_calculation_mode": "floor"},
            r"scale_calculation_mode \(=floor\) means nothing for dtype mx6",
        ),
        ({"dtype": "mx9", "scale_type": "float"}, r"scale_type \(=float\) means nothing for dtype mx9"),
        ({"dtype": "bfloat16", "ch_axis": 0}, r"ch_axis \(=0\) means nothing for dtype bfloat16"),
        (
            {"dtype": "int8", "mx_element_dtype": "fp4"},
            r"mx_element_dtype \(=fp4\) means nothing for dtype int8",
        ),
        ({"dtype": "int8", "group_size": 32}, r"group_size \(=32\) means nothing for qscheme per_tensor"),
        (
            {"dtype": "int8", "qscheme": "per_channel", "block_size": [1, 1]},
            r"block_size \(=\[1, 1\]\) means nothing for qscheme per_channel",
        ),
        (
            {"dtype": "int8", "qscheme": "per_block", "block_size": [1, 2.5]},
            r"block_size \(=\[1, 2.5\]\) must be two whole numbers",
        ),
        ({"dtype": "int8", "symmetric": "False"}, r"symmetric \(='False'\) must be True or False"),
        (
            {"dtype": "int8", "zero_point_type": "float32"},
            r"zero_point_type \(=float32\) needs symmetric \(=False\)",
        ),
        (
            {"dtype": "fp4", "scale_type": "float16", "scale_format": "e8m0"},
            r"scale_format \(=e8m0\) contradicts scale_type \(=float16\)",
        ),
        ({"dtype": "fp4", "scale_format": "e3m4"}, "scale_format 'e3m4' is unknown"),
        (
            {"dtype": "fp4", "scale_calculation_mode": "even"},
            r"scale_calculation_mode \(=even\) needs power-of-two scales",
        ),
        ({"dtype": "fp4", "is_scale_quant": True}, "describes the scales of another specification"),
        ({"dtype": "int8", "qat_spec": "TQTSpec"}, "qat_spec says how a model is trained"),
        ({"dtype": "int8", "observer_cls": "PerTensorMSEObserver"}, "takes other ranges than the extremes"),
        ({"dtype": "int8", "target_device": "GPU"}, "target_device 'GPU' is unknown; known are CPU, IPU"),
        ({"dtype": "int8", "quant_mode": "jit"}, "quant_mode 'jit' is unknown"),
        ({"dtype": "int8", "is_dynamic": 1}, r"is_dynamic \(=1\) must be True or False"),
    ],
)
def test_unknown_names_are_refused_with_what_comes_close(spec: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        quark.scheme_from_quark(spec)


def test_a_float_with_a_zero_point_is_refused_as_a_scheme() -> None:
    with pytest.raises(SchemeError):
        quark.scheme_from_quark({"dtype": "fp8_e4m3", "symmetric": False})
