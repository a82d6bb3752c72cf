"""Presets under the names that compressed-tensors users know, in lower case."""

from __future__ import annotations

from types import MappingProxyType

from ...schemes import TENSOR_PRESETS
from ..presets import LayerPreset

_CT = ":scale=input:dialect=compressed-tensors"
_MX = ":scale=even:dialect=compressed-tensors"
_NVFP4 = TENSOR_PRESETS["nvfp4"] + ":dialect=compressed-tensors"
_NVFP4_INPUT = "nvfp4 inputs need a global scale observed on data; nvfp4a16 quantizes the weights alone"
_FP8_INPUT = "static fp8 inputs need a scale observed on data; fp8_dynamic computes it at run time"

LAYER_PRESETS: MappingProxyType[str, LayerPreset] = MappingProxyType(
    {
        "w4a16": LayerPreset(weight="int4:g128" + _CT),
        "w4a16_asym": LayerPreset(weight="int4:g128:asym" + _CT),
        "w8a16": LayerPreset(weight="int8:g128" + _CT),
        "w8a8": LayerPreset(weight="int8:channel" + _CT, input="int8:token"),
        "fp8": LayerPreset(weight="float8_e4m3fn:tensor" + _CT, needs_calibration=_FP8_INPUT),
        "fp8_dynamic": LayerPreset(weight="float8_e4m3fn:channel" + _CT, input="float8_e4m3fn:token"),
        "fp8_block": LayerPreset(weight="float8_e4m3fn:block128x128" + _CT, input="float8_e4m3fn:g128"),
        "mxfp4": LayerPreset(weight="float4_e2m1fn:g32" + _MX, input="float4_e2m1fn:g32:scale=even"),
        "mxfp4a16": LayerPreset(weight="float4_e2m1fn:g32" + _MX),
        "mxfp8": LayerPreset(weight="float8_e4m3fn:g32" + _MX, input="float8_e4m3fn:g32:scale=even"),
        "mxfp8a16": LayerPreset(weight="float8_e4m3fn:g32" + _MX),
        "nvfp4": LayerPreset(weight=_NVFP4, needs_calibration=_NVFP4_INPUT),
        "nvfp4a16": LayerPreset(weight=_NVFP4),
    }
)
"""Name to layer preset."""
