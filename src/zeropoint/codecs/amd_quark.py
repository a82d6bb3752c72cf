"""AMD Quark layouts, by the dtype and granularity of the weights.

vLLM and transformers read them. For the weight ``X.weight`` of shape (N, K) and groups of g inputs (all
little-endian; S is the dtype of the model, words are AWQ's, eight 4-bit fields in the order 0, 2, 4,
6, 1, 3, 5, 7):

                         X.weight            X.weight_scale   X.weight_zero_point
    int4, uint4   g      I32 [K, N / 8]      S [K / g, N]     I32 [K / g, N / 8]
    int4, uint4   channel  I32 [N, K / 8]    S [N]            I32 [N / 8]
    int8, uint8   g      I8 or U8 [K, N]     S [K / g, N]     I8 or U8 [K / g, N]
    int8, uint8   channel  I8 or U8 [N, K]   S [N]            I8 or U8 [N]
    int8, uint8   tensor   I8 or U8 [N, K]   F32 []           I8 or U8 []
    fp8_e4m3      channel  F8_E4M3 [N, K]    S [N]
    fp8_e4m3      tensor   F8_E4M3 [N, K]    S []
    fp4           g = 32   U8 [N, K / 2]     U8 [N, K / 32]: exponent + 127; even element in the low nibble

Zero points of int4 and int8 are 0. Static inputs of fp8 have ``X.input_scale`` []. The configuration says
``{"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group",
"group_size": g, ...}, "input_tensors": ...}, "layer_quant_config": {glob: ...}, "exclude": [...], ...}``.

Source: amd-quark 0.13 (torch/export; torch/utils/pack.py), which rounds as the dialect torch when it exports,
and has no -0 in fp4. This module opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError, option
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..params import QuantizationParams
from ..params.tensors import zero_point_dtype
from ..patterns import name_patterns
from ..recipes import Activation
from ..schemes import PRESETS, Preset, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from .block_extents import blocks
from .data_scales import InputNames
from .engines import (
    LLAMA_CPP,
    TENSORRT,
    TRANSFORMERS,
    Facts,
    Loads,
    Problem,
    always,
    fused_alike,
    rules,
    with_humming,
)
from .protocol import COLUMNS, ROWS, Codec, Contents, Documents, LayerScheme, TensorSpec
from .quark_config import (
    CODE_DTYPES,
    MX,
    SCALE_DTYPES,
    QuarkKind,
    input_in,
    input_spec,
    kind_in,
    kind_of,
    text_of,
    weight_spec,
)
from .records import Entry, Known, Listing, Reader, Record, model_dtype, needed, record_of
from .safetensors_dtypes import FILE_DTYPES, TORCH_DTYPES
from .words import INTERLEAVED, interleaved_fields, interleaved_words, rows_of_words, words_of_rows

QUANT_METHOD, VERSION = "quark", "0.13"
WEIGHT, SCALE, ZEROS = "weight", "weight_scale", "weight_zero_point"
_WORD_FIELDS, _ORDERED = 8, "reorder"
_MOVED = ("input_rotation", "input_prescale")
"""Tensors of layers whose inputs are transformed first, so that their weights differ from the model's."""
_INT = ":scale=input:dialect=torch"


class QuarkReader(Reader):
    """The layers of one checkpoint of Quark."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing = listing
        self._codec = codec
        config = listing.quantization
        self._everywhere = config.get("global_quant_config")
        layers, exclude = config.get("layer_quant_config") or {}, config.get("exclude") or []
        if not isinstance(layers, dict) or not isinstance(exclude, list):
            raise CheckpointError(
                "layer_quant_config and exclude must be an object and a list; it is damaged"
            )
        if config.get("layer_type_quant_config"):
            raise UnsupportedError(
                "layer_type_quant_config of Quark is not read here; pass the original checkpoint"
            )
        export = config.get("export")
        packing_method = export.get("pack_method", _ORDERED) if isinstance(export, dict) else _ORDERED
        if packing_method != _ORDERED:
            raise UnsupportedError(
                f"pack_method {packing_method!r:.40} of Quark is not read here; known is {_ORDERED!r}"
            )
        self._layers = list(zip(name_patterns(map(str, layers)), layers.values(), strict=True))
        self.ignore = tuple(map(str, exclude))
        self._kept = name_patterns(self.ignore)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        if any(pattern.matches(key) for pattern in self._kept):
            raise CheckpointError("it is quantized, but exclude names it, so loaders would not find it")
        entry = self._entry(key)
        kind = kind_in(entry.get("weight"))
        codes, scale = needed(tensors, WEIGHT, str(kind)), needed(tensors, SCALE, str(kind))
        if kind.dtype != "fp4" and scale.dtype not in SCALE_DTYPES:
            raise CheckpointError(f"{SCALE} is {scale.dtype}, but must be one of {', '.join(SCALE_DTYPES)}")
        if len(codes.shape) != 2:
            raise CheckpointError(f"weight has shape {list(codes.shape)}, but must be a matrix")
        name = str(TORCH_DTYPES[scale.dtype]).removeprefix("torch.")
        weight = Scheme.parse(text_of(kind, name))
        layer = LayerScheme(
            codec=self._codec, name=str(weight), weight=weight, input=input_in(entry.get("input_tensors"))
        )
        lines, width = codes.shape
        width *= _WORD_FIELDS if kind.words else 2 if kind.dtype == "fp4" else 1
        shape = (width, lines) if kind.transposed else (lines, width)
        own = known.dtype if known is not None else model_dtype(self._listing.config, torch.bfloat16)
        return record_of(layer, key, tensors, shape=shape, dtype=own, optional=(ZEROS,) * kind.symmetric)

    def kept(self) -> Callable[[str], bool]:
        """See :class:`Reader`."""
        return lambda _: False

    def expects(self, module: str) -> bool:
        """See :class:`Reader`."""
        return not any(pattern.matches(module) for pattern in self._kept)

    def input_of(self, module: str) -> Activation | None:
        """See :class:`Reader`."""
        return input_in(self._entry(module).get("input_tensors"))

    def _entry(self, module: str) -> Mapping[str, Any]:
        own = (entry for pattern, entry in self._layers if pattern.matches(module))
        found = next(own, self._everywhere)
        if not isinstance(found, dict):
            raise CheckpointError(f"its entry of the configuration is {found!r:.40}, but must be an object")
        return found


def _transformers(facts: Facts) -> Iterator[Problem]:
    if facts.experts or facts.nonlinear or facts.transposed:
        yield Loads.NO, "it reads linear layers alone in this layout"
    yield Loads.PARTLY, "with amd-quark installed, which decodes weights"


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from fused_alike(facts)
    alone = [layer for layer in facts.layers if layer.input is None]
    integers = [layer for layer in alone if (kind := kind_of(layer.weight)) and kind.integer]
    if any(layer.weight.bits != 4 or not blocks(layer.weight)[COLUMNS] for layer in integers):
        yield (
            Loads.NO,
            f"of integers without quantized inputs it reads 4 bits in groups; use {option('format', 'awq')}",
        )
    elif integers:
        yield Loads.PARTLY, "integers of 4 bits in groups are read by newer releases"
    yield Loads.UNCHECKED, "it has a loader for this layout, which did not run here"


@dataclass(frozen=True)
class Quark(Codec):
    """See the module and :class:`Codec`."""

    name = "quark"
    title = "the layouts of Quark"
    presets = MappingProxyType({
        "w4a16": Preset(weight="int4:g128" + _INT), "w4a16_asym": Preset(weight="uint4:g128:asym" + _INT),
        "w8a16": Preset(weight="int8:channel" + _INT),
        **{
            name: PRESETS[name]
            for name in ("fp8", "fp8_dynamic", "mxfp4", "mxfp4a16", "amdfp4", "amdfp4_g32")
        },
    })  # fmt: skip
    defaults = MappingProxyType({"scale": "input", "dialect": "torch"})
    parts = MappingProxyType({SCALE: True, ZEROS: True, **dict.fromkeys((*_MOVED, WEIGHT), False)})
    input_names = InputNames("input_scale", "input_zero_point", "input_scale", shape=())
    engines = rules({
        TRANSFORMERS: _transformers, **with_humming(_vllm),
        TENSORRT: always(Loads.NO, "it does not know this layout"),
        LLAMA_CPP: always(Loads.NO, "it reads GGUF, and its converter does not know this layout"),
    })  # fmt: skip
    methods = (QUANT_METHOD,)
    negative_scales = True

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        kind = kind_of(layer.weight)
        if kind is None:
            raise UnsupportedError(
                f"scheme {layer.weight} is not what Quark stores: int4 and int8 without, uint4 and uint8 "
                "with zero points, in groups, by channel or, of 8 bits, with one scale; float8_e4m3fn by "
                f"channel or with one scale; mxfp4 and amdfp4; use {', '.join(self.presets)}"
            )
        if layer.input is not None and input_spec(layer.input) is None:
            raise UnsupportedError(
                f"input {layer.input} has no place in Quark; use float8_e4m3fn:token, float8_e4m3fn:tensor, "
                f"float4_e2m1fn:g{MX}:scale=even, or the input of amdfp4"
            )
        return str(kind)

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`."""
        problem, kind = super().refusal(layer, shape), _kind(layer)
        if problem is None and kind.words:
            rows, columns = shape
            uneven = rows if kind.transposed else rows if rows % _WORD_FIELDS else columns
            if uneven % _WORD_FIELDS:
                return f"has {uneven} codes in a line, but a word holds {_WORD_FIELDS}"
        return problem

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """See :class:`Codec`."""
        kind = _kind(layer)
        if kind.words and (axis == ROWS or not kind.group):
            return [(_WORD_FIELDS, "the codes that fill whole words")]
        return super().multiples(layer, axis)

    def axis(self, layer: LayerScheme) -> int:
        """See :class:`Codec`: groups of integers are cut along the inputs."""
        return COLUMNS if _kind(layer).transposed else ROWS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """See :class:`Codec`: whole groups and bytes, or whole words of zero points."""
        kind = _kind(layer)
        if kind.transposed:
            return math.lcm(kind.group, 2)
        return _WORD_FIELDS if kind.words else 1

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        kind, (rows, columns) = _kind(layer), shape
        stored, group, fields = CODE_DTYPES[kind.dtype], kind.group, _WORD_FIELDS if kind.words else 1
        own = FILE_DTYPES[_scale_dtype(layer.weight, kind, dtype)]
        if kind.transposed:
            line, across = rows // fields, (1, fields)
            return (
                TensorSpec(suffix=WEIGHT, dtype=stored, shape=(columns, line), axis=COLUMNS, across=across),
                TensorSpec(suffix=SCALE, dtype=own, shape=(columns // group, rows), axis=COLUMNS, per=group),
                TensorSpec(
                    suffix=ZEROS, dtype=stored, shape=(columns // group, line), axis=COLUMNS, per=group,
                    across=across,
                ),
            )  # fmt: skip
        if kind.dtype == "fp4":
            grid = layer.weight.granularity.grid(shape)
            codes = TensorSpec(suffix=WEIGHT, dtype=stored, shape=(rows, columns // 2))
            return codes, TensorSpec(suffix=SCALE, dtype="U8", shape=grid)
        whole = kind.qscheme == "per_tensor"
        cut, axis = (() if whole else (rows,)), None if whole else ROWS
        found = (
            TensorSpec(suffix=WEIGHT, dtype=stored, shape=(rows, columns // fields)),
            TensorSpec(suffix=SCALE, dtype=own, shape=cut, axis=axis),
        )
        if not kind.integer:
            return found
        count = () if whole else (rows // fields,)
        return (*found, TensorSpec(suffix=ZEROS, dtype=stored, shape=count, axis=axis, per=fields))

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        kind, scale = _kind(layer), q.scales[0]
        if kind.dtype == "fp4":
            return {WEIGHT: q.data, SCALE: scale.view(torch.uint8)}
        if not kind.integer:
            found = {WEIGHT: q.data.view(torch.float8_e4m3fn)}
            return found if kind.qscheme == "per_tensor" else found | {SCALE: scale.reshape(-1)}
        zeros = _zeros(q.params)
        if kind.transposed and kind.words:
            codes = words_of_rows(q.data, q.scheme, (q.shape[0], q.shape[1]), INTERLEAVED)
            return {WEIGHT: codes, ZEROS: interleaved_words(zeros.t()), SCALE: scale.t().contiguous()}
        fields = packing.unpack(q.data, layer.weight.bits, q.shape[1])
        if kind.transposed:
            found = {WEIGHT: _stored(kind, fields.t()), ZEROS: _stored(kind, zeros.t())}
            return found | {SCALE: scale.t().contiguous()}
        found = {WEIGHT: _stored(kind, fields)}
        if kind.qscheme != "per_tensor":
            found |= {SCALE: scale.reshape(-1), ZEROS: _stored(kind, zeros.reshape(1, -1)).reshape(-1)}
        return found

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        kind = _kind(layer)
        if kind.qscheme != "per_tensor":
            return {}
        scale = params.scales[0].reshape(()).to(_scale_dtype(layer.weight, kind, params.dtype))
        return {SCALE: scale} | ({ZEROS: _stored(kind, _zeros(params)).reshape(())} if kind.integer else {})

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`."""
        kind, weight = _kind(layer), layer.weight
        scale, grid = tensors[SCALE], weight.granularity.grid(shape)
        if kind.dtype == "fp4":
            scale = scale.view(storage_dtype(weight.scales[0].format_for(format_of(dtype))))
        else:
            scale = scale.to(storage_dtype(weight.scales[0].format_for(format_of(dtype))))
        zeros = None
        if weight.zero_point is not ZeroPoint.NONE:
            fields = _fields(kind, tensors[ZEROS].reshape(1, -1) if not kind.transposed else tensors[ZEROS])
            zeros = (fields.t() if kind.transposed else fields).reshape(grid).to(zero_point_dtype(weight))
        codes = tensors[WEIGHT]
        if kind.transposed and kind.words:
            codes = rows_of_words(codes, weight, (shape[0], shape[1]), INTERLEAVED)
        elif kind.integer:
            fields = _fields(kind, codes)
            codes = packing.pack((fields.t() if kind.transposed else fields).contiguous(), weight.bits)
        params = QuantizationParams(
            scheme=weight, shape=shape, scales=((scale.t() if kind.transposed else scale).reshape(grid),),
            zero_point=zeros, dtype=dtype,
        )  # fmt: skip
        return QuantizedTensor(data=codes.view(torch.uint8), params=params, shape=shape, dtype=dtype)

    def damage(self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """See :class:`Codec`; zero points that a symmetric scheme has not."""
        odd = _kind(layer).symmetric and ZEROS in tensors and bool(tensors[ZEROS].any())
        return f"{ZEROS} is not 0, but {layer.layout} is symmetric" if odd else None

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """See :class:`Codec`; codes without scales are a weight, too."""
        found = super().part_of(name, dtype)
        sure = found is not None and found[1] == WEIGHT and dtype in CODE_DTYPES.values()
        return found if not sure or found is None else (found[0], WEIGHT, True)

    def read(self, listing: Listing) -> QuarkReader:
        """See :class:`Codec`."""
        return QuarkReader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        everywhere = {
            "weight": weight_spec(_kind(layer)), "bias": None, "output_tensors": None, "target_device": None,
            "input_tensors": None if layer.input is None else input_spec(layer.input),
        }  # fmt: skip
        return Documents(section={
            "quant_method": QUANT_METHOD, "quant_mode": "eager_mode", "version": VERSION,
            "global_quant_config": everywhere, "layer_quant_config": {}, "layer_type_quant_config": {},
            "kv_cache_quant_config": {}, "exclude": contents.left_out, "algo_config": None,
            "softmax_quant_spec": None, "export": {
                "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": _ORDERED,
                "weight_format": "real_quantized", "weight_merge_groups": None,
            },
        })  # fmt: skip


def _kind(layer: LayerScheme) -> QuarkKind:
    kind = kind_of(layer.weight)
    assert kind is not None
    return kind


def _scale_dtype(weight: Scheme, kind: QuarkKind, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scales are stored."""
    if kind.integer and kind.qscheme == "per_tensor":
        return torch.float32
    return storage_dtype(weight.scales[0].format_for(format_of(dtype)))


def _zeros(params: QuantizationParams) -> torch.Tensor:
    """Return the zero point of each block, 0 in symmetric schemes."""
    found = params.zero_point
    return torch.zeros_like(params.scales[0], dtype=torch.uint8) if found is None else found.to(torch.uint8)


def _stored(kind: QuarkKind, fields: torch.Tensor) -> torch.Tensor:
    """Return rows of unsigned fields as their tensor has them."""
    if kind.words:
        return interleaved_words(fields)
    return fields.contiguous().view(TORCH_DTYPES[CODE_DTYPES[kind.dtype]])


def _fields(kind: QuarkKind, lines: torch.Tensor) -> torch.Tensor:
    """Return the fields of rows of a tensor; the inverse of :func:`_stored`."""
    return interleaved_fields(lines) if kind.words else lines.view(torch.uint8)


CODEC = Quark()
