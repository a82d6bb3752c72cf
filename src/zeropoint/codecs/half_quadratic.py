"""The layout of HQQ (half-quadratic quantization), as HQQLinear saves itself in safetensors.

For the layer ``X`` with a weight of shape (N, K), codes of b bits from 0 on and groups of g inputs, of which
there are R = N K / g, one after the other over all rows; group r is a row of g codes (all little-endian):

    X.W_q     U8 [R b / 8, g], b = 1, 2, 4, 8: line i has the codes of groups i, i + R b / 8, ..., the first
              in the high bits of a byte; I32 [ceil(R / 10), g], b = 3: likewise, ten to a word, the first in
              bits 27 to 29; groups past the last are zeros
    X.scale   [R, 1], X.zero [R, 1] in one dtype of floats: a value is ``(code - zero) * scale``
    X.nbits, X.group_size, X.axis I32 []; X.shape I64 [2]: of the weight
    X.packing, X.unpack_view_dtype, X.compute_dtype U8: the letters of ``4bit_u8``, ``torch.uint8``, ...
    X.view_as_float, X.quant_scale, X.quant_zero, X.offload_meta, X.encoded_state_dict,
    X.stores_quant_config, X.channel_wise, X.optimize, X.round_zero U8 []: flags

Under axis 0, which is read and not written, a group is every R-th number of the flattened weight:

    X.W_q     U8 [g b / 8, R], or I32 [ceil(g / 10), R]: as above, of g lines with a code of each group
    X.scale, X.zero  [1, R]

Groups of a byte lie far apart, so a weight is read and written whole. Scales and zeros are written in
float32, which HQQLinear rounds to its own dtype when it loads them. The configuration says ``{"quant_method":
"hqq", "quant_config": {"weight_quant_params": {"nbits": b, "group_size": g, "axis": 1, ...}, ...},
"skip_modules": [...]}``. Quantized scales or zeros are not read, as HQQLinear saves none in safetensors.

Source: hqq 0.2.8 (core/quantize.py, HQQLinear.state_dict and Quantizer.dequantize; core/bitpack.py;
core/utils.py, encode_safetensor_type). HQQLinear computes values in its own dtype; here they are in float32.
This module opens no file.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..layout import packing
from ..schemes import Preset, Scheme
from ..tensor import QuantizedTensor
from .block_extents import blocks
from .containers.safetensors import FILE_DTYPES, torch_name
from .distant_groups import DistantCodes, codes_of, places
from .engines import Loads, linear_alone, not_read, rules
from .held_schemes import SchemePattern, require_held
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, float_scales, names_in, needed, record_of
from .tensor_fields import (
    COLUMNS,
    ROWS,
    ZERO_POINT,
    ConstantField,
    Field,
    LevelField,
    Tensors,
    TensorSpec,
    WeightPart,
    own_dtype,
)

QUANT_METHOD = "hqq"
CODES, SCALE, ZERO, SHAPE = "W_q", "scale", "zero", "shape"
_NUMBERS = ("nbits", "group_size", "axis")
PACKING, UNPACKED, COMPUTE = _TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")
_UNSET = ("view_as_float", "quant_scale", "quant_zero", "offload_meta")
_SET = ("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize")
_FLAGS: Mapping[str, int] = dict.fromkeys(_UNSET, 0) | dict.fromkeys(_SET, 1) | {"round_zero": 0}
_REFUSED = ("view_as_float", "quant_scale", "quant_zero")
_PACKINGS = MappingProxyType({8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"})
_PATTERN = SchemePattern("uint{bits}:{blocks}:scale={scale}:asym=real", tuple(_PACKINGS))
_COMPUTE = (torch.float16, torch.bfloat16, torch.float32)
_THREE = 3
_MOST_TEXT = 64


def _scheme(bits: int, place: str, scale: str = "float32") -> Scheme:
    return Scheme.parse(f"uint{bits}:{place}:scale={scale}:asym=real")


def _text(value: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


class HqqReader(Reader):
    """The layers of one checkpoint of HQQ, each of which describes itself."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing, self._codec = listing, codec
        self.ignore = names_in(listing.quantization, "skip_modules")

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        bits, group, axis = (self._number(tensors, part) for part in _NUMBERS)
        rows, columns = self._ints(tensors, SHAPE, "I64", "<2q", (2,))
        if bits not in _PACKINGS or group < 1 or axis not in (0, 1):
            raise UnsupportedError(
                f"nbits {bits}, group_size {group} and axis {axis} are not read; known are 1, 2, 3, 4 and 8, "
                "any group, and 0 and 1"
            )
        for flag in _REFUSED:
            if flag in tensors and self._ints(tensors, flag, "U8", "<B", ())[0]:
                raise UnsupportedError(f"{flag} is set, which is not read; pass the original checkpoint")
        if self._named(tensors, PACKING) != _PACKINGS[bits]:
            raise UnsupportedError(
                f"packing {self._named(tensors, PACKING)!r:.40} of {bits} bits is not read; known is "
                f"{_PACKINGS[bits]}"
            )
        if rows < 1 or columns < 1 or (columns if axis else rows) % group:
            lines = "rows" if axis else "columns"
            raise UnsupportedError(
                f"shape [{rows}, {columns}] is not read: {lines} must be whole groups of {group}"
            )
        own = torch_name(float_scales(tensors, SCALE, CODES))
        weight = _scheme(bits, f"g{group}" if axis else f"block{group}x1", own)
        layer = LayerScheme(codec=self._codec if axis else _ALONG_OUTPUTS, name=str(weight), weight=weight)
        named = self._named(tensors, COMPUTE).removeprefix("torch.")
        dtype = next((d for d in _COMPUTE if str(d) == f"torch.{named}"), None)
        if dtype is None:
            known_names = ", ".join(str(d) for d in _COMPUTE)
            raise CheckpointError(f"compute_dtype is {named!r:.40}, but must be one of {known_names}")
        optional = (*_FLAGS, UNPACKED)
        return record_of(layer, key, tensors, Known((rows, columns), dtype), optional)

    def _number(self, tensors: Mapping[str, Entry], part: str) -> int:
        return self._ints(tensors, part, "I32", "<i", ())[0]

    def _ints(
        self, tensors: Mapping[str, Entry], part: str, dtype: str, form: str, shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        entry = needed(tensors, part, CODES)
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(
                f"{part} is {entry.dtype} of shape {list(entry.shape)}, but must be {dtype} of {list(shape)}"
            )
        return struct.unpack(form, self._listing.read(entry))

    def _named(self, tensors: Mapping[str, Entry], part: str) -> str:
        entry = needed(tensors, part, CODES)
        if entry.dtype != "U8" or len(entry.shape) != 1 or entry.shape[0] > _MOST_TEXT:
            raise CheckpointError(
                f"{part} is {entry.dtype} of shape {list(entry.shape)}, but must be U8, a short name"
            )
        return self._listing.read(entry).decode("ascii", errors="replace")


def _number(value: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda *_: torch.tensor(value, dtype=dtype)


def _descriptions(weight: Scheme) -> Iterator[Field]:
    """Yield the tensors by which a layer describes itself."""
    bits, (word, _) = weight.bits, places(weight.bits, high_first=True)
    for part, number in zip(_NUMBERS, (bits, blocks(weight)[COLUMNS], 1), strict=True):
        yield ConstantField(part, _number(number, torch.int32))
    yield ConstantField(SHAPE, lambda _, shape, __: torch.tensor(shape))
    yield ConstantField(PACKING, lambda *_: _text(_PACKINGS[bits]))
    yield ConstantField(UNPACKED, lambda *_: _text(str(word)))
    yield ConstantField(COMPUTE, lambda _, __, dtype: _text(str(dtype)))
    for part, flag in _FLAGS.items():
        yield ConstantField(part, _number(flag, torch.uint8))


_transformers = linear_alone(
    Loads.PARTLY, "hqq's own layers load it; transformers 5.23 initializes them at random, without an error"
)


@dataclass(frozen=True)
class Hqq(Codec):
    """See the module and :class:`Codec`."""

    name = "hqq"
    title = "the layout of HQQ"
    presets = MappingProxyType(
        {f"hqq_int{bits}": Preset(weight=str(_scheme(bits, "g64"))) for bits in (4, 8)}
    )
    defaults = MappingProxyType({"scale": "float32"})
    parts = MappingProxyType(
        {CODES: True, **dict.fromkeys((SCALE, ZERO, SHAPE, *_NUMBERS, *_TEXTS, *_FLAGS), False)}
    )
    engines = rules(transformers=_transformers, vllm=not_read)
    methods = (QUANT_METHOD,)
    reader = HqqReader

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the packing."""
        weight = layer.weight
        fits = _PATTERN.holds(weight) and blocks(weight)[COLUMNS] > 0
        use = "hqq_int4, or uint1, uint2, uint3, uint4 or uint8 in groups with asym=real"
        require_held(layer, "HQQ", use, fits=fits)
        return _PACKINGS[weight.bits]

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        problem = super().refusal(layer, shape)
        if problem is not None or layer.weight.bits == _THREE:
            return problem
        groups, count = layer.weight.granularity.block_count(shape), 8 // layer.weight.bits
        return f"{groups} groups do not fill whole bytes, of {count} codes" if groups % count else None

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        own = FILE_DTYPES[own_dtype(layer.weight, 0, torch.float32)]
        scale, zero = LevelField(SCALE, trailing=(1,)), LevelField(ZERO, ZERO_POINT, own, trailing=(1,))
        return DistantCodes(CODES, high_first=True), scale, zero, *_descriptions(layer.weight)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        params: dict[str, Any] = {
            "nbits": layer.weight.bits,
            "channel_wise": True,
            "group_size": blocks(layer.weight)[COLUMNS],
            "optimize": True,
            "round_zero": False,
            "axis": 1,
            "view_as_float": False,
        }
        nested = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
        section = {"quant_method": QUANT_METHOD, "quant_config": {**nested, "offload_meta": False}}
        return Documents(section=section | {"skip_modules": contents.left_out})


@dataclass(frozen=True)
class HqqAlongOutputs(Hqq):
    """HQQ layout under axis 0, which is read and not written."""

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the packing."""
        return _PACKINGS[layer.weight.bits]

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`; lines of codes must fill bytes."""
        group, count = blocks(layer.weight)[ROWS], 8 // layer.weight.bits
        if layer.weight.bits == _THREE or group % count == 0:
            return None
        return f"a group of {group} does not fill whole bytes, of {count} codes"

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        weight, group = layer.weight, blocks(layer.weight)[ROWS]
        groups, (word, shifts) = math.prod(shape) // group, places(weight.bits, high_first=True)
        whole = functools.partial(TensorSpec, axis=None)
        codes = whole(suffix=CODES, dtype=FILE_DTYPES[word], shape=(-(-group // len(shifts)), groups))
        own = FILE_DTYPES[own_dtype(weight, 0, dtype)]
        scales = (whole(suffix=part, dtype=own, shape=(1, groups)) for part in (SCALE, ZERO))
        return codes, *scales, *(field.spec(weight, shape, dtype) for field in _descriptions(weight))

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        """See :class:`Codec`; each number gets its own scale, for scattered blocks."""
        weight, bits, group = layer.weight, layer.weight.bits, blocks(layer.weight)[ROWS]
        columns, rows = part.shape[1], slice(part.start, part.start + part.shape[0])

        def each(x: torch.Tensor) -> torch.Tensor:
            return x.expand(group, -1).reshape(-1, columns)[rows]

        name = str(own_dtype(weight, 0, part.dtype)).removeprefix("torch.")
        codes = codes_of(tensors[CODES], bits, group, high_first=True)
        data = packing.pack(codes.reshape(-1, columns)[rows], bits)
        zero = each(tensors[ZERO].float())
        return part.quantized(_scheme(bits, "g1", name), data, each(tensors[SCALE]), zero)


_ALONG_OUTPUTS = HqqAlongOutputs()
CODEC = Hqq()
