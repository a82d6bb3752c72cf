"""Presets: named schemes, and named combinations for a linear layer.

A name gives the same codes and scales everywhere: in ``zp.quantize``, ``quantize_model``, recipes and
``zeropoint quantize --to``. Names from serving engines follow their arithmetic, dialect compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Text forms of the weight, input and output schemes of a layer.

    Args:
        weight: the text form of the weight's scheme.
        input, output: None keeps them in floating point.
        static: whether activation scales come from calibration data; otherwise they are computed from each
            tensor at run time.
        without_data: of a static preset, the closest one that needs no data.
    """

    weight: str
    input: str | None = None
    output: str | None = None
    static: bool = False
    without_data: str | None = None


_CT = ":scale=input:dialect=compressed-tensors"
_NVFP4 = "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor:dialect=compressed-tensors"
_MXFP4, _MXFP6, _MXFP8 = (f"{e}:g32:scale=even" for e in ("float4_e2m1fn", "float6_e2m3fn", "float8_e4m3fn"))
_AMDFP4, _GLOBAL = "float4_e2m1fn:g{}:scale=float8_ue5m3fn", ":scale2=float32@tensor"
_MX = ":dialect=compressed-tensors"
_K = ":scale=uint6:scale2=float16@g256:offset=uint6:offset2=signed/float16@g256"
_TERNARY = ":scale=linear_late/float16:round=half_even:dialect=ggml"
_POWER_OF_TWO = "int8:tensor:scale=rceil:narrow"

PRESETS: MappingProxyType[str, Preset] = MappingProxyType({
    # What compressed-tensors, llm-compressor and vLLM call so, in lower case.
    "w4a16": Preset(weight="int4:g128" + _CT),
    "w4a16_asym": Preset(weight="int4:g128:asym" + _CT),
    "w8a16": Preset(weight="int8:g128" + _CT),
    "w4a8": Preset(weight="int4:g128" + _CT, input="int8:token"),
    "w8a8": Preset(weight="int8:channel" + _CT, input="int8:token"),
    "w8a8_static": Preset(
        weight="int8:channel" + _CT, input="uint8:tensor:asym", static=True, without_data="w8a8"
    ),
    "fp8": Preset(
        weight="float8_e4m3fn:tensor" + _CT, input="float8_e4m3fn:tensor", static=True,
        without_data="fp8_dynamic",
    ),
    "fp8_dynamic": Preset(weight="float8_e4m3fn:channel" + _CT, input="float8_e4m3fn:token"),
    "fp8_block": Preset(weight="float8_e4m3fn:block128x128" + _CT, input="float8_e4m3fn:g128"),
    "mxfp4": Preset(weight=_MXFP4 + _MX, input=_MXFP4),
    "mxfp4a16": Preset(weight=_MXFP4 + _MX),
    "mxfp6a16": Preset(weight=_MXFP6 + _MX),
    "mxfp8": Preset(weight=_MXFP8 + _MX, input=_MXFP8),
    "mxfp8a16": Preset(weight=_MXFP8 + _MX),
    # Weights in 4 bits, inputs in 8: the mix that OCP MX hardware multiplies directly.
    "mxfp4_mxfp8": Preset(weight=_MXFP4 + _MX, input=_MXFP8),
    # compressed-tensors 0.20: MXFP6 weights for inputs in MXFP8, MXFP4 weights for inputs in groups of fp8.
    "mxfp6a8": Preset(weight=_MXFP6 + _MX, input=_MXFP8),
    "mxfp4xfp8": Preset(weight=_MXFP4 + _MX, input="float8_e4m3fn:g128"),
    # AMD Quark 0.13: e2m1 under scales of e5m3 without a sign, alone or under one scale of the tensor.
    "amdfp4": Preset(weight=_AMDFP4.format(16), input=_AMDFP4.format(16)),
    "amdfp4_g32": Preset(weight=_AMDFP4.format(32), input=_AMDFP4.format(32)),
    "amdfp4_global16": Preset(weight=_AMDFP4.format(16) + _GLOBAL),
    "amdfp4_global32": Preset(weight=_AMDFP4.format(32) + _GLOBAL),
    # NVIDIA NVFP4: e4m3 scales over 16, one float32 over the tensor.
    "nvfp4": Preset(weight=_NVFP4, input=_NVFP4, static=True, without_data="nvfp4a16"),
    "nvfp4a16": Preset(weight=_NVFP4),
    # NVFP4's scales over integers without -8 (INT v.s. FP, arXiv:2510.25602).
    "nvint4": Preset(weight="int4:g16:scale=float8_ue4m3fn:scale2=float32@tensor:narrow"),
    # fouroversix's IF4: NVFP4, but where int4 has less error the sign of the block's scale says so.
    "if4": Preset(weight="if4_element:g16:scale=float8_e4m3fn:scale2=float32@tensor"),
    # Shifts in place of multiplications: one power of two for each tensor, as on embedded targets.
    "int8_power_of_two": Preset(
        weight=_POWER_OF_TWO, input=_POWER_OF_TWO, output=_POWER_OF_TWO, static=True, without_data="w8a8"
    ),
    # OCP Microscaling Formats 1.0, table 1; the floor rule is its section 6.3.
    "mxfp8_e4m3": Preset(weight="float8_e4m3fn:g32:scale=floor"),
    "mxfp8_e5m2": Preset(weight="float8_e5m2:g32:scale=floor"),
    "mxfp6_e3m2": Preset(weight="float6_e3m2fn:g32:scale=floor"),
    "mxfp6_e2m3": Preset(weight="float6_e2m3fn:g32:scale=floor"),
    "mxfp4_e2m1": Preset(weight="float4_e2m1fn:g32:scale=floor"),
    "mxint8": Preset(weight="int8_mx:g32:scale=floor:narrow"),
    # Shared microexponents, arXiv:2302.08007, table 2.
    "mx9": Preset(weight="mx9_element:g2:scale=floor/microexponent:scale2=floor@g16"),
    "mx6": Preset(weight="mx6_element:g2:scale=floor/microexponent:scale2=floor@g16"),
    "mx4": Preset(weight="mx4_element:g2:scale=floor/microexponent:scale2=floor@g16"),
    # Block floating point: eight 8-bit mantissas under one exponent.
    "bfp16": Preset(weight="int8_mx:g8:scale=even"),
    # QLoRA, arXiv:2305.14314, and bitsandbytes' table of the same size.
    "nf4": Preset(weight="nf4:g64"),
    "fp4_bnb": Preset(weight="fp4_bnb:g64"),
    # bitsandbytes' compress_statistics: codes first, then absmax less its mean in blocks of 256.
    "nf4_double": Preset(
        weight="nf4:g64:scale=linear_late/dynamic8:scale2=float32@g16384:center=float32@tensor"
    ),
    # Scales and minima of 32 values in 8 bits, under float16 of each row: 4.5 bits and a bit.
    "uint4_double": Preset(
        weight="uint4:g32:scale=uint8:scale2=float16@token:offset=uint8:offset2=signed/float16@token"
    ),
    # ggml's quantize_row_q*_ref; K-quants are rounded to nearest, without llama.cpp's search.
    "q8_0": Preset(weight="int8:g32:scale=linear_late/float16:narrow:round=half_away:dialect=ggml"),
    "q4_0": Preset(weight="int4:g32:scale=signed_late/float16:dialect=ggml"),
    "q4_1": Preset(weight="uint4:g32:scale=linear_late/float16:offset=minimum_late/float16:dialect=ggml"),
    "q5_0": Preset(weight="int5:g32:scale=signed_late/float16:dialect=ggml"),
    "q5_1": Preset(weight="uint5:g32:scale=linear_late/float16:offset=minimum_late/float16:dialect=ggml"),
    "q2_k": Preset(weight="uint2:g16" + _K.replace("uint6", "uint4")),
    "q3_k": Preset(weight="int3:g16:scale=signed/int6:scale2=signed/float16@g256"),
    "q4_k": Preset(weight="uint4:g32" + _K),
    "q5_k": Preset(weight="uint5:g32" + _K),
    "q6_k": Preset(weight="int6:g16:scale=signed/int8:scale2=signed/float16@g256"),
    "iq4_nl": Preset(weight="iq4:g32:scale=signed/float16:round=half_even:dialect=ggml"),
    "iq4_xs": Preset(weight="iq4:g32:scale=signed/int6:scale2=signed/float16@g256"),
    "tq1_0": Preset(weight="digits5[-1.0,0.0,1.0]:g256" + _TERNARY),
    "tq2_0": Preset(weight="ternary:g256" + _TERNARY),
    "q2_0": Preset(weight="ternary:g64" + _TERNARY),
})  # fmt: skip
"""Name to preset."""
OF_LAYOUTS = frozenset((
    "llm_int8", "int8wo", "int8dq", "float8wo", "int4wo", "mlx_int2", "mlx_int3", "mlx_int4", "mlx_int5",
    "mlx_int6", "mlx_int8", "hqq_int4", "hqq_int8", "quanto_int8", "quanto_float8", "quanto_int4",
    "quanto_int2",
))  # fmt: skip
"""Names of presets that one file layout alone has; its codec says what they are."""
