"""FBGEMM layout of Meta's Llama 3.1 405B: float8 codes, scales of rows.

For the weight ``X.weight`` of shape (N, K) (all little-endian, rows one after the other):

    X.weight           F8_E4M3 [N, K]: a value is ``code * scale``
    X.weight_scale     F32 [N, 1]; BF16 and F16 are read, too
    X.input_scale_ub   F32 [1]: largest magnitude of an input, above which engines clip; read, not written:
                       engines take it from the configuration

The configuration says ``{"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
"modules_to_not_convert": [...]}``. Inputs are quantized by token. Fused experts are not read.

Source: transformers 5.23 (integrations/fbgemm_fp8.py) and vLLM (quantization/fbgemm_fp8.py). This module
opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..recipes import Activation
from ..schemes import PRESETS
from .engines import Loads, fused_alike, in_turn, linear_alone, rules
from .held_schemes import SchemePattern, require_held
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, MatrixReader, Record, float_scales, setting
from .tensor_fields import CodeField, Field, LevelField

QUANT_METHOD, _KEY, _BOUND = "fbgemm_fp8", "activation_scale_ub", 1200.0
WEIGHT, SCALE, BOUND = "weight", "weight_scale", "input_scale_ub"
_WEIGHT = "float8_e4m3fn:channel:scale=float32"
_PATTERN = SchemePattern(_WEIGHT.replace("float32", "{scale}"), (8,))
_INPUT = Activation.of("float8_e4m3fn:token")


class FbgemmReader(MatrixReader):
    """The layers of one checkpoint of FBGEMM."""

    kept_key, dtype = "modules_to_not_convert", torch.bfloat16

    def __init__(self, listing: Listing, codec: Codec) -> None:
        super().__init__(listing, codec)
        setting(listing.quantization, _KEY, _BOUND, _is_positive, "a positive number")

    def layer(self, key: str, tensors: Mapping[str, Entry]) -> LayerScheme:
        weight = _PATTERN.scheme(8, 0, float_scales(tensors, SCALE, QUANT_METHOD))
        return LayerScheme(codec=self.codec, name=str(weight), weight=weight, input=_INPUT)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        found = super().record(key, {part: each for part, each in tensors.items() if part != BOUND}, known)
        return replace(found, parts=(*found.parts, BOUND)) if BOUND in tensors else found

    def input_of(self, module: str) -> Activation | None:
        return _INPUT


def _is_positive(found: object) -> bool:
    return isinstance(found, int | float) and type(found) is not bool and found > 0


@dataclass(frozen=True)
class FbgemmFp8(Codec):
    """See the module and :class:`Codec`."""

    name = "fbgemm-fp8"
    title = "the layout of FBGEMM"
    presets = MappingProxyType({"fp8_dynamic": replace(PRESETS["fp8_dynamic"], weight=_WEIGHT)})
    defaults = MappingProxyType({"scale": "float32"})
    parts = MappingProxyType({SCALE: True, BOUND: True, WEIGHT: False})
    code_dtypes = ("F8_E4M3",)
    engines = rules(
        transformers=linear_alone(Loads.PARTLY, "on a GPU of compute capability 9.0, with fbgemm-gpu"),
        vllm=in_turn(fused_alike, linear_alone(Loads.PARTLY, "0.32 calls its loader deprecated")),
        sglang=linear_alone(Loads.UNCHECKED, "its loader did not run here"),
    )
    methods = (QUANT_METHOD,)
    reader = FbgemmReader

    def layout(self, layer: LayerScheme) -> str:
        use = "fp8_dynamic, or float8_e4m3fn:channel with scale=float32, bfloat16 or float16"
        require_held(layer, "FBGEMM", use, fits=_PATTERN.holds(layer.weight), given=_INPUT)
        return QUANT_METHOD

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        return CodeField(WEIGHT, "F8_E4M3"), LevelField(SCALE)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for ambiguous names of kept modules."""
        contents.require_distinct(self.title)
        kept = {"modules_to_not_convert": contents.left_out}
        return Documents(section={"quant_method": QUANT_METHOD, _KEY: _BOUND, **kept})


CODEC = FbgemmFp8()
