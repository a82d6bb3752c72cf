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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..params import QuantizationParams
from ..schemes import Preset, Scheme
from ..tensor import QuantizedTensor
from .engines import (
    DIFFUSERS,
    LLAMA_CPP,
    TRANSFORMERS,
    VLLM,
    Facts,
    Loads,
    Problem,
    always,
    fused_alike,
    loader_not_run,
    rules,
)
from .protocol import Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record, model_dtype, names_in, needed, record_of

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


class LlmInt8Reader(Reader):
    """The layers of one checkpoint of LLM.int8."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        weight = Scheme.parse(_SCHEME)
        self._layer = LayerScheme(codec=codec, name=str(weight), weight=weight)
        self._dtype = model_dtype(listing.config, torch.float16)
        self._four = bool(listing.quantization.get("load_in_4bit"))
        self.ignore = names_in(listing.quantization, "llm_int8_skip_modules")

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        codes = needed(tensors, WEIGHT, self._layer.layout)
        if len(codes.shape) != 2:
            raise CheckpointError(f"weight has shape {list(codes.shape)}, but must be a matrix")
        return record_of(
            self._layer, key, tensors, shape=(codes.shape[0], codes.shape[1]),
            dtype=self._dtype if known is None else known.dtype, optional=(FORMAT,),
        )  # fmt: skip

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        """See :class:`Reader`."""
        four = "load_in_4bit of the configuration is true, too, but its codes have 8 bits"
        return four if self._four else None


def _transformers(facts: Facts) -> Iterator[Problem]:
    if facts.experts:
        yield Loads.NO, "it quantizes linear layers in this layout, and experts are none there"
    if facts.nonlinear or facts.transposed:
        yield Loads.NO, "quantized embeddings, routers and weights of Conv1D are not read in this layout"


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from fused_alike(facts)
    yield (
        Loads.UNCHECKED,
        "from 0.28 on it reads this layout with the package vllm-bnb-plugin, which was not tried",
    )


@dataclass(frozen=True)
class LlmInt8(Codec):
    """See the module and :class:`Codec`."""

    name = "llm-int8"
    title = "the 8-bit layout of bitsandbytes"
    presets = MappingProxyType({"llm_int8": Preset(weight=_SCHEME)})
    defaults = MappingProxyType({"scale": "float32"})
    parts = MappingProxyType({SCALE: True, FORMAT: True, WEIGHT: False})
    engines = rules({
        TRANSFORMERS: _transformers, VLLM: _vllm, DIFFUSERS: loader_not_run,
        LLAMA_CPP: always(Loads.NO, "it reads GGUF, and its converter does not know this layout"),
    })  # fmt: skip
    methods = (QUANT_METHOD,)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        if layer.weight != Scheme.parse(_SCHEME) or layer.input is not None:
            raise UnsupportedError(
                f"({layer.assignment}) is not what LLM.int8 stores; use llm_int8, of which engines "
                "quantize the inputs"
            )
        return "int8"

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        return (
            TensorSpec(suffix=WEIGHT, dtype="I8", shape=shape),
            TensorSpec(suffix=SCALE, dtype="F32", shape=(shape[0],)),
            TensorSpec(suffix=FORMAT, dtype="U8", shape=(), axis=None),
        )

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        codes = q.data.view(torch.int8)
        return {WEIGHT: codes, SCALE: magnitude_of(q.scales[0].reshape(-1)).where(codes.any(1), 0.0)}

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        return {FORMAT: torch.zeros((), dtype=torch.uint8)}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`; rows of zeros may have any scale."""
        magnitude, codes = tensors[SCALE], tensors[WEIGHT]
        empty = (magnitude == 0) & ~codes.any(1)
        scale = torch.where(empty, 1.0, scale_of(magnitude)).reshape(-1, 1)
        params = QuantizationParams(scheme=layer.weight, shape=shape, scales=(scale,), dtype=dtype)
        return QuantizedTensor(data=codes.view(torch.uint8), params=params, shape=shape, dtype=dtype)

    def damage(self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """See :class:`Codec`."""
        found = int(tensors.get(FORMAT, torch.zeros(1)).sum())
        return f"{FORMAT} is {found}, which older releases wrote for tiles; known is 0" if found else None

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """See :class:`Codec`; codes without scales are a weight, too."""
        found = super().part_of(name, dtype)
        return (found[0], WEIGHT, True) if found and found[1] == WEIGHT and dtype == "I8" else found

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """See :class:`Codec`."""
        return super().claims(quantization) and bool(quantization.get(FLAG, quantization.get(f"_{FLAG}")))

    def read(self, listing: Listing) -> LlmInt8Reader:
        """See :class:`Codec`."""
        return LlmInt8Reader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for ambiguous names of kept modules."""
        contents.require_distinct(self.title)
        return Documents(section={
            "quant_method": QUANT_METHOD, FLAG: True, "load_in_4bit": False,
            "llm_int8_has_fp16_weight": False, "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_skip_modules": contents.left_out,
        })  # fmt: skip


CODEC = LlmInt8()
