"""The block types of GGUF files: codes and scale of a block lie together, row after row.

For the weight ``X.weight`` of shape (N, K), whose tensor has the same name and shape (all little-endian; d
is the block's scale, a value is ``d * code``):

    Q8_0    34 bytes for 32 values: F16 d; I8 of each code
    Q4_0    18 bytes for 32 values: F16 d; byte j has ``code + 8`` of element j in its low nibble
            and of element j + 16 in its high one

Tensors keep the names of the checkpoint, which are not those that llama.cpp gives them, and there is no
tokenizer: what is written is read by gguf-py and by zeropoint, and llama.cpp needs a conversion.

Source: ggml-org/llama.cpp, ggml/src/ggml-common.h and gguf-py/gguf/quants.py. This module opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..architectures import Config, model_type
from ..errors import CheckpointError, UnsupportedError
from ..formats import get_format
from ..layout import packing
from ..params import QuantizationParams
from ..schemes import PRESETS, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from .block_extents import blocks
from .containers.gguf import TYPES
from .containers.protocol import Metadata
from .engines import LLAMA_CPP, ONNXRUNTIME, TENSORRT, TRANSFORMERS, VLLM, Loads, always, rules
from .protocol import Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record, model_dtype

WEIGHT = "weight"
_BLOCK = 32
_ELEMENTS = {"Q8_0": "int8", "Q4_0": "int4"}
_PRESETS = MappingProxyType({
    name: PRESETS[name] for name in ("q8_0", "q4_0")
})  # fmt: skip
_READ = {"Q8_0": f"{PRESETS['q8_0'].weight}:narrow=no", "Q4_0": PRESETS["q4_0"].weight}
"""Schemes of what is read: any scale that the type holds, whatever rule picked it, and every code."""
_QUANTIZED = frozenset(name for name, found in TYPES.items() if found.block > 1)


class GgufReader(Reader):
    """The quantized tensors of one file, each with a type of its own."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._codec = codec
        self._dtype = model_dtype(listing.config, torch.float32)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the name of the tensor."""
        entry = tensors[WEIGHT]
        if entry.dtype not in _ELEMENTS:
            raise UnsupportedError(
                f"its type {entry.dtype} is not read here; read are {', '.join(_ELEMENTS)}"
            )
        if len(entry.shape) != 2:
            raise CheckpointError(f"its codes have shape {list(entry.shape)}, but must be a matrix")
        weight = Scheme.parse(_READ[entry.dtype])
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        shape = (entry.shape[0], entry.shape[1])
        dtype = self._dtype if known is None else known.dtype
        return Record(
            module=key.removesuffix(".weight"), layer=layer, shape=shape, dtype=dtype, parts=(WEIGHT,)
        )


_NOT_READ = always(
    Loads.NO, "it asks for the names that llama.cpp gives to tensors, and here they are the checkpoint's"
)
_NO_GGUF = always(Loads.NO, "it reads no GGUF")


@dataclass(frozen=True)
class Gguf(Codec):
    """See the module and :class:`Codec`."""

    name = "gguf"
    title = "the block types of GGUF"
    container = "gguf"
    presets = _PRESETS
    defaults = MappingProxyType({"scale": "float16"})
    engines = rules({
        TRANSFORMERS: _NOT_READ, VLLM: _NOT_READ, TENSORRT: _NO_GGUF, ONNXRUNTIME: _NO_GGUF,
        LLAMA_CPP: always(
            Loads.PARTLY, "it reads these types, but asks for names of its own and a tokenizer in the file"
        ),
    })  # fmt: skip
    usual = (LLAMA_CPP,)
    methods = ("gguf",)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the type."""
        weight = layer.weight
        types = {get_format(element): name for name, element in _ELEMENTS.items()}
        plain = (
            len(weight.levels) == len(weight.scales) == 1
            and weight.scales[0].format == get_format("float16")
            and blocks(weight) == (1, _BLOCK)
            and weight.zero_point is ZeroPoint.NONE
            and layer.input is None
        )
        if weight.element not in types or not plain:
            raise UnsupportedError(
                f"scheme {weight} has no type in GGUF that is written here; use q8_0, q4_0, int8:g32 or "
                "int4:g32 for weights alone, with float16 scales"
            )
        return types[weight.element]

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        return (TensorSpec(suffix=WEIGHT, dtype=layer.layout, shape=shape),)

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        rows, columns = q.shape
        codes = q.codes.view(rows, columns // _BLOCK, _BLOCK)
        if layer.layout == "Q4_0":
            fields = (codes + 8).to(torch.uint8)
            codes = fields[..., : _BLOCK // 2] | fields[..., _BLOCK // 2 :] << 4
        scales = q.scales[0].contiguous().view(torch.uint8).view(rows, columns // _BLOCK, 2)
        return {WEIGHT: torch.cat([scales, codes.contiguous().view(torch.uint8)], -1).view(rows, -1)}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`."""
        rows, columns = shape
        lines = tensors[WEIGHT].view(torch.uint8).view(rows, columns // _BLOCK, -1)
        scales = lines[..., :2].contiguous().view(torch.float16).view(rows, -1)
        stored = lines[..., 2:]
        if layer.layout == "Q4_0":
            stored = (torch.cat([stored & 15, stored >> 4], -1).to(torch.int8) - 8).view(torch.uint8)
        codes = stored.reshape(rows, columns).view(torch.int8)
        data = packing.pack(codes, layer.weight.bits)
        params = QuantizationParams(
            scheme=layer.weight, shape=shape, scales=(scales,), zero_point=None, dtype=dtype
        )
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """See :class:`Codec`."""
        return (name, WEIGHT, True) if dtype in _QUANTIZED else None

    def read(self, listing: Listing) -> GgufReader:
        """See :class:`Codec`."""
        return GgufReader(listing, self)

    def metadata(self, family: Config, metadata: Mapping[str, str]) -> Metadata:
        """See :class:`Codec`."""
        return {"general.architecture": model_type(family) or "unknown", "general.quantization_version": 2}

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the types of tensors say it all."""
        return Documents(section=None)


CODEC = Gguf()
