"""Schemes that have a name: each is one line of the text form.

Two tables: how one tensor is quantized, and how a linear layer is deployed (its weight, and its input where
that needs no calibration), under the names that compressed-tensors users know, in lower case.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

TENSOR_PRESETS: MappingProxyType[str, str] = MappingProxyType({
    # OCP Microscaling Formats 1.0, table 1; the floor rule is its section 6.3.
    "mxfp8_e4m3": "float8_e4m3fn:g32:scale=floor",
    "mxfp8_e5m2": "float8_e5m2:g32:scale=floor",
    "mxfp6_e3m2": "float6_e3m2fn:g32:scale=floor",
    "mxfp6_e2m3": "float6_e2m3fn:g32:scale=floor",
    "mxfp4": "float4_e2m1fn:g32:scale=floor",
    "mxint8": "int8_mx:g32:scale=floor:narrow",
    # NVIDIA NVFP4: e4m3 scales over 16, one float32 over the tensor.
    "nvfp4": "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor",
    # Shared microexponents, arXiv:2302.08007, table 2.
    "mx9": "mx9_element:g2:scale=floor/microexponent:scale2=floor@g16",
    "mx6": "mx6_element:g2:scale=floor/microexponent:scale2=floor@g16",
    "mx4": "mx4_element:g2:scale=floor/microexponent:scale2=floor@g16",
    # Block floating point: eight 8-bit mantissas under one exponent.
    "bfp16": "int8_mx:g8:scale=even",
    # QLoRA, arXiv:2305.14314, and bitsandbytes' table of the same size.
    "nf4": "nf4:g64",
    "fp4_bnb": "fp4_bnb:g64",
})  # fmt: skip
"""Name to text form."""


@dataclass(frozen=True, kw_only=True)
class LayerPreset:
    """What happens to a linear layer: the text forms of its weight's and its input's scheme.

    input: a scheme that is computed from each input at run time, or None to leave inputs alone.
    needs_calibration: why the full preset cannot be written without data, or None.
    """

    weight: str
    input: str | None = None
    needs_calibration: str | None = None


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
