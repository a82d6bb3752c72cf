"""Safetensors files of torchao and transformers: tensors, with JSON metadata.

For the weight ``X.weight`` of shape (N, K) and groups of g inputs (all little-endian, rows one after the
other; S is the dtype of the model):

    Int8Tensor                 X._weight_qdata I8 [N, K], X._weight_scale F32 [N, 1],
                               X._weight_zero_point I8 [N, 1], zeros
    Float8Tensor               X._weight_qdata F8_E4M3 [N, K], X._weight_scale F32 [N, 1]
    IntxUnpackedToInt8Tensor   X._weight_qdata I8 [N, K], of 2 to 8 bits each, X._weight_scale S [N, K / g],
                               X._weight_zero_point I8 [N, K / g]
    Int4Tensor, MXTensor, NVFP4Tensor: see torchao_packed.py

The metadata of a file has ``X.weight``: ``{"_type": "Int8Tensor", "_data": {"block_size": [1, K], "dtype":
{"_type": "torch.dtype", "_data": "bfloat16"}, ...}, "_tensor_data_names": [...]}``, ``{"_type": "Tensor"}``
for each tensor that is none of these, and ``tensor_names``, a list of all. The configuration says
``{"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", ...}},
"modules_to_not_convert": [...]}``.

Source: torchao 0.18 (prototype/safetensors; quantization/quantize_/workflows) and transformers 5.23
(quantizers/quantizer_torchao.py). This module opens no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..formats import IntFormat, get_format
from ..formats.torch_dtypes import storage_dtype
from ..recipes import Activation
from ..schemes import Preset, Scheme, ZeroPoint
from . import torchao_packed as packed
from .block_extents import blocks
from .containers.protocol import Metadata
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES, torch_name
from .engines import Facts, Loads, Problem, always, fused_alike, in_turn, linear_alone, loader_not_run, rules
from .model_format import ModelFiles, ModelFormat
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, float_scales, matrix, names_in, needed, record_of
from .tensor_fields import ZERO_POINT, CodeField, Field, LevelField, Tensors
from .torchao_json import FLOAT8, INT8, INTX, config_of, json_of
from .torchao_packed import CODES, INT4, MX, NVFP4, SCALE, TENSOR_SCALE, ZEROS

QUANT_METHOD = "torchao"
_INT8, _FLOAT8 = "int8:channel:scale=input:dialect=torch", "float8_e4m3fn:channel:scale=input"
_OTHERS = tuple(
    f"_weight_{name}"
    for name in ("scale_and_zero", "act_pre_scale", "act_quant_scale", "act_per_tensor_scale")
)
"""Tensors that are not read, of its other classes and of inputs."""
_NVFP4_WEIGHT = "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor"
_MXFP8, _MXFP4 = (f"{element}:g32:scale=rceil" for element in ("float8_e4m3fn", "float4_e2m1fn"))
_TOKEN = Activation.of("int8:token")
_SCALES, _NAMES = ("F32", "BF16", "F16"), "tensor_names"


def class_of(weight: Scheme) -> str | None:
    """Return torchao's class for weights of a scheme, or None.

    >>> class_of(Scheme.parse("int8:channel")), class_of(Scheme.parse("int4:g32:asym"))
    ('Int8Tensor', 'IntxUnpackedToInt8Tensor')
    """
    found = packed.class_of(weight)
    if found is not None:
        return found
    if (
        weight.beyond_factors is not None
        or len(weight.scales) != 1
        or weight.offsets
        or blocks(weight)[0] != 1
    ):
        return None
    element, (level,), group = weight.element, weight.scales, blocks(weight)[1]
    stored = None if level.format is None else FILE_DTYPES.get(storage_dtype(level.format))
    if level.rule.power_of_two or (level.format is not None and stored not in _SCALES):
        return None
    affine = weight.zero_point is not ZeroPoint.NONE
    if element == get_format("float8_e4m3fn"):
        return FLOAT8 if not (group or affine) and stored in (None, "F32") else None
    if not isinstance(element, IntFormat) or not element.signed or element.fraction_bits or element.bits > 8:
        return None
    if weight.zero_point is ZeroPoint.REAL:
        return None
    whole = element.bits == 8 and not (group or affine) and stored in (None, "F32")
    return INT8 if whole else INTX


def _member(table: Mapping[str, Any], key: str) -> Any:
    """Return a wrapped value of the JSON, such as a dtype."""
    found = table.get(key)
    return found.get("_data") if isinstance(found, dict) else found


def _unwrapped(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of a table, unwrapped."""
    return {key: _member(table, key) for key in table}


class TorchaoReader(Reader):
    """Reader of a torchao checkpoint, described by its metadata."""

    def __init__(self, listing: Listing, codec: Torchao) -> None:
        self._metadata, self._codec = listing.metadata, codec
        if _NAMES not in self._metadata:
            raise UnsupportedError(
                "its files have no metadata of torchao, as those of torch.save and of releases before 0.15; "
                "pass the original checkpoint"
            )
        self.ignore = names_in(listing.quantization, "modules_to_not_convert")
        kind = listing.quantization.get("quant_type")
        given = kind.get("default") if isinstance(kind, dict) else None
        data = given.get("_data") if isinstance(given, dict) else None
        self._said = (str(given.get("_type")), data) if isinstance(given, dict) else ("", None)
        self._symmetric = _member(data, "mapping_type") != "ASYMMETRIC" if isinstance(data, dict) else False

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        kind, data = self._described(key)
        needed(tensors, CODES, kind), needed(tensors, SCALE, kind)
        shape = matrix(tensors, CODES)
        if kind in packed.CLASSES:
            return self._packed(key, tensors, (kind, data))
        own = torch_name(float_scales(tensors, SCALE, known=_SCALES))
        weight = Scheme.parse(f"{_text(kind, data, shape, symmetric=self._symmetric)}:scale={own}")
        if class_of(weight) != kind and (class_of(weight), kind) != (INT8, INTX):
            raise UnsupportedError(f"{kind} of {weight} is not read here; pass the original checkpoint")
        named = _member(data, "dtype")
        if not isinstance(named, str) or named not in _DTYPES:
            raise CheckpointError(
                f"dtype in its metadata is {named!r:.40}, but must be one of {', '.join(_DTYPES)}"
            )
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight, input=_input(data))
        return record_of(layer, key, tensors, Known(shape, _DTYPES[named]))

    def _packed(
        self, key: str, tensors: Mapping[str, Entry], described: tuple[str, Mapping[str, Any]]
    ) -> Record:
        """Return the record of a weight whose codes or scales are packed."""
        kind, data = described
        plain, given = _unwrapped(data), data.get("act_quant_kwargs")
        inputs = given.get("_data") if isinstance(given, dict) else None
        inputs = _unwrapped(inputs) if isinstance(inputs, dict) else {}
        mode = inputs.get("scaling_mode", _member(self._said[1] or {}, "scaling_mode"))
        weight = packed.scheme_of(kind, plain, tensor=TENSOR_SCALE in tensors, mode=mode)
        if isinstance(weight, str):
            raise UnsupportedError(f"{kind} with {weight} is not read; pass the original checkpoint")
        took = packed.input_of(kind, weight, inputs) if given is not None and kind != INT4 else None
        if took is None and given is not None:
            raise UnsupportedError(f"quantized inputs {given!r:.60} in its metadata are not read")
        named = tensors[SCALE].dtype if kind == INT4 else plain.get("orig_dtype")
        named = str(TORCH_DTYPES.get(str(named), named)).removeprefix("torch.")
        if named not in _DTYPES:
            raise CheckpointError(f"its dtype is {named:.40}, but must be one of {', '.join(_DTYPES)}")
        codes = tensors[CODES].shape
        shape = (codes[0], codes[1] * (1 if weight.bits == 8 else 2))
        if kind == INT4 and plain.get("shape") not in (None, list(shape)):
            raise CheckpointError(
                f"shape in its metadata is {plain.get('shape')!r:.40}, but its codes are of {list(shape)}"
            )
        swizzle = kind != INT4 and plain.get("is_swizzled_scales") is True
        codec = self._codec if swizzle or kind == INT4 else replace(self._codec, swizzle=False)
        layer = LayerScheme(codec=codec, name=str(weight), weight=weight, input=took)
        return record_of(layer, key, tensors, Known(shape, _DTYPES[named]))

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        """See :class:`Reader`: the default, from which own entries may differ."""
        kind, data = self._said
        classes = next((found for name, found in _CLASSES.items() if kind.startswith(name)), ())
        if classes and layer.layout not in classes:
            return f"the configuration has {kind[:40]!r}, but its tensors are those of {layer.layout}"
        if layer.layout != INTX or not isinstance(data, dict):
            return None
        bits, group = _member(data, "weight_dtype"), blocks(layer.weight)[1]
        if bits not in (None, f"int{layer.weight.bits}"):
            own = layer.weight.bits
            return f"weight_dtype of the configuration is {bits!r:.40}, but its codes have {own} bits"
        cut = _member(data, "granularity")
        size = cut.get("group_size") if isinstance(cut, dict) else None
        if group and size not in (None, group):
            return f"group_size of the configuration is {size!r:.40}, but its scales are of {group} inputs"
        return None

    def _described(self, module: str) -> tuple[str, Mapping[str, Any]]:
        """Return the class and metadata of a weight."""
        try:
            found = json.loads(self._metadata[f"{module}.weight"])
        except (KeyError, ValueError, RecursionError) as error:
            raise CheckpointError("the metadata does not describe it; the file is damaged") from error
        kind = found.get("_type") if isinstance(found, dict) else None
        data = found.get("_data") if isinstance(found, dict) else None
        if not isinstance(data, dict):
            raise CheckpointError("the metadata does not describe it; the file is damaged")
        known = (INT8, FLOAT8, INTX, *packed.CLASSES)
        if kind not in known:
            raise UnsupportedError(
                f"weights of class {kind!r:.40} are not read; known are {', '.join(known)}"
            )
        return str(kind), data


_CLASSES = MappingProxyType(
    {
        **dict.fromkeys(("IntxWeightOnly", "Int8DynamicActivationIntxWeight"), (INTX, INT8)),
        **dict.fromkeys(("Int8WeightOnly", "Int8DynamicActivationInt8Weight"), (INT8,)),
        **dict.fromkeys(("Float8WeightOnly", "Float8DynamicActivationFloat8Weight"), (FLOAT8,)),
        "MXDynamicActivation": (MX,),
        "NVFP4": (NVFP4,),
        "Int4WeightOnly": (INT4,),
    }
)
"""Prefixes of configuration names, and the tensor classes that they give."""
_DTYPES = MappingProxyType(
    {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
)


def _text(kind: str, data: Mapping[str, Any], shape: tuple[int, int], *, symmetric: bool) -> str:
    """Return the scheme text in a weight's metadata, without scales."""
    block = data.get("block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or block[0] != 1
        or type(block[1]) is not int
        or block[1] < 1
    ):
        raise UnsupportedError(f"block_size {block!r:.40} in its metadata is not read; known is [1, inputs]")
    cut = "channel" if block[1] == shape[1] else f"g{block[1]}"
    if kind == FLOAT8:
        return f"float8_e4m3fn:{cut}"
    if kind == INT8:
        return f"int8:{cut}:dialect=torch"
    bits = _member(data, "target_dtype")
    if bits not in [f"int{n}" for n in range(2, 9)]:
        raise UnsupportedError(
            f"target_dtype {bits!r:.40} in its metadata is not read; known are int2 to int8"
        )
    # Quotients are rounded to the dtype of the weight, so errors are larger than in float32.
    return f"{bits}:{cut}{'' if symmetric else ':asym'}:dialect=torchao"


def _input(data: Mapping[str, Any]) -> Activation | None:
    """Return how inputs are quantized."""
    given = data.get("act_quant_kwargs") or data.get("activation_quantization")
    if given is None:
        return None
    wanted = given.get("_data") if isinstance(given, dict) else None
    if isinstance(wanted, dict) and given.get("_type") == "QuantizeTensorToInt8Kwargs":
        granularity, symmetric = wanted.get("granularity"), _member(wanted, "mapping_type") == "SYMMETRIC"
        if isinstance(granularity, dict) and granularity.get("_type") == "PerRow" and symmetric:
            return _TOKEN
    raise UnsupportedError(
        f"quantized inputs {given!r:.60} in its metadata are not read; known is int8 by token"
    )


_INSTALLED = "with torchao 0.18 installed"


def _diffusers(facts: Facts) -> Iterator[Problem]:
    """Yield the verdict of diffusers 0.42.1: int8 weights were tried."""
    if any(layer.weight.element_name != "int8" or layer.input is not None for layer in facts.layers):
        yield from loader_not_run(facts)
    yield Loads.PARTLY, _INSTALLED


class TorchaoFormat(ModelFormat):
    """Metadata of torchao: the JSON of each tensor, and all names."""

    def metadata(self, model: ModelFiles) -> Metadata:
        found = {tensor.name: json_of(tensor) for tensor in model.tensors}
        return {**super().metadata(model), "format": "pt", **found, _NAMES: json.dumps(list(found))}


@dataclass(frozen=True)
class Torchao(Codec):
    """See the module and :class:`Codec`.

    swizzle: whether scales of MXTensor and NVFP4Tensor lie as tensor cores read them, as its own
    configurations have it.
    """

    swizzle: bool = True

    name = "torchao"
    title = "the safetensors layout of torchao"
    presets = MappingProxyType(
        {
            "int8wo": Preset(weight=_INT8),
            "int8dq": Preset(weight=_INT8, input="int8:token"),
            "float8wo": Preset(weight=_FLOAT8),
            "int4wo": Preset(weight=str(packed.int4(128))),
            "mxfp8": Preset(weight=_MXFP8, input=_MXFP8),
            "mxfp4": Preset(weight=_MXFP4, input=_MXFP4),
            "nvfp4a16": Preset(weight=_NVFP4_WEIGHT),
        }
    )
    defaults = MappingProxyType({"scale": "input", "dialect": "torch"})
    parts = MappingProxyType(dict.fromkeys((CODES, SCALE, ZEROS, TENSOR_SCALE, *_OTHERS), True))
    engines = rules(
        transformers=linear_alone(Loads.PARTLY, _INSTALLED),
        vllm=in_turn(fused_alike, loader_not_run),
        tensorrt=always(Loads.NO, "it does not know this layout"),
        diffusers=_diffusers,
    )
    methods = (QUANT_METHOD,)
    reader = TorchaoReader
    negative_scales = True
    model_format = TorchaoFormat()

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the class."""
        found = class_of(layer.weight)
        if found is None:
            raise UnsupportedError(
                f"scheme {layer.weight} is not what torchao's files hold here; use float8_e4m3fn:channel, "
                "int2 to int8 in groups or by channel, int4wo, mxfp8, mxfp4 or nvfp4a16"
            )
        if layer.input is not None and (found, layer.input) != (INT8, _TOKEN) and found not in (MX, NVFP4):
            raise UnsupportedError(
                f"input {layer.input} has no place in {found}; use int8:channel with int8:token"
            )
        return found

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        if layer.layout in packed.CLASSES:
            return packed.fields(layer, swizzle=self.swizzle)
        scale = LevelField(SCALE, dtype="" if layer.layout == INTX else "F32")
        if layer.layout == FLOAT8:
            return CodeField(CODES, "F8_E4M3"), scale
        return CodeField(CODES, "I8"), scale, LevelField(ZEROS, ZERO_POINT, "I8")

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`; two codes of 4 bits fill a byte."""
        problem = super().refusal(layer, shape)
        if problem is None and layer.layout in packed.CLASSES and shape[1] % 2:
            return f"last axis {shape[1]} is odd, and two codes fill a byte"
        return problem

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        """See :class:`Codec`; wide codes, and zero points in symmetric schemes."""
        if layer.layout == FLOAT8 or layer.layout in packed.CLASSES:
            return packed.damage(layer, tensors)
        half = 1 << (layer.weight.bits - 1)
        if bool(((tensors[CODES] < -half) | (tensors[CODES] > half - 1)).any()):
            return f"{CODES} has codes of more than {layer.weight.bits} bits"
        affine = layer.weight.zero_point is not ZeroPoint.NONE
        return (
            None if affine or not tensors[ZEROS].any() else f"{ZEROS} is not 0, but the scheme is symmetric"
        )

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes."""
        layer = contents.only_layer(self.title)
        if layer.layout == MX and layer.input is None:
            raise UnsupportedError(
                f"{layer} leaves inputs as they are, and torchao multiplies MX weights by inputs quantized "
                "alike alone; use mxfp8 or mxfp4"
            )
        section = {
            "quant_method": QUANT_METHOD,
            "quant_type": {"default": config_of(layer)},
            "modules_to_not_convert": contents.left_out,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }
        return Documents(section=section)


CODEC = Torchao()
