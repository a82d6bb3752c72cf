"""The layout of GPTQ, which GPTQModel writes and vLLM reads: a weight transposed, in 32-bit words.

For the weight ``X.weight`` of shape (N, K), codes of b bits and groups of g inputs (all little-endian):

    X.qweight   I32 [K * b / 32, N]: column n is one stream of the b-bit fields ``code + 2 ** (b - 1)`` of
                output n, low bits first
    X.qzeros    I32 [K / g, N * b / 32]: row r is one stream of the fields of the zero points of group r,
                shifted as codes are; one less each in the first version of the layout, which is written for
                symmetric weights: ``2 ** (b - 1) - 1``
    X.scales    F16 [K / g, N]
    X.g_idx     I32 [K]: the group of each input, ``k // g``

A part of a weight is some of its inputs: whole lines of all four. The configuration says ``{"quant_method":
"gptq", "bits": b, "group_size": g or -1, "desc_act": false, "sym": ..., "checkpoint_format": "gptq" or
"gptq_v2"}``, in config.json and in quantize_config.json. The second version stores zero points as they are;
it is written for asymmetric weights, of which the first cannot hold a zero point of 0.

Source: GPTQModel 7.7 (nn_modules/qlinear/__init__.py, pack_original and dequantize_weight; utils/model.py,
convert_gptq_v1_to_v2_format_module). This module opens no file.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..params import QuantizationParams
from ..params.tensors import zero_point_dtype
from ..schemes import Preset, RangeRule, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from . import words
from .block_extents import blocks
from .engines import LLAMA_CPP, TENSORRT, TRANSFORMERS, VLLM, Facts, Loads, Problem, decoded_first, rules
from .protocol import COLUMNS, ROWS, Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record, needed
from .safetensors_dtypes import FILE_DTYPES
from .words import (
    CODES,
    GROUPS,
    SCALE_DTYPES,
    SCALES,
    WORD,
    ZEROS,
    fields_of,
    group_of,
    whole_words,
    with_scales,
    word_record,
    words_of,
)

QUANT_METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
_BITS = (2, 3, 4, 8)
_MARLIN_GROUPS = (0, 32, 64, 128)


def weight_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of the quantized weights under a ``quantization_config``, with float16 scales.

    Raises UnsupportedError for what is not read, CheckpointError for a malformed value.

    >>> str(weight_scheme({"bits": 4, "group_size": 128, "sym": True}))
    'int4:g128:scale=float16'
    """
    bits, group = config.get("bits"), config.get("group_size")
    if bits not in _BITS or type(bits) is not int:
        raise UnsupportedError(f"GPTQ weights of {bits!r:.40} bits cannot be read; known are {_BITS}")
    if type(group) is not int or not (group == -1 or group > 0):
        raise CheckpointError(
            f"group_size of quantization_config is {group!r:.40}, but must be -1 or positive; the file is "
            "damaged"
        )
    if config.get("desc_act"):
        raise UnsupportedError(
            "desc_act of quantization_config puts inputs into groups out of order, which is not read here; "
            "verify it with the tool that wrote it"
        )
    if config.get("checkpoint_format", V1) not in (V1, V2) or config.get("pack_dtype", "int32") != "int32":
        found = config.get("checkpoint_format", V1), config.get("pack_dtype", "int32")
        raise UnsupportedError(
            f"GPTQ files of checkpoint_format and pack_dtype {found} are not read here; verify it with the "
            "tool that wrote it"
        )
    if any(str(rule).startswith("+:") for rule in config.get("dynamic") or ()):
        raise UnsupportedError(
            "dynamic of quantization_config gives some layers other bits, which is not read here; verify it "
            "with the tool that wrote it"
        )
    text = f"int{bits}:{'channel' if group == -1 else f'g{group}'}:scale=float16"
    return Scheme.parse(text if config.get("sym", True) else f"{text}:asym")


class GptqReader(Reader):
    """The layers of one GPTQ checkpoint, all under one scheme."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._listing = listing
        self._codec = codec
        self._weight = weight_scheme(listing.quantization)
        self._layout = listing.quantization.get("checkpoint_format", V1)
        skipped = (str(rule) for rule in listing.quantization.get("dynamic") or ())
        self.ignore = tuple(rule for rule in skipped if rule.startswith("-:"))

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        codes, bits = needed(tensors, CODES), self._weight.bits
        weight = with_scales(self._weight, needed(tensors, SCALES))
        if len(codes.shape) != 2 or codes.shape[0] * WORD % bits:
            raise CheckpointError(f"qweight has shape {list(codes.shape)}, as no weight of {bits} bits has")
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        if layer.layout != self._layout:
            raise UnsupportedError(
                f"checkpoint_format {self._layout} is not read for {weight}, which has {layer.layout}"
            )
        shape = (codes.shape[1], codes.shape[0] * WORD // bits)
        record = word_record(layer, key, tensors, known, shape=shape, config=self._listing.config)
        groups = _groups(weight, shape[1]).numpy().tobytes()
        if GROUPS in tensors and self._listing.read(tensors[GROUPS]) != groups:
            raise UnsupportedError("its g_idx puts inputs into groups out of order, which is not read here")
        return record


def _is_v1(layer: LayerScheme) -> bool:
    return layer.weight.zero_point is ZeroPoint.NONE


def _groups(weight: Scheme, columns: int) -> torch.Tensor:
    return torch.arange(columns, dtype=torch.int32) // group_of(weight, columns)


@functools.lru_cache(maxsize=64)
def _shift(count: int, bits: int) -> torch.Tensor:
    """Return the packed row whose exclusive or adds ``2 ** (bits - 1)`` to ``count`` codes, and undoes it."""
    return packing.pack(torch.full((count,), 1 << (bits - 1)), bits)


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from words.vllm(facts)
    for layer in facts.layers:
        fast = layer.weight.bits in (4, 8) and blocks(layer.weight)[COLUMNS] in _MARLIN_GROUPS
        if not fast or not _is_v1(layer):
            yield Loads.PARTLY, f"{layer} has no fast kernel, and not every release reads it"


@dataclass(frozen=True)
class Gptq(Codec):
    """See the module and :class:`Codec`."""

    name = "gptq"
    title = "the layout of GPTQ"
    presets = MappingProxyType(
        {
            "w4a16": Preset(weight="int4:g128:scale=float16"),
            "w4a16_asym": Preset(weight="int4:g128:scale=float16:asym"),
            "w8a16": Preset(weight="int8:g128:scale=float16"),
        }
    )
    defaults = MappingProxyType({"scale": "float16"})
    parts = MappingProxyType({CODES: True, ZEROS: True, SCALES: False, GROUPS: False})
    engines = rules({
        TRANSFORMERS: words.transformers("optimum and gptqmodel"), VLLM: _vllm, TENSORRT: words.tensorrt,
        LLAMA_CPP: decoded_first,
    })  # fmt: skip
    methods = (QUANT_METHOD,)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
        weight, element = layer.weight, layer.weight.element
        if not element.is_whole or not element.signed:
            raise UnsupportedError(f"scheme {weight} has elements that GPTQ does not store; use {_names()}")
        if weight.bits not in _BITS or weight.range_rule is not RangeRule.FULL:
            raise UnsupportedError(f"scheme {weight} has codes that GPTQ does not store; use {_names()}")
        if weight.zero_point is ZeroPoint.REAL or len(weight.scales) != 1 or weight.chained is not None:
            raise UnsupportedError(f"scheme {weight} has parameters that GPTQ does not store; use {_names()}")
        level = weight.scales[0]
        stored = storage_dtype(level.format_for(format_of(torch.float16)))
        if level.rule.power_of_two or FILE_DTYPES.get(stored) not in SCALE_DTYPES or level.format is None:
            raise UnsupportedError(f"scheme {weight} has scales that GPTQ does not store; use scale=float16")
        if blocks(weight)[ROWS] != 1:
            raise UnsupportedError(f"scheme {weight} has blocks that GPTQ does not store; use g<N>, channel")
        if layer.input is not None:
            raise UnsupportedError(f"input {layer.input} has no place in GPTQ; leave out the input")
        return V1 if _is_v1(layer) else V2

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """See :class:`Codec`."""
        problem = super().refusal(layer, shape)
        if problem is not None:
            return problem
        fields = whole_words(layer.weight.bits)[1]
        for extent, what in zip(shape, ("first", "last"), strict=True):
            if extent % fields:
                return f"{what} axis {extent} does not fill whole words, of {fields} codes"
        return None

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """See :class:`Codec`."""
        fields = whole_words(layer.weight.bits)[1]
        if axis == ROWS:
            return [(fields, "the zero points that fill whole words")]
        return [*super().multiples(layer, axis), (fields, "the codes that fill whole words")]

    def axis(self, layer: LayerScheme) -> int:
        """See :class:`Codec`: parts are some of the inputs."""
        return COLUMNS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """See :class:`Codec`."""
        return math.lcm(group_of(layer.weight, shape[1]), whole_words(layer.weight.bits)[1])

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        rows, columns = shape
        bits, group = layer.weight.bits, group_of(layer.weight, columns)
        lines, fields = whole_words(bits)
        groups = -(-columns // group)
        scale = FILE_DTYPES[storage_dtype(layer.weight.scales[0].format_for(format_of(dtype)))]
        return (
            TensorSpec(
                suffix=CODES, dtype="I32", shape=(columns * bits // WORD, rows), axis=COLUMNS, lines=lines,
                per=fields,
            ),
            TensorSpec(
                suffix=ZEROS, dtype="I32", shape=(groups, rows * bits // WORD), axis=COLUMNS, per=group,
                across=(lines, fields),
            ),
            TensorSpec(suffix=SCALES, dtype=scale, shape=(groups, rows), axis=COLUMNS, per=group),
            TensorSpec(suffix=GROUPS, dtype="I32", shape=(columns,), axis=None),
        )  # fmt: skip

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        rows, columns = q.shape
        bits, half = q.scheme.bits, 1 << (q.scheme.bits - 1)
        codes = (q.data ^ _shift(columns, bits)).reshape(-1).view(torch.int32).view(rows, -1)
        scales = q.scales[0].t().contiguous()
        zeros = torch.full(scales.shape, half - 1) if q.zero_point is None else q.zero_point.t().long() + half
        return {CODES: codes.t().contiguous(), ZEROS: words_of(zeros.contiguous(), bits), SCALES: scales}

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        return {GROUPS: _groups(layer.weight, shape[1])}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`."""
        weight, bits = layer.weight, layer.weight.bits
        rows = tensors[CODES].t().contiguous()
        data = rows.view(torch.uint8).reshape(shape[0], -1) ^ _shift(shape[1], bits)
        zero = None
        if weight.zero_point is not ZeroPoint.NONE:
            fields = fields_of(tensors[ZEROS], bits).to(torch.int32).t() - (1 << (bits - 1))
            zero = fields.contiguous().to(zero_point_dtype(weight))
        scales = (tensors[SCALES].t().contiguous(),)
        params = QuantizationParams(scheme=weight, shape=shape, scales=scales, zero_point=zero, dtype=dtype)
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def damage(self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """See :class:`Codec`: symmetric weights have one zero point, which engines subtract all the same."""
        if not _is_v1(layer):
            return None
        wanted = (1 << (layer.weight.bits - 1)) - 1
        fields = fields_of(tensors[ZEROS], layer.weight.bits)
        wrong = fields[fields != wanted]
        return f"a zero point is stored as {int(wrong[0])}, not {wanted}" if wrong.numel() else None

    def read(self, listing: Listing) -> GptqReader:
        """See :class:`Codec`."""
        return GptqReader(listing, self)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`; raises CheckpointError for several schemes, of which it can name one."""
        layer = contents.only_layer(self.title)
        settings = {
            "bits": layer.weight.bits, "group_size": blocks(layer.weight)[COLUMNS] or -1,
            "desc_act": False, "sym": _is_v1(layer),
            "lm_head": any(module.name.endswith("lm_head") for module in contents.modules() if module.layer),
            "quant_method": QUANT_METHOD, "checkpoint_format": layer.layout, "pack_dtype": "int32",
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in contents.kept},
            "meta": {"quantizer": ["zeropoint"]},
        }  # fmt: skip
        return Documents(section=settings, files={"quantize_config.json": settings})


def _names() -> str:
    return ", ".join(f"int{bits}" for bits in _BITS)


CODEC = Gptq()
