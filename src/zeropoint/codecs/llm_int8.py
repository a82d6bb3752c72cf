"""LLM.int8, the 8-bit layout of bitsandbytes (``load_in_8bit`` in transformers).

For the weight ``X.weight`` of shape (N, K) (all little-endian, rows one after the other):

    X.weight          I8 [N, K]
    X.SCB             F32 [N]: the largest magnitude of each row; a value is ``code * SCB / 127``
    X.weight_format   U8 []: 0, rows as they are

The configuration says ``{"quant_method": "bitsandbytes", "load_in_8bit": true, "llm_int8_skip_modules":
[...], ...}``. The scale of a row is ``SCB / 127`` here, rounded to float32; bitsandbytes multiplies codes by
SCB first, which differs by a rounding of float32, and rounds ``x * (127 / SCB)`` to codes, which moves some
ties. SCB is the number of the shortest mantissa that gives the scale: the magnitude itself, of weights of 16
bits. A row of zeros has SCB 0 and scale 1.

Source: bitsandbytes 0.50.2 (nn/modules.py, Linear8bitLt; backends/default/ops.py, int8_vectorwise_quant) and
transformers 5.23 (quantizers/quantizer_bnb_8bit.py). This module opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import UnsupportedError
from ..schemes import Preset, Scheme
from ..tensor import QuantizedTensor
from .bitsandbytes import by_plugin, of_transformers
from .engines import fused_alike, in_turn, loader_not_run, rules
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, MatrixReader
from .tensor_fields import CodeField, ConstantField, Field, LevelField, Tensors, WeightPart

QUANT_METHOD, FLAG = "bitsandbytes", "load_in_8bit"
WEIGHT, SCALE, FORMAT = "weight", "SCB", "weight_format"
_SCHEME = "int8:channel:narrow:scale=float32"
_STEPS = 127


def scale_of(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the float32 scale of rows of a largest magnitude."""
    return magnitude / _STEPS


def magnitude_of(scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 magnitude of a scale, with shortest mantissa.

    >>> magnitude_of(scale_of(torch.tensor([1.9921875, 0.75]))).tolist()
    [1.9921875, 0.75]
    """
    near = (scale * _STEPS).view(torch.int32)
    bits = torch.stack([near + step for step in (-1, 0, 1)])
    lowest = torch.where(scale_of(bits.view(torch.float32)) == scale, bits & -bits, -1)
    return bits.gather(0, lowest.argmax(0, keepdim=True))[0].view(torch.float32)


@dataclass(frozen=True)
class Magnitudes(LevelField):
    """Largest magnitudes of rows, 0 for rows of zeros."""

    def lines(self, q: QuantizedTensor) -> torch.Tensor:
        return magnitude_of(super().lines(q)).where(q.codes.any(1), 0.0)

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        return super().numbers(scale_of(lines), weight, part)


_ROWS = ConstantField(FORMAT, lambda *_: torch.zeros((), dtype=torch.uint8))


class LlmInt8Reader(MatrixReader):
    """The layers of one checkpoint of LLM.int8."""

    kept_key = "llm_int8_skip_modules"
    dtype = torch.float16
    optional = (FORMAT,)

    def layer(self, key: str, tensors: Mapping[str, Entry]) -> LayerScheme:
        weight = Scheme.parse(_SCHEME)
        return LayerScheme(codec=self.codec, name=str(weight), weight=weight)

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        four = "load_in_4bit of the configuration is true, too, but its codes have 8 bits"
        return four if self.listing.quantization.get("load_in_4bit") else None


@dataclass(frozen=True)
class LlmInt8(Codec):
    """See the module and :class:`Codec`."""

    name = "llm-int8"
    title = "the 8-bit layout of bitsandbytes"
    presets = MappingProxyType({"llm_int8": Preset(weight=_SCHEME)})
    defaults = MappingProxyType({"scale": "float32"})
    parts = MappingProxyType({SCALE: True, FORMAT: True, WEIGHT: False})
    engines = rules(
        transformers=of_transformers,
        vllm=in_turn(fused_alike, by_plugin),
        sglang=loader_not_run,
        diffusers=loader_not_run,
    )
    methods = (QUANT_METHOD,)
    replaces_conv1d = True
    code_dtypes = ("I8",)
    reader = LlmInt8Reader

    def layout(self, layer: LayerScheme) -> str:
        if layer.weight != Scheme.parse(_SCHEME) or layer.input is not None:
            raise UnsupportedError(
                f"({layer.assignment}) is not what LLM.int8 stores; use llm_int8, of which engines "
                "quantize the inputs"
            )
        return "int8"

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        return CodeField(WEIGHT, "I8"), Magnitudes(SCALE, trailing=()), _ROWS

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        """See :class:`Codec`; rows of zeros may have any scale."""
        empty = (tensors[SCALE] == 0) & ~tensors[WEIGHT].any(1)
        magnitude = torch.where(empty, float(_STEPS), tensors[SCALE])
        return super().decode(layer, {**tensors, SCALE: magnitude}, part)

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        found = int(tensors.get(FORMAT, torch.zeros(1)).sum())
        return f"{FORMAT} is {found}, which older releases wrote for tiles; known is 0" if found else None

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        return super().claims(quantization) and bool(quantization.get(FLAG, quantization.get(f"_{FLAG}")))

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for ambiguous names of kept modules."""
        contents.require_distinct(self.title)
        unset = ("load_in_4bit", "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload")
        section = {"quant_method": QUANT_METHOD, FLAG: True, **dict.fromkeys(unset, False)}
        return Documents(section=section | {"llm_int8_skip_modules": contents.left_out})


CODEC = LlmInt8()
