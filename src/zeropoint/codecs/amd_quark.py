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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError, option
from ..patterns import name_patterns
from ..recipes import Activation
from ..schemes import PRESETS, Preset, Scheme
from .block_extents import blocks, no_matrix, partial_group
from .containers.safetensors import torch_name
from .data_scales import InputNames
from .engines import Facts, Loads, Problem, always, fused_alike, linear_alone, loader_not_run, rules
from .protocol import Codec, Contents, Documents, LayerScheme
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
from .records import (
    Entry,
    Known,
    Listing,
    Reader,
    Record,
    float_scales,
    matrix,
    model_dtype,
    needed,
    record_of,
)
from .tensor_fields import (
    COLUMNS,
    IN_ORDER,
    ROWS,
    ZERO_POINT,
    CodeField,
    Field,
    InterleavedZeros,
    LevelField,
    ScalarField,
    Tensors,
)
from .words import INTERLEAVED

QUANT_METHOD, VERSION = "quark", "0.13"
WEIGHT, SCALE, ZEROS = "weight", "weight_scale", "weight_zero_point"
_WORD_FIELDS, _ORDERED = 8, "reorder"
_MOVED = ("input_rotation", "input_prescale")
"""Tensors of layers whose inputs are transformed first, so that their weights differ from the model's."""
_SHARED_PRESETS = ("fp8", "fp8_dynamic", "mxfp4", "mxfp4a16", "amdfp4", "amdfp4_g32")
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
        needed(tensors, WEIGHT, str(kind))
        scale = needed(tensors, SCALE, str(kind)).dtype
        if kind.dtype != "fp4":
            float_scales(tensors, SCALE, known=SCALE_DTYPES)
        lines, width = matrix(tensors, WEIGHT)
        weight = Scheme.parse(text_of(kind, torch_name(scale)))
        layer = LayerScheme(
            codec=self._codec, name=str(weight), weight=weight, input=input_in(entry.get("input_tensors"))
        )
        width *= _WORD_FIELDS if kind.words else 2 if kind.dtype == "fp4" else 1
        shape = (width, lines) if kind.transposed else (lines, width)
        own = known.dtype if known is not None else model_dtype(self._listing.config, torch.bfloat16)
        return record_of(layer, key, tensors, Known(shape, own), (ZEROS,) * kind.symmetric)

    def kept(self) -> Callable[[str], bool]:
        return lambda _: False

    def expects(self, module: str) -> bool:
        return not any(pattern.matches(module) for pattern in self._kept)

    def input_of(self, module: str) -> Activation | None:
        return input_in(self._entry(module).get("input_tensors"))

    def _entry(self, module: str) -> Mapping[str, Any]:
        own = (entry for pattern, entry in self._layers if pattern.matches(module))
        found = next(own, self._everywhere)
        if not isinstance(found, dict):
            raise CheckpointError(f"its entry of the configuration is {found!r:.40}, but must be an object")
        return found


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


_transformers = linear_alone(Loads.PARTLY, "with amd-quark installed, which decodes weights")


@dataclass(frozen=True)
class Quark(Codec):
    """See the module and :class:`Codec`."""

    name = "quark"
    title = "the layout of Quark"
    presets = MappingProxyType(
        {
            "w4a16": Preset(weight="int4:g128" + _INT),
            "w4a16_asym": Preset(weight="uint4:g128:asym" + _INT),
            "w8a16": Preset(weight="int8:channel" + _INT),
        }
        | {name: PRESETS[name] for name in _SHARED_PRESETS}
    )
    defaults = MappingProxyType({"scale": "input", "dialect": "torch"})
    parts = MappingProxyType({SCALE: True, ZEROS: True, **dict.fromkeys((*_MOVED, WEIGHT), False)})
    input_names = InputNames("input_scale", "input_zero_point", "input_scale", shape=())
    engines = rules(
        transformers=_transformers,
        vllm=_vllm,
        humming=loader_not_run,
        tensorrt=always(Loads.NO, "it does not know this layout"),
    )
    methods = (QUANT_METHOD,)
    reader = QuarkReader
    code_dtypes = tuple(CODE_DTYPES.values())
    negative_scales = True

    def layout(self, layer: LayerScheme) -> str:
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
        problem, kind = no_matrix(shape) or partial_group(layer.weight, shape), _kind(layer)
        if problem is None and kind.words:
            rows, columns = shape
            uneven = rows if kind.transposed else rows if rows % _WORD_FIELDS else columns
            if uneven % _WORD_FIELDS:
                return f"has {uneven} codes in a line, but a word holds {_WORD_FIELDS}"
        return problem

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        """See :class:`Codec`: groups of integers are cut along the inputs."""
        kind = _kind(layer)
        stored, order = CODE_DTYPES[kind.dtype], INTERLEAVED if kind.words else IN_ORDER
        codes = CodeField(WEIGHT, stored, COLUMNS if kind.transposed else ROWS, order)
        if kind.dtype == "fp4":
            return codes, LevelField(SCALE, dtype="U8")
        if kind.qscheme == "per_tensor":
            scale: Field = ScalarField(SCALE, dtype="F32" if kind.integer else "")
            return (codes, scale, ScalarField(ZEROS, ZERO_POINT, stored)) if kind.integer else (codes, scale)
        scale = LevelField(SCALE, along=codes.along, trailing=None if kind.transposed else ())
        if kind.words:
            return codes, scale, InterleavedZeros(ZEROS, codes.along)
        zeros = LevelField(ZEROS, ZERO_POINT, stored, codes.along, scale.trailing)
        return (codes, scale, zeros) if kind.integer else (codes, scale)

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        words = _kind(layer).words and not _kind(layer).group and axis == COLUMNS
        return super().multiples(layer, axis) + words * [(_WORD_FIELDS, "the codes that fill whole words")]

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        """See :class:`Codec`; zero points that a symmetric scheme has not."""
        odd = _kind(layer).symmetric and ZEROS in tensors and bool(tensors[ZEROS].any())
        return f"{ZEROS} is not 0, but {layer.layout} is symmetric" if odd else None

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        everywhere = {
            "weight": weight_spec(_kind(layer)),
            **dict.fromkeys(("bias", "output_tensors", "target_device")),
            "input_tensors": None if layer.input is None else input_spec(layer.input),
        }
        export = {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": _ORDERED,
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        }
        section = {
            "quant_method": QUANT_METHOD,
            "quant_mode": "eager_mode",
            "version": VERSION,
            "global_quant_config": everywhere,
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "kv_cache_quant_config": {},
            "exclude": contents.left_out,
            "algo_config": None,
            "softmax_quant_spec": None,
            "export": export,
        }
        return Documents(section=section)


def _kind(layer: LayerScheme) -> QuarkKind:
    kind = kind_of(layer.weight)
    assert kind is not None
    return kind


CODEC = Quark()
