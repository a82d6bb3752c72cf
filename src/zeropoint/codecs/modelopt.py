"""NVIDIA ModelOpt layouts for TensorRT-LLM, vLLM and SGLang.

For the weight ``X.weight`` of shape (N, K) (all little-endian, rows one after the other), by ``quant_algo``:

    NVFP4, W4A16_NVFP4
        X.weight           U8 [N, K / 2]: even element in the low nibble
        X.weight_scale     F8_E4M3 [N, K / 16]
        X.weight_scale_2   F32 []: ``amax / (6 * 448)``; a value is ``code * weight_scale * weight_scale_2``
    FP8
        X.weight           F8_E4M3 [N, K]
        X.weight_scale     F32 []: ``amax / 448``
    FP8_PER_CHANNEL_PER_TOKEN
        X.weight           F8_E4M3 [N, K]
        X.weight_scale     F32 [N]
    MXFP8
        X.weight           F8_E4M3 [N, K]
        X.weight_scale     U8 [N, K / 32]: exponent + 127
    NVFP4 and FP8, for their inputs
        X.input_scale      F32 []: the largest magnitude seen, over ``6 * 448`` or 448
    keys and values of the attention layer A, in float8
        A.k_proj.k_scale   F32 []: the largest magnitude seen, after rotary embeddings, over 448
        A.v_proj.v_scale   F32 []: likewise of values

A number may be stored as a list of one. Under MIXED_PRECISION, each layer has one of these. The configuration
says ``{"quant_method": "modelopt", "quant_algo": ..., "ignore": [...], "quantized_layers": {...}}`` in
config.json and ``{"quantization": {"quant_algo": ..., "exclude_modules": [...], ...}}`` in
hf_quant_config.json, which alone is enough.

compressed-tensors has NVFP4 with ``weight_global_scale = 1 / weight_scale_2`` and the same codes and block
scales: decoded values are equal where that reciprocal is exact, as of powers of two, and a rounding of the
scale apart elsewhere.

Source: nvidia-modelopt 0.47 (torch/export/quant_utils.py, unified_export_hf.py, convert_hf_config.py;
torch/quantization/qtensor) and vLLM, model_executor/layers/quantization/modelopt.py. This module opens no
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..formats import Overflow
from ..patterns import name_patterns
from ..recipes import Activation
from ..schemes import Rounding, Scheme, TensorScale, get_dialect
from ..schemes.scale_rules import LINEAR, LINEAR_UP, RCEIL
from . import engines as known_engines
from .block_extents import blocks
from .data_scales import CacheScales, InputNames
from .engines import TENSORRT, VLLM, Facts, Loads, Problem, always, rules
from .modelopt_config import ALGORITHMS, DIALECT, MIXED, PRESETS, settings
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, matrix, model_dtype, record_of
from .tensor_fields import CodeField, Field, LevelField, ScalarField, Tensors

QUANT_METHOD = "modelopt"
FILE = "hf_quant_config.json"
VERSION = "0.47.0"
"""The ModelOpt whose form of the configuration is written, under its name: loaders ask for it."""
WEIGHT, SCALE, SCALE_2, INPUT_SCALE = "weight", "weight_scale", "weight_scale_2", "input_scale"
_SMOOTHED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
"""Tensors of layers whose weights differ from the model's: AWQ moved a factor to the inputs, SVDQuant a
part of low rank out of the weight."""
_FUSED = ("_weight_scale", "_weight_scale_2")
_FLOAT8 = "F8_E4M3"
_NVFP4 = (CodeField(WEIGHT, "U8"), LevelField(SCALE), ScalarField(SCALE_2, level=1))
_FIELDS: Mapping[str, tuple[Field, ...]] = MappingProxyType(
    {
        "NVFP4": _NVFP4,
        "W4A16_NVFP4": _NVFP4,
        "FP8": (CodeField(WEIGHT, _FLOAT8), ScalarField(SCALE)),
        "FP8_PER_CHANNEL_PER_TOKEN": (CodeField(WEIGHT, _FLOAT8), LevelField(SCALE, trailing=())),
        "MXFP8": (CodeField(WEIGHT, _FLOAT8), LevelField(SCALE, dtype="U8")),
    }
)
"""``quant_algo`` to the tensors of a layer."""


def _plain(weight: Scheme) -> Scheme:
    """Return the scheme without roundings, dialect and power-of-two rule, unstored."""
    first, *rest = weight.start.scales
    rule = RCEIL if first.rule.power_of_two else LINEAR if first.rule == LINEAR_UP else first.rule
    scales, dialect = (replace(first, rule=rule), *rest), get_dialect(DIALECT)
    return replace(weight, scales=scales, rounding=Rounding(), overflow=Overflow.SATURATE, dialect=dialect)


def algorithm_of(weight: Scheme, given: Activation | None) -> str:
    """Return the ``quant_algo`` of layers with this weight and input.

    >>> algorithm_of(Scheme.parse(PRESETS["nvfp4a16"].weight), None)
    'W4A16_NVFP4'
    """
    fits = bool(weight.scales) and weight.dialect.tensor_scale is TensorScale.DIRECT
    weights = [
        name for name, known in ALGORITHMS.items() if fits and _plain(weight) == Scheme.parse(known.weight)
    ]
    if not weights:
        raise UnsupportedError(
            f"scheme {weight} is not what ModelOpt stores, whose tensor scales are factors; use "
            f"{', '.join(PRESETS)}"
        )
    for name in weights:
        if _input_of(name) == given:
            return name
    wanted = " or ".join(str(_input_of(name) or "no input") for name in weights)
    raise UnsupportedError(f"input {given} does not go with weights in {weights[0]}; use {wanted}")


def _input_of(algorithm: str) -> Activation | None:
    """Return how the inputs of layers are quantized."""
    known = ALGORITHMS[algorithm]
    return None if known.input is None else Activation.of(known.input, dynamic=not known.static)


class ModelOptReader(Reader):
    """The layers of one checkpoint of ModelOpt."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing = listing
        self._codec = codec
        self._settings = settings(listing.quantization)
        other = listing.document(FILE)
        if other is not None:
            found, wanted = settings(other), self._settings
            if (found.algorithm, found.layers) != (wanted.algorithm, wanted.layers):
                ours, theirs = (
                    s.algorithm + (f" of {len(s.layers)} layers" if s.layers else "") for s in (wanted, found)
                )
                raise CheckpointError(
                    f"quantization_config says {ours}, but {FILE} {theirs}, or other layers, and engines "
                    "read one or the other; correct one of them"
                )
        self.ignore = self._settings.ignore
        self._names = frozenset(self.ignore)
        self._globs = name_patterns(name for name in self.ignore if set(name) & set("*?["))

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module, or the name of fused experts."""
        if any(part in tensors for part in _FUSED):
            raise UnsupportedError(
                "fused experts of ModelOpt are not read here; export them as a layer for each expert"
            )
        moved = next((part for part in _SMOOTHED if part in tensors), None)
        if moved is not None:
            raise UnsupportedError(
                f"{moved} is there, so that its weight is not that of the model, which is not read here; "
                "pass the original checkpoint"
            )
        if self._ignores(key):
            raise CheckpointError(
                "it is quantized, but the configuration ignores it, so loaders would not find it"
            )
        algorithm = self._settings.of(key)
        (rows, width), layer = matrix(tensors, WEIGHT, algorithm), _layer(self._codec, algorithm)
        shape = (rows, width * (8 // layer.weight.bits))
        dtype = known.dtype if known is not None else model_dtype(self._listing.config, torch.bfloat16)
        return record_of(layer, key, tensors, Known(shape, dtype))

    def kept(self) -> Callable[[str], bool]:
        return lambda _: False

    def expects(self, module: str) -> bool:
        mixed = self._settings.algorithm == MIXED
        return not self._ignores(module) and (not mixed or module in self._settings.layers)

    def named(self) -> Iterable[str]:
        return self._settings.layers

    def input_of(self, module: str) -> Activation | None:
        return _input_of(self._settings.of(module))

    def _ignores(self, module: str) -> bool:
        return module in self._names or any(glob.matches(module) for glob in self._globs)


def _layer(codec: Codec, algorithm: str) -> LayerScheme:
    weight = Scheme.parse(ALGORITHMS[algorithm].weight)
    return LayerScheme(codec=codec, name=str(weight), weight=weight, input=_input_of(algorithm))


_FLOAT4 = ("NVFP4", "W4A16_NVFP4")
_MIXABLE = (*_FLOAT4, "FP8")
"""Algorithms that vLLM reads in mixed checkpoints."""


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from known_engines.fused_alike(facts)
    if facts.nonlinear:
        yield Loads.NO, "quantized embeddings and routers are not read"
    odd = next((layer for layer in facts.layers if layer.layout not in _MIXABLE), None)
    if odd is not None and len(facts.layers) > 1:
        yield Loads.NO, f"{odd.layout} is read where all layers have it"
    newer = next((layer for layer in facts.layers if layer.layout not in ("NVFP4", "FP8")), None)
    if newer is not None or len(facts.layers) > 1:
        yield Loads.PARTLY, f"{newer.layout if newer else MIXED} is read by newer releases"


_tensorrt = known_engines.in_turn(
    known_engines.fused_alike,
    always(
        Loads.UNCHECKED, "its releases differ in which algorithms and models they read, and none ran here"
    ),
)


@dataclass(frozen=True)
class ModelOpt(Codec):
    """See the module and :class:`Codec`."""

    name = "modelopt"
    title = "the layouts of ModelOpt"
    presets = PRESETS
    defaults = MappingProxyType({"scale": "float32", "dialect": DIALECT})
    parts = MappingProxyType({SCALE: True, SCALE_2: True, **dict.fromkeys((WEIGHT, *_SMOOTHED), False)})
    code_dtypes = ("U8", _FLOAT8)
    reader = ModelOptReader
    input_names = InputNames(INPUT_SCALE, "input_zero_point", INPUT_SCALE, shape=())
    cache = CacheScales("k_proj.k_scale", "v_proj.v_scale")
    engines = rules(
        transformers=always(Loads.NO, "transformers 5.23 does not know this layout"),
        vllm=_vllm,
        humming=known_engines.loader_not_run,
        tensorrt=_tensorrt,
        llama_cpp=always(Loads.PARTLY, "newer releases of its converter read NVFP4"),
        diffusers=known_engines.loader_not_run,
    )
    methods = (QUANT_METHOD,)
    usual = (VLLM, TENSORRT)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the ``quant_algo``."""
        return algorithm_of(layer.weight, layer.input)

    def shares_scale(self, layer: LayerScheme) -> bool:
        """See :class:`Codec`; ModelOpt takes the largest of the layers, preprocess_linear_fusion."""
        return layer.layout in _MIXABLE

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        return _FIELDS[layer.layout]

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        """See :class:`Codec`; block scales have no sign for engines."""
        signed = layer.layout in _FLOAT4 and bool(torch.signbit(tensors[SCALE].float()).any())
        return "a scale is negative" if signed else None

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        found = super().part_of(name, dtype)
        fused = next((end for end in _FUSED if found is None and name.endswith(end)), None)
        return found if fused is None else (name.removesuffix(fused), fused, True)

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """See :class:`Codec`; hf_quant_config.json has a producer in place of a method."""
        producer = quantization.get("producer")
        named = isinstance(producer, dict) and producer.get("name") == QUANT_METHOD
        return super().claims(quantization) or (named and "quantization" in quantization)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for ambiguous names of kept modules."""
        contents.require_distinct(self.title)
        layers = {m.name: _entry(m.layer.layout) for m in contents.modules() if m.layer is not None}
        kinds = list({entry["quant_algo"]: entry for entry in layers.values()}.values())
        table: dict[str, Any] = {"quant_algo": MIXED, "kv_cache_quant_algo": None}
        if len(kinds) == 1:
            table |= {**kinds[0], "exclude_modules": sorted(contents.left_out)}
        else:
            table["quantized_layers"] = layers
        producer = {"name": QUANT_METHOD, "version": VERSION}
        return Documents(
            section=_section(table, producer), files={FILE: {"producer": producer, "quantization": table}}
        )

    def with_cache(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`Codec`; hf_quant_config.json has a word, config.json the scheme."""
        table = document.get("quantization")
        if isinstance(table, dict):
            return {**document, "quantization": {**table, "kv_cache_quant_algo": "FP8"}}
        return {**document, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}


def _entry(algorithm: str) -> dict[str, Any]:
    """Return the configuration of a layer."""
    group = blocks(Scheme.parse(ALGORITHMS[algorithm].weight))[1]
    return {"quant_algo": algorithm} | ({"group_size": group} if group else {})


def _section(table: Mapping[str, Any], producer: Mapping[str, str]) -> dict[str, Any]:
    """Return ``quantization_config`` for the contents of the other file: convert_hf_quant_config_format."""
    section: dict[str, Any] = {}
    layers: Mapping[str, Mapping[str, Any]] = table.get("quantized_layers", {})
    if layers:
        names: dict[str, list[str]] = {}
        for module, entry in layers.items():
            names.setdefault(entry["quant_algo"], []).append(module)
        groups = {
            f"group_{n}": _group(algorithm, sorted(modules))
            for n, (algorithm, modules) in enumerate(names.items())
        }
        section = {"config_groups": groups, "quantized_layers": layers}
    elif table["quant_algo"] in _MIXABLE:
        section["config_groups"] = {"group_0": _group(table["quant_algo"], ["Linear"])}
    ignore, algorithm = table.get("exclude_modules", []), table["quant_algo"]
    said = {"ignore": ignore, "quant_algo": algorithm, "producer": producer, "quant_method": QUANT_METHOD}
    return section | said


def _group(algorithm: str, targets: list[str]) -> dict[str, Any]:
    """Return a group of compressed-tensors, whose targets ModelOpt's loaders read."""
    weight = Scheme.parse(ALGORITHMS[algorithm].weight)
    group = blocks(weight)[1]
    arguments: dict[str, Any] = {"dynamic": False, "num_bits": weight.bits, "type": "float"}
    arguments |= {"group_size": group} if group else {}
    channel = {"strategy": "channel"} if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else {}
    inputs = {"input_activations": arguments} if ALGORITHMS[algorithm].input is not None else {}
    return {**inputs, "weights": {**arguments, **channel}, "targets": targets}


CODEC = ModelOpt()
