"""Schemes that have a name: each is one line of the text form.

How a linear layer is deployed, its weight and its input, is a preset of the codec that writes it (codecs/).
"""

from __future__ import annotations

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
    # bitsandbytes' compress_statistics: codes first, then absmax less its mean in blocks of 256.
    "nf4_double": "nf4:g64:scale=linear_late/dynamic8:scale2=float32@g16384:center=float32@tensor",
    # ggml's quantize_row_q*_ref; K-quants are rounded to nearest, without llama.cpp's search.
    "q8_0": "int8:g32:scale=linear_late/float16:narrow:round=half_away:dialect=ggml",
    "q4_0": "int4:g32:scale=signed_late/float16:dialect=ggml",
    "q4_1": "uint4:g32:scale=linear_late/float16:offset=minimum_late/float16:dialect=ggml",
    "q5_0": "int5:g32:scale=signed_late/float16:dialect=ggml",
    "q5_1": "uint5:g32:scale=linear_late/float16:offset=minimum_late/float16:dialect=ggml",
    "q2_k": "uint2:g16:scale=uint4:scale2=float16@g256:offset=uint4:offset2=signed/float16@g256",
    "q3_k": "int3:g16:scale=signed/int6:scale2=signed/float16@g256",
    "q4_k": "uint4:g32:scale=uint6:scale2=float16@g256:offset=uint6:offset2=signed/float16@g256",
    "q5_k": "uint5:g32:scale=uint6:scale2=float16@g256:offset=uint6:offset2=signed/float16@g256",
    "q6_k": "int6:g16:scale=signed/int8:scale2=signed/float16@g256",
})  # fmt: skip
"""Name to text form."""
